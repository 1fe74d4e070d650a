"""The grid-world, the supply-chain and any finite MDP as single Gymnasium environments.

Importing this module registers ``bmc_torchrl/SubgoalGrid-v0``, ``bmc_torchrl/SupplyChain-v0`` and
``bmc_torchrl/Tabular-v0``, all limited to 200 steps;
``gymnasium.make("bmc_torchrl.envs.gymnasium_ids:bmc_torchrl/SubgoalGrid-v0")`` imports and makes in
one call. Cart-pole is Gymnasium's own ``CartPole-v1``.
"""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from bmc_torchrl.envs.base import Observation
from bmc_torchrl.envs.factored import one_hot_encoding, unravel_index
from bmc_torchrl.envs.finite import FiniteMDP
from bmc_torchrl.envs.grid_world import PAPER_GRID, SubgoalGrid, subgoal_grid_step
from bmc_torchrl.envs.poisson import poisson_cdf, poisson_demand
from bmc_torchrl.envs.rendering import RGB, draw_grid, draw_supply_chain
from bmc_torchrl.envs.supply_chain import PAPER_NETWORK, SupplyNetwork, supply_chain_step
from bmc_torchrl.envs.tabular import Starts, tabular_step, task_of

__all__ = [
    "GRID_ID",
    "SUPPLY_CHAIN_ID",
    "TABULAR_ID",
    "SubgoalGridGym",
    "SupplyChainGym",
    "TabularGym",
]

GRID_ID = "bmc_torchrl/SubgoalGrid-v0"
SUPPLY_CHAIN_ID = "bmc_torchrl/SupplyChain-v0"
TABULAR_ID = "bmc_torchrl/Tabular-v0"


class _DiscreteGym(gymnasium.Env):  # type: ignore[misc]
    """A domain whose state is a tuple of digits, one episode at a time."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 4}

    def __init__(
        self,
        start: tuple[int, ...],
        sizes: tuple[int, ...],
        num_actions: int,
        observation: Observation,
        render_mode: str | None,
    ) -> None:
        if observation not in ("state", "encoded"):
            raise ValueError(f'observation must be "state" or "encoded", got {observation!r}.')
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f'render_mode must be None or "rgb_array", got {render_mode!r}.')
        self.start, self.sizes, self.digits = start, sizes, start
        self.observation, self.render_mode = observation, render_mode
        self.steps = 0
        self.action_space = spaces.Discrete(num_actions)
        self.observation_space = (
            spaces.Discrete(int(np.prod(sizes)))
            if observation == "state"
            else spaces.Box(0.0, 1.0, (sum(sizes),), np.float32)
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode; see :meth:`gymnasium.Env.reset`."""
        super().reset(seed=seed)
        self.digits, self.steps = self.start, 0
        return self._observe(), {}

    def _observe(self) -> Any:
        index = np.int64(np.ravel_multi_index(self.digits, self.sizes))
        if self.observation == "state":
            return index
        return one_hot_encoding(torch.as_tensor(index), self.sizes).numpy()

    def _action(self, action: Any) -> torch.Tensor:
        if not self.action_space.contains(action):
            raise ValueError(f"action must be in [0, {self.action_space.n}), got {action!r}.")
        self.steps += 1
        return torch.tensor(int(action))


