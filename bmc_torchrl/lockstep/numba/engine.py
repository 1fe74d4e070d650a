"""What both numba engines share: threads, results, strategies, and resuming."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from bmc_torchrl.lockstep.numba.arguments import has_kernel, write_strategy
from bmc_torchrl.lockstep.numba.loops import CURVES
from bmc_torchrl.strategies import EpsilonStrategy

__all__ = ["NOTHING", "NumbaEngine"]

_BLOCKS_PER_THREAD = 16
NOTHING = np.empty((0, 0, 0))
"""In place of given draws."""


class NumbaEngine:
    """Many independent runs in compiled loops, each tested greedily after every episode.

    A run is a loop of its own: it waits for no other, tests itself where an episode ends, and its
    numbers depend on the seed and its index alone, not on how many runs there are, how
    ``advance`` is called or how many threads work.

    Args:
        lanes: what the loops change, a ``NamedTuple`` of arrays.
        strategy: the source of ε; only its parts' classes are kept.
        threads: how many threads; as many as numba would use by default, all cores in general.
    """

    def __init__(self, lanes: Any, strategy: EpsilonStrategy, threads: int | None) -> None:
        if threads is not None and threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}.")
        self.threads = threads or numba.config.NUMBA_NUM_THREADS
        self._lanes = lanes
        _, self.runs, self.episodes = lanes.curves.shape
        self._parts = [(type(part), runs) for part, runs in strategy.parts()]

    @staticmethod
    def can_run(strategy: EpsilonStrategy) -> bool:
        """Whether the loops have `strategy`."""
        return has_kernel(strategy)

    def _each_block(self, work: Callable[[int, int], None]) -> None:
        """`work(first, last)` on blocks of lanes; the threads take them as they get free."""
        if self.threads == 1:
            work(0, self.runs)
            return
        size = max(1, -(-self.runs // (self.threads * _BLOCKS_PER_THREAD)))
        blocks = [(i, min(i + size, self.runs)) for i in range(0, self.runs, size)]
        with ThreadPoolExecutor(self.threads) as pool:
            for done in [pool.submit(work, *block) for block in blocks]:
                done.result()

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
        """Mean loss of each training episode, ``[runs, episodes]``, NaN where not yet."""
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
        arrays: dict[str, Any] = self._lanes._asdict()
        return arrays


def _signed(array: Any) -> Any:
    return array.view(np.int64) if array.dtype == np.uint64 else array
