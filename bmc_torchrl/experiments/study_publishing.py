"""What bmc study publishes: small tables, figures and provenance, from its tables of runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from bmc_torchrl.analysis.overviews import write_between_marks
from bmc_torchrl.analysis.plots import save_figure
from bmc_torchrl.analysis.study import (
    FAMILY_TITLES,
    MEASURES,
    cell_means,
    dqn_scores,
    dqn_summary,
    family_table,
    learned,
    paired_difference,
    setting_table,
    strategy_table,
)
from bmc_torchrl.analysis.study_report import (
    dqn_figure,
    families_figure,
    page_tables,
    profiles_figure,
    scales_figure,
)
from bmc_torchrl.analysis.tables import write_atomically, write_csv

__all__ = ["publish"]

READING = ("bmc", "scale_free", "vdbe", "wins")
"""Families whose ε depends on rewards."""
COMPARED = ("bmc", "free_10", "wins", "wins_100", "linear")
"""Settings that are compared with the families' best ones, whatever these are."""

Made = Mapping[tuple[str, str], Mapping[str, Any]]


def publish(settings: Mapping[str, Any], made: Made, folders: Sequence[Path]) -> None:
    """Write what follows from the finished tasks to `folders`.

    Args:
        settings: The study's.
        made: How the finished tasks were made, by part and name.
        folders: Where to.
    """
    output = Path(settings["output"])
    named = setting_table(settings["sweep"]["strategies"])
    tables: dict[str, pd.DataFrame] = {}
    figures: dict[str, Any] = {}
    finite = _scores(output / "finite", [t for p, t in made if p in ("development", "held_out")])
    if len(finite):
        found, drawn = _finite(
            finite, _scores(output / "noise", _tasks(made, "noise")), made, named
        )
        tables |= found
        figures |= drawn
    if _tasks(made, "dqn"):
        found, drawn = _dqn(output / "dqn", made, named)
        tables |= found
        figures |= drawn
    for folder in folders:
        for name, table in tables.items():
            write_csv(folder / f"{name}.csv", table, digits=4)
        for name, figure in figures.items():
            save_figure(figure, folder / name)
        content = json.dumps(_provenance(made), indent=1, sort_keys=True).encode() + b"\n"
        write_atomically(folder / "provenance.json", lambda f, c=content: f.write(c))  # type: ignore[misc]
    if settings["page"] is not None and "families" in tables:
        write_between_marks(Path(settings["page"]), page_tables(folders[-1]))


def _tasks(made: Made, *parts: str) -> list[str]:
    return [task for part, task in made if part in parts]


def _scores(folder: Path, tasks: Sequence[str]) -> pd.DataFrame:
    """The scores of all runs of the tasks."""
    tables = [pd.read_csv(folder / f"{task}.csv").assign(task=task) for task in tasks]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def _finite(
    scores: pd.DataFrame, noisy: pd.DataFrame, made: Made, named: pd.DataFrame
) -> tuple[dict[str, pd.DataFrame], dict[str, Any]]:
    held = _tasks(made, "held_out")
    cells = cell_means(scores)
    families = family_table(cells, named, held)
    singles = families["single"].tolist()
    of_split = {"development": scores[~scores["task"].isin(held)]}
    if held:
        of_split["held_out"] = scores[scores["task"].isin(held)]
    if len(noisy):
        of_split["noise"] = noisy
    intervals = list(dict.fromkeys([*singles, *COMPARED]))
    strategies = {
        split: strategy_table(found, named, intervals=intervals)
        for split, found in of_split.items()
    }
    every = cells if not len(noisy) else pd.concat([cells, cell_means(noisy)], ignore_index=True)
    every.insert(1, "held_out", every["task"].isin([t for t in held]))
    tables = {
        "cells": every.drop(columns=["late"]),
        "families": families,
        "strategies": pd.concat([t.assign(split=s) for s, t in strategies.items()]),
    }
    primary = {split: table for split, table in strategies.items() if split != "noise"}
    shown = {f: named.loc[named["family"] == f, "strategy"].tolist() for f in READING}
    titles = named.set_index("strategy")["setting"]
    figures = {
        "families": families_figure(families, primary),
        "scales": scales_figure(cells, shown, titles),
    }
    if held:
        compared = {"held-out": cells[cells["task"].isin(held)]}
        if len(noisy):
            compared["from noise"] = cell_means(noisy)
        found = [_differences(c, families, named).assign(tasks=t) for t, c in compared.items()]
        tables["differences"] = pd.concat(found)
        by_measure = {m: _profiles(of_split["held_out"], families, m) for m in MEASURES}
        called = {
            row.family: f"{FAMILY_TITLES[row.family]} ({row.setting})"
            for row in families.itertuples()
        }
        figures["profiles"] = profiles_figure(by_measure, called)
    return tables, figures


