"""Any finite Markov decision process as a batch of environments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Unbounded

from bmc_torchrl.envs.base import BatchedEnv
from bmc_torchrl.envs.finite import FiniteMDP
from bmc_torchrl.envs.lanes import LaneDomain, Number, Numbers
from bmc_torchrl.envs.optimal import optimal_tabular_values, random_tabular_values
from bmc_torchrl.envs.uniforms import uniform

__all__ = ["TabularEnv", "TabularTask", "tabular_step"]

MOST_STATES = 2**23
"""Twice as many are counted exactly in float32, which replay holds."""
NEVER = 2**62


class TabularTask(NamedTuple):
    """One or two MDPs of equal size as :func:`tabular_step` reads them, the second's states last.

    Attributes:
        cdf: Distribution function of the outcomes, float64 ``[states, actions, K]``.
        successor: int64, of this shape.
        reward: float32, of this shape.
        terminated: bool, of this shape.
    """

    cdf: Tensor
    successor: Tensor
    reward: Tensor
    terminated: Tensor


def tabular_step(
    state: Tensor, action: Tensor, uniform: Tensor, task: TabularTask
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of every MDP of a batch: the first outcome whose distribution function exceeds u.

    Args:
        state: int64 ``[*batch]``.
        action: int64 ``[*batch]``.
        uniform: Draws from [0, 1), float64 ``[*batch]``; not read where K is 1.
        task: The tables.

    Returns:
        Next state int64, reward float32 and termination bool, each ``[*batch]``.

    >>> slippery = FiniteMDP.from_tables([[[0.5, 0.5]], [[0, 1]]], [[-1.0], [0.0]], [False, True])
    >>> draws = torch.tensor([0.4, 0.6], dtype=torch.float64)
    >>> zeros = torch.zeros(2, dtype=torch.int64)
    >>> tabular_step(zeros, zeros, draws, task_of([slippery]))[0]
    tensor([0, 1])
    """
    _, actions, outcomes = task.cdf.shape
    entry = state * actions + action
    if outcomes > 1:
        passed = task.cdf.flatten(0, 1)[entry] <= uniform.unsqueeze(-1)
        entry = entry * outcomes + passed.sum(-1)
    successor, reward, terminated = (table.flatten()[entry] for table in task[1:])
    return successor, reward, terminated


def task_of(mdps: Sequence[FiniteMDP], reward_scale: float = 1.0) -> TabularTask:
    """The tables of MDPs of equal size, one after the other, rewards multiplied."""
    most = max(mdp.num_outcomes for mdp in mdps)
    parts = []
    for number, mdp in enumerate(mdps):
        padded = [
            torch.nn.functional.pad(table, (0, most - mdp.num_outcomes))
            for table in (mdp.probabilities, mdp.successors, mdp.rewards, mdp.terminated)
        ]
        successor = padded[1] + number * mdp.num_states
        reward = (padded[2] * reward_scale).float()
        parts.append((_distribution_function(padded[0]), successor, reward, padded[3]))
    return TabularTask(*(torch.cat(tables).contiguous() for tables in zip(*parts, strict=True)))


def _distribution_function(probabilities: Tensor) -> Tensor:
    """Cumulative sums along the last dimension, exactly 1 from the last possible outcome on."""
    possible = (probabilities > 0).int()
    more_follow = possible.flip(-1).cumsum(-1).flip(-1) > possible
    return torch.where(more_follow, probabilities.cumsum(-1).clamp(max=1.0), 1.0)


class Starts(NamedTuple):
    """Where episodes start: possible states int64 ``[n]``, their distribution function."""

    states: Tensor
    cdf: Tensor

    @classmethod
    def of(cls, mdp: FiniteMDP) -> Starts:
        """Those of an MDP."""
        states = mdp.start.nonzero().squeeze(-1)
        return cls(states, _distribution_function(mdp.start[states]))

    def at(self, draws: Tensor) -> Tensor:
        """First states at uniforms from [0, 1), float64 ``[*batch]``."""
        return self.states[torch.searchsorted(self.cdf, draws, right=True)]


