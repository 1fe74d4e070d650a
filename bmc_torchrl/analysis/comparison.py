r"""Our results against published data: z scores that are honest about correlated episodes.

For each strategy and metric, :math:`z = (\text{ours} - \text{published}) / \sqrt{se^2 + se'^2}`.

*Standard errors of windows.* The authors published a standard error for every episode, but not
for the mean of many episodes; episodes of one run are correlated, so it cannot be computed from
theirs alone. We measured both: the published error of a window is taken to be the root mean square
of its published per-episode errors times *our* ratio of the window's error to the same root mean
square. The ratio is about :math:`\sqrt{\bar\rho}`, the root of the mean correlation between
episodes: 1 if they move together, :math:`1/\sqrt{n}` if they are independent. If our own errors
are all zero, it is taken as 1, its largest value.

*No error at all.* A constant ε, or last episodes in which every run is optimal, have no error on
either side. Such a pair is *exact*: z is 0 if both agree to 0.1 % (the authors' ε = 0.5 is printed
0.4999 in one file), and otherwise the difference in units of that tolerance. A pair that is exact
and agrees says nothing about noise and is left out of medians.

*Rounding.* Where the published means were printed with few digits, the half unit of the last digit
is taken off the difference.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from rich import box
from rich.table import Table

from bmc_torchrl.analysis.published_workbooks import experiment_of
from bmc_torchrl.analysis.scoring import measure
from bmc_torchrl.analysis.summaries import (
    EXPLORATION,
    METRICS,
    PERFORMANCE,
    Results,
    metric_windows,
)
from bmc_torchrl.analysis.titles import METRIC_TITLES
from bmc_torchrl.errors import ResultsError

EXACT_TOLERANCE = 1e-3
"""Relative difference up to which two values without error are equal."""

SINGLE_PRECISION = 2e-6
"""Relative error of the authors' means, which were summed in single precision."""

NEGLIGIBLE = 1e-6
"""What is no larger is zero: an ε of 1e-36, for example."""


@dataclass(frozen=True)
class Comparison:
    """Published against ours.

    Attributes:
        table: One row per strategy and metric: strategy, metric, ours, ours_se, published,
            published_se, z, and ``informative`` (False where both sides are exact and agree).
        notes: What a reader must know: strategies or episodes that could not be compared.
    """

    table: pd.DataFrame
    notes: tuple[str, ...] = ()

    def medians(self) -> pd.DataFrame:
        """Median and largest size of z by metric, and over all pairs as ``all``.

        Columns: metric, pairs, median, maximum. Uninformative pairs are left out; a metric that has
        no others is not judged, its median and maximum are NaN.
        """
        size = self.table.assign(z=self.table["z"].abs())[self.table["informative"]]
        groups = {name: size.loc[size["metric"] == name, "z"] for name in METRICS}
        groups["all"] = size["z"]
        rows = [
            {
                "metric": name,
                "pairs": len(z),
                "median": z.median(),
                "maximum": z.max(),
            }
            for name, z in groups.items()
        ]
        return pd.DataFrame(rows)

    @property
    def judged(self) -> bool:
        """Whether there is an informative pair."""
        return bool(self.table["informative"].any())

    def agrees(self, threshold: float = 2.0) -> bool:
        """Whether the median size of z over strategies is at most ``threshold`` for every metric.

        Each metric is judged by itself (and all together), so that agreement in ε cannot make up
        for a disagreement in performance. Without an informative pair nothing agrees.
        """
        medians = self.medians()["median"].dropna()
        return self.judged and bool((medians <= threshold).all())


def compare(results: Results, published: pd.DataFrame) -> Comparison:
    """Compare a results folder with published curves.

    Args:
        results: What ``read_results`` returns.
        published: What ``read_published`` returns. Episodes beyond ours are left out.

    Raises:
        ResultsError: If they are of different experiments, or there is no strategy in common, fewer
            than two runs, or fewer published episodes than ours.
    """
    known = experiment_of(published)
    if known not in (None, results.experiment):
        raise ResultsError(
            f"the workbook is the authors' {known}, the results are of {results.experiment}: "
            f"compare with {results.experiment}.xlsx, or say --experiment {known} if they are of it"
        )
    column = measure(results.experiment).column
    ours = dict(iter(results.curves.groupby("strategy")))
    theirs = dict(iter(published.groupby("strategy")))
    common = [name for name in theirs if name in ours]
    if not common:
        raise ResultsError(
            f"no strategy in common: ours are {sorted(ours)}, published are {sorted(theirs)}"
        )
    summary = results.summary.set_index("strategy")
    rows: list[dict[str, object]] = []
    for name in common:
        _check_sizes(name, summary.loc[name], len(theirs[name]))
        rows += _strategy_rows(name, column, summary.loc[name], ours[name], theirs[name])
    return Comparison(pd.DataFrame(rows), _notes(summary, theirs, common))


def _check_sizes(name: str, summary: pd.Series, published_episodes: int) -> None:
    if summary["runs"] < 2:
        raise ResultsError(f"{name!r} has a single run and no standard error; run at least two")
    if summary["episodes"] > published_episodes:
        raise ResultsError(
            f"{name!r} has {summary['episodes']:.0f} episodes but only {published_episodes} are "
            "published; is this the file of another experiment?"
        )


