"""What a running sweep has finished: parts of a results table, so that it can be resumed."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bmc_torchrl.analysis.tables import check, load, load_metadata, save
from bmc_torchrl.errors import ResultsError


class TableParts:
    """The finished cells of a running sweep: a folder of Parquet files, one per batch of cells.

    A *cell* is a strategy and a range of runs. A batch of cells that was computed together is
    added as one file, so a killed sweep never leaves half a batch behind.

    Args:
        folder: For example ``outputs/grid_sarsa/table.parts``; created when first added to.

    Example:
        >>> import tempfile
        >>> from bmc_torchrl.analysis.tables import provenance, tidy
        >>> parts = TableParts(Path(tempfile.mkdtemp()) / "table.parts")
        >>> cell = tidy("grid_sarsa", ["bmc"], [[[200]] * 3], [[[-30]] * 3], [[[0.5]] * 3])
        >>> _ = parts.add(cell, provenance({}, seed=0), seconds=1.5)
        >>> parts.missing(["bmc", "fixed_01"], range(4))
        {'bmc': [3], 'fixed_01': [0, 1, 2, 3]}
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def add(self, table: pd.DataFrame, metadata: Mapping[str, Any], seconds: float) -> Path:
        """Write the cells of ``table`` as one part; ``seconds`` is the wall time they took.

        Raises:
            ResultsError: If a run is finished already, or earlier parts had another config.
        """
        cells = _cells(table, seconds)
        for path, earlier in self._metadata():
            if earlier["config"] != json.loads(json.dumps(metadata["config"])):
                raise ResultsError(
                    f"{path} was made with another config; finish that sweep with its own config "
                    "or choose another output folder"
                )
            for cell in cells:
                if any(_overlap(cell, other) for other in earlier["cells"]):
                    raise ResultsError(
                        f"runs {cell['first_run']}–{cell['last_run']} of {cell['strategy']!r} are "
                        f"already in {path}; ask TableParts.missing for what is left"
                    )
        return save(table, self.folder / _part_name(cells), {**metadata, "cells": cells})

    def cells(self) -> pd.DataFrame:
        """Finished cells: strategy, first_run, last_run, episodes and wall time in seconds."""
        columns = ["strategy", "first_run", "last_run", "episodes", "seconds"]
        rows = [cell for _, metadata in self._metadata() for cell in metadata["cells"]]
        table = pd.DataFrame(rows, columns=columns)
        return table.sort_values(["strategy", "first_run"], ignore_index=True)

    def missing(self, strategies: Sequence[str], runs: Sequence[int]) -> dict[str, list[int]]:
        """The runs left to do, by strategy; strategies that are finished are left out."""
        finished = {
            (cell.strategy, run)
            for cell in self.cells().itertuples()
            for run in range(cell.first_run, cell.last_run + 1)
        }
        left = {s: [run for run in runs if (s, run) not in finished] for s in strategies}
        return {strategy: todo for strategy, todo in left.items() if todo}

    def merge(self, path: str | Path) -> pd.DataFrame:
        """Join all parts into the table at ``path`` and return it; the parts stay.

        The result does not depend on the order in which the parts were finished.

        Raises:
            ResultsError: If a part, or a table already at ``path``, cannot be read, or that table
                holds runs the parts do not.
        """
        described = self._metadata()
        if not described:
            raise ResultsError(f"{self.folder} holds no finished cell; run scripts/reproduce.py")
        table = pd.concat([load(part) for part, _ in described], ignore_index=True)
        table = table.sort_values(["strategy", "run", "episode"], ignore_index=True)
        path = Path(path)
        if path.exists():
            _refuse_loss(load(path), table, path)
        save(table, path, _merged([metadata for _, metadata in described]))
        return table

    def _metadata(self) -> list[tuple[Path, dict[str, Any]]]:
        return [(path, load_metadata(path)) for path in sorted(self.folder.glob("*.parquet"))]


def _cells(table: pd.DataFrame, seconds: float) -> list[dict[str, Any]]:
    check(table, "the table to add")
    cells = []
    for strategy, rows in table.groupby("strategy", sort=False):
        runs = np.unique(rows["run"].to_numpy())
        if runs[-1] - runs[0] + 1 != len(runs):
            raise ResultsError(f"the runs of {strategy!r} are not a range; add them as two parts")
        cells.append(
            {
                "strategy": strategy,
                "first_run": int(runs[0]),
                "last_run": int(runs[-1]),
                "episodes": int(rows["episode"].max()),
                "seconds": seconds * len(rows) / len(table),
            }
        )
    return cells


def _overlap(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return bool(
        one["strategy"] == other["strategy"]
        and one["first_run"] <= other["last_run"]
        and other["first_run"] <= one["last_run"]
    )


def _part_name(cells: list[dict[str, Any]]) -> str:
    keys = [f"{cell['strategy']}.{cell['first_run']:04d}-{cell['last_run']:04d}" for cell in cells]
    if len(keys) == 1:
        return f"{keys[0]}.parquet"
    return f"{keys[0]}.and_{len(keys) - 1}_more.{zlib.crc32(' '.join(keys).encode()):08x}.parquet"


def _refuse_loss(old: pd.DataFrame, new: pd.DataFrame, path: Path) -> None:
    keys = ["strategy", "run"]
    lost = (
        old[keys].drop_duplicates().merge(new[keys].drop_duplicates(), how="left", indicator=True)
    )
    count = int((lost["_merge"] == "left_only").sum())
    if count:
        raise ResultsError(
            f"{path} holds {count} runs that are not among the parts and would be lost; move it "
            "away, or restore its parts, and merge again. Nothing was overwritten."
        )


def _merged(metadata: list[dict[str, Any]]) -> dict[str, Any]:
    """The parts' provenance; what differs between parts becomes a list of its values."""
    merged: dict[str, Any] = {}
    for key in metadata[0]:
        if key == "cells":
            merged[key] = [cell for entry in metadata for cell in entry[key]]
            continue
        texts = sorted({json.dumps(entry.get(key), sort_keys=True) for entry in metadata})
        values = [json.loads(text) for text in texts]
        merged[key] = values[0] if len(values) == 1 else values
    return merged
