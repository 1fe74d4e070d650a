"""Train one job: bmc train experiment=cart_dqn strategy=bmc runs=8 episodes=20."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig
from torchrl.envs import EnvBase

from bmc_torchrl.analysis.job_summary import print_job_summary
from bmc_torchrl.experiments.build import build_job
from bmc_torchrl.experiments.configs import configured_by, plain
from bmc_torchrl.experiments.settings import check_settings, chosen_device, chosen_strategies
from bmc_torchrl.training import AtomicCheckpoint, EpisodeMetrics, EpisodeProgress, ResultsTable
from bmc_torchrl.training.report import JobFigures, WandbReport
from bmc_torchrl.training.run_records import ChunkedLearner
from bmc_torchrl.training.video import GreedyVideo

__all__ = ["callbacks", "fit", "flat", "main"]


def callbacks(
    cfg: DictConfig, learner: L.LightningModule, own: list[Any], output: Path
) -> list[Any]:
    """The callbacks of a job: its own, and those that every job has."""
    labels = [entry.label for entry in chosen_strategies(cfg)]
    metrics = EpisodeMetrics(labels)
    table = ResultsTable(
        output / "table.parquet",
        experiment=cfg.name,
        strategies=labels,
        config=plain(cfg),
        seed=cfg.seed,
    )
    pictures: list[Any] = [JobFigures(output, metrics)] if cfg.figure else []
    if cfg.figure and not any(isinstance(callback, GreedyVideo) for callback in own):
        painted = functools.partial(_painted_env, cfg, cfg.runs * len(labels))
        pictures.append(GreedyVideo(output / "greedy.gif", painted, cfg.domain.max_steps))
    trainer = cfg.trainer
    chunked = isinstance(learner, ChunkedLearner)
    every = trainer.checkpoint_every_n_chunks if chunked else trainer.checkpoint_every_n_updates
    return [
        *own,
        metrics,
        table,
        *pictures,
        EpisodeProgress(labels),
        AtomicCheckpoint(output, every),
        WandbReport(output, labels),
    ]


def _painted_env(cfg: DictConfig, runs: int) -> EnvBase:
    """Test environments that can be filmed, batch size ``[runs, 1]``."""
    options = {} if cfg.domain.native else {"make": {"render_mode": "rgb_array"}}
    env: EnvBase = instantiate(cfg.domain.env, **options)(
        batch_size=[runs, 1], device=chosen_device(cfg.device), observation=cfg.observation
    )
    return env


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted names, as trackers show them.

    >>> flat({"domain": {"tests": 3}, "runs": 2})
    {'domain.tests': 3, 'runs': 2}
    """
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def fit(cfg: DictConfig, learner: L.LightningModule, stream: Any, own: list[Any]) -> L.Trainer:
    """Fit a job of :func:`~bmc_torchrl.experiments.build.build_job`, resuming it if asked to."""
    torch.set_num_threads(cfg.trainer.threads)
    device, output = chosen_device(cfg.device), Path(cfg.output)
    placed: dict[str, Any] = {"accelerator": "cpu"} if device.type == "cpu" else {}
    if ":" in cfg.device:
        placed["devices"] = [device.index]
    checkpoint = output / "last.ckpt"
    resume = str(checkpoint) if cfg.resume and checkpoint.exists() else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        make_trainer = instantiate(cfg.trainer.lightning, _partial_=True, **placed)
        trainer: L.Trainer = make_trainer(
            logger=instantiate(cfg.logger), callbacks=callbacks(cfg, learner, own, output)
        )
        told = plain(cfg)
        told["sweep"] = {entry["label"]: entry for entry in chosen_strategies(told)}
        for logger in trainer.loggers:
            logger.log_hyperparams(flat(told))
        trainer.fit(learner, stream, ckpt_path=resume, weights_only=True)
    if stream is not None:
        stream.shutdown()
    return trainer


@configured_by("train")
def main(cfg: DictConfig) -> None:
    """Train, then show the results."""
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        cfg.output = HydraConfig.get().runtime.output_dir
    for name in ("lightning.pytorch", "torchrl"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        check_settings(cfg)
        parts = build_job(cfg)
    except (ValueError, InstantiationException) as error:
        raise SystemExit(f"These settings cannot be run. {error}") from error
    if fit(cfg, *parts).is_global_zero:
        print_job_summary(Path(cfg.output), figure=cfg.figure)
