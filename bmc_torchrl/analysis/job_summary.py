"""What a finished job shows: a table on the console, a figure beside the results."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from bmc_torchrl.analysis.plots import comparison_figure, save_figure
from bmc_torchrl.analysis.scoring import measure
from bmc_torchrl.analysis.summaries import curves, summary
from bmc_torchrl.analysis.tables import load, load_metadata
from bmc_torchrl.analysis.titles import Strategies, experiment_title

__all__ = ["print_job_summary"]

LAST = 50
"""Episodes that ``last_50`` is the mean of; all of them, where there are fewer."""


def print_job_summary(output: Path, *, figure: bool = True, advised: bool = False) -> None:
    """Print the summary of the table in `output`, draw it, and say where everything is.

    With `advised`, the advice in ``whatif.txt`` comes last.
    """
    path = output / "table.parquet"
    table, strategies = load(path), Strategies.of_metadata(load_metadata(path))
    experiment = str(table["experiment"].iloc[0])
    judged = measure(experiment)
    found = summary(table)
    last = min(LAST, int(table["episode"].max()))
    shown = Table(title=f"{experiment_title(experiment)}: {judged.label}")
    columns = ("strategy", "runs", "mean (AUC)", f"last {last} episodes", "final ε")
    for name in columns:
        shown.add_column(name, justify="left" if name == "strategy" else "right")
    for row in found.to_dict("records"):
        shown.add_row(
            strategies[row["strategy"]].title,
            str(row["runs"]),
            _with_error(row["auc"], row["auc_se"], 2),
            _with_error(row["last_50"], row["last_50_se"], 2),
            _with_error(row["epsilon_last"], row["epsilon_last_se"], 4),
        )
    console = Console()
    console.print(shown)
    if found["runs"].max() > 1:
        console.print("± is one standard error over runs.")
    console.print(f"Results: {path}", highlight=False, markup=False)
    if figure and table["episode"].max() > 1:
        drawn = comparison_figure(experiment, curves(table), strategies)
        where = save_figure(drawn, output / "curves")
        console.print(f"Figure: {where}", highlight=False, markup=False)
    advice = output / "whatif.txt"
    if advised and advice.exists():
        console.print(advice.read_text().strip(), highlight=False, markup=False)


def _with_error(value: float, error: float, digits: int) -> str:
    """A mean, with its standard error where there are several runs.

    >>> _with_error(2.0, 0.125, 2), _with_error(2.0, float("nan"), 2)
    ('2.00 ± 0.12', '2.00')
    """
    return f"{value:.{digits}f}" + ("" if error != error else f" ± {error:.{digits}f}")
