"""Grid-world with sub-goals to be visited in order ([GSL19], §5.1, after Ng et al. 1999)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from bmc_torchrl.envs.base import BatchedEnv
from bmc_torchrl.envs.factored import ravel_index, unravel_index
from bmc_torchrl.envs.lanes import LaneDomain, Number, Numbers

__all__ = ["SubgoalGrid", "SubgoalGridEnv", "subgoal_grid_step", "subgoal_grid_table"]

Cell = tuple[int, int]


def _cell(name: str, cell: Sequence[int]) -> Cell:
    if len(tuple(cell)) != 2:
        raise ValueError(f"{name}: a cell is (row, column), got {cell!r}.")
    return int(cell[0]), int(cell[1])


@dataclass(frozen=True)
class SubgoalGrid:
    """A grid, a start and the sub-goals in the order in which they must be reached.

    The state is (row, column, stage), the stage counting the sub-goals reached; its index is
    row-major. The defaults are the paper's.

    Attributes:
        rows: Height; row 0 is the top.
        columns: Width; column 0 is the left.
        start: First cell of an episode, as (row, column).
        goals: Distinct cells; reaching the last one ends the episode.
        move_reward: Reward of a move.
        blocked_reward: Reward of staying in place because the move is not possible.

    >>> SubgoalGrid().num_states
    150
    """

    rows: int = 5
    columns: int = 5
    start: Cell = (4, 0)
    goals: Sequence[Cell] = ((3, 4), (1, 1), (3, 0), (4, 4), (0, 4))
    move_reward: float = -0.1
    blocked_reward: float = -0.2

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", _cell("start", self.start))
        object.__setattr__(self, "goals", tuple(_cell("goals", goal) for goal in self.goals))
        if self.rows < 1 or self.columns < 1:
            raise ValueError(f"rows and columns must be positive, got {self.rows}, {self.columns}.")
        if not self.goals:
            raise ValueError("goals must name at least one cell: the last goal ends the episode.")
        for name, cell in [("start", self.start), *(("goals", goal) for goal in self.goals)]:
            if not (0 <= cell[0] < self.rows and 0 <= cell[1] < self.columns):
                raise ValueError(
                    f"{name}: cell {cell} is outside the {self.rows} × {self.columns} grid; "
                    "cells are (row, column), counted from 0."
                )
        if len({self.start, *self.goals}) <= len(self.goals):
            raise ValueError(f"start and goals must be distinct, got {self.start}, {self.goals}.")

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Number of rows, columns and stages."""
        return self.rows, self.columns, len(self.goals) + 1

    @property
    def num_states(self) -> int:
        """Number of (row, column, stage) triples, the terminal stage included."""
        return self.rows * self.columns * (len(self.goals) + 1)

    @property
    def start_state(self) -> int:
        """Index of the start cell at stage 0."""
        return (self.start[0] * self.columns + self.start[1]) * (len(self.goals) + 1)


PAPER_GRID = SubgoalGrid()
LEFT, UP, RIGHT, DOWN = range(4)


