"""Algorithm 1 with a table, one run in plain Python, given its random numbers.

Shares no code with the library: the posterior is `oracles.Run`, the grid-world is written out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from oracles import FLOAT, Run

MOVES = ((0, -1), (-1, 0), (0, 1), (1, 0))


@dataclass
class Grid:
    """The grid-world, one agent."""

    rows: int
    columns: int
    start: tuple[int, int]
    goals: list[tuple[int, int]]
    max_steps: int

    def reset(self) -> int:
        """Go to the start."""
        self.cell, self.stage, self.steps = self.start, 0, 0
        return self.state

    @property
    def state(self) -> int:
        """Index of (row, column, stage), row-major."""
        row, column = self.cell
        return (row * self.columns + column) * (len(self.goals) + 1) + self.stage

    def step(self, action: int) -> tuple[int, float, bool, bool]:
        """Next state, reward, whether the last goal was reached, whether the episode is over."""
        row, column = (here + move for here, move in zip(self.cell, MOVES[action], strict=True))
        self.steps += 1
        reward = -0.2
        if 0 <= row < self.rows and 0 <= column < self.columns:
            goal = self.goals.index((row, column)) + 1 if (row, column) in self.goals else 0
            if goal <= self.stage + 1:
                self.cell, reward = (row, column), -0.1
                self.stage += goal == self.stage + 1
        terminated = self.stage == len(self.goals)
        return self.state, reward, terminated, terminated or self.steps >= self.max_steps


@dataclass
class Episode:
    """What an episode leaves."""

    epsilons: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)


@dataclass
class ExpectedSarsa:
    """Algorithm 1 ([GSL19]) with expected SARSA in a table.

    Args:
        table: Q, changed in place.
        draws: pairs (coin, which); a coin below ε replaces the greedy action by
            ``int(which * actions)``. A pair is used up at every step, even where the action was
            drawn before; with ``next_action="before"``, a second pair is.
        next_action: draw the next action after the updates, or before them, as published.
        masked: no bootstrap from a terminal state.
    """

    grid: Grid
    table: list[list[float]]
    draws: Iterator[tuple[float, float]]
    run: Run
    learning_rate: float
    gamma: float
    next_action: Literal["before", "after"]
    masked: bool
    actions: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)

    def act(self, state: int) -> int:
        """ε-greedy, ties to the first action."""
        coin, which = next(self.draws)
        values = self.table[state]
        return int(which * len(values)) if coin < self.run.epsilon else values.index(max(values))

    def episode(self) -> Episode:
        """Play and learn until the episode is over."""
        episode, over, committed = Episode(), False, None
        state = self.grid.reset()
        while not over:
            fresh = self.act(state)
            action = fresh if committed is None else committed
            self.states.append(state)
            self.actions.append(action)
            following, reward, terminated, over = self.grid.step(action)
            if self.next_action == "before":
                committed = self.act(following)
            episode.epsilons.append(self.run.epsilon)
            episode.rewards.append(reward)
            self.learn(state, action, reward, following, self.masked and terminated)
            state = following
        return episode

    def learn(self, state: int, action: int, reward: float, following: int, end: bool) -> None:
        """Lines 8–15: target with ε and Q of before, then Q, then the posterior."""
        values = [0.0 if end else value for value in self.table[following]]
        epsilon = self.run.epsilon
        bootstrap = (1 - epsilon) * max(values) + epsilon * sum(values) / len(values)
        target = reward + self.gamma * bootstrap
        self.table[state][action] += self.learning_rate * (target - self.table[state][action])
        self.run.update(reward, values, self.gamma)


def bmc_run(alpha: float, beta: float) -> Run:
    """ε-BMC's posterior in Python floats."""
    return Run(alpha, beta, FLOAT)