class SubgoalGridGym(_DiscreteGym):
    """The grid-world; see :class:`~bmc_torchrl.envs.grid_world.SubgoalGrid` for its rules.

    Args:
        grid: The layout; the paper's by default.
        observation: ``"state"`` for ``Discrete(150)``, ``"encoded"`` for the one-hot ``Box``.
        render_mode: ``"rgb_array"`` for pictures.

    >>> env = gymnasium.make(GRID_ID)
    >>> int(env.reset()[0])
    120
    """

    def __init__(
        self,
        grid: SubgoalGrid = PAPER_GRID,
        observation: Observation = "state",
        render_mode: str | None = None,
    ) -> None:
        super().__init__((*grid.start, 0), grid.sizes, 4, observation, render_mode)
        self.grid = grid

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Move the agent; see :meth:`gymnasium.Env.step`."""
        state = torch.tensor(int(np.ravel_multi_index(self.digits, self.sizes)))
        state, reward, terminated = subgoal_grid_step(state, self._action(action), self.grid)
        self.digits = tuple(int(digit) for digit in unravel_index(state, self.sizes))
        return self._observe(), float(reward), bool(terminated), False, {}

    def render(self) -> RGB | None:
        """Picture of the grid, flags and agent."""
        if self.render_mode is None:
            return None
        row, column, stage = self.digits
        return draw_grid(self.grid, row, column, stage, self.steps)


class SupplyChainGym(_DiscreteGym):
    """The supply-chain; see :class:`~bmc_torchrl.envs.supply_chain.SupplyNetwork` for its rules.

    ``info`` of a step holds ``produced``, and per warehouse ``shipped``, ``demand`` and ``sold``.

    Args:
        network: The constants; the paper's by default.
        observation: ``"state"`` for ``Discrete(2601)``, ``"encoded"`` for the one-hot ``Box``.
        render_mode: ``"rgb_array"`` for pictures.

    >>> env = gymnasium.make(SUPPLY_CHAIN_ID)
    >>> int(env.reset(seed=0)[0])
    510
    """

    def __init__(
        self,
        network: SupplyNetwork = PAPER_NETWORK,
        observation: Observation = "state",
        render_mode: str | None = None,
    ) -> None:
        start = tuple(network.initial_stocks)
        super().__init__(start, network.sizes, network.num_actions, observation, render_mode)
        self.network = network
        self.cdfs = [poisson_cdf(rate) for rate in network.demand_rate]
        self.last: dict[str, Any] = {}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode; see :meth:`gymnasium.Env.reset`."""
        self.last = {}
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Sell, ship and produce; see :meth:`gymnasium.Env.step`."""
        chosen, before = self._action(action), self.digits
        uniform = torch.as_tensor(self.np_random.random(len(self.cdfs)))
        demand = torch.stack([poisson_demand(uniform[j], cdf) for j, cdf in enumerate(self.cdfs)])
        stocks, reward, _ = supply_chain_step(torch.tensor(before), chosen, demand, self.network)
        self.digits = tuple(stocks.tolist())
        self.last = _flows(before, self.digits, demand.tolist())
        return self._observe(), float(reward), False, False, dict(self.last)

    def render(self) -> RGB | None:
        """Picture of the stocks, the trucks and the last demand."""
        if self.render_mode is None:
            return None
        return draw_supply_chain(self.network, self.digits, steps=self.steps, **self.last)


class TabularGym(_DiscreteGym):
    """A finite MDP; see :class:`~bmc_torchrl.envs.finite.FiniteMDP`. It has no pictures.

    Args:
        mdp: The tables.
        reward_scale: What rewards are multiplied by.
        observation: ``"state"`` for ``Discrete``, ``"encoded"`` for the one-hot ``Box``.

    >>> from bmc_torchrl.envs import chain
    >>> env = gymnasium.make(TABULAR_ID, mdp=chain())
    >>> int(env.reset(seed=0)[0])
    0
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

    def __init__(
        self, mdp: FiniteMDP, reward_scale: float = 1.0, observation: Observation = "state"
    ) -> None:
        super().__init__((0,), (mdp.num_states,), mdp.num_actions, observation, None)
        self.task, self.starts = task_of([mdp], reward_scale), Starts.of(mdp)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode; see :meth:`gymnasium.Env.reset`."""
        gymnasium.Env.reset(self, seed=seed)
        first = self.starts.at(self._draw())
        self.digits, self.steps = (int(first),), 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Draw an outcome; see :meth:`gymnasium.Env.step`."""
        state, chosen = torch.tensor(self.digits[0]), self._action(action)
        state, reward, ends = tabular_step(state, chosen, self._draw(), self.task)
        self.digits = (int(state),)
        return self._observe(), float(reward), bool(ends), False, {}

    def _draw(self) -> torch.Tensor:
        return torch.tensor(self.np_random.random(), dtype=torch.float64)


def _flows(before: tuple[int, ...], after: tuple[int, ...], demand: list[int]) -> dict[str, Any]:
    sold = tuple(min(wanted, stock) for wanted, stock in zip(demand, before[1:], strict=True))
    shipped = tuple(
        new - old + gone for new, old, gone in zip(after[1:], before[1:], sold, strict=True)
    )
    produced = after[0] - before[0] + sum(shipped)
    return {"produced": produced, "shipped": shipped, "demand": tuple(demand), "sold": sold}


for _id, _entry_point in (
    (GRID_ID, SubgoalGridGym),
    (SUPPLY_CHAIN_ID, SupplyChainGym),
    (TABULAR_ID, TabularGym),
):
    if _id not in gymnasium.registry:
        gymnasium.register(_id, _entry_point, max_episode_steps=200)