def subgoal_grid_step(
    state: Tensor,
    action: Tensor,
    grid: SubgoalGrid = PAPER_GRID,
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """One move of every agent of a batch.

    Leaving the grid, or entering a sub-goal whose turn has not come, leaves the agent in place for
    ``blocked_reward``; any other move costs ``move_reward``.

    Args:
        state: State index, int64 ``[*batch]``.
        action: 0 left, 1 up, 2 right, 3 down; int64 ``[*batch]``.
        grid: The layout.
        dtype: Precision of the reward.

    Returns:
        Next state int64, reward and termination bool, each ``[*batch]``.

    >>> subgoal_grid_step(torch.tensor([120, 120]), torch.tensor([LEFT, UP]))[1]
    tensor([-0.2000, -0.2000])
    """
    row, column, stage = unravel_index(state, grid.sizes)
    to_row = row + (action == DOWN).long() - (action == UP).long()
    to_column = column + (action == RIGHT).long() - (action == LEFT).long()
    goal = torch.zeros_like(state)
    for number, (goal_row, goal_column) in enumerate(grid.goals, start=1):
        goal = goal + number * ((to_row == goal_row) & (to_column == goal_column)).long()
    inside = (to_row >= 0) & (to_row < grid.rows) & (to_column >= 0) & (to_column < grid.columns)
    moves = inside & (goal <= stage + 1)
    to_stage = stage + (moves & (goal == stage + 1)).long()
    digits = torch.where(moves, to_row, row), torch.where(moves, to_column, column), to_stage
    reward = grid.blocked_reward + (grid.move_reward - grid.blocked_reward) * moves.to(dtype)
    return ravel_index(digits, grid.sizes), reward, to_stage == len(grid.goals)


def subgoal_grid_table(
    grid: SubgoalGrid = PAPER_GRID,
    device: torch.device | str | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`subgoal_grid_step` of every state and action.

    Returns:
        Next state int64, reward and termination bool, each ``[states, 4]``.
    """
    pair = torch.arange(grid.num_states * 4, device=device).reshape(grid.num_states, 4)
    return subgoal_grid_step(pair // 4, pair % 4, grid, dtype=dtype)


class GridLanes(LaneDomain):
    """Lanes whose moves are read from the environment's table."""

    def __init__(self, env: SubgoalGridEnv) -> None:
        super().__init__(env)
        self.start_state: int = env.grid.start_state
        self.shortest_episode = min(len(env.grid.goals), self.max_steps)
        self.next_state: Tensor = env.next_state_table
        self.reward: Tensor = env.reward_table
        self.terminated: Tensor = env.terminated_table

    def start(self, reset: Tensor, episode: Tensor) -> Tensor:
        return torch.full(reset.shape[:-1], self.start_state, device=reset.device)

    def step(self, state: Tensor, action: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        entry = state * self.num_actions + action
        return self.next_state[entry], self.reward[entry], self.terminated[entry]


class GridScalars(NamedTuple):
    """One run whose moves are read from the tables of :func:`subgoal_grid_table`."""

    next_state: Any
    reward: Any
    terminated: Any
    start_state: int

    def start(self, u: Numbers, episode: Number) -> tuple[Numbers, Number]:
        return (0.0, 0.0, 0.0, 0.0), self.start_state

    def step(self, p: Numbers, state: Number, action: Number, u: Number) -> tuple[Any, ...]:
        move = state, action
        return p, self.next_state[move], self.reward[move], self.terminated[move]

    def cell(self, p: Numbers, state: Number) -> Number:
        return state

    def noisy(self) -> bool:
        return False


class SubgoalGridEnv(BatchedEnv):
    """The grid-world as a batch of environments; see :class:`SubgoalGrid` for its rules.

    Observations: ``"state"`` int64 ``[*batch]`` and, with ``observation="encoded"``,
    ``"observation"`` float32 ``[*batch, rows + columns + stages]``: row, column, stage one-hot.

    Args:
        grid: The layout; the paper's by default.
        **options: ``observation``, ``batch_size``, ``device``, ``max_steps`` and
            ``one_hot_actions``, as in :class:`~bmc_torchrl.envs.base.BatchedEnv`.

    >>> env = SubgoalGridEnv(batch_size=[3])
    >>> env.rollout(10)["next", "reward"].shape
    torch.Size([3, 10, 1])
    """

    def __init__(self, grid: SubgoalGrid = PAPER_GRID, **options: Any) -> None:
        super().__init__(sizes=grid.sizes, num_actions=4, **options)
        self.grid = grid
        next_state, reward, terminated = subgoal_grid_table(grid, self.device)
        self.register_buffer("next_state_table", next_state.flatten(), persistent=False)
        self.register_buffer("reward_table", reward.flatten(), persistent=False)
        self.register_buffer("terminated_table", terminated.flatten(), persistent=False)

    def lanes(self) -> GridLanes:
        """See :class:`~bmc_torchrl.envs.lanes.LaneDomain`."""
        return GridLanes(self)

    def scalars(self) -> GridScalars:
        """See :class:`~bmc_torchrl.envs.lanes.ScalarDomain`."""
        next_state, reward, terminated = (x.numpy() for x in subgoal_grid_table(self.grid))
        return GridScalars(next_state.astype(np.int32), reward, terminated, self.grid.start_state)

    def picture(self, current: TensorDictBase, steps: int) -> Any:
        """The grid with its flags and the agent."""
        from bmc_torchrl.envs.rendering import draw_grid  # Pillow is an extra.

        row, column, stage = (int(digit) for digit in unravel_index(current["state"], self.sizes))
        return draw_grid(self.grid, row, column, stage, steps)

    def _initial_state(self) -> dict[str, Tensor]:
        start = torch.full(
            self.batch_size, self.grid.start_state, dtype=torch.int64, device=self.device
        )
        return {"state": start}

    def _next_state(
        self, tensordict: TensorDictBase, action: Tensor
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        entry = tensordict.get("state") * 4 + action
        state = {"state": self.next_state_table[entry]}
        return state, self.reward_table[entry], self.terminated_table[entry]
