"""The tabular experiments on CPU cores: expected SARSA, one compiled loop per run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numba
import numpy as np
import torch
from torch import Tensor

from bmc_torchrl.envs import CartPole, SubgoalGrid, SupplyNetwork
from bmc_torchrl.lockstep.numba.arguments import (
    StrategyArrays,
    domain_kernel,
    read_strategy,
    write_strategy,
)
from bmc_torchrl.lockstep.numba.loops import (
    STAMP,
    Lanes,
    Rule,
    Scratch,
    advance_lanes,
    start_lanes,
)
from bmc_torchrl.strategies import EpsilonStrategy

__all__ = ["NumbaTabularEngine"]

Domain = str | SubgoalGrid | CartPole | SupplyNetwork
_TABLES = {"zeros": 0, "normal": 1, "uniform": 2}
_BLOCKS_PER_THREAD = 16
_NOTHING = np.empty((0, 0, 0))


class NumbaTabularEngine:
    r"""Expected SARSA on tables for many independent runs, tested greedily after every episode.

    A run is a loop of its own: it waits for no other, tests itself where an episode ends, and its
    numbers depend on `seed` and its index alone, not on how many runs there are, how
    :meth:`advance` is called or how many threads work. The rules are those of the tensor functions
    of the package, to which tests hold them.

    Args:
        domain: ``"grid_world"``, ``"cart_pole"``, ``"supply_chain"`` (one warehouse), or its
            parameters: a :class:`SubgoalGrid`, :class:`CartPole` or :class:`SupplyNetwork`.
        strategy: the source of ε, of batch shape ``[runs]``; it is read, and written only by
            :meth:`write_strategy`. Several strategies are one :class:`StackedEpsilon`.
        runs: how many runs.
        episodes: training episodes of each run.
        tests: greedy episodes after each training episode; 0 for none.
        max_steps: longest episode, training or test.
        gamma: discount factor of the returns and of the tests.
        learning_rate: η of the first episode.
        learning_rate_decay: η is multiplied by it after every episode, ...
        learning_rate_floor: ... but is never lower than this.
        table: ``"zeros"``, ``"normal"`` (`scale` · N(0, 1)), ``"uniform"`` (U[0, `scale`]), or the
            tables themselves, ``[runs, states, actions]``, which are copied.
        scale: see `table`.
        mask_terminated: do not bootstrap from terminal states; the published experiments do.
        next_action: whether a′ is drawn before (published) or after learning (Algorithm 1).
        stop_after_perfect_tests: freeze a run after so many tests in which every episode lasted
            `max_steps`; its remaining episodes repeat the last results.
        seed: of all random numbers.
        first_run: index of the first run, where the runs of one experiment are split over engines.
        threads: how many threads; as many as numba would use by default, all cores in general.
        physics_dtype: precision of cart-pole's physics.

    >>> from bmc_torchrl import BMCEpsilon
    >>> engine = NumbaTabularEngine(
    ...     "grid_world", BMCEpsilon(batch_shape=[2]), runs=2, episodes=3, tests=1, gamma=0.99,
    ...     learning_rate=0.7, table="normal", threads=1,
    ... )
    >>> engine.advance(600)
    >>> engine.finished, engine.steps.shape
    (True, torch.Size([2, 3]))
    """

    def __init__(
        self,
        domain: Domain,
        strategy: EpsilonStrategy | StrategyArrays,
        *,
        runs: int,
        episodes: int,
        tests: int,
        max_steps: int = 200,
        gamma: float,
        learning_rate: float,
        learning_rate_decay: float = 1.0,
        learning_rate_floor: float = 0.0,
        table: Literal["zeros", "normal", "uniform"] | Tensor = "zeros",
        scale: float = 0.1,
        mask_terminated: bool = False,
        next_action: Literal["before", "after"] = "before",
        stop_after_perfect_tests: int | None = None,
        seed: int = 0,
        first_run: int = 0,
        threads: int | None = None,
        physics_dtype: torch.dtype = torch.float32,
    ) -> None:
        for name, value, least in (
            ("runs", runs, 1),
            ("episodes", episodes, 1),
            ("tests", tests, 0),
            ("seed", seed, 0),
            ("first_run", first_run, 0),
            ("max_steps", max_steps, 1),
            ("threads", 1 if threads is None else threads, 1),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}.")
        if next_action not in ("before", "after"):
            raise ValueError(f"next_action must be 'before' or 'after', got {next_action!r}.")
        if isinstance(table, str) and table not in _TABLES:
            raise ValueError(f"table must be one of {sorted(_TABLES)} or a tensor, got {table!r}.")
        self.runs, self.episodes, self.seed = runs, episodes, seed
        self.threads = threads or numba.config.NUMBA_NUM_THREADS
        self._domain = domain_kernel(domain, physics_dtype)
        self._rule = Rule(
            episodes=episodes,
            tests=tests,
            max_steps=max_steps,
            gamma=float(gamma),
            rate_initial=float(learning_rate),
            rate_decay=float(learning_rate_decay),
            rate_floor=float(learning_rate_floor),
            mask_terminated=bool(mask_terminated),
            before=next_action == "before",
            enough_perfect=stop_after_perfect_tests or 0,
        )
        states, actions = self._domain.num_states, self._domain.num_actions
        if isinstance(strategy, EpsilonStrategy):
            strategy = read_strategy(strategy, runs, states)
        self._lanes = _lanes(runs, states, actions, episodes, strategy, physics_dtype)
        kind = 0
        if isinstance(table, str):
            kind = _TABLES[table]
        elif tuple(table.shape) != (runs, states, actions):
            raise ValueError(
                f"table must have the shape {(runs, states, actions)} of [runs, states, actions], "
                f"got {tuple(table.shape)}."
            )
        else:
            self._lanes.table[...] = table.detach().cpu().numpy()
        kernel, lanes = self._domain.kernel, self._lanes

        def work(first: int, last: int) -> None:
            start_lanes(
                kernel, lanes, first, last, first_run, seed, kind, float(scale), _NOTHING, STAMP
            )

        self._each_block(work)

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
        kernel, rule, lanes = self._domain.kernel, self._rule, self._lanes

        def work(first: int, last: int) -> None:
            scratch = _scratch(rule.tests, lanes.physics.dtype)
            advance_lanes(kernel, rule, lanes, first, last, steps, given, scratch, STAMP)

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
        return torch.from_numpy(self._lanes.steps)

    @property
    def returns(self) -> Tensor:
        """Mean discounted return of the tests, ``[runs, episodes]``, NaN where not yet."""
        return torch.from_numpy(self._lanes.returns)

    @property
    def epsilons(self) -> Tensor:
        """Mean ε of each training episode, ``[runs, episodes]``, NaN where not yet."""
        return torch.from_numpy(self._lanes.logged)

    @property
    def table(self) -> Tensor:
        """The action values, ``[runs, states, actions]``; a view, not to be written to."""
        return torch.from_numpy(self._lanes.table)

    @property
    def state(self) -> Tensor:
        """The state each run is in, int64 ``[runs]``."""
        return torch.from_numpy(self._lanes.state)

    @property
    def physics(self) -> Tensor:
        """Cart-pole's physics, ``[runs, 4]``; zero in other domains."""
        return torch.from_numpy(self._lanes.physics)

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
    runs: int,
    states: int,
    actions: int,
    episodes: int,
    strategy: StrategyArrays,
    physics_dtype: torch.dtype,
) -> Lanes:
    for name, array in strategy._asdict().items():
        if name != "epsilons" and len(array) != runs:
            raise ValueError(f"strategy: {name} must have one entry per run ({runs}): {len(array)}")
    count = np.zeros((6, runs), np.int64)
    curves = np.full((3, runs, episodes), np.nan)
    physics = torch.zeros(runs, 4, dtype=physics_dtype).numpy()
    return Lanes(
        table=np.zeros((runs, states, actions), np.float32),
        greedy=np.zeros((runs, states), np.int16),
        row_sum=np.zeros((runs, states)),
        physics=physics,
        state=count[0],
        action=count[1],
        step_count=count[2],
        episode=count[3],
        epsilon_sum=np.zeros(runs),
        perfect=count[4],
        bits=np.zeros((runs, 4), np.uint64),
        family=strategy.family,
        parameters=strategy.parameters,
        posterior=strategy.posterior,
        epsilons=strategy.epsilons,
        epsilons_row=strategy.epsilons_row,
        steps=curves[0],
        returns=curves[1],
        logged=curves[2],
    )
