"""What every engine logs under the same names: a row per episode, a series per strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L  # noqa: N812
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import WandbLogger
from torch import Tensor

from bmc_torchrl.training.callbacks import GreedyEvaluation
from bmc_torchrl.training.episodes import EpisodeLog
from bmc_torchrl.training.run_records import RecordedLearner
from bmc_torchrl.training.tracking import EpisodeCSVLogger, Row, define_axes, resend

__all__ = ["EpisodeMetrics", "episode_row", "log_points", "prior_row", "runs_of", "series"]

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


def series(name: str, label: str, labels: Sequence[str]) -> str:
    """The name of a strategy's metric: with several strategies, each has its own.

    Examples:
        >>> series("eval/return", "bmc", ["bmc"]), series("eval/return", "bmc", ["bmc", "linear"])
        ('eval/return', 'eval/return/bmc')
    """
    return name if len(labels) == 1 else f"{name}/{label}"


def runs_of(labels: Sequence[str], runs: int) -> dict[str, slice]:
    """The runs of each strategy, equal shares of them.

    Examples:
        >>> runs_of(["bmc", "linear"], 4)
        {'bmc': slice(0, 2, None), 'linear': slice(2, 4, None)}
    """
    each = runs // len(labels)
    return {label: slice(i * each, (i + 1) * each) for i, label in enumerate(labels)}


def _spread(name: str, values: Tensor) -> Row:
    """Mean over runs, and its standard error where there are several."""
    known = values[values.isfinite()].double()
    if not known.numel():
        return {}
    found = {name: float(known.mean())}
    if len(known) > 1:
        found[f"{name}_se"] = float(known.std() / len(known) ** 0.5)
    return found


def _mean(name: str, values: Tensor) -> Row:
    known = values[values.isfinite()].double()
    return {name: float(known.mean())} if known.numel() else {}


def episode_row(log: EpisodeLog, labels: Sequence[str], episode: int) -> Row:
    """All metrics of an episode, the first being 1, averaged over the runs of each strategy.

    ``train/frames`` is the mean number of steps up to the episode's end; a run that was stopped
    counts on with the length of its last episode.

    Args:
        log (EpisodeLog): Where the runs stand; run i belongs to strategy i // (runs / strategies).
        labels (sequence of str): Of the strategies.
        episode (int): Which one.
    """
    row: Row = {"episode": float(episode)}
    column = episode - 1
    frames = log.train_steps[:, :episode].double().sum(-1)
    for label, runs in runs_of(labels, log.runs).items():
        epsilon = log.epsilons[runs, column]
        found: Row = {}
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
            found |= _mean(name, table[runs, column])
        row |= {series(name, label, labels): value for name, value in found.items()}
    return row


def prior_row(learner: RecordedLearner, labels: Sequence[str]) -> Row:
    """ε and the posterior before the first episode: episode 0."""
    row: Row = {"episode": 0.0}
    runs = learner.log_of_episodes.runs
    epsilon = learner.strategy.eps.double().expand(runs)
    said = learner.diagnostics()
    for label, own in runs_of(labels, runs).items():
        found: Row = {"train/frames": 0.0, "train/episodes": 0.0}
        found |= _spread("train/epsilon", epsilon[own])
        found["train/epsilon_min"], found["train/epsilon_max"] = map(float, epsilon[own].aminmax())
        for name, value in said.items():
            found |= _mean(name, value.double().expand(runs)[own])
        row |= {series(name, label, labels): value for name, value in found.items()}
    return row


class EpisodeMetrics(Callback):
    """Logs a row when every run has finished an episode that is due, and the prior as episode 0.

    The names are the same for every module and engine: ``train/loss``, ``train/return``,
    ``train/epsilon``, ``train/episodes``, ``train/frames``, ``eval/return``, ``eval/steps``,
    ``posterior/*`` and ``skipped/*``, and with
    :class:`~bmc_torchrl.training.whatif.WhatIf` ``whatif/*``. Means are over the runs of a
    strategy, with the standard error at ``…_se``; several strategies have a series each,
    ``eval/return/<label>``. The axis is ``"episode"``. ``eval/*`` comes from greedy tests
    after episodes, by :class:`~bmc_torchrl.training.callbacks.GreedyEvaluation` or the engine; rows
    that Lightning logs itself, such as ``trainer.validate``'s ``eval/return``, have no
    ``"episode"``.

    Rows depend on what the runs measured alone, not on when they were looked at: with
    :func:`~bmc_torchrl.training.tracking.csv_logger` or ``wandb_loggers``, the log of a resumed job
    is that of an uninterrupted one.

    Args:
        labels (sequence of str): Of the strategies, equal shares of the runs each.
        most (int): Rows of a job with a known number of episodes.

    Examples:
        >>> trainer = L.Trainer(
        ...     max_steps=50_000,
        ...     callbacks=[EpisodeMetrics()],  # trainer.fit(module) logs the rows now
        ...     logger=False,
        ...     enable_checkpointing=False,
        ... )
    """

    def __init__(self, labels: Sequence[str] = ("ε",), *, most: int = MOST_POINTS) -> None:
        self.labels, self.most = list(labels), most
        self.logged, self.frames = -1, 0
        self.prior: Row = {}
        self.last: Row = {}
        self._sent = -1

    def state_dict(self) -> dict[str, Any]:
        """How far it has logged, the prior, and how many frames there were."""
        return {"logged": self.logged, "prior": self.prior, "frames": self.frames}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self.logged, self.prior = state_dict["logged"], state_dict["prior"]
        self.frames = state_dict["frames"]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let loggers forget what comes again, and log the prior if nothing came before."""
        assert isinstance(pl_module, RecordedLearner)
        log = pl_module.log_of_episodes
        self._frames_before = self.frames
        self._points = [] if log.endless else log_points(log.episodes, self.most)
        self._tested = pl_module.tests_itself or any(
            isinstance(callback, GreedyEvaluation)
            for callback in trainer.callbacks  # type: ignore[attr-defined]
        )
        if trainer.is_global_zero:
            self._rewind(trainer)
        if self.logged < 0:
            self.prior = prior_row(pl_module, self.labels)
            self._log(trainer, self.prior, 0)

    def _rewind(self, trainer: L.Trainer) -> None:
        kept: list[Row] = []
        for logger in trainer.loggers:
            if isinstance(logger, EpisodeCSVLogger):
                kept = logger.rewind(self.logged, trainer.global_step)
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                define_axes(logger.experiment)
                self._sent = resend(logger.experiment, kept)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Log the episodes that all runs have finished since."""
        assert isinstance(pl_module, RecordedLearner)
        log = pl_module.log_of_episodes
        self.frames = self._frames_before + pl_module.vector_steps
        done = min(log.done.tolist())
        if log.endless:
            if done >= self.logged + max(1, self.logged // (self.most // 2)):
                self._log_last(trainer, log, done)
            return
        if done <= self.logged and not bool(log.stopped.any()):
            return
        done = int(log.done.masked_fill(log.stopped, log.episodes).min())
        for episode in self._points:
            if self.logged < episode <= done:
                if self._tested and not bool(log.steps[:, episode - 1].isfinite().all()):
                    return
                self._log(trainer, episode_row(log, self.labels, episode), episode)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log what was tested last."""
        self.on_train_batch_end(trainer, pl_module)

    def _log_last(self, trainer: L.Trainer, log: EpisodeLog, episode: int) -> None:
        """Log the last episode of runs that have no end; only that one is remembered."""
        row = episode_row(log, self.labels, 1)
        for label in self.labels:
            row[series("train/frames", label, self.labels)] = float(self.frames)
            row[series("train/episodes", label, self.labels)] = float(episode)
        self._log(trainer, {**row, "episode": float(episode)}, episode)

    def _log(self, trainer: L.Trainer, row: Row, episode: int) -> None:
        self.logged, self.last = episode, row
        if not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            if not isinstance(logger, WandbLogger):
                logger.log_metrics(row, step=episode)
            elif episode > self._sent:
                # W&B has an axis of its own for them: Lightning's counts optimiser steps.
                logger.experiment.log(row)
