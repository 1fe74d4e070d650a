"""Where metrics go, and what a run leaves in Weights & Biases beside them."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import torch
import wandb
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only
from wandb.sdk.lib.runid import generate_id

from bmc_torchrl.analysis.plots import posterior_figure, save_figure
from bmc_torchrl.analysis.tables import load
from bmc_torchrl.strategies import BMCEpsilon
from bmc_torchrl.training.run_records import RecordedLearner

__all__ = [
    "ContinuedCSVLogger",
    "PosteriorHistory",
    "WandbReport",
    "csv_logger",
    "wandb_loggers",
]


class ContinuedCSVLogger(CSVLogger):
    """Lightning's CSV logger, which would start afresh, going on with an interrupted job's file.

    Args:
        save_dir: the metrics go to ``metrics/metrics.csv`` below it.
    """

    def __init__(self, save_dir: str | Path) -> None:
        super().__init__(save_dir, name="metrics", version="")
        self.kept: list[dict[str, Any]] = []
        path = Path(self.log_dir) / "metrics.csv"
        if path.exists():
            with open(path, newline="") as stream:
                self.kept = list(csv.DictReader(stream))

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Log, after what was logged before the checkpoint that is resumed from."""
        if self.kept and step is not None:
            self._write_kept([row for row in self.kept if int(row["step"]) < step])
        super().log_metrics(metrics, step)

    @rank_zero_only
    def save(self) -> None:
        """Write the file."""
        self._write_kept(self.kept)
        super().save()

    def _write_kept(self, rows: list[dict[str, Any]]) -> None:
        self.experiment.metrics.extend(rows)
        self.kept = []


def csv_logger(save_dir: str | Path, resume: bool = False) -> CSVLogger:
    """Metrics in ``metrics/metrics.csv`` below `save_dir`, after the earlier ones if resumed."""
    return ContinuedCSVLogger(save_dir) if resume else CSVLogger(save_dir, "metrics", "")


def wandb_loggers(save_dir: str | Path, resume: bool = False, **options: Any) -> list[Logger]:
    """Metrics in W&B and in a CSV file; a resumed job goes on with its W&B run.

    The run's identity, a sweep agent's or a new one, is kept in ``wandb_id`` below `save_dir`.

    Args:
        save_dir: where both write.
        resume: whether an interrupted job goes on.
        options: those of Lightning's ``WandbLogger``.
    """
    path = Path(save_dir) / "wandb_id"
    known = resume and path.exists()
    given = os.environ.get("WANDB_RUN_ID") or generate_id()
    identity = path.read_text() if known else given
    _write(path, identity)
    options |= {"resume": "allow"} if known else {}
    logger = WandbLogger(save_dir=save_dir, id=identity, **options)
    return [logger, csv_logger(save_dir, resume)]


@rank_zero_only
def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


class PosteriorHistory(Callback):
    """Remembers α and β (mean over runs) of every chunk, and draws the posterior over time.

    Args:
        path: where the figure goes, without suffix.
        every_n_chunks: chunks between two points.
    """

    def __init__(self, path: str | Path, every_n_chunks: int = 1) -> None:
        self.path, self.every_n_chunks = Path(path), every_n_chunks
        self.history: list[list[float]] = []
        self.figure: Path | None = None

    def state_dict(self) -> dict[str, Any]:
        """The points so far."""
        return {"history": self.history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from these points."""
        self.history = state_dict["history"]

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Add a point."""
        assert isinstance(pl_module, RecordedLearner)
        if trainer.global_step % self.every_n_chunks:
            return
        for part in pl_module.strategy.modules():
            if isinstance(part, BMCEpsilon):
                episodes = pl_module.log_of_episodes.done.double().mean()
                point = torch.stack([episodes, part.alpha.mean(), part.beta.mean()])
                self.history.append(point.tolist())
                return

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw."""
        if len(self.history) > 1 and trainer.is_global_zero:
            time, alpha, beta = zip(*self.history, strict=True)
            self.figure = save_figure(posterior_figure(alpha, beta, time=time), self.path)


class WandbReport(Callback):
    """At the end: posterior figure, histogram of ε over runs, results table, artifact, summary.

    Args:
        history: whose figure to send.
        results: the results table's file.
        checkpoint: the last checkpoint.
        video: a greedy episode, if one was filmed.
    """

    def __init__(
        self,
        history: PosteriorHistory,
        results: str | Path,
        checkpoint: str | Path,
        video: str | Path,
    ) -> None:
        self.history, self.video = history, Path(video)
        self.results, self.checkpoint = Path(results), Path(checkpoint)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Tell W&B that metrics are over chunks."""
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.experiment.define_metric("*", step_metric="trainer/global_step")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Send what the other callbacks wrote when training ended."""
        assert isinstance(pl_module, RecordedLearner)
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger) and trainer.is_global_zero:
                self._send(logger, pl_module)
                logger.experiment.finish()

    def _send(self, logger: WandbLogger, learner: RecordedLearner) -> None:
        run, log = logger.experiment, learner.log_of_episodes
        epsilon = learner.strategy.eps.reshape(-1).tolist()
        sent: dict[str, Any] = {"epsilon_over_runs": wandb.Histogram(epsilon)}
        if self.history.figure is not None:
            sent["posterior"] = wandb.Image(str(self.history.figure))
        if self.video.exists():
            sent["greedy_episode"] = wandb.Video(str(self.video), format="gif")
        if self.results.exists():
            sent["results"] = wandb.Table(dataframe=load(self.results))
            run.summary["eval/auc"] = float(log.steps.nanmean())
            run.summary["eval/final_steps"] = float(log.steps[:, -1].nanmean())
            run.summary["eval/final_return"] = float(log.returns[:, -1].nanmean())
            run.summary["train/final_epsilon"] = float(learner.strategy.eps.mean())
        run.log(sent)
        artifact = wandb.Artifact(f"{run.id}-results", type="results")
        for path in (self.results, self.checkpoint):
            if path.exists():
                artifact.add_file(str(path))
        run.log_artifact(artifact)
