"""Run the paper's sweep, skipping what is finished: bmc reproduce [overrides]."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from bmc_torchrl.analysis.tables import provenance, tidy
from bmc_torchrl.errors import SettingsError
from bmc_torchrl.experiments import sweep
from bmc_torchrl.experiments.build import (
    build_engine,
    build_strategy,
    learner_settings,
    run_settings,
    settings_of,
    strategy_seed,
)
from bmc_torchrl.experiments.configs import DECISIVE, configured_by, experiment_config, plain
from bmc_torchrl.experiments.exits import in_a_line
from bmc_torchrl.experiments.locks import only_job
from bmc_torchrl.experiments.memory import bytes_of_a_run, require_memory
from bmc_torchrl.experiments.settings import (
    check_settings,
    chosen_strategies,
    require_integer,
    require_list,
    require_number,
)
from bmc_torchrl.signals import Interrupted

__all__ = ["compute", "main"]

CHUNK_STEPS = 2000
TABLE_BYTES = 100
"""Of a row of the joined table, while it is written."""


def compute(settings: dict[str, Any], cell: sweep.Cell) -> str:
    """Compute a cell and keep it; returns its mean performance."""
    torch.set_num_threads(1)
    began = time.monotonic()
    cfg = cell_config(settings, cell.experiment)
    (entry,) = (e for e in settings["sweep"]["strategies"] if e["label"] == cell.label)
    entries = [OmegaConf.create(entry)]
    engine = build_engine(
        settings_of(cfg, entries),
        build_strategy(cfg, entries, cell.runs),
        device=settings["device"],
        seed=strategy_seed(settings["seed"], cell.label),
        first_run=cell.first_run,
        threads=1,
    )
    while not engine.finished:
        engine.advance(CHUNK_STEPS)
    found = (values[None].cpu() for values in (engine.steps, engine.returns, engine.epsilons))
    table = tidy(cell.experiment, [cell.label], *found, first_run=cell.first_run)
    sweep.keep(
        settings["output"],
        cell,
        table,
        provenance(decisive(cfg), settings["seed"]),
        strategy=entry,
        seconds=time.monotonic() - began,
    )
    return sweep.mean_performance(table)


def cell_config(settings: Mapping[str, Any], experiment: str) -> DictConfig:
    """The settings of ``bmc train`` that an experiment's cells are computed with."""
    overrides = [f"protocol={settings['protocol']}", *settings["overrides"]]
    if settings["episodes"] is not None:
        overrides.append(f"episodes={settings['episodes']}")
    return experiment_config(experiment, overrides)


def decisive(cfg: DictConfig) -> dict[str, Any]:
    """What decides a cell's results, beside its seed and strategy."""
    whole = plain(cfg)
    if "by_family" in whole:  # An override of it is not in the protocol's own.
        whole["settings"]["by_family"] = whole["by_family"]
    return {name: whole[name] for name in (*DECISIVE, "protocol")}


def borrow(settings: Mapping[str, Any], experiment: str, entries: list[Any]) -> None:
    """Take over finished cells of another experiment that this one would compute alike."""
    lender = settings["borrow"].get(experiment)
    if lender is None:
        return
    cfg, other = (cell_config(settings, name) for name in (experiment, lender))
    labels = {
        entry["label"]
        for entry in entries
        if effective(cfg, OmegaConf.create(entry)) == effective(other, OmegaConf.create(entry))
    }
    made = {"config": decisive(other), "seed": settings["seed"]}
    sweep.require_same(settings["output"], lender, made, entries)
    sweep.borrow(settings["output"], experiment, lender, labels, decisive(cfg))


def effective(cfg: DictConfig, entry: DictConfig) -> dict[str, Any]:
    """What decides the results of one strategy, whatever other families' settings are."""
    found = decisive(settings_of(cfg, [entry]))
    return {**found, "settings": {**found["settings"], "by_family": None}}


