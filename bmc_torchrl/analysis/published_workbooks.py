"""Reader of the authors' published data: one Excel workbook per experiment.

A workbook has the sheets ``reward`` and ``epsilon`` (means over 100 runs) and ``reward_std`` and
``epsilon_std`` (standard errors of those means), one row per episode and one column per strategy,
``<strategy>_<sheet>``. ``reward`` is the number of steps for grid-world and cart-pole and the
discounted return for supply-chain. Only ``reward`` has a column ``episode``; sheets may have empty
rows and columns beyond the data.
"""

from __future__ import annotations

import warnings
import zipfile
from pathlib import Path
from xml.etree.ElementTree import ParseError

import numpy as np
import pandas as pd

from bmc_torchrl.errors import ResultsError

SHEETS = {
    "reward": "performance_mean",
    "reward_std": "performance_se",
    "epsilon": "epsilon_mean",
    "epsilon_std": "epsilon_se",
}
RUNS = 100

BMC_MEANS = {
    "grid_sarsa": 47.8676,
    "grid_dqn": 27.812266,
    "cart_sarsa": 124.585333,
    "cart_dqn": 154.178107,
    "supply_sarsa": 8.095087,
}
"""BMC's performance in each of the authors' workbooks, the mean over episodes."""

_COARSE_DIGITS = 4


def read_published(path: str | Path) -> pd.DataFrame:
    """Read a published workbook as a tidy table.

    Args:
        path: For example ``published/grid_sarsa.xlsx``.

    Returns:
        One row per strategy and episode (from 1), with the columns strategy, episode,
        performance_mean, performance_se, epsilon_mean, epsilon_se, and the half-widths
        performance_rounding and epsilon_rounding: half a unit of the last digit where the means
        were printed with at most four significant digits, else 0.

    Raises:
        ResultsError: If the file is missing, truncated, corrupt or not in this format.
    """
    path = Path(path)
    sheets = _sheets(path)
    columns = {name: _columns(sheets[name], name, path) for name in SHEETS}
    strategies = list(columns["reward"])
    if not strategies:
        raise ResultsError(f"{path}: sheet 'reward' has no column such as bmc_reward")
    for name, found in columns.items():
        absent = [label for label in strategies if label not in found]
        if absent:
            raise ResultsError(
                f"{path}: sheet {name!r} lacks the columns {[f'{s}_{name}' for s in absent]} that "
                "sheet 'reward' has; use the authors' file unchanged"
            )
    tables = [_strategy(label, columns, path) for label in strategies]
    return pd.concat(tables, ignore_index=True)


def experiment_of(published: pd.DataFrame) -> str | None:
    """The experiment that a workbook of the authors' is of, by its numbers, not by its name.

    Args:
        published: What :func:`read_published` returns.

    Returns:
        None if it is none of theirs.
    """
    mean = published.loc[published["strategy"] == "bmc", "performance_mean"].mean()
    return next((name for name, known in BMC_MEANS.items() if abs(mean - known) < 1e-4), None)


def _sheets(path: Path) -> dict[str, pd.DataFrame]:
    if not path.is_file():
        raise ResultsError(f"{path} does not exist; give a workbook such as grid_sarsa.xlsx")
    try:
        found = pd.read_excel(path, sheet_name=None, engine="openpyxl")
    except (zipfile.BadZipFile, ParseError, KeyError, ValueError, OSError, EOFError) as error:
        raise ResultsError(
            f"{path} is not a readable Excel workbook ({error}); it is truncated or corrupt: "
            "get the authors' file again"
        ) from error
    sheets = {str(name).strip().lower(): sheet for name, sheet in found.items()}
    absent = [name for name in SHEETS if name not in sheets]
    if absent:
        raise ResultsError(f"{path} lacks the sheets {absent}; it has {list(found)}")
    return sheets


def _columns(sheet: pd.DataFrame, name: str, path: Path) -> dict[str, np.ndarray]:
    """The sheet's columns by strategy, without the empty cells that follow the data."""
    found = {}
    for title in sheet.columns:
        label, suffix, rest = str(title).strip().rpartition(f"_{name}")
        if not suffix or rest:
            continue
        values = pd.to_numeric(sheet[title], errors="coerce").to_numpy(dtype=np.float64)
        filled = sheet[title].notna().to_numpy()
        values = values[: filled.nonzero()[0].max(initial=-1) + 1]
        if len(values) == 0 or not np.isfinite(values).all():
            row = int(np.argmin(np.isfinite(values))) + 2 if len(values) else 2
            raise ResultsError(
                f"{path}: sheet {name!r}, column {title!r} has no number in row {row}; "
                "use the authors' file unchanged"
            )
        found[label] = values
    return found


def _strategy(label: str, columns: dict[str, dict[str, np.ndarray]], path: Path) -> pd.DataFrame:
    lengths = {name: len(found[label]) for name, found in columns.items()}
    episodes = min(lengths.values())
    if episodes != max(lengths.values()):
        warnings.warn(
            f"{path}: the columns of {label!r} differ in length ({lengths}); only the first "
            f"{episodes} episodes are used",
            stacklevel=3,
        )
    values = {column: columns[name][label][:episodes] for name, column in SHEETS.items()}
    return pd.DataFrame(
        {
            "strategy": label,
            "episode": np.arange(1, episodes + 1),
            **values,
            "performance_rounding": _rounding(values["performance_mean"]),
            "epsilon_rounding": _rounding(values["epsilon_mean"]),
        }
    )


def _rounding(values: np.ndarray) -> np.ndarray:
    """Half a unit of the last digit if the column was printed with few digits, else 0.

    The BMC column of grid-world SARSA has three digits. A column of few different values may be
    short without having been rounded.
    """
    different = np.unique(np.abs(values[values != 0]))
    for digits in range(1, _COARSE_DIGITS + 1):
        units = _unit(different, digits)
        if len(different) >= 20 and np.allclose(different / units, np.round(different / units)):
            return 0.5 * _unit(values, digits)
    return np.zeros_like(values)


def _unit(values: np.ndarray, digits: int) -> np.ndarray:
    magnitude = np.floor(np.log10(np.abs(np.where(values == 0, 1.0, values))) + 1e-12)
    return np.asarray(np.where(values == 0, 0.0, 10.0 ** (magnitude - digits + 1)))
