"""Judge our results against the authors' published data.

Prints, for each strategy, ours and published with standard errors and z scores, then the median and
the largest |z| by metric. Exit status: 0 if the median |z| over strategies is at most the threshold
for every metric (AUC, first 100, last 50, ε at episodes 10, 100 and last), 1 if not, 2 if a file
cannot be used or nothing can be judged. "exact" marks values that have no standard error on either
side and agree; a metric with no others is not judged. How the errors of correlated episodes are
obtained is said in bmc_torchrl/analysis/comparison.py.
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from bmc_torchrl.analysis.comparison import Comparison, compare, comparison_tables
from bmc_torchrl.analysis.published_workbooks import RUNS, read_published
from bmc_torchrl.analysis.scoring import EXPERIMENTS
from bmc_torchrl.analysis.summaries import read_results
from bmc_torchrl.analysis.tables import write_csv
from bmc_torchrl.analysis.titles import experiment_title
from bmc_torchrl.errors import ResultsError
from bmc_torchrl.experiments.exits import ends_in_a_line

REMARKABLE = 3.0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bmc compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: bmc compare results/grid_sarsa published/grid_sarsa.xlsx",
    )
    parser.add_argument("results", type=Path, help="folder with curves.csv and summary.csv")
    parser.add_argument("published", type=Path, help="the authors' workbook, .xlsx")
    parser.add_argument("--experiment", help="such as grid_sarsa (default: the folder's name)")
    parser.add_argument(
        "--threshold", type=float, default=2.0, help="of the median |z| (%(default)s)"
    )
    parser.add_argument("--csv", type=Path, help="also write the table of pairs to this new file")
    parser.add_argument(
        "--record", action="store_true", help="write z to RESULTS/comparison.csv, for bmc figures"
    )
    return parser.parse_args()


def _print_report(console: Console, comparison: Comparison, threshold: float) -> None:
    for table in comparison_tables(comparison):
        console.print(table)
    pairs = comparison.table[comparison.table["z"].abs() > REMARKABLE]
    for pair in pairs.itertuples():
        console.print(f"|z| > {REMARKABLE:g}: {pair.strategy} {pair.metric} z = {pair.z:.2f}")
    for note in comparison.notes:
        console.print(f"note: {note}")
    if not comparison.judged:
        console.print("not judged: every pair is exact, without a standard error on either side")
        return
    verdict = "agrees with" if comparison.agrees(threshold) else "DISAGREES with"
    worst = comparison.medians()["median"].max()
    console.print(
        f"{verdict} the published data: largest median |z| {worst:.2f}, threshold {threshold:g}"
    )


def _require_name(workbook: Path, experiment: str) -> None:
    if workbook.stem in EXPERIMENTS and workbook.stem != experiment:
        raise ResultsError(
            f"{workbook} is called as the workbook of {workbook.stem}, the results are of "
            f"{experiment}; say --experiment {workbook.stem} if they are of it"
        )


@ends_in_a_line("bmc compare")
def main() -> int:
    """Compare, print, and say by the exit status whether they agree."""
    options = _arguments()
    console = Console(width=max(Console().width, 140), highlight=False)
    try:
        results = read_results(options.results, experiment=options.experiment)
        _require_name(options.published, results.experiment)
        comparison = compare(results, read_published(options.published))
        if options.csv is not None and options.csv.exists():
            raise ResultsError(f"--csv {options.csv} exists already; choose another name")
    except ResultsError as error:
        print(f"bmc compare: {error}", file=sys.stderr)
        return 2
    runs = "–".join(str(number) for number in sorted(set(results.summary["runs"])))
    console.print(
        f"{experiment_title(results.experiment)}: {runs} runs, "
        f"against {RUNS} published in {options.published}\n"
    )
    _print_report(console, comparison, options.threshold)
    if options.csv is not None:
        comparison.table.to_csv(options.csv, index=False)
    if options.record:
        kept = comparison.table[["strategy", "metric", "z", "informative"]]
        write_csv(options.results / "comparison.csv", kept, digits=4)
    if not comparison.judged:
        return 2
    return 0 if comparison.agrees(options.threshold) else 1
