"""How returns are distributed around a model of them: what turns a gap into evidence."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from bmc_torchrl.functional import (
    Moments,
    gaussian_log_evidence_ratio,
    precision_posterior,
    prior_rate,
    student_t_log_evidence_ratio,
)
from bmc_torchrl.precision import KeepsPrecision, PerRun, per_run, require_run_shape, shown

__all__ = ["GaussianLikelihood", "Likelihood", "NormalGammaPrior", "StudentTLikelihood"]

_POSITIVE = "positive and finite (the paper uses mu0=0, tau0=1, a0=500, b0=500)"


class Likelihood(KeepsPrecision, ABC):
    """A distribution of returns around the greedy and the uniform model.

    A subclass defines :meth:`log_evidence_ratio`. What it is made of are float64 buffers, each a
    number or one per run, so that a checkpoint of the strategy says which likelihood it is of.

    Examples:
        >>> class Pinned(Likelihood):
        ...     def __init__(self, unit):
        ...         super().__init__()
        ...         self.register_buffer("unit", torch.tensor(unit, dtype=torch.float64))
        ...
        ...     def log_evidence_ratio(self, gap, alpha, beta, moments):
        ...         return -gap / self.unit
        >>> Pinned(2.0)
        Pinned(unit=2)
    """

    @abstractmethod
    def log_evidence_ratio(
        self, gap: Tensor, alpha: Tensor, beta: Tensor, moments: Moments
    ) -> Tensor:
        r""":math:`\log e^U - \log e^Q` of the mixture return.

        Args:
            gap (Tensor): greedy minus uniform return, ``[*batch_shape]``.
            alpha (Tensor): posterior parameter of ε, ``[*batch_shape]``.
            beta (Tensor): posterior parameter of ε, ``[*batch_shape]``.
            moments (Moments): of the mixture returns so far, the current one included.

        Returns:
            ``[*batch_shape]``.
        """

    def over_runs(self, batch_shape: Sequence[int]) -> Self:
        """A copy with one value per run.

        Args:
            batch_shape (sequence of int): shape of the runs.

        Returns:
            The copy; its buffers are ``[*batch_shape]``.
        """
        own = copy.deepcopy(self)
        for name, buffer in list(own.named_buffers(recurse=False)):
            require_run_shape(buffer, batch_shape, f"{type(self).__name__}: {name}")
            setattr(own, name, buffer.expand(tuple(batch_shape)).clone())
        return own

    def extra_repr(self) -> str:
        """The buffers."""
        return ", ".join(f"{name}={shown(buffer)}" for name, buffer in self.named_buffers())


@dataclass(frozen=True)
class NormalGammaPrior:
    r"""Prior of the returns' mean and precision ([GSL19], Eq. (8)), the paper's by default.

    :math:`b_0 / a_0` is the prior variance of returns; scaling rewards by :math:`k` and `b0` by
    :math:`k^2` leaves ε unchanged. Each field is a number, or one per run.

    With ``b0=None`` the prior is *scale-free*: :math:`b_0 = a_0 \hat\sigma^2` follows the running
    variance of the returns, so that no unit of reward matters, and rewards times :math:`2^k` give
    the same ε bit for bit. Nothing is then learned until two returns have differed.

    Args:
        mu0 (float, sequence of float or Tensor, optional): mean of the returns' mean. Default: 0.
        tau0 (float, sequence of float or Tensor, optional): how many returns the mean is worth.
            Default: 1.
        a0 (float, sequence of float or Tensor, optional): shape of the precision. Default: 500.
        b0 (float, sequence of float or Tensor, optional): rate of the precision, or None to follow
            the returns. Default: 500.

    Examples:
        >>> NormalGammaPrior(b0=50.0)
        NormalGammaPrior(mu0=0.0, tau0=1.0, a0=500.0, b0=50.0)
        >>> StudentTLikelihood(NormalGammaPrior(b0=None))
        StudentTLikelihood(mu0=0, tau0=1, a0=500, b0=running)
    """

    mu0: PerRun = 0.0
    tau0: PerRun = 1.0
    a0: PerRun = 500.0
    b0: PerRun | None = 500.0

    def __post_init__(self) -> None:
        mu0 = per_run(self.mu0, "NormalGammaPrior: mu0", torch.isfinite, "finite")
        for name in ("tau0", "a0", "b0"):
            value = getattr(self, name)
            if value is not None:
                per_run(value, f"NormalGammaPrior: {name}", lambda x: x > 0, _POSITIVE)
        if self.b0 is None and bool((mu0 != 0).any()):
            raise ValueError(
                f"NormalGammaPrior: mu0 must be 0 where b0=None, got {self.mu0}: a mean has a "
                "unit, and the prior would not be scale-free."
            )


class StudentTLikelihood(Likelihood):
    """Normal returns whose unknown precision is integrated out ([GSL19], Eqs. (8)–(10)).

    The buffer ``b0`` is 0 where the prior follows the returns, so that a checkpoint says so, too.

    Args:
        prior (NormalGammaPrior, optional): of the returns' mean and precision.
            Default: the paper's.

    Examples:
        >>> StudentTLikelihood(NormalGammaPrior(b0=50.0))
        StudentTLikelihood(mu0=0, tau0=1, a0=500, b0=50)
    """

    def __init__(self, prior: NormalGammaPrior | None = None) -> None:
        super().__init__()
        prior = prior or NormalGammaPrior()
        self.mu0: Tensor
        self.tau0: Tensor
        self.a0: Tensor
        self.b0: Tensor
        for name in ("mu0", "tau0", "a0", "b0"):
            given = getattr(prior, name)
            value = torch.as_tensor(0.0 if given is None else given, dtype=torch.float64)
            self.register_buffer(name, value.detach().clone())

    def log_evidence_ratio(
        self, gap: Tensor, alpha: Tensor, beta: Tensor, moments: Moments
    ) -> Tensor:
        """See :meth:`Likelihood.log_evidence_ratio`."""
        b0 = prior_rate(self.a0, self.b0, moments)
        a, b = precision_posterior(moments, self.mu0, self.tau0, self.a0, b0)
        ratio = student_t_log_evidence_ratio(gap, alpha, beta, a, b)
        return torch.where(b0 > 0, ratio, 0.0)

    def extra_repr(self) -> str:
        """The prior, and whether its rate is the running one."""
        parts = [f"{name}={shown(getattr(self, name))}" for name in ("mu0", "tau0", "a0")]
        return ", ".join([*parts, f"b0={_shown_or_running(self.b0)}"])


class GaussianLikelihood(Likelihood):
    """Normal returns of known variance ([GSL19], Eq. (7)), or of their running sample variance.

    With the running variance, an observation teaches nothing until two returns have differed. The
    buffer ``variance`` is then 0, so that a checkpoint says so, too.

    Args:
        variance (float, sequence of float or Tensor, optional): of the returns, a number or one per
            run; None for the sample variance of all returns so far. Default: None.

    Examples:
        >>> GaussianLikelihood(variance=2.0)
        GaussianLikelihood(variance=2)
        >>> GaussianLikelihood()
        GaussianLikelihood(variance=running)
    """

    def __init__(self, variance: PerRun | None = None) -> None:
        super().__init__()
        self.variance: Tensor
        fixed = torch.zeros((), dtype=torch.float64)
        if variance is not None:
            requirement = "positive and finite, or None for the running variance"
            fixed = per_run(variance, "GaussianLikelihood: variance", lambda x: x > 0, requirement)
        self.register_buffer("variance", fixed)

    def log_evidence_ratio(
        self, gap: Tensor, alpha: Tensor, beta: Tensor, moments: Moments
    ) -> Tensor:
        """See :meth:`Likelihood.log_evidence_ratio`."""
        variance = torch.where(self.variance > 0, self.variance, moments.variance)
        known = variance > 0
        ratio = gaussian_log_evidence_ratio(gap, alpha, beta, torch.where(known, variance, 1.0))
        return torch.where(known, ratio, torch.zeros_like(ratio))

    def extra_repr(self) -> str:
        """The variance, or that it is the running one."""
        return f"variance={_shown_or_running(self.variance)}"


def _shown_or_running(value: Tensor) -> str:
    text = shown(value)
    return "running" if text.partition(" (")[0] == "0" else text
