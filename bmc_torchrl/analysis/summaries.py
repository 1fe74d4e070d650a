"""Small tables made from the results table: curves, scores of every run, summaries.

They are what ``results/<experiment>/`` holds and all that the figures and the comparison read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from bmc_torchrl.analysis.scoring import measure, reduction
from bmc_torchrl.analysis.statistics import strategy_statistics
from bmc_torchrl.analysis.tables import VALUES, check, write_atomically, write_csv
from bmc_torchrl.analysis.titles import Strategies
from bmc_torchrl.errors import ResultsError

PERFORMANCE = ("auc", "first_100", "last_50")
EXPLORATION = ("epsilon_10", "epsilon_100", "epsilon_last")
METRICS = (*PERFORMANCE, *EXPLORATION)
OPTIONAL = {
    "strategies": ["strategy", "family", "title"],
    "scores": ["strategy", "run", *METRICS],
    "statistics": ["strategy", "rank", "rank_low", "rank_high"],
    "timings": ["strategy", "seconds"],
    "sensitivity": ["parameter", "value", "auc", "auc_se"],
    "posterior": ["episode", "alpha", "beta"],
    "comparison": ["strategy", "metric", "z", "informative"],
}
"""Tables that a folder may hold, and what they must have."""

CELL = ("strategy", "first_run", "last_run", "episodes", "seconds")
TEXT = ("strategy", "parameter", "family", "title", "metric")

Windows = Callable[[int], Mapping[str, slice]]


def curves(table: pd.DataFrame) -> pd.DataFrame:
    """Mean and standard error over runs, by strategy and episode.

    Columns: strategy, episode, runs, and ``<value>_mean`` and ``<value>_se`` for steps, return
    and epsilon. The standard error of a single run is missing (NaN).
    """
    check(table)
    grouped = table.groupby(["strategy", "episode"], sort=True)
    columns = {"runs": grouped.size()}
    for name in VALUES:
        columns[f"{name}_mean"] = grouped[name].mean()
        columns[f"{name}_se"] = grouped[name].sem()
    return pd.DataFrame(columns).reset_index()


def metric_windows(episodes: int) -> dict[str, slice]:
    """Which of a run's episodes each metric is the mean of; there may be fewer than it says."""
    tenth, hundredth = min(10, episodes), min(100, episodes)
    return {
        "auc": slice(None),
        "first_100": slice(100),
        "last_50": slice(-50, None),
        "epsilon_10": slice(tenth - 1, tenth),
        "epsilon_100": slice(hundredth - 1, hundredth),
        "epsilon_last": slice(-1, None),
    }


