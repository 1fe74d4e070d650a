"""The tabular experiments on CPU cores: expected SARSA, one compiled loop per run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from bmc_torchrl.envs.base import BatchedEnv
from bmc_torchrl.learners.settings import ExpectedSarsaSettings, RunSettings
from bmc_torchrl.lockstep.numba.arguments import has_kernel, read_strategy, write_strategy
from bmc_torchrl.lockstep.numba.loops import CURVES, Lanes, Rule, Scratch, loops_of
from bmc_torchrl.strategies import EpsilonStrategy, ScalarRule

__all__ = ["NumbaTabularEngine"]

_TABLES = {"zeros": 0, "normal": 1, "uniform": 2}
_BLOCKS_PER_THREAD = 16
_NOTHING = np.empty((0, 0, 0))


class NumbaTabularEngine:
    r"""Expected SARSA on tables for many independent runs, tested greedily after every episode.

    A run is a loop of its own: it waits for no other, tests itself where an episode ends, and its
    numbers depend on the seed and its index alone, not on how many runs there are, how
    :meth:`advance` is called or how many threads work. The rules are those of the tensor functions
    of the package, to which tests hold them.

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
        if threads is not None and threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}.")
        self.runs, self.episodes = env.batch_size.numel(), run.episodes
        self.threads = threads or numba.config.NUMBA_NUM_THREADS
        self._domain = env.scalars()
        self._parts = [(type(part), lanes) for part, lanes in strategy.parts()]
        self._rules, self._lanes = _lanes(env, strategy, run.episodes)
        start_lanes, self._advance_lanes = loops_of(
            type(self._domain), tuple(type(rule) for rule in self._rules)
        )
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
        )
        kind = _TABLES[learner.initializer]
        if table is not None:
            wanted = self._lanes.table.shape
            if tuple(table.shape) != wanted:
                raise ValueError(
                    f"table must have the shape {wanted} of [runs, states, actions], got "
                    f"{tuple(table.shape)}."
                )
            self._lanes.table[...] = table.detach().cpu().numpy()
            kind = 0
        drawn = run.first_run, run.seed, kind, float(learner.scale), _NOTHING
        self._each_block(
            lambda first, last: start_lanes(
                self._domain, self._rules, self._lanes, first, last, *drawn
            )
        )

    @staticmethod
    def can_run(strategy: EpsilonStrategy) -> bool:
        """Whether the loops have `strategy`."""
        return has_kernel(strategy)

    def _each_block(self, work: Callable[[int, int], None]) -> None:
        """`work(first, last)` on blocks of lanes; the threads take them as they get free."""
        size = max(1, -(-self.runs // (self.threads * _BLOCKS_PER_THREAD)))
        blocks = [(i, min(i + size, self.runs)) for i in range(0, self.runs, size)]
        if self.threads == 1:
            for block in blocks:
                work(*block)
            return
        with ThreadPoolExecutor(self.threads) as pool:
            for done in [pool.submit(work, *block) for block in blocks]:
                done.result()

    def advance(self, steps: int, *, uniforms: Tensor | None = None) -> None:
        """Up to `steps` training steps of every unfinished run, tests included.

        Args:
            steps: how many.
            uniforms: draws to use for training instead of each run's own, ``[steps, runs, 9]``:
                two for the action, one for the step, four for the reset, two for the next action.
        """
        given = _NOTHING
        if uniforms is not None:
            if tuple(uniforms.shape) != (steps, self.runs, 9):
                raise ValueError(
                    f"uniforms must have the shape {(steps, self.runs, 9)} of [steps, runs, 9], "
                    f"got {tuple(uniforms.shape)}."
                )
            given = np.ascontiguousarray(uniforms.double().numpy())
        domain, rules, rule, lanes = self._domain, self._rules, self._rule, self._lanes

        def work(first: int, last: int) -> None:
            scratch = _scratch(rule.tests, lanes.physics.dtype)
            self._advance_lanes(domain, rules, rule, lanes, first, last, steps, given, scratch)

        self._each_block(work)

    @property
    def finished(self) -> bool:
        """Whether every run has finished its episodes."""
        return bool((self._lanes.episode >= self.episodes).all())

    @property
    def episodes_done(self) -> Tensor:
        """Finished episodes of each run, int64 ``[runs]``."""
        return torch.from_numpy(self._lanes.episode)

    @property
    def steps(self) -> Tensor:
        """Mean steps of the tests after each episode, ``[runs, episodes]``, NaN where not yet."""
        return self._curve("steps")

    @property
    def returns(self) -> Tensor:
        """Mean discounted return of the tests, ``[runs, episodes]``, NaN where not yet."""
        return self._curve("returns")

    @property
    def epsilons(self) -> Tensor:
        """Mean ε of each training episode, ``[runs, episodes]``, NaN where not yet."""
        return self._curve("epsilons")

    @property
    def train_returns(self) -> Tensor:
        """Sum of the rewards of each training episode, ``[runs, episodes]``, NaN where not yet."""
        return self._curve("train_returns")

    @property
    def losses(self) -> Tensor:
        """Mean squared TD error of each episode, ``[runs, episodes]``, NaN where not yet."""
        return self._curve("losses")

    @property
    def train_steps(self) -> Tensor:
        """Length of each training episode, ``[runs, episodes]``, NaN where not yet."""
        return self._curve("train_steps")

    def _curve(self, name: str) -> Tensor:
        return torch.from_numpy(self._lanes.curves[CURVES.index(name)])

    @property
    def diagnostics(self) -> dict[str, Tensor]:
        """:meth:`EpsilonStrategy.diagnostics` at the end of each episode, by name.

        ``[runs, episodes]`` each, NaN where not yet and for strategies that do not say it.
        """
        found: dict[str, Tensor] = {}
        for kind, runs in self._parts:
            rows = self._lanes.history_row[runs]
            if rows.min() < 0:
                continue
            history = torch.from_numpy(self._lanes.history[rows])
            for name, value in kind.scalar_diagnostics(history).items():
                shape = self.runs, self.episodes
                empty = torch.full(shape, torch.nan, dtype=torch.float64)
                found.setdefault(name, empty)[runs] = value
        return found

    @property
    def table(self) -> Tensor:
        """The action values, ``[runs, states, actions]``; a view, not to be written to."""
        return torch.from_numpy(self._lanes.table)

    def write_strategy(self, strategy: EpsilonStrategy) -> None:
        """Give `strategy`, of the kind that this engine was built with, what the runs learned."""
        write_strategy(strategy, self._lanes)

    def state_dict(self) -> dict[str, Tensor]:
        """All that :meth:`load_state_dict` needs to go on exactly from here."""
        return {name: torch.from_numpy(_signed(x)).clone() for name, x in self._arrays().items()}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Go on from a :meth:`state_dict` of an engine that was built with equal arguments."""
        arrays = self._arrays()
        if set(state_dict) != set(arrays):
            raise ValueError(
                f"The state has the entries {sorted(state_dict)}, not {sorted(arrays)}: it belongs "
                "to another engine or version."
            )
        for name, array in arrays.items():
            if tuple(state_dict[name].shape) != array.shape:
                raise ValueError(
                    f"{name} has the shape {tuple(state_dict[name].shape)}, not {array.shape}: "
                    "build the engine with the arguments it was saved with."
                )
        for name, array in arrays.items():
            _signed(array)[...] = state_dict[name].cpu().numpy()

    def _arrays(self) -> dict[str, Any]:
        return self._lanes._asdict()


def _scratch(tests: int, dtype: Any) -> Scratch:
    return Scratch(
        physics=np.zeros((tests, 4), dtype),
        states=np.zeros(tests, np.int64),
        slots=np.zeros(tests, np.int64),
        streams=np.zeros(tests, np.uint64),
        returns=np.zeros(tests),
    )


def _signed(array: Any) -> Any:
    return array.view(np.int64) if array.dtype == np.uint64 else array


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
