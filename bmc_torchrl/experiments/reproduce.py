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

from bmc_torchrl.analysis.overviews import overview_table
from bmc_torchrl.analysis.scoring import reduction
from bmc_torchrl.analysis.summaries import read_results
from bmc_torchrl.analysis.tables import provenance, tidy
from bmc_torchrl.analysis.titles import experiment_title
from bmc_torchrl.errors import SettingsError
from bmc_torchrl.experiments import sensitivity, sweep
from bmc_torchrl.experiments.build import (
    build_engine,
    build_strategy,
    learner_settings,
    run_settings,
    settings_of,
    strategy_seed,
)
from bmc_torchrl.experiments.configs import (
    DECISIVE,
    command_config,
    configured_by,
    experiment_config,
    plain,
)
from bmc_torchrl.experiments.exits import in_a_line
from bmc_torchrl.experiments.figures import draw
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
OVERVIEW_WIDTH = 140
TABLE_BYTES = 100
"""Of a row of the joined table, while it is written."""


def compute(planned: Mapping[str, dict[str, Any]], cell: sweep.Cell) -> str:
    """Compute a cell, by its experiment's settings, and keep it; returns its mean performance."""
    torch.set_num_threads(1)
    began, settings = time.monotonic(), planned[cell.experiment]
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


def borrow(settings: Mapping[str, Any], experiment: str) -> None:
    """Take over finished cells of another experiment that this one would compute alike."""
    lender, entries = settings["borrow"].get(experiment), chosen_strategies(settings)
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


def of_experiment(settings: Mapping[str, Any], experiment: str) -> dict[str, Any]:
    """The sweep's settings with the runs, episodes and strategies of one experiment.

    They are the smaller of what is asked for and what ``at_most`` allows.
    """
    most = settings["at_most"].get(experiment, {})
    labels = [entry["label"] for entry in settings["sweep"]["strategies"]]
    labels = labels if settings["strategies"] is None else settings["strategies"]
    kept = [label for label in labels if label in most.get("strategies", labels)]
    if not kept:
        raise SettingsError(
            f"strategies={labels}: {experiment} is reduced to {most['strategies']}; name one of "
            "these, or leave that experiment out of experiments=."
        )
    episodes = [n for n in (settings["episodes"], most.get("episodes")) if n is not None]
    return {
        **settings,
        "runs": min(settings["runs"], most.get("runs", settings["runs"])),
        "episodes": min(episodes, default=None),
        "strategies": kept,
    }


def check_sweep(settings: Mapping[str, Any]) -> None:
    """Raise :class:`SettingsError` for what cannot be run in any experiment."""
    require_list(settings, "experiments", list(settings["batch"]))
    for name, least in (("runs", 1), ("workers", 1), ("seed", 0)):
        require_integer(settings, name, least)
    for experiment in settings["experiments"]:
        require_integer(settings, f"batch.{experiment}", 1)
    if settings["hours"] is not None:
        require_number(settings, "hours", 0, math.inf)
    if settings["episodes"] is not None:
        require_integer(settings, "episodes", 1)
    if settings["sensitivity"]:
        require_list(settings, "sensitivity", list(sensitivity.REWARDS))
    if isinstance(settings["overrides"], str):
        raise SettingsError("overrides must be a list, such as overrides=['domain.tests=5'].")
    if settings["at_most"] and settings["results"] is not None:
        raise SettingsError("results: a reduced sweep is not published; leave results= out.")
    if settings["strategies"] is not None:
        chosen_strategies(settings)


def check_experiment(settings: Mapping[str, Any], experiment: str) -> None:
    """Raise if an experiment cannot be run, memory does not suffice, or results would be lost."""
    entries = chosen_strategies(settings)
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
    """Compute what is missing, join it, publish and draw it if asked to."""
    console, settings = Console(), plain(cfg)
    check_sweep(settings)
    planned = {name: of_experiment(settings, name) for name in settings["experiments"]}
    for experiment, its in planned.items():
        check_experiment(its, experiment)
    if settings["at_most"]:
        say_what_is_reduced(planned, console)
    with contextlib.ExitStack() as locks:
        for experiment, its in planned.items():
            cells = Path(settings["output"]) / experiment / "cells"
            for label in its["strategies"]:
                what = f"{label} in {cells.parent}"
                locks.enter_context(only_job(cells / f".{label}.lock", what))
        for experiment, its in planned.items():
            borrow(its, experiment)
        left = cells_left(planned)
        console.print(f"{len(left)} cells to compute, {cfg.workers} at a time")
        try:
            sweep.execute(
                left,
                functools.partial(compute, planned),
                workers=cfg.workers,
                hours=cfg.hours,
                console=console,
            )
        except Interrupted as stop:
            done = len(left) - len(cells_left(planned))
            stop.left = (
                f"with {done} of {len(left)} cells finished, which are kept in "
                f"{cfg.output}; the same command computes the rest"
            )
            raise
        for experiment in settings["experiments"]:
            if sweep.finished_cells(cfg.output, experiment):
                target = None if cfg.results is None else Path(cfg.results) / experiment
                where = sweep.publish(cfg.output, experiment, target)
                console.print(f"{experiment}: {where}", highlight=False, markup=False)
        show(planned, settings, console)


def say_what_is_reduced(planned: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    """A line for each experiment."""
    for experiment, its in planned.items():
        said = reduction(
            experiment,
            runs=its["runs"],
            episodes=cell_config(its, experiment).episodes,
            strategies=len(its["strategies"]),
        )
        line = f"{experiment_title(experiment)}: {said or 'as published'}"
        console.print(line, highlight=False, soft_wrap=True)


def cells_left(planned: Mapping[str, Mapping[str, Any]]) -> list[sweep.Cell]:
    """What is to be computed, in the order of the experiments."""
    return [
        cell
        for experiment, its in planned.items()
        for cell in sweep.plan(
            its["output"], [experiment], its["strategies"], its["runs"], its["batch"]
        )
    ]


def show(
    planned: Mapping[str, Mapping[str, Any]], settings: Mapping[str, Any], console: Console
) -> None:
    """Sensitivity, figures and a table of what there is, as far as they are asked for."""
    output = Path(settings["output"])
    for name in settings["sensitivity"]:
        if name in planned and not (output / name / sensitivity.TABLES[0]).exists():
            its = planned[name]
            wanted = {"name": name, "seed": its["seed"], "runs": its["runs"], "output": output}
            wanted["episodes"] = cell_config(its, name).episodes
            pairs = [f"{key}={value}" for key, value in wanted.items()]
            sensitivity.compute(command_config("sensitivity", pairs))
    found = [output / name for name in planned if (output / name / "curves.csv").exists()]
    if settings["figures"] and found:
        for path in draw(found, output / "figures"):
            console.print(f"{path}", highlight=False, markup=False)
        if all("bmc" in its["strategies"] for its in planned.values()):
            wide = Console(width=max(console.width, OVERVIEW_WIDTH))
            wide.print(overview_table(map(read_results, found)))