def scores(table: pd.DataFrame, windows: Windows = metric_windows) -> pd.DataFrame:
    """The metrics of every run, by strategy and run.

    Those named ``epsilon_…`` are means of ε, the others of the experiment's measure, in its unit.

    Args:
        table: A tidy table of one experiment.
        windows: The episodes that each metric is the mean of, for a number of episodes. By default
            ``auc`` is the mean of the whole test curve, ``first_100`` and ``last_50`` are those of
            these episodes (of all, if there are fewer); ``epsilon_10``, ``epsilon_100`` and
            ``epsilon_last`` are ε in that episode (the last one, if there are fewer).
    """
    check(table)
    performance, keys = measure(table["experiment"].iloc[0]).column, ["strategy", "run"]
    found: dict[str, list[pd.Series]] = {}
    for _, rows in table.sort_values([*keys, "episode"]).groupby("strategy"):
        for name, window in windows(rows["episode"].max()).items():
            column = "epsilon" if name.startswith("epsilon") else performance
            means = rows.groupby(keys).nth(window).groupby(keys)[column].mean()
            found.setdefault(name, []).append(means)
    return pd.DataFrame({name: pd.concat(means) for name, means in found.items()}).reset_index()


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Every metric of :func:`scores`, mean and standard error over runs, by strategy.

    Columns: strategy, runs, episodes, and ``<metric>`` and ``<metric>_se`` for each metric.
    """
    by_strategy = scores(table).groupby("strategy")
    columns = {"runs": by_strategy.size(), "episodes": table.groupby("strategy")["episode"].max()}
    for name in METRICS:
        columns[name] = by_strategy[name].mean()
        columns[f"{name}_se"] = by_strategy[name].sem()
    return pd.DataFrame(columns).reset_index()


@dataclass(frozen=True)
class Results:
    """What a folder ``results/<experiment>`` holds; tables that are not there are None."""

    experiment: str
    curves: pd.DataFrame
    summary: pd.DataFrame
    strategies: Strategies
    scores: pd.DataFrame | None = None
    statistics: pd.DataFrame | None = None
    timings: pd.DataFrame | None = None
    sensitivity: pd.DataFrame | None = None
    posterior: pd.DataFrame | None = None
    comparison: pd.DataFrame | None = None

    @property
    def reduction(self) -> str:
        """What they have less of than the published ones, in words; else empty."""
        runs, episodes = (int(self.summary[name].min()) for name in ("runs", "episodes"))
        return reduction(
            self.experiment, runs=runs, episodes=episodes, strategies=len(self.summary)
        )


def write_results(table: pd.DataFrame, folder: str | Path, metadata: Mapping[str, Any]) -> None:
    """Write every small table of ``table`` to ``folder``, each file atomically.

    Args:
        table: A tidy table of one experiment.
        folder: ``results/<experiment>``.
        metadata: What ``tables.load_metadata`` returns. A sweep's cells, with their wall times, go
            to ``timings.csv``, its strategies to ``strategies.csv``, the rest to
            ``provenance.json``.
    """
    folder = Path(folder)
    experiment = table["experiment"].iloc[0]
    per_run = scores(table)
    strategies = Strategies.of_metadata(metadata) if "cells" in metadata else Strategies()
    files = {
        "curves.csv": curves(table),
        "summary.csv": summary(table),
        "scores.csv": per_run,
        "statistics.csv": _statistics(per_run, strategies, measure(experiment).lower_is_better),
    }
    if "cells" in metadata:
        cells = pd.DataFrame(metadata["cells"], columns=list(CELL))
        files["timings.csv"] = cells.sort_values(["strategy", "first_run"])
        files["strategies.csv"] = strategies.table()
    for name, content in files.items():
        write_csv(folder / name, content)
    (folder / "comparison.csv").unlink(missing_ok=True)  # It was of the results before.
    rest = {key: value for key, value in metadata.items() if key not in ("cells", "strategies")}
    text = json.dumps(
        {"experiment": experiment, **rest}, indent=2, sort_keys=True, ensure_ascii=False
    )
    write_atomically(folder / "provenance.json", lambda stream: stream.write(f"{text}\n".encode()))


def _statistics(
    per_run: pd.DataFrame, strategies: Strategies, lower_is_better: bool
) -> pd.DataFrame:
    """Statistics within each truck-cost rule: what paid by another cannot be ranked beside it."""
    rules = per_run["strategy"].map(lambda label: strategies[label].truck_cost or "")
    of_rule = dict(iter(per_run.groupby(rules)))
    found = [
        strategy_statistics(rows, lower_is_better=lower_is_better)
        for _, rows in sorted(
            of_rule.items(), key=lambda pair: "bmc" not in set(pair[1]["strategy"])
        )
    ]
    return pd.concat(found, ignore_index=True)


def read_results(folder: str | Path, *, experiment: str | None = None) -> Results:
    """Read a folder ``results/<experiment>``.

    Args:
        folder: Holds at least ``curves.csv`` and ``summary.csv``.
        experiment: The folder's name by default.

    Raises:
        ResultsError: If a file is missing, truncated or corrupt.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ResultsError(f"{folder} is no folder; give one such as results/grid_sarsa")
    optional = {
        name: _read(path, columns)
        for name, columns in OPTIONAL.items()
        if (path := folder / f"{name}.csv").exists()
    }
    value_columns = [f"{name}_{part}" for name in VALUES for part in ("mean", "se")]
    metric_columns = [name + part for name in METRICS for part in ("", "_se")]
    found = Results(
        experiment or folder.resolve().name,
        _read(folder / "curves.csv", ["strategy", "episode", "runs", *value_columns]),
        _read(folder / "summary.csv", ["strategy", "runs", "episodes", *metric_columns]),
        Strategies.of_table(optional.pop("strategies", pd.DataFrame())),
        **optional,
    )
    _check_curves(found, folder)
    return found


def result_folders(paths: Iterable[str | Path]) -> list[Path]:
    """The given folders that hold ``curves.csv``, and those within the others that do.

    Raises:
        ResultsError: If there is none at or in a given path.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        inside = [path] if (path / "curves.csv").exists() else []
        inside = inside or sorted(file.parent for file in path.glob("*/curves.csv"))
        if not inside:
            raise ResultsError(f"{path} holds no curves.csv, nor do its folders; give results/")
        found += inside
    return found


def _read(path: Path, columns: list[str]) -> pd.DataFrame:
    fix = f"make it again with scripts/reproduce.py, or restore it with git checkout {path}"
    if not path.is_file():
        raise ResultsError(f"{path} does not exist; {fix}")
    try:
        table = pd.read_csv(path)
    except (ValueError, OSError) as error:
        raise ResultsError(f"{path} cannot be read ({error}); {fix}") from error
    missing = [name for name in columns if name not in table]
    if missing:
        raise ResultsError(f"{path} lacks the columns {missing}; {fix}")
    numbers = [name for name in columns if name not in TEXT]
    broken = [name for name in numbers if not pd.api.types.is_numeric_dtype(table[name])]
    # A standard error is missing when there was a single run; nothing else may be.
    holes = [n for n in columns if not n.endswith("_se") and table[n].isna().any()]
    if broken or holes or table.empty:
        raise ResultsError(f"{path} is truncated or corrupt (columns {broken + holes}); {fix}")
    return table


def _check_curves(found: Results, folder: Path) -> None:
    lengths = found.curves.groupby("strategy")["episode"].agg(["size", "max"])
    expected = found.summary.set_index("strategy")["episodes"]
    same = lengths.reindex(expected.index)
    if (
        set(lengths.index) != set(expected.index)
        or not ((same["size"] == expected) & (same["max"] == expected)).all()
    ):
        raise ResultsError(
            f"{folder / 'curves.csv'} and summary.csv disagree about strategies or episodes; one "
            "of them is truncated or older. Make both again with scripts/reproduce.py"
        )
