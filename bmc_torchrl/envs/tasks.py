"""Well-known finite tasks as tables, of any size: :class:`~bmc_torchrl.envs.finite.FiniteMDP`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from bmc_torchrl.envs.finite import FiniteMDP
from bmc_torchrl.envs.grid_world import DOWN, LEFT, RIGHT, UP

__all__ = [
    "chain",
    "cliff_walking",
    "deep_sea",
    "frozen_lake",
    "garnet",
    "gymnasium_mdp",
    "maze",
    "taxi",
    "windy_grid",
]

MOVES = {LEFT: (0, -1), UP: (-1, 0), RIGHT: (0, 1), DOWN: (1, 0)}
"""Row and column that an action adds, as in the grid-world."""
WIND = (0, 0, 0, 1, 1, 1, 2, 2, 1, 0)


def gymnasium_mdp(name: str, **options: Any) -> FiniteMDP:
    """The MDP of a Gymnasium environment that has its model in ``P``, as the toy-text ones do.

    Args:
        name: Its id.
        **options: Those of ``gymnasium.make``, such as ``map_name="8x8"``.

    >>> gymnasium_mdp("FrozenLake-v1", map_name="8x8").num_states
    64
    """
    from bmc_torchrl.envs.gymnasium_batch import gym_env  # Gymnasium is an extra.

    env: Any = gym_env(name, **options).unwrapped
    outcomes, start = (getattr(env, key, None) for key in ("P", "initial_state_distrib"))
    env.close()
    if outcomes is None or start is None:
        raise ValueError(
            f"{name!r} has no tables P and initial_state_distrib: use GymBatchEnv, or make the "
            "tables yourself and call FiniteMDP.from_outcomes."
        )
    if getattr(env, "fickle_passenger", False):
        raise ValueError(
            "fickle_passenger=True is not in the tables of Taxi: leave it out, or use GymBatchEnv."
        )
    return FiniteMDP.from_outcomes(outcomes, start)


def frozen_lake(map_name: str = "4x4", *, slippery: bool = True) -> FiniteMDP:
    """Gymnasium's FrozenLake, ``"4x4"`` or ``"8x8"``: 1 at the goal, an end in every hole.

    >>> frozen_lake().num_outcomes
    3
    """
    return gymnasium_mdp("FrozenLake-v1", map_name=map_name, is_slippery=slippery)


def cliff_walking(*, slippery: bool = False) -> FiniteMDP:
    """Gymnasium's CliffWalking: −1 a step, −100 over the cliff, which leads back to the start.

    >>> cliff_walking().shortest_episode
    13
    """
    return gymnasium_mdp("CliffWalking-v1", is_slippery=slippery)


def taxi(*, rainy: bool = False) -> FiniteMDP:
    """Gymnasium's Taxi without its action mask: 500 states, of which 300 may be the first.

    >>> taxi().num_states, int((taxi().start > 0).sum())
    (500, 300)
    """
    return gymnasium_mdp("Taxi-v4", is_rainy=rainy)


def chain(
    length: int = 5, *, slip: float = 0.2, small: float = 2.0, large: float = 10.0
) -> FiniteMDP:
    """Strens' chain (2000): 0 goes on, which pays `large` at the end; 1 goes back for `small`.

    Either does what the other would with probability `slip`. Episodes never end by themselves.

    >>> chain().successors[4].tolist()
    [[4, 0], [0, 4]]
    """
    _require("length", length, 2)
    _require_probability("slip", slip)
    on = [(min(s + 1, length - 1), large * (s == length - 1)) for s in range(length)]
    chances = ((1 - slip, slip), (slip, 1 - slip))
    outcomes = [
        [[(stay, *on[s], False), (leave, 0, small, False)] for stay, leave in chances]
        for s in range(length)
    ]
    for row in outcomes:
        row[1].reverse()
    return FiniteMDP.from_outcomes(outcomes, start=0)


def deep_sea(size: int, *, seed: int | None = None, move_cost: float = 0.01) -> FiniteMDP:
    """Deep sea (Osband et al. 2019): of 2^size paths down a grid, one leads to the only reward.

    Every step goes down a row, and left or right; right costs ``move_cost / size`` and, in the last
    column, pays 1. The episode ends below the last row, in a state of its own.

    Args:
        size: Rows and columns.
        seed: Of which action is right in which cell, as in bsuite; None for action 1 everywhere.
        move_cost: Of going right all the way.

    >>> sea = deep_sea(10)
    >>> sea.num_states, sea.shortest_episode
    (101, 10)
    """
    _require("size", size, 1)
    row, column = torch.arange(size).view(-1, 1, 1), torch.arange(size).view(1, -1, 1)
    is_right = torch.ones(size, size, dtype=torch.int64)
    if seed is not None:
        is_right = torch.randint(2, (size, size), generator=torch.Generator().manual_seed(seed))
    right = torch.arange(2) == is_right.unsqueeze(-1)
    to_column = (column + torch.where(right, 1, -1)).clamp(0, size - 1)
    end = (row == size - 1).expand_as(right)
    successors = torch.where(end, size**2, (row + 1) * size + to_column).reshape(-1, 2, 1)
    rewards = right * ((column == size - 1).double() - move_cost / size)
    ended = torch.cat([end.reshape(-1, 2, 1), torch.ones(1, 2, 1, dtype=torch.bool)])
    return FiniteMDP(
        torch.cat([successors, torch.full((1, 2, 1), size**2)]),
        torch.ones(size**2 + 1, 2, 1),
        torch.cat([rewards.reshape(-1, 2, 1), torch.zeros(1, 2, 1).double()]),
        ended,
        start=torch.tensor(0),
    )


def garnet(states: int, actions: int, branching: int, seed: int) -> FiniteMDP:
    """A random MDP (Archibald, McKinnon & Thomas 1995).

    Every action leads to `branching` different states, with probabilities that cut [0, 1] at
    uniform points, for a standard normal reward of state and action. Episodes start in state 0 and
    never end by themselves.

    >>> garnet(20, 3, 2, seed=0).successors.shape
    torch.Size([20, 3, 2])
    """
    _require("states", states, 1)
    _require("actions", actions, 1)
    _require("branching", branching, 1)
    if branching > states:
        raise ValueError(f"branching must be at most states={states}, got {branching}.")
    generator = torch.Generator().manual_seed(seed)
    options: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    successors = torch.rand(states, actions, states, **options).argsort(-1)[..., :branching]
    cuts = torch.rand(states, actions, branching - 1, **options).sort(-1).values
    edge = torch.zeros(states, actions, 1, dtype=torch.float64)
    probabilities = torch.cat([edge, cuts, edge + 1], -1).diff(dim=-1)
    rewards = torch.randn(states, actions, 1, **options)
    return FiniteMDP(successors, probabilities, rewards, torch.tensor(False), torch.tensor(0))


def maze(
    text: str,
    *,
    goal: float = 1.0,
    trap: float = 0.0,
    step: float = 0.0,
    bump: float | None = None,
    slip: float = 0.0,
) -> FiniteMDP:
    """A maze drawn in letters.

    ``#`` is a wall, ``.`` a floor, ``S`` a start, of which one is drawn if there are several, ``G``
    a goal and ``X`` a trap, which both end the episode. The state is the row-major index of the
    cell; actions are 0 left, 1 up, 2 right, 3 down.

    Args:
        text: One line per row.
        goal: Added to the reward of a step into a goal.
        trap: Added to the reward of a step into a trap.
        step: Reward of every step.
        bump: Reward of a step against a wall or the border instead of `step`, if it differs.
        slip: Probability of going aside instead, half of it to each side.

    >>> room = maze('''
    ... S.#
    ... #.G
    ... ''')
    >>> room.num_states, room.shortest_episode
    (6, 3)
    """
    rows = [line.strip() for line in text.split("\n") if line.strip()]
    letters = "".join(rows)
    unknown = sorted(set(letters) - set("#.SGX"))
    if not rows or len({len(row) for row in rows}) > 1 or unknown:
        raise ValueError(
            "text must be lines of one length of the letters # . S G X, got lines of "
            f"{[len(row) for row in rows]} letters with {unknown} among them."
        )
    if "S" not in letters or "G" not in letters:
        raise ValueError(f"text must have a start S and a goal G, got {rows}.")
    _require_probability("slip", slip)
    bump = step if bump is None else bump
    columns = len(rows[0])

    def moved(cell: int, action: int) -> tuple[int, float, bool]:
        row, column = (a + b for a, b in zip(divmod(cell, columns), MOVES[action], strict=True))
        inside = 0 <= row < len(rows) and 0 <= column < columns
        if not inside or rows[row][column] == "#":
            return cell, bump, False
        letter = rows[row][column]
        gain = step + {"G": goal, "X": trap}.get(letter, 0.0)
        return row * columns + column, gain, letter in "GX"

    def outcomes(cell: int, action: int) -> list[tuple[float, int, float, bool]]:
        if letters[cell] in "GX#":
            return [(1.0, cell, 0.0, True)]
        aside = [((action + turn) % 4, slip / 2) for turn in (1, 3)] if slip else []
        return [(p, *moved(cell, a)) for a, p in [(action, 1 - slip), *aside]]

    cells = range(len(letters))
    starts = torch.tensor([letter == "S" for letter in letters]).double()
    table = [[outcomes(cell, action) for action in range(4)] for cell in cells]
    return FiniteMDP.from_outcomes(table, starts / starts.sum())


def windy_grid(
    *,
    rows: int = 7,
    wind: Sequence[int] = WIND,
    start: tuple[int, int] = (3, 0),
    goal: tuple[int, int] = (3, 7),
    stochastic: bool = False,
) -> FiniteMDP:
    """The windy grid-world of Sutton & Barto (2018, Example 6.5): −1 a step until the goal.

    Args:
        rows: Height; there are as many columns as winds.
        wind: Rows by which each column lifts the agent that leaves it.
        start: First cell, as (row, column).
        goal: Last cell.
        stochastic: Where there is wind, it is one more or one less a third of the time each
            (Exercise 6.10).

    >>> windy_grid().shortest_episode
    15
    """
    columns = len(wind)
    for name, (row, column) in (("start", start), ("goal", goal)):
        if not (0 <= row < rows and 0 <= column < columns):
            raise ValueError(
                f"{name}: cell {(row, column)} is outside the {rows} × {columns} grid; cells are "
                "(row, column), counted from 0."
            )
    end = goal[0] * columns + goal[1]

    def moved(cell: int, action: int, lift: int) -> int:
        row, column = divmod(cell, columns)
        down, right = MOVES[action]
        row = min(max(row + down - lift, 0), rows - 1)
        return row * columns + min(max(column + right, 0), columns - 1)

    def outcomes(cell: int, action: int) -> list[tuple[float, int, float, bool]]:
        if cell == end:
            return [(1.0, cell, 0.0, True)]
        blows = wind[cell % columns]
        lifts = [blows - 1, blows, blows + 1] if stochastic and blows else [blows]
        after = [moved(cell, action, lift) for lift in lifts]
        return [(1 / len(lifts), to, -1.0, to == end) for to in after]

    table = [[outcomes(cell, action) for action in range(4)] for cell in range(rows * columns)]
    return FiniteMDP.from_outcomes(table, start[0] * columns + start[1])


def _require(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}.")


def _require_probability(name: str, value: float) -> None:
    if not (math.isfinite(value) and 0 <= value <= 1):
        raise ValueError(f"{name} must be a probability, got {value}.")
