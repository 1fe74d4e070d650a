"""A study: a few strategies on many tasks. Tables in, a summary and a figure out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bmc_torchrl.analysis.plots import BLACK, COLOURS, STYLE
from bmc_torchrl.analysis.scoring import measure
from bmc_torchrl.analysis.statistics import UNKNOWN, improvement_interval, iqm_interval
from bmc_torchrl.analysis.summaries import scores
from bmc_torchrl.analysis.titles import Strategies, experiment_title

__all__ = ["ALL_TASKS", "study_figure", "study_scores", "study_summary"]

ALL_TASKS = "all"
"""The rows of the summary about all tasks together, whose scores are scaled to [0, 1]."""

LAST_PART = 0.2
METRICS = ("auc", "final")

Tables = Mapping[str, pd.DataFrame]


def study_scores(table: pd.DataFrame) -> pd.DataFrame:
    """The scores of every run of a task, by strategy and run; high is good.

    ``auc`` is the mean of the whole test curve, ``final`` that of its last fifth, and
    ``epsilon_last`` is ε in the last episode.
    """
    found = scores(table, _windows)
    if measure(table["experiment"].iloc[0]).lower_is_better:
        found[list(METRICS)] *= -1.0
    return found


def _windows(episodes: int) -> dict[str, slice]:
    late = slice(int((1 - LAST_PART) * episodes), None)
    return {"auc": slice(None), "final": late, "epsilon_last": slice(-1, None)}


def study_summary(tables: Tables, *, reference: str = "bmc") -> pd.DataFrame:
    """Interquartile means with 95 % stratified bootstrap intervals, by task and strategy.

    Columns: task, strategy, runs, ``auc``, ``final`` with ``_low`` and ``_high``, ``epsilon_last``
    (mean over runs), and ``improvement`` with ``_low`` and ``_high``: the probability that a run
    of `reference` has the better AUC. The last rows are of all tasks together: scores are scaled
    to [0, 1] by the worst and the best run of the task.
    """
    by_task = {task: study_scores(table) for task, table in tables.items()}
    rows = []
    for task, found in by_task.items():
        by_strategy = {
            name: {metric: runs[[metric]].to_numpy() for metric in METRICS}
            for name, runs in found.groupby("strategy", sort=False)
        }
        epsilon = found.groupby("strategy")["epsilon_last"].mean().to_dict()
        rows += _rows(task, by_strategy, epsilon, reference)
    if len(by_task) > 1:
        rows += _rows(ALL_TASKS, _scaled(by_task), {}, reference)
    return pd.DataFrame(rows)


def _scaled(by_task: Tables) -> dict[str, dict[str, Any]]:
    """Scores ``[runs, tasks]`` in [0, 1] by strategy and metric."""
    scaled: dict[str, dict[str, list[Any]]] = {}
    for found in by_task.values():
        for metric in METRICS:
            low, high = found[metric].min(), found[metric].max()
            for name, runs in found.groupby("strategy", sort=False):
                column = (runs[metric].to_numpy() - low) / ((high - low) or 1.0)
                scaled.setdefault(str(name), {}).setdefault(metric, []).append(column)
    return {
        name: {metric: np.stack(columns, axis=1) for metric, columns in metrics.items()}
        for name, metrics in scaled.items()
    }


def _rows(
    task: str,
    scores: Mapping[str, Mapping[str, Any]],
    epsilon: Mapping[str, float],
    reference: str,
) -> list[dict[str, Any]]:
    rows = []
    for name, metrics in scores.items():
        row: dict[str, Any] = {"task": task, "strategy": name, "runs": len(metrics["auc"])}
        for metric in METRICS:
            row |= iqm_interval(metrics[metric]).columns(metric)
        row["epsilon_last"] = epsilon.get(name, np.nan)
        improvement = UNKNOWN
        if name != reference and reference in scores:
            improvement = improvement_interval(scores[reference]["auc"], metrics["auc"])
        rows.append(row | improvement.columns("improvement"))
    return rows


def study_figure(
    tables: Tables, summary: pd.DataFrame, strategies: Strategies, *, columns: int = 4
) -> Figure:
    """Test return and ε over episodes, a pair of panels for each task, and all tasks together.

    Lines are interquartile means over runs, bands 95 % bootstrap intervals of the tests, every
    few episodes; ε is the mean over runs.

    Args:
        tables: The results table of each task.
        summary: What :func:`study_summary` returns.
        strategies: How they are called.
        columns: Tasks side by side.
    """
    names = list(dict.fromkeys(summary["strategy"]))
    others = (name for name in names if name != "bmc")
    styles = {"bmc": BLACK, **dict(zip(others, COLOURS, strict=False))}
    titles = [strategies[name].title for name in styles]
    together = summary[summary["task"] == ALL_TASKS].set_index("strategy")
    blocks = -(-(len(tables) + (len(together) > 0)) // columns)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(3.4 * columns, 4.6 * blocks + 0.5), layout="constrained")
        panels = figure.subplots(2 * blocks, columns, squeeze=False)
        for axes in panels.ravel():
            axes.set_visible(False)
        for number, (task, table) in enumerate(tables.items()):
            block, column = divmod(number, columns)
            _task_panels(panels[2 * block, column], panels[2 * block + 1, column], table, styles)
            panels[2 * block, column].set_title(experiment_title(task))
        block, column = divmod(len(tables), columns)
        pair = panels[2 * block : 2 * block + 2, column] if len(together) else ()
        for axes, metric in zip(pair, METRICS, strict=False):
            _aggregate_panel(axes, together, styles, metric)
            axes.set_yticks(range(len(styles)), titles)
        lines = [mpl.lines.Line2D([], [], color=c, linewidth=2) for c in styles.values()]
        figure.legend(lines, titles, loc="outside lower center", ncols=len(styles))
    return figure


def _task_panels(above: Axes, below: Axes, table: pd.DataFrame, styles: dict[str, str]) -> None:
    judged = measure(table["experiment"].iloc[0])
    for name, colour in styles.items():
        runs = table[table["strategy"] == name]
        tests = runs.pivot(index="episode", columns="run", values=judged.column)
        known = tests[tests.ne(tests.shift(-1)).any(axis=1)]
        found = [iqm_interval(row[:, None], resamples=500) for row in known.to_numpy()]
        # A test stands for the episodes since the one before.
        drawn = pd.DataFrame(found, index=known.index).reindex(tests.index).bfill()
        width = 2.0 if name == "bmc" else 1.3
        low, high = drawn["low"], drawn["high"]
        above.fill_between(drawn.index, low, high, color=colour, alpha=0.15, linewidth=0)
        above.plot(drawn.index, drawn["estimate"], color=colour, linewidth=width, zorder=width)
        epsilon = runs.groupby("episode")["epsilon"].mean()
        below.plot(epsilon.index, epsilon, color=colour, linewidth=width, zorder=width)
    above.set(ylabel=f"test {judged.label}")
    below.set(ylabel="ε", xlabel="episode", ylim=(-0.02, 1.02))
    for axes in (above, below):
        axes.set_visible(True)
        axes.set_xlim(left=0)


def _aggregate_panel(axes: Axes, rows: pd.DataFrame, styles: dict[str, str], metric: str) -> None:
    axes.set_visible(True)
    for place, (name, colour) in enumerate(styles.items()):
        row = rows.loc[name]
        axes.barh(place, row[f"{metric}_high"] - row[f"{metric}_low"], left=row[f"{metric}_low"],
                  color=colour, alpha=0.45, height=0.7)  # fmt: skip
        axes.plot([row[metric]] * 2, [place - 0.35, place + 0.35], color=colour, linewidth=2.5)
    axes.invert_yaxis()
    meaning = {"auc": "AUC", "final": "last fifth"}[metric]
    axes.set(xlabel=f"{meaning}, scaled to [0, 1]", title="all tasks" if metric == "auc" else "")
