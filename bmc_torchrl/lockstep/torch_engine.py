"""What both torch engines share: lanes, episodes, greedy tests, the stop rule and resuming."""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from bmc_torchrl.envs.base import BatchedEnv
from bmc_torchrl.exploration import VALUE_KEYS
from bmc_torchrl.functional import greedy_return, uniform_return
from bmc_torchrl.learners.settings import RunSettings
from bmc_torchrl.lockstep.compiling import CompiledOnce
from bmc_torchrl.lockstep.greedy_queue import GreedyTests, Outcome, Rollout, greedy_steps
from bmc_torchrl.strategies import EpsilonStrategy

__all__ = ["Lockstep"]

_TESTED = ("steps", "returns")
_TRAINED = ("epsilons", "train_returns", "losses", "train_steps")

LONGEST_CHUNK = 8
"""Vector steps whose draws are made at once; no lane may end two episodes within them."""


class Lockstep(ABC):
    """Many independent runs, stepped together; each resets, learns and is tested on its own.

    A *lane* is one run. A lane that has had its episodes still steps, but nothing it does is
    learned or recorded. After each of its episodes a lane is tested greedily with Q as it was right
    then; tests wait in a queue until `test_slots` of them can run at once.

    Results are float64 ``[runs, episodes]``, NaN where not yet known: ``steps`` and ``returns``,
    the mean steps and mean discounted return of the tests; ``epsilons``, ``train_returns``,
    ``losses`` and ``train_steps``, the training episode's mean ε, undiscounted return, mean loss
    and length; and ``diagnostics``, by name, what the strategy said of itself when it ended.

    Args:
        env: a domain with ``batch_size=[runs]`` that has :meth:`~BatchedEnv.lanes`.
        strategy: the source of ε, of batch shape ``[runs]``; changed in place.
        run: how long, how tested, from which seed.
        test_slots: how many lanes are tested together.
        compiled: whether to compile.
    """

    def __init__(
        self,
        env: BatchedEnv,
        strategy: EpsilonStrategy,
        run: RunSettings,
        *,
        test_slots: int = 128,
        compiled: bool = True,
    ) -> None:
        self.domain = env.lanes()
        self.runs = _checked_runs(env, strategy)
        self.device = self.domain.device
        if run.tests < 1:
            raise ValueError(f"tests must be at least 1 in this engine, got {run.tests}.")
        self.strategy, self.run = strategy, run
        self.needs_values = VALUE_KEYS[0] in strategy.in_keys
        self.episodes, self.gamma = run.episodes, run.gamma
        self.test_slots, self.compiled = min(self.runs, test_slots), compiled
        self.generator = torch.Generator(self.device)
        self.generator.manual_seed(run.seed + run.first_run)
        self.time = 0
        self.chunk = min(self.domain.shortest_episode, LONGEST_CHUNK)
        self._make_results()
        self._make_lanes()

    @staticmethod
    def can_run(strategy: EpsilonStrategy) -> bool:
        """Any strategy: it is updated with tensors, as in ``training``."""
        return True

    @contextlib.contextmanager
    def _own_seed(self) -> Iterator[None]:
        """The global generator as `run` seeds it, for the values that lanes start with."""
        with torch.random.fork_rng():
            torch.manual_seed(self.run.seed + self.run.first_run)
            yield

    def _make_tests(self, policy: Tensor, unroll: int) -> None:
        """Greedy tests of lanes whose policies look like `policy`, `unroll` steps per call."""
        self._greedy = GreedyTests(
            self.domain,
            self._compile(self._test_steps, "greedy tests"),
            slots=self.test_slots,
            tests=self.run.tests,
            policy=policy,
            generator=self.generator,
            unroll=unroll,
        )

    def _compile(self, function: Any, name: str) -> CompiledOnce:
        return CompiledOnce(function, name, enabled=self.compiled)

    def _make_results(self) -> None:
        shape = (self.runs, self.episodes)
        self.names = tuple(self.strategy.diagnostics())
        tested, trained = len(_TESTED), len(_TRAINED) + len(self.names)
        self.results = torch.full((tested + trained, *shape), torch.nan, dtype=torch.float64)
        self._streak = [0] * self.runs
        self._judged = [0] * self.runs

    def _make_lanes(self) -> None:
        options: dict[str, Any] = {"device": self.device}
        reset = self.domain.draw_reset([self.runs], self.generator)
        self.step_count = torch.zeros(self.runs, dtype=torch.int64, **options)
        self.episodes_done = torch.zeros(self.runs, dtype=torch.int64, **options)
        self.state = self.domain.start(reset, self.episodes_done)
        # Of the episode under way: ε, rewards and losses.
        self.sums = torch.zeros(3, self.runs, dtype=torch.float64, **options)
        self.ended = torch.zeros(self.runs, dtype=torch.bool, **options)
        found = len(self.results) - len(_TESTED)
        self.ended_results = torch.zeros(found, self.runs, dtype=torch.float64, **options)

    @property
    def steps(self) -> Tensor:
        """Mean steps of the tests."""
        return self.results[0]

    @property
    def returns(self) -> Tensor:
        """Mean discounted return of the tests."""
        return self.results[1]

    @property
    def epsilons(self) -> Tensor:
        """Mean ε of each training episode."""
        return self.results[2]

    @property
    def train_returns(self) -> Tensor:
        """Undiscounted return of each training episode."""
        return self.results[3]

    @property
    def losses(self) -> Tensor:
        """Mean loss of each training episode."""
        return self.results[4]

    @property
    def train_steps(self) -> Tensor:
        """Length of each training episode."""
        return self.results[5]

    @property
    def diagnostics(self) -> dict[str, Tensor]:
        """What the strategy said of itself at the end of each training episode, by name."""
        return dict(zip(self.names, self.results[6:], strict=True))

    @property
    def finished(self) -> bool:
        """Whether every lane has had its episodes, and their tests."""
        return not self._greedy.pending and self._all_trained()

    def _all_trained(self) -> bool:
        return bool((self.episodes_done >= self.episodes).all())

    def advance(self, steps: int) -> None:
        """Take `steps` vector steps and the tests that come due; stops early once finished.

        Steps are rounded up to whole chunks, so results do not depend on how calls divide them.
        """
        with torch.no_grad():
            for _ in range(0, steps, self.chunk):
                if self.finished:
                    return
                self._chunk(self.chunk)
                self.time += self.chunk
                self._harvest()

    @abstractmethod
    def _chunk(self, steps: int) -> None:
        """Take `steps` vector steps, in which no lane can end two episodes."""

    @abstractmethod
    def _ended_policies(self, lanes: Tensor) -> Tensor:
        """What :meth:`_choose` reads for the lanes that ended an episode, as it was then."""

    @abstractmethod
    def _choose(self, policy: Tensor, state: Tensor) -> Tensor:
        """Greedy actions ``[policies, tests]``."""

    def _update_strategy(
        self,
        index: Tensor | None,
        reward: Tensor,
        terminated: Tensor,
        done: Tensor,
        next_value: Tensor,
        change: Tensor | None,
        left: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> None:
        """Step 5 of the algorithm, for the lanes that still learn."""
        active = self.episodes_done < self.episodes
        masked = terminated if self.run.mask_terminated else None
        columns = {
            "greedy_return": greedy_return(reward, next_value, self.gamma, terminated=masked),
            "uniform_return": uniform_return(reward, next_value, self.gamma, terminated=masked),
            "next": {"done": done.unsqueeze(-1)},
            "collector": {"mask": active},
        }
        if index is not None:
            columns["state"] = index
        if change is not None:
            columns["value_change"] = change
        if left is not None:
            columns |= zip(VALUE_KEYS, left, strict=True)
        self.strategy.update(TensorDict(columns, [self.runs]))

    def _count_episodes(
        self, done: Tensor, epsilon: Tensor, reward: Tensor, loss: Tensor
    ) -> Tensor:
        """Step 6: what episodes that end measured, and counters. Returns the lanes that reset."""
        ends = done & (self.episodes_done < self.episodes)
        total, length = self.sums + torch.stack([epsilon, reward, loss]), self.step_count + 1
        said = [value.double() for value in self.strategy.diagnostics().values()]
        found = [total[0] / length, total[1], total[2] / length, length.double(), *said]
        self.ended_results.copy_(torch.where(ends, torch.stack(found), self.ended_results))
        self.ended.copy_(self.ended | ends)
        self.sums.copy_(torch.where(done, 0.0, total))
        self.step_count.copy_(torch.where(done, 0, length))
        self.episodes_done.add_(ends)
        return ends

    def _current_epsilon(self, index: Tensor | None) -> Tensor:
        entries = {} if index is None else {"state": index}
        epsilon: Tensor = self.strategy.epsilon(TensorDict(entries, [self.runs]))
        return epsilon.float()

    def _harvest(self) -> None:
        """Queue the tests of lanes that ended an episode, and run them if there are enough."""
        lanes = self.ended.nonzero().squeeze(-1)
        if lanes.numel():
            episode = (self.episodes_done[lanes] - 1).cpu()
            rows = lanes.cpu()
            self.results[len(_TESTED) :, rows, episode] = self.ended_results[:, lanes].cpu()
            owners = list(zip(rows.tolist(), episode.tolist(), strict=True))
            self._greedy.add(owners, self._ended_policies(lanes))
            self.ended.zero_()
        self._record(self._greedy.run(drain=self._all_trained()))

    def _test_steps(self, policy: Tensor, rollout: Rollout, noise: Tensor) -> Rollout:
        return greedy_steps(self.domain, self._choose, policy, rollout, noise, self.gamma)

    def _record(self, outcomes: Sequence[Outcome]) -> None:
        known = [outcome for outcome in outcomes if outcome.episode >= self._judged[outcome.lane]]
        if not known:
            return
        lanes, episodes, steps, returns, _ = zip(*known, strict=True)
        cell = torch.tensor(lanes), torch.tensor(episodes)
        self.steps[cell] = torch.tensor(steps, dtype=torch.float64)
        self.returns[cell] = torch.tensor(returns, dtype=torch.float64)
        if self.run.stop_after_perfect_tests is not None:
            for lane in sorted(set(lanes)):
                self._judge(lane, self.run.stop_after_perfect_tests)

    def _judge(self, lane: int, stop_after: int) -> None:
        """Follow the lane's tests in order, and freeze it after `stop_after` perfect ones."""
        results = self.steps[lane].tolist()
        while self._judged[lane] < self.episodes:
            episode = self._judged[lane]
            if math.isnan(results[episode]):
                return
            perfect = results[episode] >= self.domain.max_steps
            self._streak[lane] = self._streak[lane] + 1 if perfect else 0
            self._judged[lane] += 1
            if self._streak[lane] == stop_after:
                self._judged[lane] = self.episodes
                self.episodes_done[lane] = self.episodes
                last = self.results[:, lane, episode].clone()
                self.results[:, lane, episode:] = last.unsqueeze(-1)

    _LANES = ("state", "step_count", "episodes_done", "sums", "ended", "ended_results", "results")

    def write_strategy(self, strategy: EpsilonStrategy) -> None:
        """The strategy was changed in place, its runs possibly in another order."""
        if strategy is not self.strategy:
            raise ValueError("A lockstep engine changes the strategy it was built with, no other.")

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides what comes next, and the results; tensors and numbers only."""
        tensors = {name: getattr(self, name).clone() for name in self._LANES}
        return {
            "tensors": tensors,
            "strategy": {name: x.clone() for name, x in self.strategy.state_dict().items()},
            "generator": self.generator.get_state(),
            "time": self.time,
            "tests": self._greedy.state_dict(),
            "streak": list(self._streak),
            "judged": list(self._judged),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where :meth:`state_dict` was taken."""
        for name, tensor in state["tensors"].items():
            getattr(self, name).copy_(tensor)
        self.strategy.load_state_dict(state["strategy"])
        self.generator.set_state(state["generator"].cpu())
        self.time = state["time"]
        self._greedy.load_state_dict(state["tests"])
        self._streak, self._judged = list(state["streak"]), list(state["judged"])


def _checked_runs(env: BatchedEnv, strategy: EpsilonStrategy) -> int:
    if len(env.batch_size) != 1:
        raise ValueError(
            f"env must have batch_size=[runs], got {list(env.batch_size)}: the engine steps one "
            "dimension of runs."
        )
    if strategy.batch_shape != env.batch_size:
        raise ValueError(
            f"strategy has batch_shape={list(strategy.batch_shape)} but env has "
            f"{env.batch_size[0]} runs: build it with batch_shape=[{env.batch_size[0]}]."
        )
    return int(env.batch_size[0])
