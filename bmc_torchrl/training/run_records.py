"""What every trained module has in common: runs, a source of ε, and where the runs stand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L  # noqa: N812
import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.envs import EnvBase

from bmc_torchrl.strategies import EpsilonStrategy, StrategyBank
from bmc_torchrl.strategies.whatif import diagnosed
from bmc_torchrl.training.episodes import EpisodeLog

__all__ = ["ChunkedLearner", "RecordedLearner"]


class RecordedLearner(L.LightningModule):
    """A module that callbacks can ask where its runs stand.

    Attributes:
        strategy: The source of ε of all runs.
        log_of_episodes: Where the runs stand.
        vector_steps: Steps that all runs have taken together so far in this process.
        q_actor: The greedy policy, where it is TorchRL's.
        step_hooks: Called with the runs whose episode ended, after each vector step.
        tests_itself: Whether greedy tests need no callback.
        bank: Strategies that learn from the same transitions and do not act.
    """

    strategy: EpsilonStrategy
    log_of_episodes: EpisodeLog
    vector_steps: int = 0
    q_actor: TensorDictModuleBase
    step_hooks: list[Callable[[Tensor], None]]
    tests_itself: bool = False
    bank: StrategyBank | None = None

    def watch(self, bank: StrategyBank) -> None:
        """Let strategies that do not act learn from what the one that does learns from."""
        self.__dict__["bank"] = bank
        self.log_of_episodes.watch(tuple(bank.diagnostics(self.strategy)))

    def diagnostics(self) -> dict[str, Tensor]:
        """What the strategy says of itself, and what others would."""
        return diagnosed(self.strategy, self.bank)

    @property
    def finished(self) -> bool:
        """Whether every run has finished."""
        return bool(self.log_of_episodes.finished.all())

    @property
    def episodes_finished(self) -> int:
        """Episodes that every run has finished; all of them where it was stopped early."""
        log = self.log_of_episodes
        return int(log.done.masked_fill(log.stopped, log.episodes).min())

    def greedy_policy(self, env: EnvBase) -> TensorDictModuleBase:
        """An actor that acts greedily in `env`, batch size ``[runs, …]``."""
        return self.q_actor


class ChunkedLearner(RecordedLearner):
    """A module whose ``training_step`` is a chunk of vector steps of many runs.

    Lightning's ``global_step`` counts chunks.

    Args:
        strategy: the source of ε of all runs.
        runs: number of runs.
        episodes: training episodes of each run.
        test_every: episodes between two tests.
    """

    def __init__(
        self,
        strategy: EpsilonStrategy,
        *,
        runs: int,
        episodes: int,
        test_every: int = 1,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.strategy = strategy
        self.log_of_episodes = EpisodeLog(runs, episodes, test_every, tuple(strategy.diagnostics()))
        self.clock = torch.nn.Parameter(torch.zeros(0))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """A clock: Lightning counts its steps, one per chunk."""
        return torch.optim.SGD([self.clock], lr=1.0)

    def count_chunk(self) -> None:
        """Let Lightning know that a chunk is over."""
        clock = self.optimizers()
        assert not isinstance(clock, list)
        # A gradient of no elements: a gradient scaler refuses to step without any.
        self.clock.grad = torch.zeros_like(self.clock)
        clock.step()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Stop when every run has finished."""
        if self.trainer.strategy.reduce_boolean_decision(self.finished, all=True):
            self.trainer.should_stop = True
