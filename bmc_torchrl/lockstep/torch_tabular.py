"""Tabular expected SARSA for many runs at once, as tensors: what a GPU runs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from bmc_torchrl.envs.base import BatchedEnv
from bmc_torchrl.envs.lanes import Noise
from bmc_torchrl.functional import (
    epsilon_greedy_action,
    greedy_return,
    mixture_return,
    uniform_action,
    uniform_return,
    values_left,
)
from bmc_torchrl.learners.settings import ExpectedSarsaSettings, RunSettings
from bmc_torchrl.learners.values import QTable
from bmc_torchrl.lockstep.torch_engine import Lockstep
from bmc_torchrl.strategies import EpsilonStrategy

__all__ = ["TabularDraws", "TabularLockstep"]

MOST_STEPS = 4
"""Vector steps per compiled call; the domain may afford fewer."""


class TabularDraws(NamedTuple):
    """All uniforms of some vector steps, in the order in which the TorchRL path draws them.

    Attributes:
        act: coin and action at s, float32 ``[steps, 2, runs]``.
        noise: of the domain, ``[steps, runs, n]``.
        act_next: coin and action at s′, float32 ``[steps, 2, runs]``; unused with "after".
    """

    act: Tensor
    noise: Noise
    act_next: Tensor


class History(NamedTuple):
    """What the steps of a chunk changed, each ``[steps, runs]``.

    Attributes:
        state: the state that was left.
        greedy: its greedy action before learning.
        ends: whether an episode that counts ended there.
    """

    state: Tensor
    greedy: Tensor
    ends: Tensor


class TabularLockstep(Lockstep):
    r"""Expected SARSA with one table per lane.

    Beside the tables the engine keeps the greedy action of every state, so that acting and testing
    read one byte instead of a row.

    Args:
        env: see :class:`Lockstep`.
        strategy: see :class:`Lockstep`.
        run: see :class:`Lockstep`.
        learner: how the tables start and learn.
        table: initial values to use instead, ``runs=[runs]``.
        test_slots: see :class:`Lockstep`.
        **options: see :class:`Lockstep`.

    >>> from bmc_torchrl.envs import SubgoalGridEnv
    >>> from bmc_torchrl.strategies import BMCEpsilon
    >>> engine = TabularLockstep(
    ...     SubgoalGridEnv(batch_size=[2], max_steps=10),
    ...     BMCEpsilon(batch_shape=[2]),
    ...     RunSettings(gamma=0.99, episodes=2),
    ...     ExpectedSarsaSettings(learning_rate=0.7),
    ...     compiled=False,
    ... )
    >>> engine.advance(30)
    >>> engine.finished, engine.steps.shape
    (True, torch.Size([2, 2]))
    """

    def __init__(
        self,
        env: BatchedEnv,
        strategy: EpsilonStrategy,
        run: RunSettings,
        learner: ExpectedSarsaSettings,
        *,
        table: QTable | None = None,
        test_slots: int = 1024,
        **options: Any,
    ) -> None:
        super().__init__(env, strategy, run, test_slots=test_slots, **options)
        states, actions = self.domain.num_states, self.domain.num_actions
        if table is None:
            with self._own_seed():
                table = QTable(
                    states,
                    actions,
                    runs=self.runs,
                    initializer=learner.initializer,
                    scale=learner.scale,
                    device=self.device,
                )
        if table.weight.shape != (self.runs, states, actions):
            raise ValueError(
                f"table has shape {tuple(table.weight.shape)}, the domain needs "
                f"{(self.runs, states, actions)}."
            )
        self.learner, self.before = learner, run.next_action == "before"
        steps = range(1, min(MOST_STEPS, self.domain.unroll, self.chunk) + 1)
        self.unroll_steps = max(n for n in steps if self.chunk % n == 0)
        self.table = table.weight.detach().to(self.device).clone()
        small = torch.uint8 if actions <= 256 else torch.int64
        self.greedy = self.table.argmax(-1).to(small)
        self.history = self._no_history()
        self.action = torch.zeros(self.runs, dtype=torch.int64, device=self.device)
        self.lane = torch.arange(self.runs, device=self.device)
        self._make_tests(self.greedy[0], self.domain.unroll)
        self._steps = self._compile(self._vector_steps, "expected SARSA")

    def draw(self, steps: int) -> TabularDraws:
        """Fresh uniforms of `steps` vector steps."""
        options: dict[str, Any] = {"device": self.device, "generator": self.generator}
        act = torch.rand((steps, 2, self.runs), **options)
        noise = self.domain.draw([steps, self.runs], self.generator)
        return TabularDraws(act, noise, torch.rand((steps, 2, self.runs), **options))

    def _chunk(self, steps: int) -> None:
        self.vector_steps(self.draw(steps))

    def vector_steps(self, draws: TabularDraws) -> None:
        """Step every lane as often as there are draws, some steps per compiled call."""
        noise = self.domain.transition_noise(draws.noise.transition)
        columns = (draws.act, noise, draws.noise.reset, draws.act_next)
        parts = zip(*(torch.split(x, self.unroll_steps) for x in columns), strict=True)
        calls = [self._steps(*part) for part in parts]
        self.history = History(*(torch.cat(entries) for entries in zip(*calls, strict=True)))

    def _no_history(self) -> History:
        zeros = torch.zeros(self.chunk, self.runs, dtype=torch.int64, device=self.device)
        return History(zeros, zeros.to(self.greedy.dtype), zeros.bool())

    def _vector_steps(self, act: Tensor, noise: Tensor, reset: Tensor, act_next: Tensor) -> History:
        draws = zip(*(x.unbind(0) for x in (act, noise, reset, act_next)), strict=True)
        steps = [self._step(*now) for now in draws]
        return History(*(torch.stack(entries) for entries in zip(*steps, strict=True)))

    def _step(self, act: Tensor, noise: Tensor, reset: Tensor, act_next: Tensor) -> History:
        domain, lane = self.domain, self.lane
        index = domain.index(self.state).clone()
        # All that is written depends on all that is read: what else reads, inductor moves behind
        # the writing, and copies the tables of all runs in every step to have the old ones, too.
        row, best_before = self.table[lane, index], self.greedy[lane, index]
        action = self._act(index, best_before, act)
        after, reward, terminated = domain.step(self.state, action, noise)
        done = terminated | (self.step_count + 1 >= domain.max_steps)
        following = domain.index(after)
        epsilon = self._current_epsilon(following)
        value = self.table[lane, following]
        if self.before:
            self.action.copy_(self._chosen(value.argmax(-1), epsilon, act_next))
        masked = terminated if self.run.mask_terminated else None
        greedy = greedy_return(reward, value, self.gamma, terminated=masked)
        uniform = uniform_return(reward, value, self.gamma, terminated=masked)
        target = mixture_return(greedy, uniform, epsilon)
        old = row.gather(-1, action.unsqueeze(-1)).squeeze(-1)
        left = values_left(row, action) if self.needs_values else None
        change = self._learn(index, action, row, old, target)
        self._update_strategy(index, reward, terminated, done, value, change, left)
        ends = self._count_episodes(done, epsilon, reward, (target - old).square())
        mask = done.reshape(-1, *[1] * (after.ndim - 1))
        fresh = domain.start(reset, self.episodes_done)
        self.state.copy_(torch.where(mask, fresh, after))
        return History(index, best_before, ends)

    def _act(self, index: Tensor, best: Tensor, draws: Tensor) -> Tensor:
        epsilon = self._current_epsilon(index)
        chosen = self._chosen(best, epsilon, draws)
        return torch.where(self.step_count == 0, chosen, self.action) if self.before else chosen

    def _chosen(self, best: Tensor, epsilon: Tensor, draws: Tensor) -> Tensor:
        random = uniform_action(draws[1], self.domain.num_actions)
        return epsilon_greedy_action(best.long(), epsilon, draws[0], random)

    def _learn(
        self, index: Tensor, action: Tensor, row: Tensor, old: Tensor, target: Tensor
    ) -> Tensor:
        """:func:`bmc_torchrl.learners.objectives.tabular_update` where a lane still learns."""
        active, learner = self.episodes_done < self.episodes, self.learner
        decay = torch.full_like(target, learner.decay)
        rate = (learner.learning_rate * decay**self.episodes_done).clamp(min=learner.floor)
        actions = torch.arange(row.shape[-1], device=row.device)
        taken = actions == action.unsqueeze(-1)
        new = torch.where(active, old + rate * (target - old), old)
        best = torch.where(taken, new.unsqueeze(-1), row).argmax(-1)
        self.table.index_put_((self.lane, index, action), new)
        self.greedy.index_put_((self.lane, index), best.to(self.greedy.dtype))
        return new - old

    def _ended_policies(self, lanes: Tensor) -> Tensor:
        """Greedy actions when the episode ended: what was learned since in the chunk is undone."""
        policies = self.greedy[lanes]
        states, actions, ends = (column[:, lanes] for column in self.history)
        ended = ends.int().argmax(0)
        for step in reversed(range(len(states))):
            state = states[step].unsqueeze(-1)
            undone = torch.where(ended < step, actions[step], policies.gather(1, state).squeeze(-1))
            policies.scatter_(1, state, undone.unsqueeze(-1))
        return policies

    def _choose(self, policy: Tensor, state: Tensor) -> Tensor:
        return policy.gather(1, self.domain.index(state)).long()

    _TABLES = ("table", "greedy", "action")

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`Lockstep.state_dict`."""
        state = super().state_dict()
        state["tensors"] |= {name: getattr(self, name).clone() for name in self._TABLES}
        return state
