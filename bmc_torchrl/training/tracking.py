"""Where metrics go: a CSV file, and Weights & Biases beside it."""

from __future__ import annotations

import csv
import io
import itertools
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.core.saving import save_hparams_to_yaml
from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only
from wandb.sdk.lib.runid import generate_id

from bmc_torchrl.analysis.tables import write_atomically
from bmc_torchrl.errors import ResultsError

__all__ = ["EpisodeCSVLogger", "Row", "csv_logger", "define_axes", "resend", "wandb_loggers"]

Row = dict[str, Any]
"""Metrics by name; those of an episode have its number at ``"episode"``."""

FIRST_COLUMNS = ("episode", "step")
PER_EPISODE = ("train/*", "eval/*", "posterior/*", "skipped*", "whatif/*")
"""What W&B draws over episodes."""


class EpisodeCSVLogger(Logger):
    """Metrics in ``metrics/metrics.csv``, each row on disk as soon as it is logged.

    Whatever kills the job, the rows up to its last checkpoint are in the file;
    :class:`~bmc_torchrl.training.metrics.EpisodeMetrics` calls :meth:`rewind` when training starts,
    so that a resumed job's file is that of an uninterrupted one.

    Args:
        save_dir (str or Path): The folder ``metrics`` is made in it.
    """

    def __init__(self, save_dir: str | Path) -> None:
        super().__init__()
        self.folder = Path(save_dir) / "metrics"
        self.path = self.folder / "metrics.csv"
        self.columns: list[str] = list(FIRST_COLUMNS)

    @property
    def name(self) -> str:
        """Of the folder."""
        return "metrics"

    @property
    def version(self) -> str:
        """There is one file only."""
        return ""

    @property
    def log_dir(self) -> str:
        """Where the file is."""
        return str(self.folder)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *_: Any) -> None:
        """Write ``hparams.yaml``."""
        self.folder.mkdir(parents=True, exist_ok=True)
        save_hparams_to_yaml(self.folder / "hparams.yaml", params)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Append a row."""
        row = {**metrics, "step": step}
        if not self.path.exists() or not set(row) <= set(self.columns):
            self._rewrite([*self.rows(), row])
            return
        with self.path.open("a", newline="") as stream:
            csv.DictWriter(stream, self.columns, lineterminator="\n").writerow(row)

    def rows(self) -> list[Row]:
        """What the file holds, as text, without a last line that was not written to its end."""
        if not self.path.exists():
            return []
        whole = self.path.read_text().rpartition("\n")[0]
        found = csv.DictReader(whole.splitlines())
        return [{name: text for name, text in row.items() if text} for row in found]

    def rewind(self, episode: int, step: int) -> list[Row]:
        """Drop what was logged after `episode`, or without one from Lightning's `step` on.

        Returns:
            The rows that stay, as numbers.

        Raises:
            ResultsError: If the file is none of this logger's.
        """
        texts = [] if episode < 0 and step == 0 else self.rows()
        try:
            rows = [{name: float(text) for name, text in row.items()} for row in texts]
            stay = [
                row["episode"] <= episode if "episode" in row else row["step"] < step
                for row in rows
            ]
        except (ValueError, TypeError, KeyError) as error:
            raise ResultsError(
                f"{self.path} is corrupt or no file of this logger; move it away, and the job logs "
                "what comes from now on"
            ) from error
        self.columns = list(FIRST_COLUMNS)
        if any(stay):
            self._rewrite(list(itertools.compress(texts, stay)))
        else:
            self.path.unlink(missing_ok=True)
        return list(itertools.compress(rows, stay))

    def _rewrite(self, rows: Sequence[Row]) -> None:
        """Write the file anew; a crash leaves the old one."""
        names = set().union(*rows, self.columns) - set(FIRST_COLUMNS)
        self.columns = [*FIRST_COLUMNS, *sorted(names)]
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(self.path, lambda stream: stream.write(text.getvalue().encode()))


def csv_logger(save_dir: str | Path) -> EpisodeCSVLogger:
    """Metrics in ``metrics/metrics.csv`` below `save_dir`."""
    return EpisodeCSVLogger(save_dir)


def wandb_loggers(save_dir: str | Path, resume: bool = False, **options: Any) -> list[Logger]:
    """Metrics in W&B and in a CSV file; a resumed job goes on with its W&B run.

    The run's identity, a sweep agent's or a new one, is kept in ``wandb_id`` below `save_dir`. An
    offline run cannot be gone on with: a resumed job writes all of it again, and what was written
    before is moved to ``wandb/superseded``, where ``wandb sync --sync-all`` does not look.

    Args:
        save_dir (str or Path): Where both write.
        resume (bool): Whether an interrupted job goes on.
        **options (Any): Those of Lightning's ``WandbLogger``.
    """
    path = Path(save_dir) / "wandb_id"
    known = resume and path.exists()
    given = os.environ.get("WANDB_RUN_ID") or generate_id()
    identity = path.read_text() if known else given
    _keep_identity(path, identity)
    if known and options.get("offline"):
        _supersede(Path(save_dir) / "wandb", identity)
    elif known:
        options["resume"] = "allow"
    logger = WandbLogger(save_dir=save_dir, id=identity, **options)
    return [logger, csv_logger(save_dir)]


@rank_zero_only
def _keep_identity(path: Path, identity: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(identity)


@rank_zero_only
def _supersede(folder: Path, identity: str) -> None:
    """Move away the offline runs of `identity`; W&B may have appended a number to it."""
    for run in folder.glob(f"offline-run-*-{identity}*"):
        target = folder / "superseded" / run.name
        target.parent.mkdir(exist_ok=True)
        run.rename(target)


def define_axes(run: Any) -> None:
    """Tell W&B that metrics are over episodes; ``train/frames`` is there as another axis."""
    run.define_metric("episode")
    for names in PER_EPISODE:
        run.define_metric(names, step_metric="episode")


def resend(run: Any, rows: Sequence[Row]) -> int:
    """Send W&B the rows of before that it has not got.

    Args:
        run (wandb.Run): A new run, or one that goes on.
        rows (sequence of Row): What the CSV file has of before.

    Returns:
        The last episode that it has then, −1 for none.
    """
    last = int(run.summary.get("episode", -1)) if run.resumed else -1
    for row in rows:
        step = row.pop("step")
        if "episode" not in row:
            row["trainer/global_step"] = step
        if row.get("episode", 0.0 if last < 0 else -1.0) > last:
            run.log(row)
            last = int(row.get("episode", last))
    return last
