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


def print_job_summary(output: Path, *, figure: bool = True) -> None:
    """Print the summary of the table in `output`, draw it, and say where everything is."""
    path = output / "table.parquet"
    table, strategies = load(path), Strategies.of_metadata(load_metadata(path))
    experiment = str(table["experiment"].iloc[0])
    judged = measure(experiment)
    shown = Table(title=f"{experiment_title(experiment)}: {judged.label}")
    for name in ("strategy", "runs", "mean (AUC)", "last episodes", "final ε"):
        shown.add_column(name, justify="left" if name == "strategy" else "right")
    for row in summary(table).to_dict("records"):
        shown.add_row(
            strategies[row["strategy"]].title,
            str(row["runs"]),
            f"{row['auc']:.2f} ± {row['auc_se']:.2f}",
            f"{row['last_50']:.2f} ± {row['last_50_se']:.2f}",
            f"{row['epsilon_last']:.4f} ± {row['epsilon_last_se']:.4f}",
        )
    console = Console()
    console.print(shown)
    console.print(f"± is one standard error over runs. Results: {path}", highlight=False)
    if figure and table["episode"].max() > 1:
        drawn = comparison_figure(experiment, curves(table), strategies)
        console.print(f"Figure: {save_figure(drawn, output / 'curves')}", highlight=False)
