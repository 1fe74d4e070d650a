"""The tidy results table: one row per (experiment, strategy, run, episode), and its file.

A table lives in one Parquet file per experiment whose schema metadata says how it was made. Every
write goes to a temporary file first and is then renamed: a reader sees the whole file or none of
it. While a sweep runs, its finished cells are kept by :mod:`bmc_torchrl.experiments.sweep`.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import ArrayLike

from bmc_torchrl.errors import ResultsError

COLUMNS = ("experiment", "strategy", "run", "episode", "steps", "return", "epsilon")
VALUES = ("steps", "return", "epsilon")
VERSIONED = ("bmc_torchrl", "torch", "torchrl", "tensordict", "numpy", "pandas", "pyarrow")

_SCHEMA = pa.schema(
    [
        ("experiment", pa.string()),
        ("strategy", pa.string()),
        ("run", pa.int64()),
        ("episode", pa.int64()),
        *((name, pa.float64()) for name in VALUES),
    ]
)
_METADATA_KEY = b"bmc_torchrl"


def tidy(
    experiment: str,
    strategies: Sequence[str],
    steps: ArrayLike,
    returns: ArrayLike,
    epsilon: ArrayLike,
    *,
    first_run: int = 0,
) -> pd.DataFrame:
    """Arrange per-episode measurements as a tidy table.

    Args:
        experiment: Name such as ``grid_sarsa``.
        strategies: Labels, one per entry of the arrays' first dimension.
        steps: Steps of the greedy test, ``[strategies, runs, episodes]``.
        returns: Return of the greedy test, same shape.
        epsilon: Mean ε of the training episode, same shape.
        first_run: Number of the first run in the arrays.

    Returns:
        The table, sorted by strategy as given, run and episode; episodes count from 1, as in the
        published data.

    Example:
        >>> tidy("grid_sarsa", ["bmc"], [[[200, 22]]], [[[-30, -2.2]]], [[[0.5, 0.4]]])
           experiment strategy  run  episode  steps  return  epsilon
        0  grid_sarsa      bmc    0        1  200.0   -30.0      0.5
        1  grid_sarsa      bmc    0        2   22.0    -2.2      0.4
    """
    values = {
        name: np.asarray(array, dtype=np.float64)
        for name, array in zip(VALUES, (steps, returns, epsilon), strict=True)
    }
    shape = values["steps"].shape
    if len(shape) != 3 or shape[0] != len(strategies):
        raise ValueError(
            f"steps has shape {shape}; expected [strategies, runs, episodes] "
            f"with {len(strategies)} strategies"
        )
    for name, array in values.items():
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, steps has {shape}: make them equal")
    strategy, run, episode = np.indices(shape).reshape(3, -1)
    return pd.DataFrame(
        {
            "experiment": experiment,
            "strategy": np.asarray(strategies, dtype=object)[strategy],
            "run": run + first_run,
            "episode": episode + 1,
            **{name: array.reshape(-1) for name, array in values.items()},
        }
    )


def provenance(
    config: Mapping[str, Any], seed: int, *, command: str | None = None
) -> dict[str, Any]:
    """Everything needed to make a table again: config, seed, command, versions and commit.

    Args:
        config: Plain containers that decide a run's results (not how runs were batched).
        seed: What the generator was given.
        command: The command line; this process's by default.
    """
    return {
        "config": dict(config),
        "seed": seed,
        "command": command if command is not None else " ".join(["python", *sys.argv]),
        "versions": {"python": platform.python_version(), **_versions()},
        "commit": _commit(),
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in VERSIONED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, sync it to disk, then rename it.

    A process killed at any moment leaves either the old file or the new one under ``path``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(
        dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"
    )
    try:
        with os.fdopen(descriptor, "wb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def write_csv(path: Path, table: pd.DataFrame, *, digits: int = 7) -> None:
    """Write a small table, atomically, its numbers with so many significant digits."""
    text = table.to_csv(index=False, float_format=f"%.{digits}g", lineterminator="\n")
    write_atomically(path, lambda stream: stream.write(text.encode()))


def check(table: pd.DataFrame, source: str = "the table") -> None:
    """Raise :class:`ResultsError` unless the table is complete and has one row per episode.

    Args:
        table: A tidy table of one experiment.
        source: What the message calls the table.
    """
    missing = [name for name in COLUMNS if name not in table]
    if missing or len(table) == 0:
        what = f"lacks the columns {missing}" if missing else "has no rows"
        raise ResultsError(f"{source} {what}; write tables with tables.tidy and tables.save")
    if table["experiment"].nunique() != 1:
        names = sorted(table["experiment"].unique())
        raise ResultsError(f"{source} mixes the experiments {names}; keep one table per experiment")
    if not np.isfinite(table[list(VALUES)].to_numpy(dtype=np.float64)).all():
        raise ResultsError(f"{source} has missing or infinite values; run those cells again")
    episodes = table.groupby(["strategy", "run"])["episode"].agg(["min", "max", "size", "nunique"])
    length = episodes.groupby("strategy")["max"].transform("max")
    wrong = episodes[
        (episodes["min"] != 1)
        | (episodes["max"] != length)
        | (episodes["size"] != length)
        | (episodes["nunique"] != length)
    ]
    if len(wrong):
        strategy, run = wrong.index[0]
        raise ResultsError(
            f"{source} has missing or repeated episodes in {len(wrong)} runs, first in run {run} "
            f"of {strategy!r}; run those cells again"
        )


def save(table: pd.DataFrame, path: str | Path, metadata: Mapping[str, Any]) -> Path:
    """Write a checked table and how it was made to a Parquet file, atomically.

    Args:
        table: A tidy table of one experiment.
        path: Where to; an existing file is replaced.
        metadata: What :func:`provenance` returns; stored as JSON in the schema's metadata.
    """
    path = Path(path)
    check(table, f"the table for {path}")
    arrow = pa.Table.from_pandas(
        table[list(COLUMNS)], schema=_SCHEMA, preserve_index=False
    ).replace_schema_metadata({_METADATA_KEY: json.dumps(dict(metadata), sort_keys=True)})
    write_atomically(
        path,
        lambda stream: pq.write_table(
            arrow, stream, compression="zstd", write_page_checksum=True, store_schema=True
        ),
    )
    return path


def load(path: str | Path) -> pd.DataFrame:
    """Read a table written by :func:`save`.

    Raises:
        ResultsError: If the file is missing, truncated, corrupt or not a results table.
    """
    path = Path(path)
    with _readable(path):
        arrow = pq.read_table(path, page_checksum_verification=True, partitioning=None)
    table = arrow.to_pandas()
    check(table, str(path))
    return table


def load_metadata(path: str | Path) -> dict[str, Any]:
    """Read how the table at ``path`` was made; only the file's footer is read."""
    path = Path(path)
    with _readable(path):
        stored = pq.read_schema(path).metadata or {}
        if _METADATA_KEY not in stored:
            raise pa.ArrowInvalid("it does not say how it was made")
        content: dict[str, Any] = json.loads(stored[_METADATA_KEY])
    return content


class _readable:  # noqa: N801
    """Context in which any failure to read ``path`` becomes a :class:`ResultsError`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        if not self.path.is_file():
            raise ResultsError(f"{self.path} does not exist; make it with scripts/reproduce.py")

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (pa.ArrowException, OSError, ValueError)):
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ResultsError(
                f"{self.path} is not a readable results table ({reason}); it is truncated, corrupt "
                "or no results table. Move it away and run scripts/reproduce.py again, which "
                "computes only what is missing. Nothing was overwritten."
            ) from error
