"""What a job leaves beside its metrics: figures, and a page in Weights & Biases."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import wandb
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import WandbLogger

from bmc_torchrl.analysis.plots import comparison_figure, posterior_figure, save_figure
from bmc_torchrl.analysis.summaries import curves, summary
from bmc_torchrl.analysis.tables import load, load_metadata
from bmc_torchrl.analysis.titles import Strategies
from bmc_torchrl.training.metrics import EpisodeMetrics, log_points, runs_of, series
from bmc_torchrl.training.run_records import RecordedLearner
from bmc_torchrl.training.whatif import WhatIf

__all__ = ["JobFigures", "WandbReport"]


class JobFigures(Callback):
    """Draws ``curves.png`` and the posterior of every ε-BMC strategy when a tracked job ends.

    Args:
        folder (str or Path): Where ``table.parquet`` is and figures go: ``posterior.png``, or
            ``posterior_<label>.png`` where there are several.
        metrics (EpisodeMetrics): Which knows the prior.
    """

    def __init__(self, folder: str | Path, metrics: EpisodeMetrics) -> None:
        self.folder, self.metrics = Path(folder), metrics

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw."""
        assert isinstance(pl_module, RecordedLearner)
        if not trainer.loggers or not trainer.is_global_zero or not pl_module.finished:
            return
        self._draw_curves()
        self._draw_posteriors(pl_module)

    def _draw_curves(self) -> None:
        path = self.folder / "table.parquet"
        if not path.exists():
            return
        table, strategies = load(path), Strategies.of_metadata(load_metadata(path))
        if table["episode"].max() > 1:
            experiment = str(table["experiment"].iloc[0])
            figure = comparison_figure(experiment, curves(table), strategies)
            save_figure(figure, self.folder / "curves")

    def _draw_posteriors(self, learner: RecordedLearner) -> None:
        log, labels = learner.log_of_episodes, self.metrics.labels
        names = ("posterior/alpha", "posterior/beta")
        if names[0] not in log.diagnostics:
            return
        tables = [log.diagnostics[name] for name in names]
        points = log_points(log.episodes)
        columns = [episode - 1 for episode in points]
        found = {}
        for label, runs in runs_of(labels, log.runs).items():
            alpha, beta = (table[runs][:, columns].mean(0).tolist() for table in tables)
            if alpha[-1] == alpha[-1]:
                first, second = (self.metrics.prior[series(name, label, labels)] for name in names)
                found[label] = [first, *alpha], [second, *beta]
        for label, (alpha, beta) in found.items():
            name = "posterior" if len(found) == 1 else f"posterior_{label}"
            figure = posterior_figure(alpha, beta, time=[0, *points])
            save_figure(figure, self.folder / name)


class WandbReport(Callback):
    """At the end: figures, film, histogram of ε over runs, results table, artifact, summary.

    Args:
        folder (str or Path): Where the other callbacks put their files.
        labels (sequence of str): Of the strategies.
        what_if (WhatIf, optional): Whose counterfactual ε is a panel of its own.
    """

    def __init__(
        self, folder: str | Path, labels: Sequence[str], what_if: WhatIf | None = None
    ) -> None:
        self.folder, self.labels, self.what_if = Path(folder), list(labels), what_if

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Send what the other callbacks wrote when training ended."""
        assert isinstance(pl_module, RecordedLearner)
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger) and trainer.is_global_zero:
                self._send(logger.experiment, pl_module)
                logger.experiment.finish()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Close the run, which has the rows so far."""
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger) and trainer.is_global_zero:
                logger.experiment.finish(exit_code=1)

    def _send(self, run: Any, learner: RecordedLearner) -> None:
        runs = learner.log_of_episodes.runs
        epsilon = learner.strategy.eps.reshape(runs, -1).mean(-1)
        sent: dict[str, Any] = {
            series("figures/epsilon_over_runs", label, self.labels): wandb.Histogram(
                epsilon[own].tolist()
            )
            for label, own in runs_of(self.labels, runs).items()
        }
        for found in [] if self.what_if is None else self.what_if.found():
            name = series("counterfactual/epsilon", found.acting, self.labels)
            sent[name] = wandb.plot.line_series(
                xs=list(found.episodes),
                ys=[list(found.own), *map(list, found.others.values())],
                keys=[found.legend, *found.others],
                title=found.title,
                xname="episode",
            )
        for path in sorted(self.folder.glob("*.png")):
            sent[f"figures/{path.stem}"] = wandb.Image(str(path))
        film, results = self.folder / "greedy.gif", self.folder / "table.parquet"
        if film.exists():
            sent["figures/greedy_episode"] = wandb.Video(str(film), format="gif")
        if results.exists():
            table = load(results)
            sent["tables/results"] = wandb.Table(dataframe=table)
            run.summary.update(self._summary(table))
        run.log(sent)
        artifact = wandb.Artifact(f"{run.id}-results", type="results")
        for path in (
            results,
            self.folder / "last.ckpt",
            self.folder / "metrics" / "metrics.csv",
            film,
            *sorted(self.folder.glob("*.png")),
        ):
            if path.exists():
                artifact.add_file(str(path))
        run.log_artifact(artifact)

    def _summary(self, table: Any) -> dict[str, float]:
        """What sorts the runs of a sweep: AUC, and return and ε of the last episode."""
        last = table[table["episode"] == table["episode"].max()]
        final = last.groupby("strategy")[["return", "epsilon"]].mean()
        auc = summary(table).set_index("strategy")["auc"]
        found: dict[str, float] = {}
        for label in self.labels:
            for name, value in (
                ("auc", auc[label]),
                ("final_return", final.loc[label, "return"]),
                ("final_epsilon", final.loc[label, "epsilon"]),
            ):
                found[series(f"summary/{name}", label, self.labels)] = float(value)
        return found
