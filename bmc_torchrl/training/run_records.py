"""What every trained module has in common: chunks as steps, an episode log, metrics."""

from __future__ import annotations

from typing import Any

import lightning as L  # noqa: N812
import torch
from torch import Tensor

from bmc_torchrl.strategies import BMCEpsilon, EpsilonStrategy
from bmc_torchrl.training.episodes import EpisodeLog

__all__ = ["RecordedLearner"]


class RecordedLearner(L.LightningModule):
    """A module whose ``training_step`` is a chunk of vector steps of many runs.

    Lightning's ``global_step`` counts chunks. Callbacks find where the runs stand in
    ``log_of_episodes``, the source of ε in ``strategy``, and the vector steps of the last chunk in
    ``chunk_steps``.

    Args:
        strategy: the source of ε of all runs.
        runs: number of runs.
        episodes: training episodes of each run.
        log_every_n_chunks: chunks between two looks at the metrics.
        test_every: episodes between two tests.
    """

    def __init__(
        self,
        strategy: EpsilonStrategy,
        *,
        runs: int,
        episodes: int,
        log_every_n_chunks: int,
        test_every: int = 1,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.strategy = strategy
        self.log_of_episodes = EpisodeLog(runs, episodes, test_every)
        self.log_every_n_chunks = log_every_n_chunks
        self.chunk_steps = 0
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

    @property
    def finished(self) -> bool:
        """Whether every run has finished."""
        return bool(self.log_of_episodes.finished.all())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log what is known, and stop when every run has finished."""
        finished = self.trainer.strategy.reduce_boolean_decision(self.finished, all=True)
        if finished or self.global_step % self.log_every_n_chunks == 0:
            self.log_dict(self.metrics(), batch_size=1)
        if finished:
            self.trainer.should_stop = True

    def metrics(self) -> dict[str, Tensor]:
        """What is known so far, as tensors on the device."""
        log, eps = self.log_of_episodes, self.strategy.eps
        last = log.last_tested
        found = {
            "train/epsilon": eps.mean(),
            "train/epsilon_min": eps.min(),
            "train/epsilon_max": eps.max(),
            "train/episodes": log.done.double().mean(),
            "eval/steps": log.steps.gather(-1, last).nanmean(),
            "eval/return": log.returns.gather(-1, last).nanmean(),
        }
        for part in self.strategy.modules():
            if isinstance(part, BMCEpsilon):
                found |= {
                    "posterior/alpha": part.alpha.mean(),
                    "posterior/beta": part.beta.mean(),
                    "posterior/strength": (part.alpha + part.beta).mean(),
                    "posterior/log_evidence_ratio": part.log_evidence_ratio.mean(),
                    "posterior/return_variance": part.return_variance.mean(),
                }
        return found
