"""ε that follows a clock: finished episodes, or frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor

from bmc_torchrl.functional import geometric_decay, linear_decay, power_decay
from bmc_torchrl.precision import PerRun, shown
from bmc_torchrl.strategies.base import EpsilonStrategy, per_run_buffer
from bmc_torchrl.strategies.scalar import (
    NoScalarFormError,
    Number,
    Row,
    ScalarForm,
    ScalarRule,
)

__all__ = [
    "ConstantEpsilon",
    "GeometricEpsilon",
    "GeometricRule",
    "LinearEpsilon",
    "LinearRule",
    "PowerEpsilon",
    "PowerRule",
]


def _probability(value: PerRun, batch_shape: Sequence[int], name: str) -> Tensor:
    return per_run_buffer(
        value, batch_shape, name, lambda x: (x >= 0) & (x <= 1), "between 0 and 1"
    )


class ConstantEpsilon(EpsilonStrategy):
    r"""The same :math:`\varepsilon = c` forever.

    Args:
        value (float, sequence of float or Tensor): :math:`c`, a number or one per run.
        batch_shape (sequence of int, optional): shape of the runs. Default: ``()``.

    Examples:
        >>> ConstantEpsilon(0.1)
        ConstantEpsilon(eps=0.1, batch_shape=())
    """

    def __init__(self, value: PerRun, *, batch_shape: Sequence[int] = ()) -> None:
        super().__init__(batch_shape)
        self.value: Tensor
        self.register_buffer("value", _probability(value, batch_shape, "value"))

    @property
    def eps(self) -> Tensor:
        """ε per run."""
        return self.value.expand(self.batch_shape)

    def scalars(self) -> ScalarForm:
        """ε."""
        return ScalarForm(ScalarRule, memory=(self.value,))


class _AnnealedByEpisodes(EpsilonStrategy):
    """Counts the episodes that ended."""

    def __init__(self, initial: PerRun, batch_shape: Sequence[int]) -> None:
        super().__init__(batch_shape)
        self.in_keys = [("next", "done")]
        self.initial: Tensor
        self.episodes: Tensor
        self.register_buffer("initial", _probability(initial, batch_shape, "initial"))
        self.frames: Tensor
        self.register_buffer("episodes", torch.zeros(self.batch_shape, dtype=torch.int64))
        self.register_buffer("frames", torch.zeros(self.batch_shape, dtype=torch.int64))
        self.register_skipped("mask", "foreign")

    @property
    def waits(self) -> bool:
        """True: ε follows the episodes."""
        return True

    @property
    def learned(self) -> Tensor:
        """How many frames :meth:`update` has counted."""
        return self.frames

    def learned_from(self, transition: TensorDictBase) -> Tensor | None:
        """Where an episode ended."""
        return self._done(transition, self.episodes)

    def read(self, transition: TensorDictBase, taken: Tensor | None) -> tuple[Tensor, ...]:
        """Where an episode ended and which frames count, ``[steps, *batch_shape]``."""
        done = self._done(transition, self.episodes)
        counted = self.mark_like(taken, done)
        return self.steps(transition, done & counted), self.steps(transition, counted)

    def learn(self, *columns: Tensor) -> None:
        """Count."""
        for clock, counted in zip((self.episodes, self.frames), columns, strict=True):
            clock += counted.sum(0)

    def load_scalars(self, memory: Tensor, local: Tensor | None) -> None:
        """Take over the number of episodes."""
        self.episodes.copy_(memory[:, 1])


class GeometricRule(ScalarRule):
    """``geometric_decay``: parameters are ε₀, ρ, episodes before; memory is ε, episodes so far."""

    @staticmethod
    def begin(parameters: Row, memory: Row, episode: Number) -> None:
        """ε of the episode."""
        memory[1] = episode + parameters[2]
        memory[0] = parameters[0] * parameters[1] ** memory[1]


class GeometricEpsilon(_AnnealedByEpisodes):
    r"""Annealing :math:`\varepsilon_k = \varepsilon_0 \rho^k` after :math:`k` finished episodes.

    Args:
        initial (float, sequence of float or Tensor, optional): :math:`\varepsilon_0`, a number or
            one per run. Default: 0.5.
        rate (float, sequence of float or Tensor, optional): :math:`\rho`, likewise. Default: 0.95.
        batch_shape (sequence of int, optional): shape of the runs. Default: ``()``.

    Examples:
        >>> GeometricEpsilon(0.5, 0.95)
        GeometricEpsilon(eps=0.5, batch_shape=(), initial=0.5, rate=0.95)
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

    def scalars(self) -> ScalarForm:
        """The formula's parameters, ε and the episodes so far."""
        parameters = (self.initial, self.rate, self.episodes)
        return ScalarForm(GeometricRule, parameters, memory=(self.eps, self.episodes))

    def extra_repr(self) -> str:
        """ε and its formula's parameters."""
        return f"{super().extra_repr()}, initial={shown(self.initial)}, rate={shown(self.rate)}"


class PowerRule(ScalarRule):
    """``power_decay``: parameters are ε₀, p, first index, episodes before; memory as there."""

    @staticmethod
    def begin(parameters: Row, memory: Row, episode: Number) -> None:
        """ε of the episode."""
        memory[1] = episode + parameters[3]
        memory[0] = parameters[0] * max(memory[1] + parameters[2], 1.0) ** -parameters[1]


