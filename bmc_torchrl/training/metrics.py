"""What every engine logs under the same names: a row per episode, a series per strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L  # noqa: N812
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from bmc_torchrl.training.episodes import EpisodeLog
from bmc_torchrl.training.run_records import RecordedLearner

__all__ = ["EpisodeMetrics", "episode_row", "log_points", "prior_row"]

MOST_POINTS = 400
"""Rows of a long job; one with fewer episodes has a row for each."""


def log_points(episodes: int, most: int = MOST_POINTS) -> list[int]:
    """The episodes that are logged, counted from 1: all, or `most` of them with the last.

    Examples:
        >>> log_points(3), log_points(10, most=4)
        ([1, 2, 3], [3, 5, 8, 10])
    """
    count = min(episodes, most)
    return sorted({-(-(number + 1) * episodes // count) for number in range(count)})


def _series(name: str, label: str, labels: Sequence[str]) -> str:
    return name if len(labels) == 1 else f"{name}/{label}"


def _spread(name: str, values: Tensor) -> dict[str, float]:
    """Mean over runs, and its standard error where there are several."""
    known = values[values.isfinite()].double()
    if not known.numel():
        return {}
    found = {name: float(known.mean())}
    if len(known) > 1:
        found[f"{name}_se"] = float(known.std() / len(known) ** 0.5)
    return found


def episode_row(log: EpisodeLog, labels: Sequence[str], episode: int) -> dict[str, float]:
    """All metrics of an episode, the first being 1, averaged over the runs of each strategy.

    Args:
        log (EpisodeLog): Where the runs stand; run i belongs to strategy i // (runs / strategies).
        labels (sequence of str): Of the strategies.
        episode (int): Which one.
    """
    row: dict[str, float] = {"episode": float(episode)}
    column = episode - 1
    frames = log.train_steps[:, :episode].sum(-1)
    for label, runs in zip(labels, _slices(log.runs, len(labels)), strict=True):
        epsilon = log.epsilons[runs, column]
        found: dict[str, float] = {}
        for name, table in (
            ("train/return", log.train_returns),
            ("train/loss", log.losses),
            ("train/epsilon", log.epsilons),
            ("eval/return", log.returns),
            ("eval/steps", log.steps),
        ):
            found |= _spread(name, table[runs, column])
        found["train/epsilon_min"], found["train/epsilon_max"] = map(float, epsilon.aminmax())
        found["train/frames"] = float(frames[runs].mean())
        found["train/episodes"] = float(log.done[runs].clamp(max=episode).double().mean())
        for name, table in log.diagnostics.items():
            found |= {k: v for k, v in _spread(name, table[runs, column]).items() if k == name}
        row |= {_series(name, label, labels): value for name, value in found.items()}
    return row


def prior_row(learner: RecordedLearner, labels: Sequence[str]) -> dict[str, float]:
    """ε and the posterior before the first episode: episode 0."""
    row: dict[str, float] = {"episode": 0.0}
    runs = learner.log_of_episodes.runs
    said = {"train/epsilon": learner.strategy.eps, **learner.strategy.diagnostics()}
    for label, own in zip(labels, _slices(runs, len(labels)), strict=True):
        found: dict[str, float] = {"train/frames": 0.0, "train/episodes": 0.0}
        for name, value in said.items():
            mean = _spread(name, value.double().expand(runs)[own])
            found |= {k: v for k, v in mean.items() if k == name}
        row |= {_series(name, label, labels): value for name, value in found.items()}
    return row


def _slices(runs: int, labels: int) -> list[slice]:
    each = runs // labels
    return [slice(number * each, (number + 1) * each) for number in range(labels)]


class EpisodeMetrics(Callback):
    """Logs a row when every run has finished an episode that is due, and the prior before.

    Rows depend on what the runs measured alone, not on when they were looked at: a resumed job logs
    what an uninterrupted one does.

    Args:
        labels (sequence of str): Of the strategies, equal shares of the runs each.
        tested (bool): Whether a row waits for the episode's greedy tests.
        most (int): Rows of a job with a known number of episodes.
    """

    def __init__(
        self, labels: Sequence[str] = ("ε",), *, tested: bool = True, most: int = MOST_POINTS
    ) -> None:
        self.labels, self.tested, self.most = list(labels), tested, most
        self.logged = -1
        self.last: dict[str, float] = {}

    def state_dict(self) -> dict[str, Any]:
        """How far it has logged."""
        return {"logged": self.logged}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self.logged = state_dict["logged"]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the prior."""
        assert isinstance(pl_module, RecordedLearner)
        log = pl_module.log_of_episodes
        self.points = [] if log.endless else log_points(log.episodes, self.most)
        if self.logged < 0:
            self._log(trainer, prior_row(pl_module, self.labels), 0)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Log the episodes that all runs have finished since."""
        assert isinstance(pl_module, RecordedLearner)
        log = pl_module.log_of_episodes
        done = int(torch.where(log.stopped, log.episodes, log.done).min())
        if done <= self.logged:
            return
        if log.endless:
            if done >= self.logged + max(1, self.logged // (self.most // 2)):
                self._log(trainer, {**episode_row(log, self.labels, 1), "episode": done}, done)
            return
        for episode in self.points:
            if self.logged < episode <= done:
                if self.tested and not bool(log.steps[:, episode - 1].isfinite().all()):
                    return
                self._log(trainer, episode_row(log, self.labels, episode), episode)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log what was tested last."""
        self.on_train_batch_end(trainer, pl_module)

    def _log(self, trainer: L.Trainer, row: dict[str, float], episode: int) -> None:
        self.logged, self.last = episode, row
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(row, step=episode)
