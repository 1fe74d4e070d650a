"""A sweep: which cells are left, computing them in processes, joining what they give.

A *cell* is a strategy and a range of runs; its results are one Parquet file, which says how they
were made. What is there is not computed again, so a killed sweep goes on where it was.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from bmc_torchrl.analysis.scoring import measure
from bmc_torchrl.analysis.summaries import write_results
from bmc_torchrl.analysis.tables import load, load_metadata, save
from bmc_torchrl.errors import ResultsError

__all__ = ["Cell", "execute", "finished_cells", "keep", "mean_performance", "plan", "publish"]

Work = TypeVar("Work")


@dataclass(frozen=True)
class Cell:
    """Runs of one strategy that are computed together.

    Example:
        >>> str(Cell("grid_sarsa", "bmc", first_run=100, runs=50))
        'grid_sarsa bmc runs 100–149'
    """

    experiment: str
    label: str
    first_run: int
    runs: int

    @property
    def last_run(self) -> int:
        """The number of its last run."""
        return self.first_run + self.runs - 1

    def __str__(self) -> str:
        return f"{self.experiment} {self.label} runs {self.first_run}–{self.last_run}"


def finished_cells(output: str | Path, experiment: str) -> dict[Path, dict[str, Any]]:
    """How each finished cell of an experiment was made, by its file."""
    folder = Path(output) / experiment / "cells"
    return {path: load_metadata(path) for path in sorted(folder.glob("*.parquet"))}


def plan(
    output: str | Path,
    experiments: Sequence[str],
    labels: Sequence[str],
    runs: int,
    sizes: Mapping[str, int],
) -> Iterator[Cell]:
    """What is left to do, in the order of the experiments.

    Runs are cut at multiples of the experiment's batch size, whatever is finished: a cell is the
    same in a sweep that was interrupted and in one that was not. Where a sweep of fewer runs, or
    in smaller batches, came before, what it left out of a batch is a cell.
    """
    for experiment in experiments:
        finished = {
            (done["strategy"], run)
            for made in finished_cells(output, experiment).values()
            for done in made["cells"]
            for run in range(done["first_run"], done["last_run"] + 1)
        }
        for label, first in itertools.product(labels, range(0, runs, sizes[experiment])):
            batch = range(first, min(first + sizes[experiment], runs))
            left = [run for run in batch if (label, run) not in finished]
            for _, span in itertools.groupby(enumerate(left), lambda pair: pair[1] - pair[0]):
                together = [run for _, run in span]
                yield Cell(experiment, label, together[0], len(together))


def keep(
    output: str | Path,
    cell: Cell,
    table: pd.DataFrame,
    metadata: Mapping[str, Any],
    *,
    strategy: Mapping[str, Any],
    seconds: float,
) -> Path:
    """Write the results of a cell.

    Args:
        output: Where the sweep's files are.
        cell: What was computed.
        table: Its tidy table.
        metadata: What ``tables.provenance`` returns.
        strategy: The strategy's entry of the sweep: label, family, parameters.
        seconds: The wall time it took.

    Raises:
        ResultsError: If one of its runs is finished already, or an earlier cell was made with
            another config, or with another strategy of this label.
    """
    made = {"strategy": cell.label, "first_run": cell.first_run, "last_run": cell.last_run}
    made |= {"episodes": int(table["episode"].max()), "seconds": seconds}
    metadata = json.loads(json.dumps({**metadata, "strategies": [strategy], "cells": [made]}))
    for path, earlier in finished_cells(output, cell.experiment).items():
        alike = [other for other in earlier["cells"] if other["strategy"] == cell.label]
        changed = alike and metadata["strategies"][0] not in earlier["strategies"]
        if earlier["config"] != metadata["config"] or changed:
            raise ResultsError(
                f"{path} was made with another config; finish that sweep with its own config "
                "or choose another output folder"
            )
        if any(
            other["first_run"] <= cell.last_run and cell.first_run <= other["last_run"]
            for other in alike
        ):
            raise ResultsError(
                f"runs {cell.first_run}–{cell.last_run} of {cell.label!r} are already in {path}; "
                "ask plan for what is left"
            )
    name = f"{cell.label}.{cell.first_run:04d}-{cell.last_run:04d}.parquet"
    return save(table, Path(output) / cell.experiment / "cells" / name, metadata)


def publish(output: str | Path, experiment: str, target: str | Path) -> None:
    """Join an experiment's cells into its table, and write its small tables to `target`.

    The result does not depend on the order in which the cells were finished. Jobs that share an
    experiment publish one after the other, each all cells that there are by then: the last one
    publishes the whole.

    Raises:
        ResultsError: If there is no cell, or a cell, or a table already there, cannot be read, or
            that table holds runs the cells do not.
    """
    path = Path(output) / experiment / "table.parquet"
    if not finished_cells(output, experiment):
        raise ResultsError(f"{path.parent} holds no finished cell; run scripts/reproduce.py")
    with _only_one(path.with_suffix(".lock")):
        made = finished_cells(output, experiment)
        table = pd.concat([load(cell) for cell in made], ignore_index=True)
        table = table.sort_values(["strategy", "run", "episode"], ignore_index=True)
        if path.exists():
            _refuse_loss(load(path), table, path)
        save(table, path, _joined(list(made.values())))
        write_results(table, target, load_metadata(path))


def _refuse_loss(old: pd.DataFrame, new: pd.DataFrame, path: Path) -> None:
    there, kept = (set(zip(table["strategy"], table["run"], strict=True)) for table in (old, new))
    if there - kept:
        raise ResultsError(
            f"{path} holds {len(there - kept)} runs that are not among the cells and would be "
            "lost; move it away, or restore its cells, and publish again. Nothing was overwritten."
        )


def _joined(metadata: list[dict[str, Any]]) -> dict[str, Any]:
    """All cells and strategies; what else differs between cells becomes a list of its values."""
    joined: dict[str, Any] = {}
    for key in metadata[0]:
        texts = sorted({json.dumps(entry.get(key), sort_keys=True) for entry in metadata})
        values = [json.loads(text) for text in texts]
        if key in ("cells", "strategies"):
            joined[key] = list(itertools.chain.from_iterable(values))
        else:
            joined[key] = values[0] if len(values) == 1 else values
    return joined


@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """A section that one process at a time is in; the lock of a killed process is free."""
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def mean_performance(table: pd.DataFrame) -> str:
    """What is known from a table, in a few words."""
    judged = measure(table["experiment"].iloc[0])
    return f"{judged.label} {table[judged.column].mean():.2f} on average"


def execute(
    work: Sequence[Work],
    compute: Callable[[Work], str],
    *,
    workers: int,
    hours: float | None,
    console: Console,
) -> None:
    """Compute everything in `workers` processes, showing what is known so far.

    The processes end when this one does, however it ends.

    Args:
        work: what to do, in order.
        compute: does a piece of it and keeps the result; returns what is known by it. A function
            of a module, or a partial one.
        workers: number of processes.
        hours: nothing is started after so many hours.
        console: where the progress bar goes.
    """
    deadline = time.monotonic() + (float("inf") if hours is None else hours * 3600)
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    context = multiprocessing.get_context("spawn")
    waiting = iter(work)
    running: dict[Future[str], Work] = {}
    with (
        Progress(*columns, console=console) as bar,
        ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_parent) as pool,
    ):
        task = bar.add_task("finished", total=len(work))
        while True:
            free = workers - len(running) if time.monotonic() < deadline else 0
            for piece in itertools.islice(waiting, free):
                running[pool.submit(compute, piece)] = piece
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                bar.console.print(f"{running.pop(future)}: {future.result()}")
                bar.advance(task)


def _end_with_parent() -> None:
    """In a worker: end when the process that started it has ended, were it killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait_and_end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait_and_end, daemon=True).start()
