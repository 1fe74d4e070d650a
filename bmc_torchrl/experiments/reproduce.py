"""Run the paper's sweep, skipping what is finished: bmc reproduce [overrides]."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from rich.console import Console

from bmc_torchrl.analysis.scoring import measure
from bmc_torchrl.analysis.tables import provenance
from bmc_torchrl.experiments.build import build_engine, build_strategy, strategy_seed
from bmc_torchrl.experiments.configs import DECISIVE, configured_by, experiment_config, plain
from bmc_torchrl.experiments.settings import chosen_strategies
from bmc_torchrl.experiments.sweep import Batch, execute, finished_table, parts_of, plan, publish

__all__ = ["compute", "main"]


def compute(settings: dict[str, Any], batch: Batch) -> float:
    """Compute a batch and keep it; returns its mean performance."""
    torch.set_num_threads(1)
    began = time.monotonic()
    overrides = [f"protocol={settings['protocol']}", *settings["overrides"]]
    if settings["episodes"] is not None:
        overrides.append(f"episodes={settings['episodes']}")
    cfg = experiment_config(batch.experiment, overrides)
    entries = {entry.label: entry for entry in cfg.sweep.strategies}
    engine = build_engine(
        cfg,
        build_strategy(cfg, [entries[label] for label in batch.labels], batch.runs),
        device=settings["device"],
        seed=strategy_seed(settings["seed"], batch.label),
        first_run=batch.first_run,
        threads=1,
    )
    table = finished_table(batch, engine)
    whole = plain(cfg)
    config = {name: whole[name] for name in DECISIVE} | {"protocol": cfg.protocol}
    parts = parts_of(settings["output"], batch.experiment)
    parts.add(table, provenance(config, settings["seed"]), time.monotonic() - began)
    return float(table[measure(batch.experiment).column].mean())


@configured_by("reproduce")
def main(cfg: DictConfig) -> None:
    """Compute what is missing, then publish."""
    console = Console()
    every = [entry.label for entry in cfg.sweep.strategies]
    wanted = {"strategies": cfg.strategies or every, "sweep": cfg.sweep}
    labels = [entry.label for entry in chosen_strategies(wanted)]
    batches = list(plan(cfg.output, cfg.experiments, labels, cfg.runs, cfg.batch, cfg.stack))
    console.print(f"{len(batches)} batches to compute, {cfg.workers} at a time")
    settings = plain(cfg)
    try:
        execute(
            batches,
            functools.partial(compute, settings),
            workers=cfg.workers,
            hours=cfg.hours,
            console=console,
        )
    finally:
        for experiment in cfg.experiments:
            if len(parts_of(cfg.output, experiment).cells()):
                target = Path(cfg.results) / experiment
                publish(cfg.output, experiment, target)
                console.print(f"{experiment}: {target}", highlight=False)
