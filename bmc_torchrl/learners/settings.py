"""What a learner is given, whoever runs it: TorchRL's path or a lockstep engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = [
    "DQNSettings",
    "ExpectedSarsaSettings",
    "LearnerSettings",
    "PublishedDQNSettings",
    "RunSettings",
]


def _require_count(settings: Any, least: int, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {value}.")


def _require_finite(settings: Any, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be at least 0 and finite, got {value}.")


def _require_share(settings: Any, *names: str, zero: bool = False) -> None:
    for name in names:
        value = getattr(settings, name)
        if not 0 <= value <= 1 or (value == 0 and not zero):
            raise ValueError(f"{name} must be in {'[' if zero else '('}0, 1], got {value}.")


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What all learners share: how long a run is, how it is tested, and its random numbers.

    Attributes:
        gamma: discount factor of the returns, in learning and in tests.
        episodes: training episodes of each run.
        tests: greedy test episodes after each training episode; 0 for none.
        mask_terminated: leave out the bootstrap of a terminal s′ in the returns that strategies
            and expected SARSA see. The published experiments do not.
        next_action: whether a′ is drawn "after" learning, as in Algorithm 1, or "before", as in the
            published data of expected SARSA.
        stop_after_perfect_tests: freeze a run after so many consecutive tests in which every
            episode reached the step limit; its remaining episodes repeat the last results.
        seed: of all random numbers.
        first_run: index of the first run, where the runs of one experiment are divided.

    >>> RunSettings(gamma=0.99, episodes=500).next_action
    'after'
    """

    gamma: float
    episodes: int
    tests: int = 1
    mask_terminated: bool = False
    next_action: Literal["before", "after"] = "after"
    stop_after_perfect_tests: int | None = None
    seed: int = 0
    first_run: int = 0

    def __post_init__(self) -> None:
        _require_share(self, "gamma", zero=True)
        _require_count(self, 1, "episodes")
        _require_count(self, 0, "tests", "seed", "first_run")
        if self.stop_after_perfect_tests is not None:
            _require_count(self, 1, "stop_after_perfect_tests")
        if self.next_action not in ("before", "after"):
            raise ValueError(f"next_action must be 'before' or 'after', got {self.next_action!r}.")


@dataclass(frozen=True, kw_only=True)
class ExpectedSarsaSettings:
    r"""Tabular expected SARSA.

    Attributes:
        learning_rate: η of the first episode; that of episode k is
            :math:`\max(\eta\,\mathrm{decay}^k, \mathrm{floor})`.
        decay: see `learning_rate`.
        floor: see `learning_rate`.
        initializer: of the table: ``"zeros"``, ``"normal"`` (`scale` · N(0, 1)) or ``"uniform"``
            (U[0, `scale`]).
        scale: see `initializer`.
    """

    learning_rate: float
    decay: float = 1.0
    floor: float = 0.0
    initializer: Literal["zeros", "normal", "uniform"] = "zeros"
    scale: float = 0.1

    def __post_init__(self) -> None:
        _require_share(self, "learning_rate")
        _require_share(self, "decay", "floor", zero=True)
        _require_finite(self, "scale")
        if self.initializer not in ("zeros", "normal", "uniform"):
            raise ValueError(
                f"initializer={self.initializer!r} is unknown; use zeros, normal or uniform."
            )


@dataclass(frozen=True, kw_only=True)
class PublishedDQNSettings:
    """The DQN of the published data: no target network, several epochs on one minibatch.

    Attributes:
        hidden: widths of the hidden layers.
        learning_rate: Adam's η.
        batch_size: of the minibatch; learning starts once replay holds as many.
        capacity: transitions in each run's replay.
        epochs: Adam steps on each minibatch.
        l2: Keras' kernel penalty.
    """

    hidden: Sequence[int]
    learning_rate: float
    batch_size: int
    capacity: int
    epochs: int
    l2: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", tuple(self.hidden))
        _require_share(self, "learning_rate")
        _require_count(self, 1, "batch_size", "epochs")
        _require_finite(self, "l2")
        _require_room(self)


@dataclass(frozen=True, kw_only=True)
class DQNSettings:
    """DQN with a target network, one update per environment step.

    Attributes:
        hidden: widths of the hidden layers.
        learning_rate: Adam's η.
        loss_function: ``"l2"`` or ``"smooth_l1"``.
        batch_size: transitions per update.
        capacity: transitions in each run's replay.
        warmup: transitions of each run before the first update.
        n_steps: steps of the return.
        target_tau: share by which the target network follows.
        target_interval: updates between two moves of the target network.
        double: Double DQN.
        dueling: dueling head.
        prioritized: prioritised replay, α = 0.6 and β = 0.4.
        torchrl: learn with TorchRL's ``DQNLoss`` and replay buffer instead of plain tensors.
        max_grad_norm: gradient clipping, each run by itself.
    """

    hidden: Sequence[int] = (64, 64)
    learning_rate: float = 1e-3
    batch_size: int = 64
    capacity: int = 10_000
    loss_function: Literal["l2", "smooth_l1"] = "l2"
    warmup: int = 64
    n_steps: int = 1
    target_tau: float = 0.01
    target_interval: int = 1
    double: bool = False
    dueling: bool = False
    prioritized: bool = False
    torchrl: bool = False
    max_grad_norm: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", tuple(self.hidden))
        _require_share(self, "learning_rate", "target_tau")
        _require_count(self, 1, "batch_size", "n_steps", "target_interval")
        _require_count(self, 0, "warmup")
        _require_room(self)
        if self.max_grad_norm is not None and not 0 < self.max_grad_norm < math.inf:
            raise ValueError(f"max_grad_norm must be positive or null, got {self.max_grad_norm}.")
        if self.torchrl and (self.prioritized or self.n_steps > 1):
            raise ValueError(
                "torchrl=true has one-step returns and uniform replay; leave prioritized and "
                "n_steps out, or hand TorchRL's own objects to EpsilonGreedyDQN."
            )


def _require_room(settings: PublishedDQNSettings | DQNSettings) -> None:
    for width in settings.hidden:
        if not isinstance(width, int) or width < 1:
            raise ValueError(f"hidden must be widths of at least 1, got {list(settings.hidden)}.")
    _require_count(settings, 1, "capacity")
    if settings.capacity < settings.batch_size:
        raise ValueError(
            f"capacity={settings.capacity} must hold a batch of batch_size={settings.batch_size}."
        )


LearnerSettings = ExpectedSarsaSettings | PublishedDQNSettings | DQNSettings
