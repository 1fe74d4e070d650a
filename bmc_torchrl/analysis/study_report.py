"""The study's figures and the tables of its page, from the small tables it publishes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bmc_torchrl.analysis.plots import BLACK, COLOURS, STYLE
from bmc_torchrl.analysis.statistics import performance_profile
from bmc_torchrl.analysis.study import FAMILY_TITLES

__all__ = ["dqn_figure", "families_figure", "page_tables", "profiles_figure", "scales_figure"]

MORE = ("#999933", "#882255")
FAMILY_COLOURS = {
    **dict(zip((f for f in FAMILY_TITLES if f != "bmc"), (*COLOURS[:6], *MORE), strict=True)),
    "bmc": BLACK,
}
SPLITS = {"development": "development tasks", "held_out": "held-out tasks"}


def families_figure(families: pd.DataFrame, singles: Mapping[str, pd.DataFrame]) -> Figure:
    """Each family's single setting: interquartile means of both measures, and what tuning adds.

    Args:
        families: What ``study.family_table`` returns.
        singles: What ``study.strategy_table`` returns, by split.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 3.6 * len(singles)), layout="constrained")
        panels = figure.subplots(len(singles), 2, squeeze=False, sharey=True, sharex=True)
        order = families.sort_values("greedy_development")
        for row, (split, table) in zip(panels, singles.items(), strict=True):
            known = table.set_index("strategy")
            for axes, measure in zip(row, ("greedy", "online"), strict=True):
                for place, entry in enumerate(order.to_dict("records")):
                    _bar(axes, place, known.loc[entry["single"]], measure, entry)
                axes.set_title(f"{SPLITS[split]}, {measure}")
            labels = [f"{FAMILY_TITLES[e.family]} ({e.setting})" for e in order.itertuples()]
            row[0].set_yticks(range(len(order)), labels)
        said = "score, 0 random policy, 1 optimum: line and bar are IQM and its 95 %, ◇ is the mean"
        figure.supxlabel(said, fontsize=10)
    return figure


def _bar(axes: Axes, place: int, row: Any, measure: str, entry: Mapping[str, Any]) -> None:
    colour = FAMILY_COLOURS[entry["family"]]
    low, high = row[f"{measure}_low"], row[f"{measure}_high"]
    axes.barh(place, high - low, left=low, color=colour, alpha=0.45, height=0.7)
    axes.plot([row[f"{measure}_iqm"]] * 2, [place - 0.35, place + 0.35], color=colour, linewidth=2)
    axes.plot(row[measure], place, "D", color=colour, markersize=5, markerfacecolor="white")


def profiles_figure(scores: Mapping[str, Mapping[str, Any]], titles: Mapping[str, str]) -> Figure:
    """Fraction of runs above each score, a panel for each measure.

    Args:
        scores: Scores ``[runs, cells]`` by measure and family.
        titles: Of the families, with their settings.
    """
    levels = np.linspace(-0.2, 1, 121)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 4.6), layout="constrained")
        for axes, (measure, found) in zip(
            figure.subplots(1, 2, sharey=True), scores.items(), strict=True
        ):
            for family, runs in found.items():
                width = 2.4 if family == "bmc" else 1.5
                axes.plot(levels, performance_profile(runs, levels), linewidth=width,
                          color=FAMILY_COLOURS[family], label=titles[family])  # fmt: skip
            axes.set(xlabel=f"{measure} score τ", title=f"held-out tasks, {measure}")
        figure.axes[0].set_ylabel("fraction of runs above τ")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)
    return figure


def scales_figure(cells: pd.DataFrame, shown: Mapping[str, Sequence[str]], titles: Any) -> Figure:
    """Mean greedy score by the scale of rewards, a panel for each family that reads rewards.

    Args:
        cells: What ``study.cell_means`` returns.
        shown: Strategies by family.
        titles: Printed setting of each strategy.
    """
    conditions = [name for name in dict.fromkeys(cells["condition"]) if name.startswith("x")]
    means = cells.groupby(["strategy", "condition"])["greedy"].mean().unstack()[conditions]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(3.1 * len(shown), 3.2), layout="constrained")
        panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
        for axes, (family, labels) in zip(panels, shown.items(), strict=True):
            for colour, label in zip((BLACK, *COLOURS), labels, strict=False):
                axes.plot(conditions, means.loc[label], "o-", color=colour, label=titles[label])
            axes.set(title=FAMILY_TITLES[family], xlabel="rewards times")
            axes.set_xticks(range(len(conditions)), [name[1:] for name in conditions])
            axes.legend(fontsize=7)
        panels[0].set_ylabel("mean greedy score")
    return figure


