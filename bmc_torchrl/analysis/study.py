"""The study: scores of every run in, tables of strategies and families out.

Scores are 0 for a random policy and 1 for the optimum. A *cell* is a task in a condition (a scale
of its rewards); a strategy's score in a cell is the mean over its runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bmc_torchrl.analysis.statistics import (
    UNKNOWN,
    Interval,
    interquartile_mean,
    iqm_interval,
)

__all__ = [
    "FAMILY_TITLES",
    "cell_means",
    "clustered_iqm",
    "dqn_scores",
    "dqn_summary",
    "family_table",
    "paired_difference",
    "setting_table",
    "strategy_table",
]

Array = NDArray[np.float64]

FAMILY_TITLES = {
    "constant": "constant",
    "geometric": "geometric, per episode",
    "power": "power, per episode",
    "linear": "linear, fixed frames",
    "linear_run": "linear, share of the run",
    "vdbe": "VDBE",
    "bmc": "ε-BMC",
    "scale_free": "ε-BMC, scale-free",
    "wins": "exploration wins",
}
"""Printed name of a family."""

SYMBOLS = {
    "value": "ε",
    "initial": "ε₀",
    "rate": "ρ",
    "power": "p",
    "num_frames": "frames",
    "share": "share",
    "sigma": "σ",
    "alpha0": "α₀",
    "strength": "strength",
    "drift_corrected": "corrected",
}
"""How a parameter is printed; others are no parameters of their own (β₀ follows α₀)."""

MEASURES = ("greedy", "online")
ENOUGH = 0.95
RESAMPLES = 1000


def setting_table(entries: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Label, family, printed setting and parameters of each strategy of a sweep.

    >>> entry = {"label": "bmc", "family": "bmc", "parameters": {"alpha0": 1.0, "beta0": 1.01}}
    >>> setting_table([entry]).loc[0, ["strategy", "setting"]].tolist()
    ['bmc', 'α₀ = 1']
    """
    rows = []
    for entry in entries:
        given = {**entry["parameters"], **({"share": entry["share"]} if "share" in entry else {})}
        if "share" in given:
            del given["num_frames"]
        known = {name: given[name] for name in SYMBOLS if name in given}
        shown = ", ".join(f"{SYMBOLS[name]} = {_number(value)}" for name, value in known.items())
        rows.append({"strategy": entry["label"], "family": entry["family"], "setting": shown})
        rows[-1]["parameters"] = known
    return pd.DataFrame(rows)