def first_row(
    starts: Sequence[Starts], draws: Tensor, episode: Tensor | None, states: int, switch_at: Any
) -> Tensor:
    """Row of a task's tables at which an episode starts, int64 ``[*batch]``.

    Args:
        starts: Of the one or two MDPs.
        draws: Uniforms from [0, 1), float64 ``[*batch]``.
        episode: Number of the training episode ``[*batch]``; read where there are two.
        states: Number of states of each.
        switch_at: First episode of the second.
    """
    rows = [start.at(draws) + number * states for number, start in enumerate(starts)]
    return rows[0] if len(rows) == 1 else torch.where(episode >= switch_at, rows[1], rows[0])


class TabularLanes(LaneDomain):
    """Lanes whose state is a row of the tables: after the switch, that of the second MDP."""

    unroll = 4

    def __init__(self, env: TabularEnv) -> None:
        super().__init__(env)
        self.task, self.starts, self.switch_at = env.task, env.starts, env.switch_at
        self.draws, self.resets = int(env.noisy), int(env.random_start)
        self.shortest_episode = min(env.shortest_episode, self.max_steps)

    def start(self, reset: Tensor, episode: Tensor) -> Tensor:
        draws = torch.zeros(reset.shape[:-1], dtype=torch.float64, device=reset.device)
        if self.resets:
            draws = reset.squeeze(-1).double()
        return first_row(self.starts, draws, episode, self.num_states, self.switch_at)

    def step(self, state: Tensor, action: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return tabular_step(state, action, noise.squeeze(-1), self.task)

    def index(self, state: Tensor) -> Tensor:
        return state % self.num_states

    def encode(self, state: Tensor) -> Tensor:
        return super().encode(self.index(state))

    def positions(self, state: Tensor) -> Tensor:
        return super().positions(self.index(state))


class TabularScalars(NamedTuple):
    """One run: :func:`tabular_step` on arrays of a fixed type, so that all MDPs compile once.

    The first of the four numbers is what is added to a state to get its row of the tables.
    """

    cdf: Any
    successor: Any
    reward: Any
    terminated: Any
    start_cdf: Any
    start_state: Any
    states: int
    switch_at: int
    random: bool

    def start(self, u: Numbers, episode: Number) -> tuple[Numbers, Number]:
        task = 1 if episode >= self.switch_at else 0
        k = 0
        while self.start_cdf[task, k] <= u[0]:
            k += 1
        return (float(task * self.states), 0.0, 0.0, 0.0), self.start_state[task, k]

    def step(self, p: Numbers, state: Number, action: Number, u: Number) -> tuple[Any, ...]:
        row = state + np.int64(p[0])
        k = 0
        while self.cdf[row, action, k] <= u:
            k += 1
        at = row, action, k
        return p, self.successor[at], self.reward[at], self.terminated[at]

    def cell(self, p: Numbers, state: Number) -> Number:
        return state

    def noisy(self) -> bool:
        return self.random


class TabularEnv(BatchedEnv):
    """A finite MDP as a batch of environments, stepped by look-up on the device.

    Observations: ``"state"`` int64 ``[*batch]`` and, with ``observation="encoded"``,
    ``"observation"`` float32 ``[*batch, states]``, the state one-hot. A step draws one float64
    uniform, or none where every action has one outcome.

    The task may change during training: with `after`, the episodes of a run from number
    `switch_at` on, counted from 0, and the greedy tests that follow them, are those of another MDP.
    ``"episode"``, int64 ``[*batch]``, is then part of the state: it counts the resets, and
    ``reset(tensordict)`` starts the episode whose number `tensordict` has.

    Args:
        transitions: A :class:`~bmc_torchrl.envs.finite.FiniteMDP`, or probabilities ``[states,
            actions, states]`` with which come the next three.
        rewards: ``[states, actions]`` or ``[states, actions, states]``.
        terminal: States that end an episode, bool ``[states]``; None for none.
        start: First state, or its distribution ``[states]``.
        reward_scale: What rewards are multiplied by.
        after: The MDP from episode `switch_at` on, with as many states and actions.
        switch_at: Episodes of each run before the switch.
        **options: ``observation``, ``batch_size``, ``device``, ``max_steps`` and
            ``one_hot_actions``, as in :class:`~bmc_torchrl.envs.base.BatchedEnv`.

    >>> right = [[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.0, 1.0]]]
    >>> env = TabularEnv(right, [[0.0, -1.0], [0.0, 0.0]], [False, True], 0, batch_size=[3])
    >>> env.rollout(10, break_when_any_done=False)["next", "reward"].shape
    torch.Size([3, 10, 1])
    >>> env.optimal_return(gamma=0.9), round(env.random_return(gamma=0.9), 4)
    (0.0, -1.5385)
    """

    def __init__(
        self,
        transitions: FiniteMDP | Any,
        rewards: Any = None,
        terminal: Any = None,
        start: Any = None,
        *,
        reward_scale: float = 1.0,
        after: FiniteMDP | None = None,
        switch_at: int | None = None,
        **options: Any,
    ) -> None:
        mdp = _mdp_of(transitions, rewards, terminal, start)
        mdps = (mdp,) if after is None else (mdp, after)
        _check_switch(mdps, switch_at)
        if isinstance(reward_scale, bool) or not (math.isfinite(reward_scale) and reward_scale > 0):
            raise ValueError(f"reward_scale must be finite and positive, got {reward_scale}.")
        self.__dict__["switch_at"] = switch_at
        super().__init__(sizes=(mdp.num_states,), num_actions=mdp.num_actions, **options)
        self.mdps, self.reward_scale = mdps, float(reward_scale)
        task = task_of(mdps, reward_scale)
        if not bool(task.reward.isfinite().all()):
            raise ValueError(
                f"reward_scale={reward_scale} makes rewards larger than float32 holds: lower it."
            )
        for name, table in task._asdict().items():
            self.register_buffer(f"{name}_table", table.to(self.device), persistent=False)
        starts = [Starts.of(each) for each in mdps]
        for number, (states, cdf) in enumerate(starts):
            self.register_buffer(f"starts_{number}", states.to(self.device), persistent=False)
            self.register_buffer(f"start_cdf_{number}", cdf.to(self.device), persistent=False)
        self.noisy = self.task.cdf.shape[-1] > 1
        self.random_start = any(len(states) > 1 for states, _ in starts)

    @property
    def task(self) -> TabularTask:
        """The tables of :func:`tabular_step`."""
        return TabularTask(*(getattr(self, f"{name}_table") for name in TabularTask._fields))

    @property
    def starts(self) -> list[Starts]:
        """Where the episodes of each MDP start."""
        names = ("starts", "start_cdf")
        numbers = range(len(self.mdps))
        return [Starts(*(getattr(self, f"{name}_{i}") for name in names)) for i in numbers]

    @property
    def shortest_episode(self) -> int:
        """No episode ends in fewer steps."""
        found = [mdp.shortest_episode or self.max_steps or 1 for mdp in self.mdps]
        return min(found)

    def mdp_of(self, episode: int = 0) -> FiniteMDP:
        """The MDP of a training episode, counted from 0; rewards as they were given."""
        return self.mdps[self.switch_at is not None and episode >= self.switch_at]

    def optimal_return(self, gamma: float, *, episode: int = 0) -> float:
        """Most that a policy that knows the time can expect of an episode, discounted.

        Args:
            gamma: Discount factor; 1 is allowed where there is a step limit.
            episode: Of which training episode, where the task changes.
        """
        mdp = self.mdp_of(episode)
        values = optimal_tabular_values(mdp, gamma, horizon=self.max_steps).values
        return self._from_start(values if self.max_steps is None else values[0], mdp)

    def random_return(self, gamma: float, *, episode: int = 0) -> float:
        """What uniformly random actions can expect of an episode; see :meth:`optimal_return`."""
        mdp = self.mdp_of(episode)
        return self._from_start(random_tabular_values(mdp, gamma, horizon=self.max_steps), mdp)

    def _from_start(self, values: Tensor, mdp: FiniteMDP) -> float:
        return self.reward_scale * float(mdp.start @ values)

    def lanes(self) -> TabularLanes:
        """See :class:`~bmc_torchrl.envs.lanes.LaneDomain`."""
        return TabularLanes(self)

    def scalars(self) -> TabularScalars:
        """See :class:`~bmc_torchrl.envs.lanes.ScalarDomain`."""
        task = task_of(self.mdps, self.reward_scale)
        starts = [Starts.of(mdp) for mdp in self.mdps]
        most = max(len(states) for states, _ in starts)
        first = np.zeros((len(starts), most), np.int32)
        start_cdf = np.ones((len(starts), most))
        for number, (states, cdf) in enumerate(starts):
            first[number, : len(states)], start_cdf[number, : len(cdf)] = states, cdf
        return TabularScalars(
            cdf=task.cdf.numpy(),
            successor=(task.successor % self.num_states).numpy().astype(np.int32),
            reward=task.reward.numpy(),
            terminated=task.terminated.numpy(),
            start_cdf=start_cdf,
            start_state=first,
            states=self.num_states,
            switch_at=NEVER if self.switch_at is None else self.switch_at,
            random=self.noisy,
        )

    def _hidden_spec(self) -> dict[str, Any]:
        if self.switch_at is None:
            return {}
        return {"episode": Unbounded(self.batch_size, dtype=torch.int64, device=self.device)}

    def _given_state(self, tensordict: TensorDictBase) -> dict[str, Tensor]:
        return {**super()._given_state(tensordict), **self._episode(tensordict)}

    def _episode(self, tensordict: TensorDictBase | None) -> dict[str, Tensor]:
        if self.switch_at is None:
            return {}
        given = None if tensordict is None else tensordict.get("episode", None)
        if given is None:
            given = torch.zeros(self.batch_size, dtype=torch.int64, device=self.device)
        return {"episode": given}

    def _new_episode(self, tensordict: TensorDictBase | None, later: int) -> dict[str, Tensor]:
        counted = {key: count + later for key, count in self._episode(tensordict).items()}
        draws, episode = self._draws(self.random_start), counted.get("episode")
        row = first_row(self.starts, draws, episode, self.num_states, self.switch_at)
        return {"state": row % self.num_states, **counted}

    def _draws(self, drawn: bool) -> Tensor:
        if drawn:
            return uniform(self.batch_size, torch.float64, self.device)
        return torch.zeros(self.batch_size, dtype=torch.float64, device=self.device)

    def _next_state(
        self, tensordict: TensorDictBase, action: Tensor
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        row, counted = tensordict.get("state"), self._episode(tensordict)
        if self.switch_at is not None:
            row = row + self.num_states * (counted["episode"] >= self.switch_at)
        row, reward, terminated = tabular_step(row, action, self._draws(self.noisy), self.task)
        return {"state": row % self.num_states, **counted}, reward, terminated


def _mdp_of(transitions: Any, rewards: Any, terminal: Any, start: Any) -> FiniteMDP:
    if not isinstance(transitions, FiniteMDP):
        return FiniteMDP.from_tables(transitions, rewards, terminal, 0 if start is None else start)
    given = {"rewards": rewards, "terminal": terminal, "start": start}
    if any(value is not None for value in given.values()):
        twice = ", ".join(name for name, value in given.items() if value is not None)
        raise ValueError(f"{twice}: a FiniteMDP has its own; pass it alone, or tables with these.")
    return transitions


def _check_switch(mdps: Sequence[FiniteMDP], switch_at: int | None) -> None:
    if (len(mdps) > 1) != (switch_at is not None):
        raise ValueError(
            f"after and switch_at go together, got {'no after' if len(mdps) == 1 else 'after'} and "
            f"switch_at={switch_at}: pass the second task and the episodes before it."
        )
    if switch_at is not None and (not isinstance(switch_at, int) or switch_at < 1):
        raise ValueError(f"switch_at must be a number of episodes of at least 1, got {switch_at}.")
    wrong = [mdp for mdp in mdps if not isinstance(mdp, FiniteMDP)]
    if wrong:
        raise ValueError(f"after must be a FiniteMDP, got {type(wrong[0]).__name__}.")
    shapes = {(mdp.num_states, mdp.num_actions) for mdp in mdps}
    if len(shapes) > 1:
        first, second = (f"{mdp.num_states} and {mdp.num_actions}" for mdp in mdps)
        raise ValueError(
            f"after must have as many states and actions as the first task, {first}; got {second}."
        )
    if mdps[0].num_states > MOST_STATES:
        raise ValueError(f"At most {MOST_STATES} states are counted, got {mdps[0].num_states}.")
