"""Train one job: bmc train experiment=cart_dqn strategy=bmc runs=8 episodes=20."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig

from bmc_torchrl.analysis.job_summary import print_job_summary
from bmc_torchrl.experiments.build import build_job
from bmc_torchrl.experiments.configs import configured_by, plain
from bmc_torchrl.experiments.settings import check_settings, chosen_device, chosen_strategies
from bmc_torchrl.training import AtomicCheckpoint, EpisodeProgress, ResultsTable
from bmc_torchrl.training.metrics import EpisodeMetrics
from bmc_torchrl.training.tracking import PosteriorHistory, WandbReport

__all__ = ["callbacks", "fit", "main"]


def callbacks(cfg: DictConfig, own: list[Any], output: Path) -> list[Any]:
    """The callbacks of a job: its own, and those that every job has."""
    labels = [entry.label for entry in chosen_strategies(cfg)]
    history = PosteriorHistory(output / "posterior", cfg.trainer.log_every_n_chunks)
    table = output / "table.parquet"
    return [
        *own,
        EpisodeMetrics(labels),
        history,
        ResultsTable(
            table, experiment=cfg.name, strategies=labels, config=plain(cfg), seed=cfg.seed
        ),
        EpisodeProgress(),
        AtomicCheckpoint(output, cfg.trainer.checkpoint_every_n_chunks),
        WandbReport(history, table, output / "last.ckpt", output / "greedy.gif"),
    ]


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
            logger=instantiate(cfg.logger), callbacks=callbacks(cfg, own, output)
        )
        for logger in trainer.loggers:
            logger.log_hyperparams(plain(cfg))
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
