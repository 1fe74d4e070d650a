"""ε-BMC against four others on others' environments: bmc study [overrides].

Writes summary.csv and study.png to `output`, and with results=FOLDER to a folder that has none.
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
from bmc_torchrl.analysis.study_summary import study_figure, study_summary
from bmc_torchrl.analysis.tables import load, load_metadata, write_csv
from bmc_torchrl.analysis.titles import Strategies
from bmc_torchrl.errors import ResultsError
from bmc_torchrl.experiments.build import build_job
from bmc_torchrl.experiments.configs import DECISIVE, configured_by, experiment_config, plain
from bmc_torchrl.experiments.locks import only_job
from bmc_torchrl.experiments.settings import check_settings, require_integer
from bmc_torchrl.experiments.sweep import execute, mean_performance, require_new
from bmc_torchrl.experiments.train import fit
from bmc_torchrl.signals import Interrupted

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
    if made.get("explore", wanted["explore"]) != wanted["explore"]:
        different.append("explore")
    if different:
        raise ResultsError(f"{path} was made with other {different}; move it away, or set output=")
    return True


def compute(settings: dict[str, Any], task: str) -> str:
    """One job of scripts/train.py, resumed if it was interrupted."""
    torch.set_num_threads(1)
    cfg = task_config(settings, task)
    check_settings(cfg)
    fit(cfg, *build_job(cfg))
    return mean_performance(load(Path(cfg.output) / TABLE))


def publish(settings: dict[str, Any]) -> list[str]:
    """Summary and figure of the tasks that are finished; returns those."""
    paths = {task: Path(settings["output"]) / task / TABLE for task in settings["tasks"]}
    tables = {task: load(path) for task, path in paths.items() if path.exists()}
    if tables:
        summary = study_summary(tables)
        strategies = Strategies.of_entries(settings["sweep"]["strategies"])
        for folder in filter(None, (settings["output"], settings["results"])):
            write_csv(Path(folder) / "summary.csv", summary, digits=5)
            save_figure(study_figure(tables, summary, strategies), Path(folder) / "study")
    return list(tables)


@configured_by("study")
def main(cfg: DictConfig) -> None:
    """Train what is missing, then publish."""
    console, settings, output = Console(), plain(cfg), Path(cfg.output)
    for name, least in (("runs", 1), ("workers", 1), ("seed", 0)):
        require_integer(settings, name, least)
    for task in cfg.tasks:
        check_settings(task_config(settings, task))
    if cfg.results is not None:
        require_new(Path(cfg.results) / "summary.csv")
    with only_job(output / ".lock", str(output)):
        left = [task for task in cfg.tasks if not finished(settings, task)]
        try:
            execute(
                left,
                functools.partial(compute, settings),
                workers=cfg.workers,
                hours=None,
                console=console,
            )
        except Interrupted as stop:
            stop.left = (
                f"; finished tasks and the others' checkpoints are kept in {cfg.output}, the same "
                "command goes on from them"
            )
            raise
        done = publish(settings)
        where = cfg.results or cfg.output
        console.print(
            f"{len(done)} of {len(cfg.tasks)} tasks: {where}", highlight=False, markup=False
        )
