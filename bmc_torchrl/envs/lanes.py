"""The three domains as the engine sees them: lanes of plain tensors, and uniforms as arguments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bmc_torchrl.envs import (
    CartPole,
    CartPoleEnv,
    SubgoalGridEnv,
    SupplyChainEnv,
    cart_pole_bins,
    cart_pole_step,
    ravel_index,
    supply_chain_step,
    unravel_index,
)
from bmc_torchrl.envs.base import BatchedEnv

__all__ = ["LaneDomain", "Noise", "lane_domain"]


class Noise(NamedTuple):
    """Uniform draws of one or more steps, ``[*steps, *lanes, n]`` with ``n = 0`` where unused.

    Attributes:
        transition: float64, what :meth:`LaneDomain.transition_noise` turns into demand.
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
    """

    record_width = 1
    ones = 0
    unroll = 10
    shortest_episode = 1
    demands = 0
    resets = 0

    def __init__(self, env: BatchedEnv) -> None:
        if env.max_steps is None:
            raise ValueError("The lockstep engine needs a step limit: build env with max_steps=….")
        self.sizes: tuple[int, ...] = env.sizes
        self.num_states: int = env.num_states
        self.num_actions: int = env.num_actions
        self.num_features: int = sum(env.sizes)
        self.max_steps: int = env.max_steps
        self.device: torch.device = env.device

    def draw(self, shape: Sequence[int], generator: torch.Generator) -> Noise:
        """Fresh uniforms ``[*shape, n]``."""
        transition = self.draw_transition(shape, generator)
        return Noise(transition, self.draw_reset(shape, generator))

    def draw_transition(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Uniforms of transitions alone."""
        options: dict[str, Any] = {"device": self.device, "generator": generator}
        return torch.rand((*shape, self.demands), dtype=torch.float64, **options)

    def draw_reset(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Uniforms of initial states alone."""
        return torch.rand((*shape, self.resets), device=self.device, generator=generator)

    def transition_noise(self, uniform: Tensor) -> Tensor:
        """What :meth:`step` is given instead of the uniforms."""
        return uniform

    @abstractmethod
    def start(self, reset: Tensor) -> Tensor:
        """Initial states from uniforms ``[*lanes, resets]``."""

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
        digits, shifted, offset = unravel_index(state, self.sizes), [], 0
        for digit, size in zip(digits, self.sizes, strict=True):
            shifted.append(digit.long() + offset)
            offset += size
        return torch.stack(shifted, 1)


class GridLanes(LaneDomain):
    """The grid-world, its moves read from the environment's table."""

    ones = 3

    def __init__(self, env: SubgoalGridEnv) -> None:
        super().__init__(env)
        self.start_state: int = env.grid.start_state
        self.shortest_episode = min(len(env.grid.goals), self.max_steps)
        self.next_state: Tensor = env.next_state_table
        self.reward: Tensor = env.reward_table
        self.terminated: Tensor = env.terminated_table

    def start(self, reset: Tensor) -> Tensor:
        return torch.full(reset.shape[:-1], self.start_state, device=reset.device)

    def step(self, state: Tensor, action: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        entry = state * self.num_actions + action
        return self.next_state[entry], self.reward[entry], self.terminated[entry]


class CartPoleLanes(LaneDomain):
    """Cart-pole: the state is the physics ``[*lanes, 4]``."""

    record_width = 4
    resets = 4

    def __init__(self, env: CartPoleEnv) -> None:
        super().__init__(env)
        if env.physics_dtype != torch.float32:
            raise ValueError(f"The engine steps float32 physics, got dtype={env.physics_dtype}.")
        self.model = env.model
        self.num_features = 4
        # Pushed one way from the outermost start, the paper's pole needs 8 steps to fall.
        self.shortest_episode = min(6, self.max_steps) if env.model == CartPole() else 1

    def start(self, reset: Tensor) -> Tensor:
        return (2.0 * reset - 1.0) * self.model.initial_bound

    def step(self, state: Tensor, action: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return cart_pole_step(state, action, self.model)

    def index(self, state: Tensor) -> Tensor:
        return cart_pole_bins(state, self.model)

    def record(self, state: Tensor) -> Tensor:
        return state

    def restore(self, record: Tensor) -> Tensor:
        return record

    def encode(self, state: Tensor) -> Tensor:
        return state.mT


class SupplyChainLanes(LaneDomain):
    """The supply-chain: the state is the row-major index of the stocks."""

    unroll = 2

    def __init__(self, env: SupplyChainEnv) -> None:
        super().__init__(env)
        self.env, self.network = env, env.network
        self.demands = env.network.warehouses
        self.ones = 1 + self.demands
        self.start_state = 0
        for stock, size in zip(env.network.initial_stocks, env.sizes, strict=True):
            self.start_state = self.start_state * size + stock
        self.shortest_episode = self.max_steps

    def transition_noise(self, uniform: Tensor) -> Tensor:
        demand: Tensor = self.env.demand(uniform)
        return demand

    def start(self, reset: Tensor) -> Tensor:
        return torch.full(reset.shape[:-1], self.start_state, device=reset.device)

    def step(self, state: Tensor, action: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        stocks = torch.stack(unravel_index(state, self.sizes), -1)
        stocks, reward, terminated = supply_chain_step(stocks, action, noise, self.network)
        return ravel_index(stocks.unbind(-1), self.sizes), reward, terminated


def lane_domain(env: BatchedEnv) -> LaneDomain:
    """The lanes of one of the package's environments.

    >>> lane_domain(SubgoalGridEnv(batch_size=[3])).num_features
    16
    """
    if isinstance(env, SubgoalGridEnv):
        return GridLanes(env)
    if isinstance(env, CartPoleEnv):
        return CartPoleLanes(env)
    if isinstance(env, SupplyChainEnv):
        return SupplyChainLanes(env)
    raise TypeError(
        f"The lockstep engine steps SubgoalGridEnv, CartPoleEnv and SupplyChainEnv, not "
        f"{type(env).__name__}: use the TorchRL path (engine=torchrl)."
    )
