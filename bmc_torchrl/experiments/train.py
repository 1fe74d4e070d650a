"""Train one job: bmc train experiment=cart_dqn strategy=bmc runs=8 episodes=20."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig
from torchrl.envs import EnvBase

from bmc_torchrl.analysis.job_summary import print_job_summary
from bmc_torchrl.analysis.tables import load
from bmc_torchrl.errors import ResultsError, SettingsError
from bmc_torchrl.experiments.build import build_bank, build_job
from bmc_torchrl.experiments.configs import configured_by, flat, plain
from bmc_torchrl.experiments.exits import in_a_line
from bmc_torchrl.experiments.locks import only_job
from bmc_torchrl.experiments.memory import bytes_of_a_run, require_memory
from bmc_torchrl.experiments.resuming import decisive_settings, resumable
from bmc_torchrl.experiments.settings import check_settings, chosen_device, chosen_strategies
from bmc_torchrl.signals import Interrupted, StopSignals
from bmc_torchrl.training import (
    AtomicCheckpoint,
    EpisodeMetrics,
    EpisodeProgress,
    ResultsTable,
    WhatIf,
)
from bmc_torchrl.training.report import JobFigures, WandbReport
from bmc_torchrl.training.run_records import ChunkedLearner, RecordedLearner
from bmc_torchrl.training.video import GreedyVideo

__all__ = ["callbacks", "fit", "main"]

TABLE = "table.parquet"


def callbacks(
    cfg: DictConfig,
    learner: RecordedLearner,
    own: list[Any],
    output: Path,
    signals: StopSignals,
) -> list[Any]:
    """The callbacks of a job: its own, and those that every job has."""
    labels = [entry.label for entry in chosen_strategies(cfg)]
    metrics = EpisodeMetrics(labels)
    pictures: list[Any] = [JobFigures(output, metrics)] if cfg.figure else []
    bank = build_bank(cfg)
    watching = [WhatIf(bank, output, labels=labels, figure=cfg.figure)] if bank else []
    if cfg.figure and not any(isinstance(callback, GreedyVideo) for callback in own):
        painted = functools.partial(_painted_env, cfg, cfg.runs * len(labels))
        pictures.append(GreedyVideo(output / "greedy.gif", painted, cfg.domain.max_steps))
    trainer = cfg.trainer
    chunked = isinstance(learner, ChunkedLearner)
    every = trainer.checkpoint_every_n_chunks if chunked else trainer.checkpoint_every_n_updates
    return [
        *own,
        *watching,
        metrics,
        _results_table(cfg),
        *pictures,
        EpisodeProgress(labels),
        AtomicCheckpoint(output, every, settings=decisive_settings(cfg), signals=signals),
        WandbReport(output, labels, *watching),
    ]


def _results_table(cfg: DictConfig) -> ResultsTable:
    return ResultsTable(
        Path(cfg.output) / TABLE,
        experiment=cfg.name,
        strategies=[entry.label for entry in chosen_strategies(cfg)],
        config=plain(cfg),
        seed=cfg.seed,
    )


def _painted_env(cfg: DictConfig, runs: int) -> EnvBase:
    """Test environments that can be filmed, batch size ``[runs, 1]``."""
    options = {} if cfg.domain.native else {"make": {"render_mode": "rgb_array"}}
    env: EnvBase = instantiate(cfg.domain.env, **options)(
        batch_size=[runs, 1], device=chosen_device(cfg.device), observation=cfg.observation
    )
    return env


def fit(cfg: DictConfig, learner: RecordedLearner, stream: Any, own: list[Any]) -> L.Trainer:
    """Fit a job of :func:`~bmc_torchrl.experiments.build.build_job`, resuming it if asked to."""
    torch.set_num_threads(cfg.trainer.threads)
    checkpoint = resumable(cfg) if cfg.resume else None
    with warnings.catch_warnings(), StopSignals() as signals:
        warnings.filterwarnings("ignore", module="lightning")
        trainer = _trainer(cfg, callbacks(cfg, learner, own, Path(cfg.output), signals))
        told = plain(cfg)
        told["sweep"] = {entry["label"]: entry for entry in chosen_strategies(told)}
        for logger in trainer.loggers:
            logger.log_hyperparams(flat(told))
        try:
            resumed = None if checkpoint is None else str(checkpoint.path)
            trainer.fit(learner, stream, ckpt_path=resumed, weights_only=True)
            signals.raise_pending()
        except Interrupted as stop:
            stop.left = _left(trainer, learner, cfg.episodes)
            raise
    if stream is not None:
        stream.shutdown()
    return trainer


def _trainer(cfg: DictConfig, callbacks: list[Any]) -> L.Trainer:
    device = chosen_device(cfg.device)
    placed: dict[str, Any] = {"accelerator": "cpu"} if device.type == "cpu" else {}
    if ":" in cfg.device:
        placed["devices"] = [device.index]
    make_trainer = instantiate(cfg.trainer.lightning, _partial_=True, **placed)
    try:
        trainer: L.Trainer = make_trainer(logger=instantiate(cfg.logger), callbacks=callbacks)
    except (TypeError, ValueError, MisconfigurationException) as error:
        raise SettingsError(f"trainer.lightning: {error}") from error
    return trainer


def _left(trainer: L.Trainer, learner: RecordedLearner, episodes: int) -> str:
    """Where an interrupted job stands, and how to go on."""
    (saved,) = (c for c in trainer.checkpoint_callbacks if isinstance(c, AtomicCheckpoint))
    reached = learner.episodes_finished
    where = f"at episode {reached} of {episodes}"
    if saved.episode is None:
        return f"{where}, before there was a checkpoint; start it again"
    if saved.episode < reached:
        where += f", the last checkpoint is of episode {saved.episode}"
    return f"{where}; continue with resume=true"


@configured_by("train")
def main(cfg: DictConfig) -> None:
    """Train, then show the results."""
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        cfg.output = HydraConfig.get().runtime.output_dir
    for name in ("lightning.pytorch", "torchrl"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        check_settings(cfg)
        runs = cfg.runs * len(chosen_strategies(cfg))
        require_memory(runs * bytes_of_a_run(cfg), f"runs={cfg.runs} episodes={cfg.episodes}")
        if cfg.resume:
            resumable(cfg)  # Before anything is built, which may compile.
        parts = build_job(cfg)
    except (ValueError, InstantiationException) as error:
        raise SettingsError(in_a_line(error)) from error
    output = Path(cfg.output)
    first = getattr(rank_zero_only, "rank", 0) == 0
    with only_job(output / ".lock", str(output)) if first else contextlib.nullcontext():
        checkpoint = resumable(cfg) if cfg.resume else None
        if checkpoint is None or not checkpoint.finished:
            fit(cfg, *parts)
        elif first:
            _tell_finished(cfg)
            if not _is_whole(output / TABLE):
                log = parts[0].log_of_episodes
                checkpoint.load_log(log)
                _results_table(cfg).write(log)
        if first:
            advised = bool(cfg.whatif.strategies)
            print_job_summary(output, figure=cfg.figure, advised=advised)


def _tell_finished(cfg: DictConfig) -> None:
    labels = ", ".join(entry.label for entry in chosen_strategies(cfg))
    print(
        f"bmc train: {cfg.output} is finished: {cfg.name} with {labels}, {cfg.runs} "
        f"runs of {cfg.episodes} episodes each, seed {cfg.seed}. There is nothing left to train.",
        file=sys.stderr,
    )


def _is_whole(table: Path) -> bool:
    """Whether a finished job's table can be read; if not, it is made again from the checkpoint."""
    try:
        load(table)
    except ResultsError:
        return False
    return True


if __name__ == "__main__":
    main()