def _number(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"


def cell_means(scores: pd.DataFrame) -> pd.DataFrame:
    """Mean and standard error over runs, by task, condition and strategy."""
    grouped = scores.groupby(["task", "condition", "strategy"], sort=False)
    columns = {"runs": grouped.size()}
    for name in MEASURES:
        columns[name] = grouped[name].mean()
        columns[f"{name}_se"] = grouped[name].sem()
    for name in ("late", "epsilon", "epsilon_last"):
        columns[name] = grouped[name].mean()
    return pd.DataFrame(columns).reset_index()


def clustered_iqm(scores: Array, *, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """Interquartile mean of all scores, with a 95 % bootstrap of runs within each task.

    Args:
        scores: ``[tasks, conditions, runs]``. A run has the same random numbers in all
            conditions, so that these are resampled together.
        resamples: Bootstrap samples.
        seed: Of the bootstrap's generator.

    >>> clustered_iqm(np.ones((2, 3, 5)))
    Interval(estimate=1.0, low=1.0, high=1.0)
    """
    tasks, _, runs = scores.shape
    chosen = np.random.default_rng(seed).integers(runs, size=(resamples, tasks, runs))
    drawn = scores.swapaxes(1, 2)[np.arange(tasks)[:, None], chosen].reshape(resamples, -1)
    samples = interquartile_mean(drawn, axis=1)
    low, high = np.quantile(samples, [0.025, 0.975])
    return Interval(float(interquartile_mean(scores.ravel())), float(low), float(high))


def paired_difference(
    one: pd.Series, other: pd.Series, *, resamples: int = 5000, seed: int = 0
) -> Interval:
    """Mean over tasks of `one` minus `other`, with a 95 % bootstrap over tasks.

    >>> left = pd.Series([1.0, 2.0], index=["a", "b"])
    >>> paired_difference(left, left - 0.5)
    Interval(estimate=0.5, low=0.5, high=0.5)
    """
    difference = (one - other).to_numpy()
    chosen = np.random.default_rng(seed).integers(
        len(difference), size=(resamples, len(difference))
    )
    low, high = np.quantile(difference[chosen].mean(-1), [0.025, 0.975])
    return Interval(float(difference.mean()), float(low), float(high))


def strategy_table(
    scores: pd.DataFrame, settings: pd.DataFrame, *, intervals: Sequence[str] = ()
) -> pd.DataFrame:
    """Each strategy over all tasks and conditions of `scores`.

    Args:
        scores: Of every run: task, condition, strategy, run, greedy, online.
        settings: What :func:`setting_table` returns.
        intervals: Strategies whose interquartile means get bootstrap intervals.

    Returns:
        strategy, family, setting, tasks; for each measure its mean, interquartile mean
        (``_iqm``, ``_low``, ``_high``) and the lowest mean of a task (``_worst``); and ``unit``:
        the largest difference of its greedy score between conditions, averaged over tasks.
    """
    rows = []
    for label, family, setting in settings[["strategy", "family", "setting"]].to_numpy():
        found = scores[scores["strategy"] == label]
        row: dict[str, Any] = {"strategy": label, "family": family, "setting": setting}
        row["tasks"] = found["task"].nunique()
        for name in MEASURES:
            cube = _cube(found, name)
            row[name] = cube.mean()
            interval = Interval(float(interquartile_mean(cube.ravel())), np.nan, np.nan)
            if label in intervals:
                interval = clustered_iqm(cube)
            row |= dict(zip((f"{name}_iqm", f"{name}_low", f"{name}_high"), interval, strict=True))
            row[f"{name}_worst"] = cube.mean((1, 2)).min()
        row["unit"] = np.ptp(_cube(found, "greedy").mean(-1), axis=1).mean()
        rows.append(row)
    return pd.DataFrame(rows)


def _cube(scores: pd.DataFrame, measure: str) -> Array:
    """One strategy's scores as ``[tasks, conditions, runs]``."""
    wide = scores.pivot_table(
        index=["task", "condition"], columns="run", values=measure, sort=False, observed=True
    )
    tasks = scores["task"].nunique()
    return np.asarray(wide.to_numpy().reshape(tasks, len(wide) // tasks, -1))


def family_table(
    cells: pd.DataFrame, settings: pd.DataFrame, held_out: Sequence[str]
) -> pd.DataFrame:
    """What each family does with one setting for all tasks, and with one for each.

    The single setting is the one with the highest mean greedy score over the cells of the tasks
    that are not held out.

    Args:
        cells: What :func:`cell_means` returns.
        settings: What :func:`setting_table` returns.
        held_out: Tasks that nothing is chosen on.

    Returns:
        family, settings (how many), parameters, single (its label), setting; for ``development``
        and ``held_out``: mean ``greedy_`` and ``online_`` scores of the single setting,
        ``tuned_``: greedy with the best setting of each cell, ``sensitivity_``: the difference;
        ``dimensions``: parameters to tune per cell for 95 % of the tuned score; ``earning``: the
        setting that would have been chosen by online score, with its ``earning_greedy_`` and
        ``earning_online_`` scores.
    """
    is_held = cells["task"].isin(held_out)
    greedy = {split: _wide(cells[mask], "greedy") for split, mask in _splits(is_held)}
    online = {split: _wide(cells[mask], "online") for split, mask in _splits(is_held)}
    rows = []
    for family, members in settings.groupby("family", sort=False):
        labels = members["strategy"].tolist()
        single = greedy["development"][labels].mean().idxmax()
        parameters = members.set_index("strategy")["parameters"]
        names = varied(parameters)
        row = {"family": family, "settings": len(labels), "parameters": len(names)}
        row |= {"single": single, "setting": members.set_index("strategy")["setting"][single]}
        for split, table in greedy.items():
            if len(table):
                tuned = table[labels].max(axis=1).mean()
                row |= {
                    f"greedy_{split}": table[single].mean(),
                    f"online_{split}": online[split][single].mean(),
                    f"tuned_{split}": tuned,
                    f"sensitivity_{split}": tuned - table[single].mean(),
                }
        row["dimensions"] = dimensions(greedy["development"], parameters, single)
        earning = online["development"][labels].mean().idxmax()
        row |= {
            "earning": earning,
            "earning_setting": members.set_index("strategy")["setting"][earning],
        }
        for split in greedy:
            if len(greedy[split]):
                row[f"earning_greedy_{split}"] = greedy[split][earning].mean()
                row[f"earning_online_{split}"] = online[split][earning].mean()
        rows.append(row)
    return pd.DataFrame(rows)


def _splits(is_held: pd.Series) -> list[tuple[str, pd.Series]]:
    return [("development", ~is_held), ("held_out", is_held)]


def _wide(cells: pd.DataFrame, measure: str) -> pd.DataFrame:
    return cells.pivot(index=["task", "condition"], columns="strategy", values=measure)


def varied(parameters: pd.Series) -> list[str]:
    """Names of the parameters that differ within a family."""
    names = parameters.iloc[0]
    return [name for name in names if len({given[name] for given in parameters}) > 1]


def dimensions(greedy: pd.DataFrame, parameters: pd.Series, single: str) -> int:
    """Fewest parameters that, tuned per cell, reach 95 % of the family's tuned mean score.

    Args:
        greedy: Scores of the cells, a column for each strategy.
        parameters: Parameters of the family's strategies, by label.
        single: The setting that the others are left at.
    """
    names, best = varied(parameters), parameters[single]
    wanted = ENOUGH * greedy[list(parameters.index)].max(axis=1).mean()
    for count in range(len(names)):
        for tuned in itertools.combinations(names, count):
            allowed = [
                label
                for label, given in parameters.items()
                if all(given[name] == best[name] for name in names if name not in tuned)
            ]
            if greedy[allowed].max(axis=1).mean() >= wanted:
                return count
    return len(names)


def dqn_scores(curves: pd.DataFrame, random_mean: float) -> pd.DataFrame:
    """Scores of each run of a task with networks, from what it showed between its tests.

    Args:
        curves: strategy, run, frame, greedy, online, epsilon.
        random_mean: Mean return of random episodes.

    Returns:
        strategy, run, and mean ``greedy`` and ``online`` over the tests, 0 being random and 1 the
        best mean test of any strategy; ``final``, of the last two tests; ``epsilon_last``; and
        ``greedy_return``, not scaled.
    """
    best = curves.groupby(["strategy", "frame"])["greedy"].mean().max()
    scale = (best - random_mean) or 1.0
    rows = []
    for (label, run), found in curves.groupby(["strategy", "run"], sort=False):
        greedy = (found["greedy"].to_numpy() - random_mean) / scale
        online = (found["online"].to_numpy() - random_mean) / scale
        row = {"strategy": label, "run": run, "greedy": greedy.mean(), "online": np.nanmean(online)}
        row |= {"final": greedy[-2:].mean(), "epsilon_last": found["epsilon"].dropna().iloc[-1]}
        rows.append(row | {"greedy_return": found["greedy"].mean()})
    return pd.DataFrame(rows)


def learned(curves: pd.DataFrame, random_mean: float, random_sd: float, episodes: int) -> bool:
    """Whether some strategy's mean test is above a random policy by two standard errors."""
    runs = curves["run"].nunique()
    best = curves.groupby(["strategy", "frame"])["greedy"].mean().max()
    return bool(best > random_mean + 2 * random_sd / (runs * episodes) ** 0.5)


def dqn_summary(by_task: Mapping[str, pd.DataFrame], counted: Sequence[str]) -> pd.DataFrame:
    """Interquartile means with intervals by task and strategy, and of the `counted` tasks together.

    Args:
        by_task: What :func:`dqn_scores` returns.
        counted: Tasks in which something was learned; their rows together are called ``all``. The
            others have no scores, as nothing says what 1 is.
    """
    rows = []
    measures = ("greedy", "online", "final")
    for task, found in by_task.items():
        for label, runs in found.groupby("strategy", sort=False):
            row: dict[str, Any] = {"task": task, "learned": task in counted, "strategy": label}
            for name in measures:
                interval = UNKNOWN
                if task in counted:
                    interval = iqm_interval(runs[[name]].to_numpy(), resamples=RESAMPLES)
                row |= interval.columns(name)
            row["epsilon_last"] = runs["epsilon_last"].mean()
            rows.append(row | {"greedy_return": runs["greedy_return"].mean()})
    for label in dict.fromkeys(row["strategy"] for row in rows) if len(counted) > 1 else ():
        row = {"task": "all", "learned": True, "strategy": label}
        for name in measures:
            columns = [
                found.loc[found["strategy"] == label, name].to_numpy()
                for task, found in by_task.items()
                if task in counted
            ]
            row |= iqm_interval(np.stack(columns, 1), resamples=RESAMPLES).columns(name)
        rows.append(row)
    return pd.DataFrame(rows)
