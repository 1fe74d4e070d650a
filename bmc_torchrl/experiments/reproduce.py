"""Run the paper's sweep, skipping what is finished: bmc reproduce [overrides]."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from rich.console import Console

from bmc_torchrl.analysis.tables import provenance, tidy
from bmc_torchrl.experiments import sweep
from bmc_torchrl.experiments.build import build_engine, build_strategy, strategy_seed
from bmc_torchrl.experiments.configs import DECISIVE, configured_by, experiment_config, plain
from bmc_torchrl.experiments.settings import chosen_strategies

__all__ = ["compute", "main"]

CHUNK_STEPS = 2000


def compute(settings: dict[str, Any], cell: sweep.Cell) -> str:
    """Compute a cell and keep it; returns its mean performance."""
    torch.set_num_threads(1)
    began = time.monotonic()
    overrides = [f"protocol={settings['protocol']}", *settings["overrides"]]
    if settings["episodes"] is not None:
        overrides.append(f"episodes={settings['episodes']}")
    cfg = experiment_config(cell.experiment, overrides)
    (entry,) = (entry for entry in cfg.sweep.strategies if entry.label == cell.label)
    engine = build_engine(
        cfg,
        build_strategy(cfg, [entry], cell.runs),
        device=settings["device"],
        seed=strategy_seed(settings["seed"], cell.label),
        first_run=cell.first_run,
        threads=1,
    )
    while not engine.finished:
        engine.advance(CHUNK_STEPS)
    found = (values[None].cpu() for values in (engine.steps, engine.returns, engine.epsilons))
    table = tidy(cell.experiment, [cell.label], *found, first_run=cell.first_run)
    whole = plain(cfg)
    config = {name: whole[name] for name in DECISIVE} | {"protocol": cfg.protocol}
    sweep.keep(
        settings["output"],
        cell,
        table,
        provenance(config, settings["seed"]),
        strategy=plain(entry),
        seconds=time.monotonic() - began,
    )
    return sweep.mean_performance(table)


@configured_by("reproduce")
def main(cfg: DictConfig) -> None:
    """Compute what is missing, then publish."""
    console = Console()
    every = [entry.label for entry in cfg.sweep.strategies]
    wanted = {"strategies": cfg.strategies or every, "sweep": cfg.sweep}
    labels = [entry.label for entry in chosen_strategies(wanted)]
    cells = list(sweep.plan(cfg.output, cfg.experiments, labels, cfg.runs, cfg.batch))
    console.print(f"{len(cells)} cells to compute, {cfg.workers} at a time")
    try:
        sweep.execute(
            cells,
            functools.partial(compute, plain(cfg)),
            workers=cfg.workers,
            hours=cfg.hours,
            console=console,
        )
    finally:
        for experiment in cfg.experiments:
            if sweep.finished_cells(cfg.output, experiment):
                target = Path(cfg.results) / experiment
                sweep.publish(cfg.output, experiment, target)
                console.print(f"{experiment}: {target}", highlight=False)