def dqn_figure(curves: pd.DataFrame, titles: Mapping[str, str], columns: int = 4) -> Figure:
    """Greedy test return and ε over frames, a pair of panels for each task.

    Args:
        curves: task, strategy, frame, greedy, greedy_se, epsilon.
        titles: Printed names of the strategies.
        columns: Tasks side by side.
    """
    tasks = list(dict.fromkeys(curves["task"]))
    colours = dict(zip(dict.fromkeys(curves["strategy"]), (BLACK, *COLOURS), strict=False))
    blocks = -(-len(tasks) // columns)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(3.1 * columns, 3.8 * blocks + 0.6), layout="constrained")
        panels = figure.subplots(2 * blocks, columns, squeeze=False, height_ratios=[2, 1] * blocks)
        for axes in panels.ravel():
            axes.set_visible(False)
        for number, task in enumerate(tasks):
            block, column = divmod(number, columns)
            above, below = panels[2 * block, column], panels[2 * block + 1, column]
            for label, found in curves[curves["task"] == task].groupby("strategy", sort=False):
                colour, frames = colours[label], found["frame"] / 1000
                low, high = (found["greedy"] + s * found["greedy_se"] for s in (-1, 1))
                above.fill_between(frames, low, high, color=colour, alpha=0.15, linewidth=0)
                above.plot(frames, found["greedy"], color=colour, label=titles[label])
                below.plot(frames, found["epsilon"], color=colour)
            above.set_title(task)
            above.set_visible(True)
            below.set(visible=True, ylim=(-0.03, 1.03), xlabel="thousand frames")
            if column == 0:
                above.set_ylabel("greedy test return")
                below.set_ylabel("ε")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def page_tables(folder: Path) -> str:
    """The generated part of docs/study.md, in Markdown, from the tables in `folder`."""
    families = pd.read_csv(folder / "families.csv")
    strategies = pd.read_csv(folder / "strategies.csv")
    parts = [_families(families), _differences(folder)]
    if (folder / "dqn.csv").exists():
        parts.append(_dqn(folder))
    parts += [_scales(strategies), _noise(folder), _tasks(folder), _cost(folder)]
    return "\n".join(part for part in parts if part)


def _markdown(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (heading, *rows)]
    return "\n".join([lines[0], "|---" * len(heading) + "|", *lines[1:]]) + "\n"


def _two(value: float) -> str:
    return "—" if pd.isna(value) else f"{value:z.2f}"


def _families(families: pd.DataFrame) -> str:
    held = "greedy_held_out" in families
    splits = ["development", *(["held_out"] if held else [])]
    heading = ["family", "its best single setting", "parameters", "to tune for 95 %"]
    for split in splits:
        heading += [f"{split.replace('_', '-')}: greedy", "online", "best per task", "sensitivity"]
    rows = []
    for row in families.sort_values(f"greedy_{splits[-1]}", ascending=False).to_dict("records"):
        cells = [FAMILY_TITLES[row["family"]], row["setting"], f"{row['parameters']}"]
        cells.append(f"{row['dimensions']}")
        for split in splits:
            cells += [
                _two(row[f"{name}_{split}"])
                for name in ("greedy", "online", "tuned", "sensitivity")
            ]
        rows.append(cells)
    told = "### One setting for all tasks, and one for each\n\n" + _markdown(heading, rows)
    heading = ["family", "chosen by online score"]
    for split in splits:
        heading += [f"{split.replace('_', '-')}: greedy", "online"]
    order = families.sort_values(f"earning_online_{splits[-1]}", ascending=False)
    rows = [
        [FAMILY_TITLES[row["family"]], row["earning_setting"],
         *(_two(row[f"earning_{m}_{split}"]) for split in splits for m in ("greedy", "online"))]
        for row in order.to_dict("records")
    ]  # fmt: skip
    return f"{told}\n### The same, chosen by what training earned\n\n{_markdown(heading, rows)}"


def _differences(folder: Path) -> str:
    if not (folder / "differences.csv").exists():
        return ""
    found = pd.read_csv(folder / "differences.csv")
    found["shown"] = [
        f"{row.difference:+.2f} [{row.difference_low:+.2f}, {row.difference_high:+.2f}]"
        for row in found.itertuples()
    ]
    against = list(dict.fromkeys(found["against"]))
    wide = found.pivot(index="strategy", columns=["against", "tasks", "measure"], values="shown")
    columns = [
        (other, tasks, measure)
        for other in against
        for tasks in dict.fromkeys(found["tasks"])
        for measure in ("greedy", "online")
    ]
    labels = list(dict.fromkeys(found["strategy"]))
    told = []
    for other in against:
        chosen = [column for column in columns if column[0] == other]
        rows = [
            [label, *wide.loc[label].reindex(chosen).fillna("—")]
            for label in labels
            if label != other
        ]
        heading = [f"minus {other}", *(f"{tasks}: {measure}" for _, tasks, measure in chosen)]
        told.append(_markdown(heading, rows))
    note = (
        "Mean score minus the other's, with a 95 % paired bootstrap over tasks: the held-out tasks "
        "in three units, and all tasks from noise."
    )
    return f"### Differences\n\n{note}\n\n" + "\n".join(told)


def _scales(strategies: pd.DataFrame) -> str:
    found = strategies[strategies["split"] == "development"]
    rows = [
        [FAMILY_TITLES[row["family"]], row["setting"], _two(row["greedy"]), _two(row["online"]),
         _two(row["greedy_worst"]), f"{row['unit']:.3f}"]
        for row in found[found["unit"] > 0].to_dict("records")
    ]  # fmt: skip
    heading = ["family", "setting", "greedy", "online", "worst task", "change with the unit"]
    note = "Development tasks, families that read rewards; the others do not change with the unit."
    return f"### The unit of reward\n\n{note}\n\n" + _markdown(heading, rows)


def _noise(folder: Path) -> str:
    cells = pd.read_csv(folder / "cells.csv")
    noisy = set(cells.loc[cells["condition"] == "noise", "task"])
    if not noisy:
        return ""
    strategies = pd.read_csv(folder / "strategies.csv")
    shown = strategies[(strategies["split"] == "development") & strategies["greedy_low"].notna()]
    found = cells[cells["task"].isin(noisy) & cells["condition"].isin(["x1", "noise"])]
    means = found.groupby(["strategy", "condition"])[["greedy", "online"]].mean().unstack()
    columns = [(m, c) for m in ("greedy", "online") for c in ("x1", "noise")]
    rows = [
        [
            FAMILY_TITLES[row.family],
            row.setting,
            *(_two(means.loc[row.strategy, c]) for c in columns),
        ]
        for row in shown.sort_values("strategy").itertuples()
    ]
    heading = ["family", "setting", "greedy: from 0", "from noise", "online: from 0", "from noise"]
    note = f"Tables that start at 0 or at 0.1 · N(0, 1), rewards × 1, {len(noisy)} tasks."
    return f"### Noise in the first values\n\n{note}\n\n" + _markdown(heading, rows)


def _cost(folder: Path) -> str:
    known = json.loads((folder / "provenance.json").read_text())["cpu_seconds"]
    halves = {"in tables": "", "with networks": "dqn "}
    minutes = {
        half: sum(s for name, s in known.items() if name.startswith("dqn ") == bool(start)) / 60
        for half, start in halves.items()
    }
    told = ", ".join(f"{spent:.0f} minutes {half}" for half, spent in minutes.items())
    return f"CPU time of one core: {told}.\n"


def _tasks(folder: Path) -> str:
    families = pd.read_csv(folder / "families.csv")
    cells = pd.read_csv(folder / "cells.csv")
    cells = cells[cells["condition"].str.startswith("x")]
    singles = families.set_index("family")["single"]
    means = cells.groupby(["task", "strategy"], sort=False)["greedy"].mean().unstack()
    shown = [family for family in FAMILY_TITLES if family in singles.index]
    means = means[[singles[family] for family in shown]]
    held = set(cells.loc[cells["held_out"], "task"])
    rows = []
    for task in dict.fromkeys(cells["task"]):
        best = means.loc[task].max()
        scores = [f"**{v:z.2f}**" if v == best else f"{v:z.2f}" for v in means.loc[task]]
        rows.append([f"{task}{' (held out)' if task in held else ''}", *scores])
    heading = ["task", *(FAMILY_TITLES[family] for family in shown)]
    return "### Task by task\n\nGreedy score of each family's single setting.\n\n" + _markdown(
        heading, rows
    )


def _dqn(folder: Path) -> str:
    found = pd.read_csv(folder / "dqn.csv")
    labels = list(dict.fromkeys(found["title"]))
    rows = []
    for task, group in found.groupby("task", sort=False):
        by_title = group.set_index("title")
        note = "" if by_title["learned"].all() else " (nothing learned)"
        rows.append([f"{task}{note}"])
        for label in labels:
            row = by_title.loc[label]
            if pd.isna(row["greedy"]):
                rows[-1].append(f"return {row['greedy_return']:.2f}")
                continue
            rows[-1].append(
                f"{row['greedy']:z.2f} [{row['greedy_low']:z.2f}, {row['greedy_high']:z.2f}] / "
                f"{row['online']:z.2f}"
            )
    heading = ["task", *labels]
    note = (
        "Interquartile mean of the greedy score [95 %] / online; ten runs each; 0 is the random "
        "policy, 1 the best mean test of any strategy."
    )
    return f"### With networks\n\n{note}\n\n" + _markdown(heading, rows)
