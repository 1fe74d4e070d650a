"""Run the paper's sweep, skipping what is finished: python scripts/reproduce.py [overrides]."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import cloudpickle
import composition
import hydra
import torch
from composition import (
    DECISIVE,
    build_engine,
    build_strategy,
    experiment_config,
    strategy_seed,
)
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from bmc_torchrl.measures import measure
from bmc_torchrl.results import provenance
from bmc_torchrl.sweeps import Batch, execute, finished_table, parts_of, plan, publish
from bmc_torchrl.training.settings import chosen_strategies

# A launcher's jobs do not have this folder on their path.
cloudpickle.register_pickle_by_value(composition)


def compute(settings: dict[str, Any], batch: Batch) -> float:
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
    whole = OmegaConf.to_container(cfg, resolve=True)
    config = {name: whole[name] for name in DECISIVE} | {"protocol": cfg.protocol}
    parts = parts_of(settings["output"], batch.experiment)
    parts.add(table, provenance(config, settings["seed"]), time.monotonic() - began)
    return float(table[measure(batch.experiment).column].mean())


@hydra.main(version_base=None, config_path="../configs", config_name="reproduce")
def main(cfg: DictConfig) -> None:
    console = Console()
    every = [entry.label for entry in cfg.sweep.strategies]
    wanted = {"strategies": cfg.strategies or every, "sweep": cfg.sweep}
    labels = [entry.label for entry in chosen_strategies(wanted)]
    batches = list(plan(cfg.output, cfg.experiments, labels, cfg.runs, cfg.batch, cfg.stack))
    console.print(f"{len(batches)} batches to compute, {cfg.workers} at a time")
    settings = OmegaConf.to_container(cfg, resolve=True)
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


if __name__ == "__main__":
    main()
