"""The tabular experiments on CPU cores: expected SARSA, one compiled loop per run."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bmc_torchrl.envs.base import BatchedEnv
from bmc_torchrl.learners.settings import ExpectedSarsaSettings, RunSettings
from bmc_torchrl.lockstep.compiling import announced
from bmc_torchrl.lockstep.numba.arguments import read_strategy
from bmc_torchrl.lockstep.numba.engine import NOTHING, NumbaEngine
from bmc_torchrl.lockstep.numba.loops import CURVES, Lanes, Rule, Scratch, loops_of
from bmc_torchrl.strategies import EpsilonStrategy, ScalarRule

__all__ = ["NumbaTabularEngine"]

_TABLES = {"zeros": 0, "normal": 1, "uniform": 2}


class NumbaTabularEngine(NumbaEngine):
    r"""Expected SARSA on tables for many independent runs, tested greedily after every episode.

    See :class:`NumbaEngine`. The rules are those of the tensor functions of the package, to which
    tests hold them.

    Args:
        env: a domain with ``batch_size=[runs]`` that has :meth:`~BatchedEnv.scalars`.
        strategy: the source of ε, of batch shape ``[runs]``; it is read, and written only by
            :meth:`write_strategy`. Several strategies are one :class:`StackedEpsilon`.
        run: how long, how tested, from which seed.
        learner: how the tables start and learn.
        table: initial values to use instead, ``[runs, states, actions]``, which are copied.
        threads: how many threads; as many as numba would use by default, all cores in general.

    >>> from bmc_torchrl import BMCEpsilon
    >>> from bmc_torchrl.envs import SubgoalGridEnv
    >>> engine = NumbaTabularEngine(
    ...     SubgoalGridEnv(batch_size=[2]),
    ...     BMCEpsilon(batch_shape=[2]),
    ...     RunSettings(gamma=0.99, episodes=3),
    ...     ExpectedSarsaSettings(learning_rate=0.7, initializer="normal"),
    ...     threads=1,
    ... )
    >>> engine.advance(600)
    >>> engine.finished, engine.steps.shape
    (True, torch.Size([2, 3]))
    """

    def __init__(
        self,
        env: BatchedEnv,
        strategy: EpsilonStrategy,
        run: RunSettings,
        learner: ExpectedSarsaSettings,
        *,
        table: Tensor | None = None,
        threads: int | None = None,
    ) -> None:
        self._rules, lanes = _lanes(env, strategy, run.episodes)
        super().__init__(lanes, strategy, threads)
        self._domain = env.scalars()
        if table is not None:
            wanted = self._lanes.table.shape
            if tuple(table.shape) != wanted:
                raise ValueError(
                    f"table must have the shape {wanted} of [runs, states, actions], got "
                    f"{tuple(table.shape)}."
                )
            self._lanes.table[...] = table.detach().cpu().numpy()
        self._rule = Rule(
            episodes=run.episodes,
            tests=run.tests,
            max_steps=env.step_limit,
            gamma=float(run.gamma),
            rate_initial=float(learner.learning_rate),
            rate_decay=float(learner.decay),
            rate_floor=float(learner.floor),
            mask_terminated=bool(run.mask_terminated),
            before=run.next_action == "before",
            enough_perfect=run.stop_after_perfect_tests or 0,
            noisy=bool(self._domain.noisy()),
            seed=run.seed,
            first_run=run.first_run,
            table=_TABLES[learner.initializer] if table is None else 0,
            scale=float(learner.scale),
        )
        with announced(f"expected SARSA in {type(env).__name__}"):
            kinds = tuple(type(rule) for rule in self._rules)
            self._advance_lanes = loops_of(type(self._domain), kinds)
            self._advance(0, NOTHING, 0, 0)
        self.advance(0)

    def advance(self, steps: int, *, uniforms: Tensor | None = None) -> None:
        """Up to `steps` training steps of every unfinished run, tests included.

        Args:
            steps: how many.
            uniforms: draws to use for training instead of each run's own, ``[steps, runs, 9]``:
                two for the action, one for the step, four for the reset, two for the next action.
        """
        given = NOTHING
        if uniforms is not None:
            if tuple(uniforms.shape) != (steps, self.runs, 9):
                raise ValueError(
                    f"uniforms must have the shape {(steps, self.runs, 9)} of [steps, runs, 9], "
                    f"got {tuple(uniforms.shape)}."
                )
            given = np.ascontiguousarray(uniforms.double().numpy())
        self._each_block(functools.partial(self._advance, steps, given))

    def _advance(self, steps: int, given: Any, first: int, last: int) -> None:
        rule, lanes = self._rule, self._lanes
        scratch = _scratch(rule.tests, lanes.physics.dtype)
        self._advance_lanes(
            self._domain, self._rules, rule, lanes, first, last, steps, given, scratch
        )

    @property
    def table(self) -> Tensor:
        """The action values, ``[runs, states, actions]``; a view, not to be written to."""
        return torch.from_numpy(self._lanes.table)


def _scratch(tests: int, dtype: Any) -> Scratch:
    return Scratch(
        physics=np.zeros((tests, 4), dtype),
        states=np.zeros(tests, np.int64),
        slots=np.zeros(tests, np.int64),
        streams=np.zeros(tests, np.uint64),
        returns=np.zeros(tests),
    )


def _lanes(
    env: BatchedEnv, strategy: EpsilonStrategy, episodes: int
) -> tuple[tuple[ScalarRule, ...], Lanes]:
    runs, states, actions = env.batch_size.numel(), env.num_states, env.num_actions
    if actions > np.iinfo(np.int16).max:
        raise ValueError(f"The numba engine counts actions to 32767, env has {actions}.")
    count = np.zeros((5, runs), np.int64)
    rules, epsilon = read_strategy(strategy, runs, states, episodes)
    return rules, Lanes(
        table=np.zeros((runs, states, actions), np.float32),
        greedy=np.zeros((runs, states), np.int16),
        row_sum=np.zeros((runs, states)),
        physics=torch.zeros(runs, 4, dtype=env.physics_dtype).numpy(),
        state=count[0],
        action=count[1],
        step_count=count[2],
        episode=count[3],
        sums=np.zeros((runs, 3)),
        perfect=count[4],
        bits=np.zeros((runs, 4), np.uint64),
        **epsilon._asdict(),
        curves=np.full((len(CURVES), runs, episodes), np.nan),
    )
