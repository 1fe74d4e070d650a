"""Uniform numbers that are the same with and without ``torch.compile``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["uniform"]


@torch.library.custom_op(
    "bmc_torchrl::uniform", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def _opaque_uniform(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.rand(list(shape), dtype=dtype, device=device)


@_opaque_uniform.register_fake
def _(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(list(shape), dtype=dtype, device=device)


def uniform(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Draws from [0, 1) by torch's global generator.

    Inductor replaces :func:`torch.rand` by a generator of its own: other numbers for the same seed,
    and on a CPU several times slower. Hiding the call from it keeps the numbers and the speed.

    >>> uniform((2, 3), torch.float64, torch.device("cpu")).shape
    torch.Size([2, 3])
    """
    if torch.compiler.is_compiling():
        draws: Tensor = _opaque_uniform(shape, dtype, device)
        return draws
    return torch.rand(tuple(shape), dtype=dtype, device=device)