def _profiles(scores: pd.DataFrame, families: pd.DataFrame, measure: str) -> dict[str, Any]:
    return {
        row.family: scores[scores["strategy"] == row.single]
        .pivot(index="run", columns=["task", "condition"], values=measure)
        .to_numpy()
        for row in families.itertuples()
    }


def _differences(cells: pd.DataFrame, families: pd.DataFrame, named: pd.DataFrame) -> pd.DataFrame:
    """Single settings, and those compared anyway, minus ε-BMC's and minus the best family's."""
    titles = {
        row.strategy: f"{FAMILY_TITLES[row.family]} ({row.setting})" for row in named.itertuples()
    }
    singles = families.set_index("family")["single"]
    best = families.sort_values("greedy_development")["single"].iloc[-1]
    chosen = list(dict.fromkeys([*singles, *COMPARED]))
    rows = []
    for measure in MEASURES:
        means = cells.groupby(["task", "strategy"])[measure].mean().unstack()
        for against in dict.fromkeys([singles["bmc"], best]):
            for label in chosen:
                if label != against:
                    found = paired_difference(means[label], means[against])
                    rows.append(
                        {"strategy": titles[label], "against": titles[against],
                         "measure": measure, **found.columns("difference")}
                    )  # fmt: skip
    return pd.DataFrame(rows)


def _dqn(
    folder: Path, made: Made, named: pd.DataFrame
) -> tuple[dict[str, pd.DataFrame], dict[str, Any]]:
    curves, scores, counted = {}, {}, []
    for task in _tasks(made, "dqn"):
        known, curves[task] = made["dqn", task], pd.read_csv(folder / f"{task}.csv")
        scores[task] = dqn_scores(curves[task], known["random_mean"])
        episodes = known["config"]["task"]["episodes"]
        if learned(curves[task], known["random_mean"], known["random_sd"], episodes):
            counted.append(task)
    titles = {
        row.strategy: f"{FAMILY_TITLES[row.family]} ({row.setting})" for row in named.itertuples()
    }
    summary = dqn_summary(scores, counted)
    summary.insert(3, "title", summary["strategy"].map(titles))
    random = {task: made["dqn", task]["random_mean"] for task in scores}
    summary["random_return"] = summary["task"].map(random)
    means = pd.concat(
        [
            found.groupby(["strategy", "frame"], sort=False)
            .agg(greedy=("greedy", "mean"), greedy_se=("greedy", "sem"), online=("online", "mean"),
                 epsilon=("epsilon", "mean"))
            .reset_index().assign(task=task)
            for task, found in curves.items()
        ],
        ignore_index=True,
    )  # fmt: skip
    return {"dqn": summary, "dqn_curves": means}, {"dqn": dqn_figure(means, titles)}


def _provenance(made: Made) -> dict[str, Any]:
    """Commits, commands, versions and CPU time of what was published."""
    tasks = {f"{part} {task}": known for (part, task), known in made.items()}
    return {
        "commits": sorted({known["commit"] for known in tasks.values()}),
        "commands": sorted({known["command"] for known in tasks.values()}),
        "seeds": sorted({known["seed"] for known in tasks.values()}),
        "versions": next(iter(tasks.values()))["versions"],
        "cpu_seconds": {name: known["cpu_seconds"] for name, known in tasks.items()},
        "cpu_minutes": round(sum(known["cpu_seconds"] for known in tasks.values()) / 60, 1),
    }
