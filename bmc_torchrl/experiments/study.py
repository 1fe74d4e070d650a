"""ε-BMC against four others on others' environments: bmc study [overrides].

Writes summary.csv and study.{png,svg,pdf} to results/study, of the tasks that are finished.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from rich.console import Console

from bmc_torchrl.analysis.plots import save_figure
from bmc_torchrl.analysis.scoring import measure
from bmc_torchrl.analysis.study_summary import study_figure, study_summary
from bmc_torchrl.analysis.tables import load, load_metadata, write_atomically
from bmc_torchrl.experiments.build import build_job
from bmc_torchrl.experiments.configs import DECISIVE, configured_by, experiment_config, plain
from bmc_torchrl.experiments.settings import check_settings
from bmc_torchrl.experiments.sweep import Batch, execute
from bmc_torchrl.experiments.train import fit

__all__ = ["main"]

TABLE = "table.parquet"


def task_config(settings: dict[str, Any], task: str) -> DictConfig:
    """The settings of scripts/train.py for all strategies of one task."""
    labels = [entry["label"] for entry in settings["sweep"]["strategies"]]
    given = {"runs": settings["runs"], "seed": settings["seed"], "resume": "true"}
    given |= {"sweep": "study", "strategies": f"[{','.join(labels)}]", "device": "cpu"}
    given["output"] = Path(settings["output"]) / task
    return experiment_config(
        task, [*settings["tasks"][task], *(f"{name}={value}" for name, value in given.items())]
    )


def finished(settings: dict[str, Any], task: str) -> bool:
    """Whether the task's table is there; one that was made with other settings is an error."""
    path = Path(settings["output"]) / task / TABLE
    if not path.exists():
        return False
    wanted = json.loads(json.dumps(plain(task_config(settings, task))))
    made = load_metadata(path)["config"]
    decisive = (*DECISIVE, "runs", "seed", "strategies")
    different = [name for name in decisive if made[name] != wanted[name]]
    if different:
        raise SystemExit(f"{path} was made with other {different}; move it away, or set output=.")
    return True


def compute(settings: dict[str, Any], batch: Batch) -> float:
    """One job of scripts/train.py, resumed if it was interrupted."""
    torch.set_num_threads(1)
    cfg = task_config(settings, batch.experiment)
    check_settings(cfg)
    fit(cfg, *build_job(cfg))
    return float(load(Path(cfg.output) / TABLE)[measure(batch.experiment).column].mean())


def publish(output: Path, tasks: list[str], results: Path) -> list[str]:
    """Summary and figure of the finished ones of `tasks`; returns those."""
    tables = {
        task: load(output / task / TABLE) for task in tasks if (output / task / TABLE).exists()
    }
    if tables:
        summary = study_summary(tables)
        text = summary.to_csv(index=False, float_format="%.5g", lineterminator="\n")
        write_atomically(results / "summary.csv", lambda stream: stream.write(text.encode()))
        figure = study_figure(tables, summary)
        save_figure(figure, results / "study")
        figure.savefig(results / "study.svg", metadata={"Date": None})
    return list(tables)


@configured_by("study")
def main(cfg: DictConfig) -> None:
    """Train what is missing, then publish."""
    console, output = Console(), Path(cfg.output)
    settings = plain(cfg)
    left = [task for task in cfg.tasks if not finished(settings, task)]
    try:
        execute(
            [Batch(task, "all strategies", 0, cfg.runs) for task in left],
            functools.partial(compute, settings),
            workers=cfg.workers,
            hours=None,
            console=console,
        )
    finally:
        done = publish(output, list(cfg.tasks), Path(cfg.results))
        console.print(f"{len(done)} of {len(cfg.tasks)} tasks: {cfg.results}", highlight=False)
