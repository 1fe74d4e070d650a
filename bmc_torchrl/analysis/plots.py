"""Figures: tables in, matplotlib figures out. Nothing here computes results.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart; ε-BMC is always the
thick black line, published curves are dashed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike
from scipy import stats

from bmc_torchrl.analysis.scoring import Measure, measure
from bmc_torchrl.analysis.statistics import performance_profile, profile_interval
from bmc_torchrl.analysis.titles import (
    FAMILIES,
    METRIC_TITLES,
    TRUCK_RULES,
    Strategies,
    Strategy,
    experiment_title,
)
from bmc_torchrl.analysis.whatif import Counterfactual
from bmc_torchrl.errors import ResultsError

BLACK = "#000000"
GREY = "#777777"
COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7", GREY)
FAMILY_COLOURS = dict(zip(("constant", "geometric", "power", "vdbe"), COLOURS, strict=False))
EPSILON = Measure("", "epsilon", "ε", lower_is_better=False, optimum=None)
SENSITIVITY_TITLES = {"alpha0": "strength of the prior, α₀", "reward_scale": "scale of rewards"}

STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.labelsize": 10,
    "legend.fontsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E5E5E5",
    "axes.axisbelow": True,
    "legend.frameon": False,
}


def learning_figure(
    experiment: str,
    curves: pd.DataFrame,
    strategies: Strategies,
    *,
    published: pd.DataFrame | None = None,
    note: str = "",
) -> Figure:
    """Test performance and ε over episodes, the six panels of one figure of the paper.

    Reproduces the figure of ``experiment`` in [GSL19] (grid-world, cart-pole and supply-chain,
    expected SARSA and DQN): ε-BMC against the constant, geometric, power and VDBE families and
    against the best of each family (by AUC), and the ε of those. Lines are means over runs, bands
    one standard error.

    Args:
        experiment: Name such as ``grid_sarsa``.
        curves: What ``summaries.curves`` returns.
        strategies: How they are called, and their families.
        published: What ``read_published`` returns, to be drawn dashed.
        note: What else the title says, such as ``reduced: 5 of 100 runs``.
    """
    judged = measure(experiment, strategies["bmc"].truck_cost)
    names = list(curves["strategy"].unique())
    auc = curves.groupby("strategy")[f"{judged.column}_mean"].mean()
    short = {name: strategies[name].short_title for name in names}
    long = {name: strategies[name].title for name in names}
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(12.5, 8.4), layout="constrained")
        axes = figure.subplots(2, 3).ravel()
        for panel, family in zip(axes[:4], FAMILY_COLOURS, strict=True):
            members = _members(names, family, strategies)
            styles = dict(zip(members, COLOURS, strict=False))
            _panel(panel, curves, judged, styles, short, published)
            if not members:
                panel.text(0.5, 0.5, "not run", transform=panel.transAxes, ha="center", color=GREY)
            panel.set_title(f"ε-BMC and {FAMILIES[family]}{' ε' if family != 'vdbe' else ''}")
            _other_optimum(panel, experiment, judged, [strategies[name] for name in members])
        styles = _best_styles(auc, judged, strategies)
        _panel(axes[4], curves, judged, styles, long, published)
        axes[4].set_title("ε-BMC and the best of each family")
        _panel(axes[5], curves, EPSILON, styles, long, published)
        _same_limits(axes[:5])
        dashed = "; published means dashed" if published is not None else ""
        figure.suptitle(_noted(f"{_title(experiment, curves)}{dashed}", note), fontsize=13)
    return figure


def _noted(title: str, note: str) -> str:
    return f"{title}\n{note}" if note else title


def _other_optimum(
    axes: Axes, experiment: str, judged: Measure, members: Sequence[Strategy]
) -> None:
    """The optimum of a family that paid trucks by another rule than ε-BMC."""
    for rule in {member.truck_cost for member in members} - {None}:
        optimum = measure(experiment, rule).optimum
        if optimum is not None and optimum != judged.optimum:
            label = f"optimum, {TRUCK_RULES[str(rule)]}"
            axes.axhline(optimum, color=GREY, linewidth=1, linestyle="-.", label=label)
            _legend_below(axes)


def _title(experiment: str, curves: pd.DataFrame) -> str:
    runs = "–".join(str(count) for count in sorted(set(curves["runs"])))
    return f"{experiment_title(experiment)}: mean and standard error of {runs} runs"


def comparison_figure(experiment: str, curves: pd.DataFrame, strategies: Strategies) -> Figure:
    """Test performance and ε over episodes of a few strategies side by side.

    Args:
        experiment: Name such as ``grid_sarsa``.
        curves: What ``summaries.curves`` returns; all its strategies are drawn.
        strategies: How they are called.
    """
    labels = {name: strategies[name].title for name in curves["strategy"].unique()}
    styles = dict(zip((name for name in labels if name != "bmc"), COLOURS, strict=False))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 4.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        _panel(left, curves, measure(experiment), styles, labels)
        left.set_title("greedy test after each episode")
        _panel(right, curves, EPSILON, styles, labels)
        figure.suptitle(_title(experiment, curves), fontsize=13)
    return figure


def best_of_families(auc: pd.Series, judged: Measure, strategies: Strategies) -> list[str]:
    """The best strategy of each family but ε-BMC's, in the order of families.

    Args:
        auc: Performance by strategy.
        judged: Says which values are good.
        strategies: Their families.
    """
    ordered = auc.sort_values(ascending=judged.lower_is_better).index
    chosen = {strategies[name].family: name for name in reversed(ordered)}
    chosen.pop(strategies["bmc"].family, None)
    order = [*FAMILY_COLOURS, *sorted(set(chosen) - set(FAMILY_COLOURS))]
    return [chosen[key] for key in order if key in chosen]


def _members(names: Sequence[str], family: str, strategies: Strategies) -> list[str]:
    found = [name for name in names if strategies[name].family == family]
    return sorted(found, key=lambda name: (strategies[name].value or 0.0, name))


def _best_styles(auc: pd.Series, judged: Measure, strategies: Strategies) -> dict[str, str]:
    spare = iter(COLOURS[len(FAMILY_COLOURS) :])
    best = best_of_families(auc, judged, strategies)
    return {n: FAMILY_COLOURS.get(strategies[n].family) or next(spare, GREY) for n in best}


def _panel(
    axes: Axes,
    curves: pd.DataFrame,
    shown: Measure,
    styles: Mapping[str, str],
    labels: Mapping[str, str],
    published: pd.DataFrame | None = None,
) -> None:
    """Test performance, or ε, over episodes."""
    column, kind = shown.column, "epsilon" if shown is EPSILON else "performance"
    if shown.optimum is not None:
        axes.axhline(shown.optimum, color=GREY, linewidth=1, linestyle=":", label="optimum")
    styles = _with_bmc(styles)
    for name, rows in _rows_of(styles, curves):
        x, mean = rows["episode"].to_numpy(), rows[f"{column}_mean"].to_numpy()
        error = rows[f"{column}_se"].fillna(0.0).to_numpy()
        width, zorder = (2.0, 3) if name == "bmc" else (1.2, 2)
        colour, label = styles[name], labels[name]
        axes.fill_between(x, mean - error, mean + error, color=colour, alpha=0.22, linewidth=0)
        axes.plot(x, mean, color=colour, linewidth=width, zorder=zorder, label=label)
    if published is not None:
        known = published[published["episode"] <= curves["episode"].max()]
        for name, rows in _rows_of(styles, known):
            x, mean = rows["episode"], rows[f"{kind}_mean"]
            axes.plot(x, mean, color=styles[name], linewidth=1, linestyle=(0, (4, 2)))
    if shown is EPSILON:
        axes.set_ylim(bottom=0)
        axes.set_title("exploration rate")
    axes.set(xlabel="training episodes", ylabel=shown.label)
    axes.margins(x=0.01)
    _legend_below(axes)


def _rows_of(names: Iterable[str], table: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    found = dict(iter(table.groupby("strategy")))
    return ((name, found[name]) for name in names if name in found)


def _with_bmc(styles: Mapping[str, str]) -> dict[str, str]:
    return {"bmc": BLACK, **styles}


def _legend_below(axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: labels[i].startswith("optimum"))
    wide = max((len(label) for label in labels), default=0) > 14
    axes.legend(
        [handles[i] for i in order],
        [labels[i] for i in order],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.16),
        ncols=2 if wide else 4,
        handlelength=1.4,
        columnspacing=1.2,
    )


def _same_limits(panels: Iterable[Axes]) -> None:
    panels = list(panels)
    limits = np.array([panel.get_ylim() for panel in panels])
    for panel in panels:
        panel.set_ylim(limits[:, 0].min(), limits[:, 1].max())


def posterior_figure(
    alpha: ArrayLike,
    beta: ArrayLike,
    *,
    time: ArrayLike | None = None,
    unit: str = "episodes",
    note: str = "",
) -> Figure:
    """The Beta posterior over ε as it changes with time: density, mean and 95 % interval.

    The density is scaled to 1 at its mode in every instant, or a narrow late posterior would hide
    the early ones.

    Args:
        alpha: Of the posterior at each instant, ``[time]``.
        beta: Likewise.
        time: The instants, increasing; 1, 2, … by default.
        unit: Of ``time``, for the axis.
        note: What else the title says.
    """
    a, b = (np.asarray(x, dtype=np.float64).reshape(-1) for x in (alpha, beta))
    x = np.arange(1, len(a) + 1) if time is None else np.asarray(time, dtype=np.float64)
    if len(a) < 2 or len(a) != len(b) or len(a) != len(x):
        raise ResultsError(
            f"alpha, beta and time have {len(a)}, {len(b)} and {len(x)} entries; "
            "give the same number, at least two"
        )
    epsilon = np.linspace(0, 1, 801)[1:-1]
    log_density = stats.beta.logpdf(epsilon[:, None], a, b)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7, 4.2), layout="constrained")
        axes = figure.subplots()
        image = axes.pcolormesh(
            x,
            epsilon,
            np.exp(log_density - log_density.max(axis=0)),
            cmap="Blues",
            shading="nearest",
            rasterized=True,
        )
        axes.plot(x, a / (a + b), color=BLACK, linewidth=2, label="mean: ε")
        for quantile, label in ((0.025, "95 % interval"), (0.975, None)):
            bound = stats.beta.ppf(quantile, a, b)
            axes.plot(x, bound, color="#D55E00", linewidth=1.2, linestyle="--", label=label)
        figure.colorbar(image, label="density / its maximum")
        axes.set(xlabel=unit, ylabel="ε", ylim=(0, 1), title=_noted("Posterior over ε", note))
        axes.grid(False)
        axes.legend(loc="upper right")
    return figure


def whatif_figure(found: Counterfactual) -> Figure:
    """ε of the strategy that acted, and what others would have shown on its transitions.

    Args:
        found: Both, over episodes.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 4.4), layout="constrained")
        axes = figure.subplots()
        colours = itertools.cycle(COLOURS)
        for (label, values), colour in zip(found.others.items(), colours, strict=False):
            axes.plot(found.episodes, values, color=colour, linewidth=1.2, label=label)
        axes.plot(found.episodes, found.own, color=BLACK, linewidth=2, label=found.legend)
        axes.set(xlabel="training episodes", ylabel="ε", ylim=(0, 1))
        axes.set_title(found.title)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def sensitivity_figure(experiment: str, table: pd.DataFrame, *, note: str = "") -> Figure:
    """How the performance of ε-BMC depends on α₀ and on the scale of rewards.

    Args:
        experiment: Name such as ``grid_sarsa``.
        table: Columns parameter (``alpha0``, ``reward_scale``), value, auc, auc_se, and
            optionally variant, a line of its own each (for example ``b₀ = 500``).
        note: What else the title says.
    """
    absent = [name for name in ("parameter", "value", "auc", "auc_se") if name not in table]
    if absent or table.empty:
        raise ResultsError(f"the sensitivity table lacks {absent or 'rows'}; see figures.py --help")
    judged = measure(experiment)
    kinds = sorted(table["parameter"].unique())
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.2 * len(kinds), 4.6), layout="constrained")
        panels = figure.subplots(1, len(kinds), squeeze=False).ravel()
        for axes, kind in zip(panels, kinds, strict=True):
            _sensitivity_panel(axes, table[table["parameter"] == kind], judged)
            axes.set(xlabel=SENSITIVITY_TITLES.get(kind, kind), ylabel=f"AUC ({judged.label})")
        _same_limits(panels)
        title = f"{experiment_title(experiment)}: sensitivity of ε-BMC"
        figure.suptitle(_noted(title, note), fontsize=13)
    return figure


