"""ε that follows a clock: finished episodes, or frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor

from bmc_torchrl.functional import geometric_decay, linear_decay, power_decay
from bmc_torchrl.strategies.base import EpsilonStrategy, per_run_buffer

__all__ = ["ConstantEpsilon", "GeometricEpsilon", "LinearEpsilon", "PowerEpsilon"]

PerRun = float | Sequence[float] | Tensor


def _probability(value: PerRun, batch_shape: Sequence[int], name: str) -> Tensor:
    return per_run_buffer(
        value, batch_shape, name, lambda x: (x >= 0) & (x <= 1), "between 0 and 1"
    )


class ConstantEpsilon(EpsilonStrategy):
    r"""The same :math:`\varepsilon = c` for ever; `value` may be one number per run.

    >>> ConstantEpsilon(0.1).eps
    tensor(0.1000, dtype=torch.float64)
    """

    needs_update = False

    def __init__(self, value: PerRun, *, batch_shape: Sequence[int] = ()) -> None:
        super().__init__(batch_shape)
        self.in_keys = []
        self.value: Tensor
        self.register_buffer("value", _probability(value, batch_shape, "value"))

    @property
    def eps(self) -> Tensor:
        """ε per run."""
        return self.value.expand(self.batch_shape)

    def epsilon(self, tensordict: TensorDictBase) -> Tensor:
        """ε per run."""
        return self.eps

    def update(self, transition: TensorDictBase) -> None:
        """Nothing to learn."""


class _AnnealedByEpisodes(EpsilonStrategy):
    def __init__(self, initial: PerRun, batch_shape: Sequence[int]) -> None:
        super().__init__(batch_shape)
        self.in_keys = [("next", "done")]
        self.initial: Tensor
        self.episodes: Tensor
        self.register_buffer("initial", _probability(initial, batch_shape, "initial"))
        self.register_buffer("episodes", torch.zeros(self.batch_shape, dtype=torch.int64))

    def epsilon(self, tensordict: TensorDictBase) -> Tensor:
        """ε per run."""
        return self.eps

    def update(self, transition: TensorDictBase) -> None:
        """Count the episodes that ended."""
        self._learn(*self._read(transition))

    def _read(self, transition: TensorDictBase) -> tuple[Tensor]:
        done = self._done(transition, self.episodes)
        return (self._steps(transition, done & self._taken(transition, done)),)

    def _learn(self, ended: Tensor) -> None:
        self.episodes += ended.sum(0)


class GeometricEpsilon(_AnnealedByEpisodes):
    r"""Annealing :math:`\varepsilon_k = \varepsilon_0 \rho^k` after :math:`k` finished episodes.

    >>> GeometricEpsilon(0.5, 0.95).eps
    tensor(0.5000, dtype=torch.float64)
    """

    def __init__(
        self, initial: PerRun = 0.5, rate: PerRun = 0.95, *, batch_shape: Sequence[int] = ()
    ) -> None:
        super().__init__(initial, batch_shape)
        self.rate: Tensor
        self.register_buffer("rate", _probability(rate, batch_shape, "rate"))

    @property
    def eps(self) -> Tensor:
        """ε per run."""
        return geometric_decay(self.initial, self.rate, self.episodes)


class PowerEpsilon(_AnnealedByEpisodes):
    r"""Annealing :math:`\varepsilon_k = \varepsilon_0 (k + 1)^{-p}` after :math:`k` episodes.

    `first_index` is what is added to :math:`k`: 1 as the paper prints, 0 as in the published data,
    whose first two episodes both use :math:`\varepsilon_0`.

    >>> PowerEpsilon(0.5, power=0.5).eps
    tensor(0.5000, dtype=torch.float64)
    """

    def __init__(
        self,
        initial: PerRun = 0.5,
        power: PerRun = 0.5,
        *,
        first_index: int = 1,
        batch_shape: Sequence[int] = (),
    ) -> None:
        super().__init__(initial, batch_shape)
        if first_index not in (0, 1):
            raise ValueError(f"first_index must be 0 or 1, got {first_index}.")
        self.first_index = first_index
        self.power: Tensor
        self.register_buffer(
            "power", per_run_buffer(power, batch_shape, "power", lambda x: x >= 0, "non-negative")
        )

    @property
    def eps(self) -> Tensor:
        """ε per run."""
        return power_decay(self.initial, self.power, self.episodes, self.first_index)


class LinearEpsilon(EpsilonStrategy):
    """TorchRL's own annealing from `initial` to `final` over `num_frames` frames, in closed form.

    `count_by` says what moves the clock: ``"update"`` counts the transitions given to
    :meth:`update`, ``"step"`` the frames given to :meth:`step`, as TorchRL's trainers do.

    >>> strategy = LinearEpsilon(1.0, 0.1, 1000, count_by="step")
    >>> strategy.step(500)
    >>> strategy.eps
    tensor(0.5500, dtype=torch.float64)
    """

    def __init__(
        self,
        initial: PerRun = 1.0,
        final: PerRun = 0.1,
        num_frames: int = 1000,
        *,
        count_by: Literal["update", "step"] = "update",
        batch_shape: Sequence[int] = (),
    ) -> None:
        super().__init__(batch_shape)
        if num_frames < 1:
            raise ValueError(f"num_frames must be at least 1, got {num_frames}.")
        if count_by not in ("update", "step"):
            raise ValueError(f"count_by must be 'update' or 'step', got {count_by!r}.")
        self.in_keys = [("next", "done")] if count_by == "update" else []
        self.count_by = count_by
        self.needs_update = count_by == "update"
        self.num_frames = num_frames
        self.initial: Tensor
        self.final: Tensor
        self.frames: Tensor
        self.register_buffer("initial", _probability(initial, batch_shape, "initial"))
        self.register_buffer("final", _probability(final, batch_shape, "final"))
        if bool((self.final > self.initial).any()):
            raise ValueError(f"final must not exceed initial, got {final} > {initial}.")
        self.register_buffer("frames", torch.zeros(self.batch_shape, dtype=torch.int64))

    @property
    def eps(self) -> Tensor:
        """ε per run."""
        return linear_decay(self.initial, self.final, self.frames, self.num_frames)

    def epsilon(self, tensordict: TensorDictBase) -> Tensor:
        """ε per run."""
        return self.eps

    def update(self, transition: TensorDictBase) -> None:
        """Count the transitions, unless the clock is :meth:`step`."""
        self._learn(*self._read(transition))

    def _read(self, transition: TensorDictBase) -> tuple[Tensor, ...]:
        if self.count_by == "step":
            return ()
        done = self._done(transition, self.frames)
        return (self._steps(transition, self._taken(transition, done)),)

    def _learn(self, *taken: Tensor) -> None:
        for steps in taken:
            self.frames += steps.sum(0)

    def step(self, frames: int) -> None:
        """Count `frames`, unless the clock is :meth:`update`."""
        if self.count_by == "step":
            self.frames += frames
