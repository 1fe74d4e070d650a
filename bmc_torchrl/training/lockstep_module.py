"""A lockstep engine in Lightning's loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tensordict.nn import TensorDictModuleBase
from torchrl.envs import EnvBase

from bmc_torchrl.lockstep.interface import Engine, greedy_actor
from bmc_torchrl.strategies import EpsilonStrategy, StrategyBank
from bmc_torchrl.training.episodes import MEASURED
from bmc_torchrl.training.run_records import ChunkedLearner

__all__ = ["ChunkStream", "LockstepLearner"]


class LockstepLearner(ChunkedLearner):
    """Many runs on a lockstep engine, which learns, tests and stops them by itself.

    Args:
        engine: built for `strategy`.
        strategy: the source of ε of all runs.
        runs: number of runs.
        episodes: training episodes of each run.
    """

    tests_itself = True

    def __init__(
        self,
        engine: Engine,
        strategy: EpsilonStrategy,
        *,
        runs: int,
        episodes: int,
    ) -> None:
        super().__init__(strategy, runs=runs, episodes=episodes)
        self.engine = engine

    @property
    def finished(self) -> bool:
        """Whether every run has had its episodes and their tests."""
        return self.engine.finished

    def training_step(self, chunk_steps: int, index: int) -> None:
        """Advance all runs by a chunk, and take over what is known."""
        self.engine.advance(chunk_steps)
        self.engine.write_strategy(self.strategy)
        log, engine = self.log_of_episodes, self.engine
        log.done.copy_(engine.episodes_done)
        for name in MEASURED:
            getattr(log, name).copy_(getattr(engine, name))
        for name, table in engine.diagnostics.items():
            log.diagnostics[name].copy_(table)
        self.vector_steps += chunk_steps
        self.count_chunk()

    def watch(self, bank: StrategyBank) -> None:
        """Not here: an engine's transitions stay inside it."""
        raise ValueError(
            "A lockstep engine keeps its transitions to itself, so that no other strategy learns "
            "from them: use engine=torchrl with whatif=."
        )

    def greedy_policy(self, env: EnvBase) -> TensorDictModuleBase:
        """See :class:`~bmc_torchrl.training.run_records.RecordedLearner`."""
        return greedy_actor(self.engine, env)

    def get_extra_state(self) -> dict[str, Any]:
        """The engine's state, so that a checkpoint has it."""
        return self.engine.state_dict()

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """The engine as it was."""
        self.engine.load_state_dict(state)


class ChunkStream:
    """The loader of an engine: how many steps each chunk has, from where it stopped.

    >>> list(ChunkStream(chunk_steps=100, num_chunks=2))
    [100, 100]
    """

    def __init__(self, chunk_steps: int, num_chunks: int) -> None:
        self.chunk_steps, self.num_chunks, self.position = chunk_steps, num_chunks, 0

    def __len__(self) -> int:
        return self.num_chunks

    def __iter__(self) -> Iterator[int]:
        while self.position < self.num_chunks:
            self.position += 1
            yield self.chunk_steps

    def state_dict(self) -> dict[str, int]:
        """Where it stands."""
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on from there."""
        self.position = state_dict["position"]

    def shutdown(self) -> None:
        """Nothing to close."""
