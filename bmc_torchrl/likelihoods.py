"""How returns are distributed around a model of them: what turns a gap into evidence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from bmc_torchrl.functional import (
    Moments,
    gaussian_log_evidence_ratio,
    precision_posterior,
    student_t_log_evidence_ratio,
)

__all__ = ["GaussianLikelihood", "Likelihood", "NormalGammaPrior", "StudentTLikelihood"]


class Likelihood(Protocol):
    """A distribution of returns around the greedy and the uniform model."""

    def log_evidence_ratio(
        self, gap: Tensor, alpha: Tensor, beta: Tensor, moments: Moments
    ) -> Tensor:
        r""":math:`\log e^U - \log e^Q` of the mixture return.

        Args:
            gap: greedy minus uniform return, ``[*batch]``.
            alpha: posterior parameter of ε, ``[*batch]``.
            beta: posterior parameter of ε, ``[*batch]``.
            moments: running moments of the mixture returns, the current one included.
        """
        ...


def _require_positive(owner: str, **values: float) -> None:
    for name, value in values.items():
        if not 0 < value < float("inf"):
            raise ValueError(
                f"{owner}: {name} must be positive and finite, got {value}. "
                "The paper uses mu0=0, tau0=1, a0=500, b0=500."
            )


@dataclass(frozen=True)
class NormalGammaPrior:
    r"""Prior of the returns' mean and precision ([GSL19], Eq. (8)), the paper's by default.

    :math:`b_0 / a_0` is the prior variance of returns; scaling rewards by :math:`k` and `b0` by
    :math:`k^2` leaves ε unchanged.

    >>> NormalGammaPrior(b0=50.0)
    NormalGammaPrior(mu0=0.0, tau0=1.0, a0=500.0, b0=50.0)
    """

    mu0: float = 0.0
    tau0: float = 1.0
    a0: float = 500.0
    b0: float = 500.0

    def __post_init__(self) -> None:
        _require_positive("NormalGammaPrior", tau0=self.tau0, a0=self.a0, b0=self.b0)
        if not abs(self.mu0) < float("inf"):
            raise ValueError(f"NormalGammaPrior: mu0 must be finite, got {self.mu0}.")


@dataclass(frozen=True)
class StudentTLikelihood:
    """Normal returns whose unknown precision is integrated out ([GSL19], Eqs. (8)–(10)).

    >>> StudentTLikelihood().prior.a0
    500.0
    """

    prior: NormalGammaPrior = field(default_factory=NormalGammaPrior)

    def log_evidence_ratio(
        self, gap: Tensor, alpha: Tensor, beta: Tensor, moments: Moments
    ) -> Tensor:
        """See :meth:`Likelihood.log_evidence_ratio`."""
        prior = self.prior
        a, b = precision_posterior(moments, prior.mu0, prior.tau0, prior.a0, prior.b0)
        return student_t_log_evidence_ratio(gap, alpha, beta, a, b)


@dataclass(frozen=True)
class GaussianLikelihood:
    """Normal returns of known `variance` ([GSL19], Eq. (7)), or of their running sample variance.

    With ``variance=None`` the sample variance of all returns so far is used; until it is positive
    an observation teaches nothing.

    >>> GaussianLikelihood(variance=2.0)
    GaussianLikelihood(variance=2.0)
    """

    variance: float | None = None

    def __post_init__(self) -> None:
        if self.variance is not None:
            _require_positive("GaussianLikelihood", variance=self.variance)

    def log_evidence_ratio(
        self, gap: Tensor, alpha: Tensor, beta: Tensor, moments: Moments
    ) -> Tensor:
        """See :meth:`Likelihood.log_evidence_ratio`."""
        if self.variance is not None:
            fixed = torch.full_like(gap, self.variance)
            return gaussian_log_evidence_ratio(gap, alpha, beta, fixed)
        running = moments.variance
        known = running > 0
        ratio = gaussian_log_evidence_ratio(gap, alpha, beta, torch.where(known, running, 1.0))
        return torch.where(known, ratio, torch.zeros_like(ratio))
