"""Ratios against peers, each measured in one run: bmc benchmark [epsilon envs …]."""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table

from bmc_torchrl.benchmarks.timing import EFFORT
from bmc_torchrl.experiments.exits import ends_in_a_line

SECTIONS = (
    "epsilon",
    "diff",
    "envs",
    "single",
    "dqn",
    "tabular",
    "engines",
    "adaptive",
    "growth",
    "memory",
)
RESULTS = Path("results/benchmark.csv")


def show(rows: pd.DataFrame) -> Table:
    table = Table(title="ours against peers, one core, one run")
    for name in rows.columns:
        table.add_column(name, justify="left" if name in ("section", "work") else "right")
    for entry in rows.to_dict("records"):
        numbers = [f"{entry[name]:.4g}" for name in ("ours", "peer", "ratio")]
        # A goal that is not there is NaN once it has been in a file.
        goal = entry["goal"] if entry["goal"] == entry["goal"] else ""
        met = {"True": "yes", "False": "[red]no[/red]"}.get(str(entry["met"]), "–")
        table.add_row(entry["section"], entry["work"], *numbers, str(goal or ""), met)
    return table


@ends_in_a_line("bmc benchmark")
def main() -> None:
    parser = argparse.ArgumentParser(prog="bmc benchmark", description=__doc__)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help="all by default")
    parser.add_argument("--core", type=int, default=0, help="the core to be pinned to")
    parser.add_argument(
        "--quick", action="store_true", help="show that it runs; ratios mean little"
    )
    parser.add_argument("--seconds", type=float, default=EFFORT.seconds, help="per measurement")
    parser.add_argument("--repeats", type=int, default=EFFORT.repeats, help="medians of so many")
    arguments = parser.parse_args()
    EFFORT.seconds, EFFORT.repeats = arguments.seconds, arguments.repeats
    results = RESULTS
    if arguments.quick:
        EFFORT.hurry()
        results = Path("outputs/benchmark-quick.csv")
    os.sched_setaffinity(0, {arguments.core})
    console = Console()
    console.print(f"load average {os.getloadavg()[0]:.1f}; measured times are processor times")
    found = pd.read_csv(results) if results.exists() else pd.DataFrame()
    for section in arguments.sections or SECTIONS:
        module = importlib.import_module(f"bmc_torchrl.benchmarks.{section}")
        measured = []
        for entry in module.rows():
            console.print(f"{entry['work']}: {entry['ratio']:.3g} ({entry['goal'] or 'no goal'})")
            measured.append({"section": section, **entry})
        kept = found[found["section"] != section] if len(found) else found
        found = pd.concat([kept, pd.DataFrame(measured)], ignore_index=True)
        results.parent.mkdir(exist_ok=True)
        found.to_csv(results, index=False, float_format="%.5g")
    console.print(show(found))