def check_sweep(settings: Mapping[str, Any]) -> list[Any]:
    """Raise :class:`SettingsError` for what cannot be run; returns the strategies' entries."""
    require_list(settings, "experiments", list(settings["batch"]))
    for name, least in (("runs", 1), ("workers", 1), ("seed", 0)):
        require_integer(settings, name, least)
    for experiment in settings["experiments"]:
        require_integer(settings, f"batch.{experiment}", 1)
    if settings["hours"] is not None:
        require_number(settings, "hours", 0, math.inf)
    if isinstance(settings["overrides"], str):
        raise SettingsError("overrides must be a list, such as overrides=['domain.tests=5'].")
    every = [entry["label"] for entry in settings["sweep"]["strategies"]]
    wanted = every if settings["strategies"] is None else settings["strategies"]
    return chosen_strategies({"strategies": wanted, "sweep": settings["sweep"]})


def check_experiment(settings: Mapping[str, Any], experiment: str, entries: list[Any]) -> None:
    """Raise if an experiment cannot be run, memory does not suffice, or results would be lost."""
    cfg = cell_config(settings, experiment)
    check_settings(cfg)
    if not cfg.domain.native:
        raise SettingsError(f"experiments: {experiment} has no lockstep engine; use bmc train.")
    try:
        run_settings(cfg, seed=settings["seed"])
        learner_settings(cfg)
        build_strategy(cfg, [OmegaConf.create(entry) for entry in entries], runs=1)
    except (ValueError, InstantiationException) as error:
        raise SettingsError(f"{experiment}: {in_a_line(error)}") from error
    runs, labels = settings["runs"], [entry["label"] for entry in entries]
    together = min(runs, settings["batch"][experiment]) * settings["workers"]
    table = TABLE_BYTES * runs * len(labels) * int(cfg.episodes)
    what = f"runs={runs} episodes={cfg.episodes}"
    require_memory(max(together * bytes_of_a_run(cfg), table), what)
    made = {"config": decisive(cfg), "seed": settings["seed"]}
    sweep.require_same(settings["output"], experiment, made, entries)
    if settings["results"] is not None:
        finished = sweep.finished_runs(settings["output"], experiment)
        counts = Counter(
            label for label, _ in finished | set(itertools.product(labels, range(runs)))
        )
        sizes = {label: (count, int(cfg.episodes)) for label, count in counts.items()}
        sweep.refuse_fewer(Path(settings["results"]) / experiment, sizes)


@configured_by("reproduce")
def main(cfg: DictConfig) -> None:
    """Compute what is missing, join it, and publish it if asked to."""
    console, settings = Console(), plain(cfg)
    entries = check_sweep(settings)
    labels = [entry["label"] for entry in entries]
    for experiment in settings["experiments"]:
        check_experiment(settings, experiment, entries)
    with contextlib.ExitStack() as locks:
        for experiment in settings["experiments"]:
            cells = Path(settings["output"]) / experiment / "cells"
            for label in labels:
                what = f"{label} in {cells.parent}"
                locks.enter_context(only_job(cells / f".{label}.lock", what))
        for experiment in settings["experiments"]:
            borrow(settings, experiment, entries)
        left = list(sweep.plan(cfg.output, cfg.experiments, labels, cfg.runs, cfg.batch))
        console.print(f"{len(left)} cells to compute, {cfg.workers} at a time")
        try:
            sweep.execute(
                left,
                functools.partial(compute, settings),
                workers=cfg.workers,
                hours=cfg.hours,
                console=console,
            )
        except Interrupted as stop:
            again = list(sweep.plan(cfg.output, cfg.experiments, labels, cfg.runs, cfg.batch))
            stop.left = (
                f"with {len(left) - len(again)} of {len(left)} cells finished, which are kept in "
                f"{cfg.output}; the same command computes the rest"
            )
            raise
        for experiment in settings["experiments"]:
            if sweep.finished_cells(cfg.output, experiment):
                target = None if cfg.results is None else Path(cfg.results) / experiment
                where = sweep.publish(cfg.output, experiment, target)
                console.print(f"{experiment}: {where}", highlight=False, markup=False)
