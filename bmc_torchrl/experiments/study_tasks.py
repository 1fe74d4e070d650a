"""Finite tasks that only the study has, and the order of their actions."""

from __future__ import annotations

import torch

from bmc_torchrl.envs.finite import FiniteMDP
from bmc_torchrl.envs.grid_world import PAPER_GRID, subgoal_grid_table

__all__ = ["in_random_order", "paper_grid", "river_swim"]


def river_swim(length: int = 6) -> FiniteMDP:
    """RiverSwim (Strehl & Littman 2008): against the stream to a reward of 1, or 0.005 at once.

    Action 0 swims down, which always works and pays 0.005 at the lower end; action 1 swims up.
    Episodes start in the second state and never end by themselves.

    >>> river_swim(6).num_outcomes
    3
    """
    if length < 3:
        raise ValueError(f"length must be at least 3, got {length}.")
    last = length - 1
    up: list[list[tuple[float, int, float, bool]]] = [
        [(0.35, s + 1, 0.0, False), (0.6, s, 0.0, False), (0.05, s - 1, 0.0, False)]
        for s in range(length)
    ]
    up[0] = [(0.6, 1, 0.0, False), (0.4, 0, 0.0, False)]
    up[last] = [(0.6, last, 1.0, False), (0.4, last - 1, 1.0, False)]
    down = [[(1.0, max(s - 1, 0), 0.005 * (s == 0), False)] for s in range(length)]
    return FiniteMDP.from_outcomes([[d, u] for d, u in zip(down, up, strict=True)], start=1)


def paper_grid() -> FiniteMDP:
    """The paper's grid-world as tables.

    >>> paper_grid().num_states
    150
    """
    tables = subgoal_grid_table(PAPER_GRID, dtype=torch.float64)
    successors, rewards, terminated = (table.unsqueeze(-1) for table in tables)
    start = torch.tensor(PAPER_GRID.start_state)
    return FiniteMDP(successors, torch.ones_like(rewards), rewards, terminated, start)


def in_random_order(mdp: FiniteMDP, seed: int) -> FiniteMDP:
    """The same task with the actions of each state in an order of their own.

    >>> one_step = FiniteMDP([[[0], [0]]], [[[1.0], [1.0]]], [[[2.0], [3.0]]], True, start=0)
    >>> {tuple(in_random_order(one_step, seed).rewards.flatten().tolist()) for seed in range(9)}
    {(2.0, 3.0), (3.0, 2.0)}
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(mdp.num_states, mdp.num_actions, generator=generator).argsort(-1)
    index = order.unsqueeze(-1).expand_as(mdp.successors)
    return FiniteMDP(
        mdp.successors.gather(1, index),
        mdp.probabilities.gather(1, index),
        mdp.rewards.gather(1, index),
        mdp.terminated.gather(1, index),
        mdp.start,
    )
