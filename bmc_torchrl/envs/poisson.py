"""Exact Poisson draws by inverting the distribution function at one uniform number."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["poisson_cdf", "poisson_demand"]

_HALF_RESOLUTION = 2.0**-54


def poisson_cdf(rate: float, device: torch.device | str | None = None) -> Tensor:
    r"""Distribution function of a Poisson variable, float64 ``[n]``, up to the last 1.

    The table ends at the first :math:`k` for which less than :math:`2^{-54}` of mass lies above:
    half of what a float64 uniform can resolve, so cutting there loses nothing. It is computed on
    the host, hence the same on every device.

    >>> poisson_cdf(2.5)[:3]
    tensor([0.0821, 0.2873, 0.5438], dtype=torch.float64)
    """
    if not (math.isfinite(rate) and rate >= 0):
        raise ValueError(f"rate must be finite and not negative, got {rate}.")
    if rate == 0:
        return torch.ones(1, dtype=torch.float64, device=device)
    masses: list[float] = []
    k = 0
    while k <= rate or masses[-1] * k / (k - rate) > _HALF_RESOLUTION:
        masses.append(math.exp(k * math.log(rate) - rate - math.lgamma(k + 1)))
        k += 1
    cdf = [min(1.0, math.fsum(masses[: i + 1])) for i in range(len(masses))]
    return torch.tensor([*cdf[:-1], 1.0], dtype=torch.float64).to(device)


def poisson_demand(uniform: Tensor, cdf: Tensor) -> Tensor:
    r"""The number of ``cdf`` entries not above ``uniform``: :math:`F^{-1}(u)`.

    Args:
        uniform: Draws from [0, 1), float64 ``[*batch]``.
        cdf: Table of :func:`poisson_cdf`, ``[n]``.

    Returns:
        Demand, int64 ``[*batch]``.

    >>> poisson_demand(torch.tensor([0.0, 0.5, 0.9], dtype=torch.float64), poisson_cdf(2.5))
    tensor([0, 2, 5])
    """
    return torch.searchsorted(cdf, uniform, right=True)
