"""ε-BMC against four others on others' environments: python scripts/study.py [overrides].

Writes summary.csv and study.{png,svg,pdf} to results/study, of the tasks that are finished.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))
from composition import experiment_config

from bmc_torchrl.measures import measure
from bmc_torchrl.plots import save_figure
from bmc_torchrl.results import load, write_atomically
from bmc_torchrl.studies import study_figure, study_summary
from bmc_torchrl.sweeps import Batch, execute


def compute(settings: dict[str, Any], batch: Batch) -> float:
    """All strategies of one task as one job of scripts/train.py, resumed if it was interrupted."""
    import train

    torch.set_num_threads(1)
    labels = [entry["label"] for entry in settings["sweep"]["strategies"]]
    output = Path(settings["output"]) / batch.experiment
    given = {"runs": batch.runs, "seed": settings["seed"], "output": output, "resume": "true"}
    given |= {"sweep": "study", "strategies": f"[{','.join(labels)}]", "device": "cpu"}
    overrides = [*settings["tasks"][batch.experiment], *(f"{k}={v}" for k, v in given.items())]
    cfg = experiment_config(batch.experiment, overrides)
    train.check_settings(cfg)
    train.fit(cfg, *train.build(cfg))
    return float(load(output / "table.parquet")[measure(batch.experiment).column].mean())


def publish(output: Path, tasks: list[str], results: Path) -> list[str]:
    """Summary and figure of the finished ones of `tasks`; returns those."""
    tables = {
        task: load(output / task / "table.parquet")
        for task in tasks
        if (output / task / "table.parquet").exists()
    }
    if tables:
        summary = study_summary(tables)
        text = summary.to_csv(index=False, float_format="%.5g", lineterminator="\n")
        write_atomically(results / "summary.csv", lambda stream: stream.write(text.encode()))
        figure = study_figure(tables, summary)
        save_figure(figure, results / "study")
        figure.savefig(results / "study.svg", metadata={"Date": None})
    return list(tables)


@hydra.main(version_base=None, config_path="../configs", config_name="study")
def main(cfg: DictConfig) -> None:
    console, output = Console(), Path(cfg.output)
    left = [task for task in cfg.tasks if not (output / task / "table.parquet").exists()]
    try:
        execute(
            [Batch(task, "all strategies", 0, cfg.runs) for task in left],
            functools.partial(compute, OmegaConf.to_container(cfg, resolve=True)),
            workers=cfg.workers,
            hours=None,
            console=console,
        )
    finally:
        finished = publish(output, list(cfg.tasks), Path(cfg.results))
        console.print(f"{len(finished)} of {len(cfg.tasks)} tasks: {cfg.results}", highlight=False)


if __name__ == "__main__":
    main()