def _sensitivity_panel(axes: Axes, rows: pd.DataFrame, judged: Measure) -> None:
    variants = rows["variant"].fillna("ε-BMC") if "variant" in rows else ["ε-BMC"] * len(rows)
    lines = rows.assign(variant=variants).groupby("variant", sort=False)
    for (name, line), colour in zip(lines, (BLACK, *COLOURS), strict=False):
        line = line.sort_values("value")
        axes.errorbar(
            line["value"],
            line["auc"],
            line["auc_se"],
            color=colour,
            marker="o",
            markersize=4,
            capsize=3,
            label=name,
        )
    if judged.optimum is not None:
        axes.axhline(judged.optimum, color=GREY, linewidth=1, linestyle=":", label="optimum")
    axes.set_xscale("log")
    _legend_below(axes)


def profile_figure(
    experiment: str,
    scores: pd.DataFrame,
    strategies: Strategies,
    *,
    metric: str = "auc",
    note: str = "",
) -> Figure:
    """Performance profiles of ε-BMC and of the best of each family.

    The fraction of runs that do better than a threshold, over all thresholds, with pointwise 95 %
    bootstrap bands: the curve that is above the others is the better strategy.

    Args:
        experiment: Name such as ``grid_sarsa``.
        scores: What ``summaries.scores`` returns.
        strategies: How they are called, and their families.
        metric: Which of its columns.
        note: What else the title says.
    """
    judged = measure(experiment)
    sign = -1.0 if judged.lower_is_better else 1.0
    means = scores.groupby("strategy")[metric].mean()
    styles = _with_bmc(_best_styles(means, judged, strategies))
    styles = {name: colour for name, colour in styles.items() if name in means.index}
    used = scores[scores["strategy"].isin(list(styles))]
    low, high = used[metric].min(), used[metric].max()
    margin = 0.03 * (high - low) or 1.0
    levels = np.linspace(low - margin, high + margin, 301)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7, 4.2), layout="constrained")
        axes = figure.subplots()
        for name, colour in styles.items():
            runs = sign * used.loc[used["strategy"] == name, [metric]].to_numpy()
            bottom, top = profile_interval(runs, sign * levels)
            axes.fill_between(levels, bottom, top, color=colour, alpha=0.18, linewidth=0)
            axes.plot(
                levels,
                performance_profile(runs, sign * levels),
                color=colour,
                linewidth=2 if name == "bmc" else 1.3,
                label=strategies[name].title,
            )
        if judged.lower_is_better:
            axes.invert_xaxis()
        axes.set(
            xlabel=f"threshold on a run's {METRIC_TITLES[metric]} ({judged.label})",
            ylabel="fraction of runs that do better",
            ylim=(-0.02, 1.02),
            title=_noted(f"{experiment_title(experiment)}: performance profiles", note),
        )
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Write a PNG file; the same figure gives the same file.

    Args:
        figure: What to write.
        path: Without suffix.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{path.name}.png")
    with mpl.rc_context(STYLE):
        # Tight, because a legend may be wider than its column.
        figure.savefig(written, dpi=150, bbox_inches="tight")
    return written