def _notes(
    summary: pd.DataFrame, theirs: dict[str, pd.DataFrame], common: list[str]
) -> tuple[str, ...]:
    notes = []
    for text, names in (
        ("published but not run", [name for name in theirs if name not in summary.index]),
        ("run but not published", [name for name in summary.index if name not in theirs]),
    ):
        if names:
            notes.append(f"{text}: {', '.join(names)}")
    short = [name for name in common if summary["episodes"][name] < len(theirs[name])]
    if short:
        lengths = sorted({int(summary["episodes"][name]) for name in short})
        notes.append(
            f"published curves are cut to our {', '.join(map(str, lengths))} episodes for: "
            f"{', '.join(short)}"
        )
    return tuple(notes)


def _strategy_rows(
    name: str, column: str, summary: pd.Series, ours: pd.DataFrame, theirs: pd.DataFrame
) -> list[dict[str, object]]:
    episodes = int(summary["episodes"])
    ours, theirs = ours.sort_values("episode"), theirs.sort_values("episode").head(episodes)
    ours = ours.rename(columns={f"{column}_se": "performance_se"})
    rows = []
    for metric, window in metric_windows(episodes).items():
        kind = "epsilon" if metric in EXPLORATION else "performance"
        published_se = window_standard_error(
            theirs[f"{kind}_se"].to_numpy()[window],
            ours[f"{kind}_se"].to_numpy()[window],
            float(summary[f"{metric}_se"]),
        )
        pair = {
            "ours": float(summary[metric]),
            "ours_se": float(summary[f"{metric}_se"]),
            "published": float(theirs[f"{kind}_mean"].to_numpy()[window].mean()),
            "published_se": published_se,
        }
        rounding = float(theirs[f"{kind}_rounding"].to_numpy()[window].mean())
        z, informative = z_score(**pair, rounding=rounding)
        rows.append(
            {"strategy": name, "metric": metric, **pair, "z": z, "informative": informative}
        )
    return rows


def window_standard_error(
    published: np.ndarray, ours: np.ndarray, our_window_error: float
) -> float:
    """Standard error of the published mean of a window of episodes.

    Args:
        published: Published standard error of every episode of the window, ``[episodes]``.
        ours: Our standard error of every episode, ``[episodes]``.
        our_window_error: Our standard error of the window's mean, measured over runs.

    Example:
        >>> window_standard_error(np.array([2.0, 2.0]), np.array([1.0, 1.0]), 0.5)
        1.0
    """
    our_rms = float(np.sqrt(np.mean(ours**2)))
    ratio = min(our_window_error / our_rms, 1.0) if our_rms > NEGLIGIBLE else 1.0
    return ratio * float(np.sqrt(np.mean(published**2)))


def z_score(
    ours: float, ours_se: float, published: float, published_se: float, *, rounding: float = 0.0
) -> tuple[float, bool]:
    """The z score of a pair, and whether it is informative.

    Example:
        >>> round(z_score(10.0, 3.0, 20.0, 4.0)[0], 6)
        -2.0
        >>> z_score(0.5, 0.0, 0.4999, 0.0)
        (0.0, False)
    """
    difference = ours - published
    arithmetic = SINGLE_PRECISION * abs(published)
    error = float(np.hypot(ours_se, published_se))
    if error <= max(arithmetic, NEGLIGIBLE if abs(difference) <= NEGLIGIBLE else 0.0):
        tolerance = max(EXACT_TOLERANCE * abs(published), NEGLIGIBLE)
        equal = abs(difference) <= tolerance + rounding
        return (0.0, False) if equal else (difference / tolerance, True)
    excess = float(np.sign(difference)) * max(abs(difference) - rounding, 0.0)
    return excess / float(np.hypot(error, arithmetic)), error > rounding or excess != 0.0


def comparison_tables(comparison: Comparison) -> list[Table]:
    """A comparison as tables to print: performance, exploration, medians."""
    return [
        _pairs(comparison.table, PERFORMANCE, "Test performance: ours | published | z"),
        _pairs(comparison.table, EXPLORATION, "ε in an episode: ours | published | z"),
        _medians(comparison.medians()),
    ]


def _pairs(table: pd.DataFrame, metrics: tuple[str, ...], title: str) -> Table:
    shown = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    shown.add_column("strategy", no_wrap=True)
    for metric in metrics:
        for heading in (METRIC_TITLES[metric], "published", "z"):
            shown.add_column(heading, justify="right", no_wrap=True)
    for name, rows in table.groupby("strategy", sort=False):
        by_metric = rows.set_index("metric")
        cells = [cell for metric in metrics for cell in _cells(by_metric.loc[metric])]
        shown.add_row(str(name), *cells)
    return shown


def _cells(pair: pd.Series) -> tuple[str, str, str]:
    def number(value: float, error: float) -> str:
        fine = abs(pair["published"]) < 2
        shown = f"{value:.3g}" if fine else f"{value:.2f}"
        return f"{shown}±{error:{'.1g' if fine else '.2f'}}" if pair["informative"] else shown

    z = f"{pair['z']:.2f}" if pair["informative"] else "exact"
    style = "bold red" if abs(pair["z"]) > 3 else "dim" if not pair["informative"] else ""
    return (
        number(pair["ours"], pair["ours_se"]),
        number(pair["published"], pair["published_se"]),
        f"[{style}]{z}[/]" if style else z,
    )


def _medians(medians: pd.DataFrame) -> Table:
    shown = Table(title="|z| over strategies", box=box.SIMPLE_HEAD, title_justify="left")
    shown.add_column("metric")
    for heading in ("pairs", "median", "maximum"):
        shown.add_column(heading, justify="right")
    for row in medians.itertuples():
        name = METRIC_TITLES.get(row.metric, row.metric)
        found = (f"{row.median:.2f}", f"{row.maximum:.2f}") if row.pairs else ("not judged", "")
        shown.add_row(name, str(row.pairs), *found)
    return shown
