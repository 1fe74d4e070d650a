"""What the engines ask of a domain: many lanes of plain tensors, or one run of plain numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from bmc_torchrl.envs.factored import active_features, unravel_index

if TYPE_CHECKING:
    from bmc_torchrl.envs.base import BatchedEnv

__all__ = ["LaneDomain", "Noise", "Number", "Numbers", "ScalarDomain"]

Number = Any
Numbers = tuple[Number, Number, Number, Number]


class Noise(NamedTuple):
    """Uniform draws of one or more steps, ``[*steps, *lanes, n]`` with ``n = 0`` where unused.

    Attributes:
        transition: float64, for the step; see :meth:`LaneDomain.transition_noise`.
        reset: float32, for the initial state of the next episode.
    """

    transition: Tensor
    reset: Tensor


class LaneDomain(ABC):
    """A domain as pure functions of lane states ``[*lanes, *state_shape]``.

    Attributes:
        record_width: number of floats that hold a state in replay.
        num_features: width of the network's dense input.
        ones: number of ones in a multi-hot input, 0 if the input is not multi-hot.
        shortest_episode: no episode ends in fewer steps.
        unroll: steps in tables to compile at once; of long ones more than two take minutes.
        draws: uniforms that a step reads.
        resets: uniforms that an initial state reads.
    """

    record_width = 1
    unroll = 10
    shortest_episode = 1
    draws = 0
    resets = 0

    def __init__(self, env: BatchedEnv) -> None:
        self.sizes: tuple[int, ...] = env.sizes
        self.num_states: int = env.num_states
        self.num_actions: int = env.num_actions
        self.num_features: int = sum(env.sizes)
        self.ones: int = len(env.sizes)
        self.max_steps: int = env.step_limit
        self.device: torch.device = env.device

    def draw(self, shape: Sequence[int], generator: torch.Generator) -> Noise:
        """Fresh uniforms ``[*shape, n]``."""
        transition = self.draw_transition(shape, generator)
        return Noise(transition, self.draw_reset(shape, generator))

    def draw_transition(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Uniforms of transitions alone."""
        options: dict[str, Any] = {"device": self.device, "generator": generator}
        return torch.rand((*shape, self.draws), dtype=torch.float64, **options)

    def draw_reset(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Uniforms of initial states alone."""
        return torch.rand((*shape, self.resets), device=self.device, generator=generator)

    def transition_noise(self, uniform: Tensor) -> Tensor:
        """What :meth:`step` is given instead of the uniforms."""
        return uniform

    @abstractmethod
    def start(self, reset: Tensor, episode: Tensor) -> Tensor:
        """Initial states from uniforms ``[*lanes, resets]``.

        Args:
            reset: the uniforms.
            episode: the training episodes that each run has had before this one, or, for a greedy
                test, before the one it follows; int64, broadcast to ``[*lanes]``. Read by domains
                whose task changes.
        """

    @abstractmethod
    def step(self, state: Tensor, action: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Next state, reward and termination."""

    def index(self, state: Tensor) -> Tensor:
        """The discrete state, int64 ``[*lanes]``."""
        return state

    def record(self, state: Tensor) -> Tensor:
        """A state as floats ``[*lanes, record_width]``, exactly."""
        return state.unsqueeze(-1).float()

    def restore(self, record: Tensor) -> Tensor:
        """The state of a :meth:`record`."""
        return record.squeeze(-1).int()

    def encode(self, state: Tensor) -> Tensor:
        """Dense network inputs ``[lanes, num_features, batch]`` of states ``[lanes, batch]``."""
        blocks = []
        for digit, size in zip(unravel_index(state, self.sizes), self.sizes, strict=True):
            values = torch.arange(size, device=state.device, dtype=digit.dtype).view(1, -1, 1)
            blocks.append((digit.unsqueeze(1) == values).float())
        return torch.cat(blocks, 1)

    def positions(self, state: Tensor) -> Tensor:
        """Positions of the ones in :meth:`encode`, int64 ``[lanes, ones, batch]``."""
        return active_features(state, self.sizes).long().mT


class ScalarDomain(Protocol):
    """A domain for one run: a ``NamedTuple`` of constants whose methods numba compiles as they are.

    They may use their arguments, ``math``, ``np`` and numbers of their module; numba itself is only
    imported by the engine. A state is an index and four numbers in the precision of the
    environment's ``physics_dtype``, zeros where the index says it all.
    """

    def start(self, u: Numbers, episode: Number) -> tuple[Numbers, Number]:
        """Numbers and state of a new episode, from four uniforms that are float32 in value.

        `episode` is as in :meth:`LaneDomain.start`.
        """
        ...

    def step(
        self, p: Numbers, state: Number, action: Number, u: Number
    ) -> tuple[Numbers, Number, Number, Any]:
        """Numbers, state, reward and termination after one step, from a float64 uniform."""
        ...

    def cell(self, p: Numbers, state: Number) -> Number:
        """The index of a state whose numbers have been rounded; `state` where there are none."""
        ...

    def noisy(self) -> bool:
        """Whether :meth:`step` reads its uniform."""
        ...