class PowerEpsilon(_AnnealedByEpisodes):
    r"""Annealing :math:`\varepsilon_k = \varepsilon_0 (k + 1)^{-p}` after :math:`k` episodes.

    Args:
        initial (float, sequence of float or Tensor, optional): :math:`\varepsilon_0`, a number or
            one per run. Default: 0.5.
        power (float, sequence of float or Tensor, optional): :math:`p`, likewise. Default: 0.5.
        first_index (int, optional): what is added to :math:`k`: 1 as the paper prints, 0 as in the
            published data, whose first two episodes both use :math:`\varepsilon_0`. Default: 1.
        batch_shape (sequence of int, optional): shape of the runs. Default: ``()``.

    Examples:
        >>> PowerEpsilon(0.5, power=0.5)
        PowerEpsilon(eps=0.5, batch_shape=(), initial=0.5, power=0.5, first_index=1)
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

    def scalars(self) -> ScalarForm:
        """The formula's parameters, ε and the episodes so far."""
        parameters = (self.initial, self.power, self.first_index, self.episodes)
        return ScalarForm(PowerRule, parameters, memory=(self.eps, self.episodes))

    def extra_repr(self) -> str:
        """ε and its formula's parameters."""
        formula = f"initial={shown(self.initial)}, power={shown(self.power)}"
        return f"{super().extra_repr()}, {formula}, first_index={self.first_index}"


class LinearRule(ScalarRule):
    """``linear_decay``: parameters are first and last ε, frames between; memory is ε, frames."""

    @staticmethod
    def learn(
        parameters: Row,
        memory: Row,
        local: Row,
        state: Number,
        greedy: Number,
        uniform: Number,
        change: Number,
    ) -> None:
        """Count."""
        initial, final, num_frames = parameters[0], parameters[1], parameters[2]
        memory[1] += 1.0
        memory[0] = max(final, initial - memory[1] * (initial - final) / num_frames)


class LinearEpsilon(EpsilonStrategy):
    """TorchRL's own annealing, in closed form.

    Args:
        initial (float, sequence of float or Tensor, optional): ε at first, a number or one per run.
            Default: 1.
        final (float, sequence of float or Tensor, optional): ε in the end, likewise. Default: 0.1.
        num_frames (int, optional): frames from one to the other. Default: 1000.
        count_by (str, optional): what moves the clock: ``"update"`` counts the transitions given to
            :meth:`update`, ``"step"`` the frames given to :meth:`step`, as TorchRL's trainers do.
            Default: ``"update"``.
        batch_shape (sequence of int, optional): shape of the runs. Default: ``()``.

    Examples:
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
        self.num_frames = num_frames
        self.initial: Tensor
        self.final: Tensor
        self.frames: Tensor
        self.register_buffer("initial", _probability(initial, batch_shape, "initial"))
        self.register_buffer("final", _probability(final, batch_shape, "final"))
        if bool((self.final > self.initial).any()):
            raise ValueError(f"final must not exceed initial, got {final} > {initial}.")
        self.register_buffer("frames", torch.zeros(self.batch_shape, dtype=torch.int64))
        self.register_skipped("mask", "foreign")

    @property
    def eps(self) -> Tensor:
        """ε per run."""
        return linear_decay(self.initial, self.final, self.frames, self.num_frames)

    @property
    def needs_update(self) -> bool:
        """Unless the clock is :meth:`step`."""
        return self.count_by == "update"

    @property
    def learned(self) -> Tensor:
        """How many frames were counted."""
        return self.frames

    def learned_from(self, transition: TensorDictBase) -> Tensor | None:
        """Where an episode ended, if the clock is :meth:`update`."""
        return None if self.count_by == "step" else self._done(transition, self.frames)

    def read(self, transition: TensorDictBase, taken: Tensor | None) -> tuple[Tensor, ...]:
        """Which transitions to count, ``[steps, *batch_shape]``; none if the clock is `step`."""
        if self.count_by == "step":
            return ()
        done = self._done(transition, self.frames)
        return (self.steps(transition, self.mark_like(taken, done)),)

    def learn(self, *columns: Tensor) -> None:
        """Count."""
        for counted in columns:
            self.frames += counted.sum(0)

    def step(self, frames: int) -> None:
        """Count frames, unless the clock is :meth:`update`.

        Args:
            frames (int): how many.
        """
        if self.count_by == "step":
            self.frames += frames

    def scalars(self) -> ScalarForm:
        """The formula's parameters, ε and the frames so far, if the clock is :meth:`update`."""
        if self.count_by == "step":
            raise NoScalarFormError("LinearEpsilon with count_by='step' is moved by step() alone.")
        parameters = (self.initial, self.final, float(self.num_frames))
        return ScalarForm(LinearRule, parameters, memory=(self.eps, self.frames))

    def load_scalars(self, memory: Tensor, local: Tensor | None) -> None:
        """Take over the number of frames."""
        self.frames.copy_(memory[:, 1])

    def extra_repr(self) -> str:
        """ε and its formula's parameters."""
        formula = f"initial={shown(self.initial)}, final={shown(self.final)}"
        clock = f"num_frames={self.num_frames}, count_by={self.count_by!r}"
        return f"{super().extra_repr()}, {formula}, {clock}"
