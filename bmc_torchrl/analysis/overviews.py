"""All experiments at a glance: tables in Markdown for README and docs, and one to print."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pandas as pd
from rich.table import Table

from bmc_torchrl.analysis.comparison import Comparison
from bmc_torchrl.analysis.scoring import PUBLISHED_BMC_RANKS, measure
from bmc_torchrl.analysis.summaries import METRICS, Results
from bmc_torchrl.analysis.tables import write_atomically
from bmc_torchrl.analysis.titles import METRIC_TITLES, TRUCK_RULES, experiment_title
from bmc_torchrl.errors import ResultsError

__all__ = [
    "experiment_tables",
    "full_table",
    "overview_table",
    "readme_table",
    "write_between_marks",
]

NOT_IN_README = ("last 50", "pairs", "wall time")
"""Columns that would make a row too wide to read in a terminal."""


def full_table(found: Iterable[Results]) -> str:
    """How ε-BMC did, beside the published rank, by experiment, in Markdown.

    Ranks are by AUC among the strategies that were run under the same truck-cost rule, with a 95 %
    bootstrap interval; |z| is against the published data.
    """
    rows = [_row(results) for results in found]
    return _markdown(list(rows[0]), [list(row.values()) for row in rows])


def readme_table(found: Iterable[Results]) -> str:
    """The same, as narrow as the README is."""
    rows = [_row(results) for results in found]
    kept = [name for name in rows[0] if name not in NOT_IN_README]
    return _markdown(kept, [[row[name] for name in kept] for row in rows])


def overview_table(found: Iterable[Results]) -> Table:
    """The same to print, with what was left out of the published experiments."""
    rows = [{**_row(results), "reduced": results.reduction[9:] or "no"} for results in found]
    left_out = ("published rank", "wall time", "median |z|", "pairs")
    shown = Table(title="Results so far; ± is one standard error over runs")
    for name in rows[0]:
        if name not in left_out:
            shown.add_column(name)
    for row in rows:
        shown.add_row(*(cell for name, cell in row.items() if name not in left_out))
    return shown


def experiment_tables(found: Iterable[Results]) -> str:
    """Every strategy of every experiment in Markdown, a table each: scores, intervals, ranks, z."""
    parts = []
    for results in found:
        note = f" ({results.reduction})" if results.reduction else ""
        parts.append(f"## {experiment_title(results.experiment)}{note}\n\n{_strategies(results)}")
    return "\n".join(parts)


def write_between_marks(path: Path, text: str) -> None:
    """Replace what stands between ``<!-- results -->`` and ``<!-- /results -->`` in a file."""
    old = path.read_text()
    start, end = "<!-- results -->\n", "<!-- /results -->"
    if start not in old or end not in old:
        raise ResultsError(f"{path} lacks the lines {start.strip()} and {end}; put them in")
    before, _, rest = old.partition(start)
    after = rest.partition(end)[2]
    content = f"{before}{start}{text}{end}{after}".encode()
    write_atomically(path, lambda stream: stream.write(content))


def _row(results: Results) -> dict[str, str]:
    table = results.summary.set_index("strategy")
    if "bmc" not in table.index:
        raise ResultsError(f"the results of {results.experiment} lack the strategy 'bmc'; run it")
    table, every = table.loc[_of_the_same_rule(results, "bmc")], len(table)
    bmc, ascending = table.loc["bmc"], measure(results.experiment).lower_is_better
    best = table["auc"].sort_values(ascending=ascending).index[0]
    published, title = PUBLISHED_BMC_RANKS.get(results.experiment), results.strategies[best].title
    mixed = "" if len(table) == every else ", two rules"
    return {
        "experiment": experiment_title(results.experiment),
        "runs": f"{int(bmc['runs'])}",
        "ε-BMC AUC": _with_error(bmc["auc"], bmc["auc_se"]),
        "last 50": _with_error(bmc["last_50"], bmc["last_50_se"]),
        "rank (95 %)": _rank(results, "bmc"),
        "published rank": "—" if published is None else f"{published} of 22{mixed}",
        **_agreement(results),
        "best strategy": f"{title} ({_with_error(table['auc'][best], table['auc_se'][best])})",
        "wall time": "—"
        if results.timings is None
        else _duration(results.timings["seconds"].sum()),
    }


def _strategies(results: Results) -> str:
    table = results.summary.set_index("strategy")
    ascending = measure(results.experiment).lower_is_better
    statistics = None if results.statistics is None else results.statistics.set_index("strategy")
    z = _z_scores(results)
    rules = {results.strategies[label].truck_cost for label in table.index}
    rows = []
    order = table["auc"].sort_values(ascending=ascending).index
    for label in sorted(
        order, key=lambda name: results.strategies[name].truck_cost or "", reverse=True
    ):
        row, strategy = table.loc[label], results.strategies[label]
        cells = [strategy.title, f"{int(row['runs'])}", _with_error(row["auc"], row["auc_se"])]
        cells.append("—" if statistics is None else _interval(statistics.loc[label]))
        cells += [_with_error(row["last_50"], row["last_50_se"]), _rank(results, label)]
        rows.append([*cells, *(z.get((label, metric), "—") for metric in METRICS)])
    heading = ["strategy", "runs", "AUC", "95 % (IQM)", "last 50", "rank (95 %)"]
    heading += [f"z {METRIC_TITLES[metric]}" for metric in METRICS]
    said = ""
    if len(rules) > 1:
        named = " and ".join(
            f"{TRUCK_RULES[rule]} ({rule})" for rule in sorted(filter(None, rules))
        )
        said = f"Two truck-cost rules, {named}: ranks are within each.\n\n"
    return said + _markdown(heading, rows)


def _of_the_same_rule(results: Results, label: str) -> list[str]:
    rule = results.strategies[label].truck_cost
    labels = results.summary["strategy"]
    return [name for name in labels if results.strategies[name].truck_cost == rule]


def _rank(results: Results, label: str) -> str:
    same = _of_the_same_rule(results, label)
    auc = results.summary.set_index("strategy")["auc"].loc[same]
    ascending = measure(results.experiment).lower_is_better
    rank = f"{int(auc.rank(ascending=ascending, method='min')[label])}"
    if results.statistics is not None:
        interval = results.statistics.set_index("strategy").loc[label]
        rank += f" ({interval['rank_low']:.0f}–{interval['rank_high']:.0f})"
    return f"{rank} of {len(same)}"


def _interval(row: pd.Series) -> str:
    low, high = row["auc_iqm_low"], row["auc_iqm_high"]
    return "—" if pd.isna(low) else f"{low:.2f} to {high:.2f}"


def _agreement(results: Results) -> dict[str, str]:
    if results.comparison is None:
        return {"median |z|": "—", "pairs": "—"}
    every = Comparison(results.comparison).medians().set_index("metric").loc["all"]
    return {"median |z|": f"{every['median']:.2f}", "pairs": f"{every['pairs']:.0f}"}


def _z_scores(results: Results) -> dict[tuple[str, str], str]:
    if results.comparison is None:
        return {}
    return {
        (row.strategy, row.metric): f"{row.z:.1f}" if row.informative else "exact"
        for row in results.comparison.itertuples()
    }


def _markdown(heading: list[str], rows: list[list[str]]) -> str:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in (heading, *rows)]
    lines = [f"| {' | '.join(row)} |" for row in escaped]
    return "\n".join([lines[0], "|---" * len(heading) + "|", *lines[1:]]) + "\n"


def _with_error(value: float, error: float) -> str:
    return f"{value:.2f}" if pd.isna(error) else f"{value:.2f} ± {error:.2f}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
