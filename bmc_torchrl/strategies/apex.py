"""One constant ε for each environment or worker: the ladder of Ape-X."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor

from bmc_torchrl.strategies.base import EpsilonStrategy
from bmc_torchrl.strategies.scalar import ScalarForm, ScalarRule

__all__ = ["ApexEpsilon", "apex_ladder"]


def apex_ladder(epsilon: float, alpha: float, number: int) -> Tensor:
    r""":math:`\varepsilon_i = \varepsilon^{1 + \alpha i / (N - 1)}` (Horgan et al. 2018).

    Args:
        epsilon (float): :math:`\varepsilon`, the most exploring rung.
        alpha (float): how far down the ladder reaches.
        number (int): :math:`N`; with one rung it is :math:`\varepsilon`.

    Returns:
        float64 ``[number]``.

    Examples:
        >>> apex_ladder(0.4, 7.0, 3)
        tensor([0.4000, 0.0162, 0.0007], dtype=torch.float64)
    """
    rungs = torch.arange(number, dtype=torch.float64) / max(number - 1, 1)
    return epsilon ** (1 + alpha * rungs)


class ApexEpsilon(EpsilonStrategy):
    r"""A ladder of constants :math:`\varepsilon_i = \varepsilon^{1 + \alpha i / (N - 1)}`.

    Environments that explore much and others that hardly do feed one learner (Ape-X, Horgan et al.
    2018). The rungs are the elements of `batch_shape`, the first exploring most; where several
    workers have environments each, one worker's rungs follow the other's.

    The ladder is made by the arguments alone and is no buffer, so that a worker keeps its own when
    the learner's weights are sent to it: build each worker's policy with its index, by
    ``policy_factory=`` of TorchRL's collectors.

    Args:
        epsilon (float, optional): :math:`\varepsilon`, between 0 and 1. Default: 0.4.
        alpha (float, optional): :math:`\alpha`, not negative. Default: 7.
        worker (int, optional): which of the workers this one is. Default: 0.
        workers (int, optional): how many workers there are, each with environments of shape
            `batch_shape`. Default: 1.
        batch_shape (sequence of int, optional): shape of the environments. Default: ``()``.

    Examples:
        >>> ApexEpsilon(batch_shape=[3]).eps
        tensor([0.4000, 0.0162, 0.0007], dtype=torch.float64)
        >>> [float(ApexEpsilon(0.5, 1.0, worker=i, workers=2).eps) for i in range(2)]
        [0.5, 0.25]
    """

    def __init__(
        self,
        epsilon: float = 0.4,
        alpha: float = 7.0,
        *,
        worker: int = 0,
        workers: int = 1,
        batch_shape: Sequence[int] = (),
    ) -> None:
        super().__init__(batch_shape)
        if not 0 <= epsilon <= 1:
            raise ValueError(f"epsilon must be between 0 and 1, got {epsilon}.")
        if not 0 <= alpha < math.inf:
            raise ValueError(f"alpha must be non-negative and finite, got {alpha}.")
        if not 0 <= worker < workers:
            raise ValueError(
                f"worker must be an index from 0 to workers - 1, got worker={worker} and "
                f"workers={workers}."
            )
        self.epsilon0, self.alpha, self.worker, self.workers = epsilon, alpha, worker, workers
        own = self.batch_shape.numel()
        ladder = apex_ladder(epsilon, alpha, own * workers)
        self.ladder = ladder[own * worker : own * (worker + 1)].reshape(self.batch_shape)

    @property
    def eps(self) -> Tensor:
        """ε of each environment."""
        return self.ladder

    def scalars(self) -> ScalarForm:
        """ε."""
        return ScalarForm(ScalarRule, memory=(self.ladder,))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.ladder = self.ladder.to(fn(self.ladder).device)
        return self

    def extra_repr(self) -> str:
        """ε, and the ladder's parameters."""
        ladder = f"epsilon={self.epsilon0:g}, alpha={self.alpha:g}"
        workers = f", worker={self.worker}, workers={self.workers}" if self.workers > 1 else ""
        return f"{super().extra_repr()}, {ladder}{workers}"
