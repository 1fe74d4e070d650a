"""What a finished job shows: a table on the console, a figure beside the results."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from bmc_torchrl.analysis.plots import comparison_figure, save_figure
from bmc_torchrl.analysis.scoring import experiment_title, measure, strategy_title
from bmc_torchrl.analysis.summaries import curves, summary
from bmc_torchrl.analysis.tables import load

__all__ = ["report"]


def report(output: Path, *, figure: bool = True) -> None:
    """Print the summary of the table in `output`, draw it, and say where everything is."""
    path = output / "table.parquet"
    table = load(path)
    experiment = str(table["experiment"].iloc[0])
    judged = measure(experiment)
    shown = Table(title=f"{experiment_title(experiment)}: {judged.label}")
    for name in ("strategy", "runs", "mean (AUC)", "last episodes", "final ε"):
        shown.add_column(name, justify="left" if name == "strategy" else "right")
    for row in summary(table).to_dict("records"):
        shown.add_row(
            strategy_title(row["strategy"]),
            str(row["runs"]),
            f"{row['auc']:.2f} ± {row['auc_se']:.2f}",
            f"{row['last_50']:.2f} ± {row['last_50_se']:.2f}",
            f"{row['epsilon_last']:.4f} ± {row['epsilon_last_se']:.4f}",
        )
    console = Console()
    console.print(shown)
    console.print(f"± is one standard error over runs. Results: {path}", highlight=False)
    if figure and table["episode"].max() > 1:
        drawn = save_figure(comparison_figure(experiment, curves(table)), output / "curves")
        console.print(f"Figure: {', '.join(map(str, drawn))}", highlight=False)
