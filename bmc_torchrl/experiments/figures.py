"""Draw every figure that the given results folders allow, as PNG files.

A folder results/<experiment> gives: curves.csv, the paper's figure of that experiment;
scores.csv, performance profiles; sensitivity.csv (parameter, value, auc, auc_se, variant),
sensitivity to α₀ and to the scale of rewards; posterior.csv (episode, alpha, beta), the posterior
over ε. Nothing is trained.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from matplotlib.figure import Figure

from bmc_torchrl.analysis.overviews import (
    experiment_tables,
    readme_table,
    write_between_marks,
)
from bmc_torchrl.analysis.plots import (
    learning_figure,
    posterior_figure,
    profile_figure,
    save_figure,
    sensitivity_figure,
)
from bmc_torchrl.analysis.published_workbooks import read_published
from bmc_torchrl.analysis.summaries import read_results, result_folders
from bmc_torchrl.errors import ResultsError
from bmc_torchrl.experiments.exits import ends_in_a_line


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bmc figures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: bmc figures results --published published --out figures",
    )
    parser.add_argument(
        "results",
        type=Path,
        nargs="*",
        default=[Path("results")],
        help="results/<experiment>, or a folder of such folders (default: results)",
    )
    parser.add_argument(
        "--published", type=Path, help="folder with <experiment>.xlsx, overlaid where there is one"
    )
    parser.add_argument("--out", type=Path, default=Path("figures"), help="(default: %(default)s)")
    parser.add_argument("--readme", type=Path, help="file whose results table is written anew")
    parser.add_argument("--tables", type=Path, help="file whose tables of strategies are, likewise")
    return parser.parse_args()


def _figures(folder: Path, published: Path | None) -> Iterator[tuple[str, Figure]]:
    results = read_results(folder)
    name = results.experiment
    workbook = None if published is None else published / f"{name}.xlsx"
    overlay = read_published(workbook) if workbook is not None and workbook.exists() else None
    named, note = results.strategies, results.reduction
    yield name, learning_figure(name, results.curves, named, published=overlay, note=note)
    if results.scores is not None:
        yield f"{name}_profiles", profile_figure(name, results.scores, named, note=note)
    if results.sensitivity is not None:
        yield f"{name}_sensitivity", sensitivity_figure(name, results.sensitivity, note=note)
    if results.posterior is not None:
        alpha, beta, time = (results.posterior[key] for key in ("alpha", "beta", "episode"))
        yield f"{name}_posterior", posterior_figure(alpha, beta, time=time, note=note)


def draw(folders: Iterable[Path], out: Path, published: Path | None = None) -> Iterator[Path]:
    """Write every figure that the folders allow to `out`, one after the other."""
    for folder in folders:
        for name, figure in _figures(folder, published):
            yield save_figure(figure, out / name)


@ends_in_a_line("bmc figures")
def main() -> int:
    """Draw."""
    options = _arguments()
    if options.published is not None and not options.published.is_dir():
        print(f"bmc figures: --published {options.published} is no folder", file=sys.stderr)
        return 2
    try:
        folders = result_folders(options.results)
        for path in draw(folders, options.out, options.published):
            print(path)
        if options.readme is not None:
            write_between_marks(options.readme, readme_table(map(read_results, folders)))
        if options.tables is not None:
            write_between_marks(options.tables, experiment_tables(map(read_results, folders)))
    except ResultsError as error:
        print(f"bmc figures: {error}", file=sys.stderr)
        return 2
    return 0
