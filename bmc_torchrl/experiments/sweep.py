"""A sweep: which cells are left, computing them in processes, joining what they give.

A *cell* is a strategy and a range of runs; its results are one Parquet file, which says how they
were made. What is there is not computed again, so a killed sweep goes on where it was.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from bmc_torchrl.analysis.scoring import measure
from bmc_torchrl.analysis.summaries import read_results, write_results
from bmc_torchrl.analysis.tables import load, load_metadata, save
from bmc_torchrl.errors import ResultsError
from bmc_torchrl.experiments.configs import differences, flat
from bmc_torchrl.experiments.locks import one_at_a_time
from bmc_torchrl.signals import Interrupted

__all__ = [
    "Cell",
    "borrow",
    "execute",
    "finished_cells",
    "finished_runs",
    "keep",
    "mean_performance",
    "plan",
    "publish",
    "refuse_fewer",
    "require_new",
    "require_same",
]

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
    found = {path: load_metadata(path) for path in sorted(folder.glob("*.parquet"))}
    for path, made in found.items():
        if not {"cells", "strategies", "config", "seed"} <= made.keys():
            raise ResultsError(f"{path} is no part of a sweep; move it out of that folder")
    return found


def finished_runs(output: str | Path, experiment: str) -> set[tuple[str, int]]:
    """The strategies and runs that are finished."""
    return {
        (done["strategy"], run)
        for made in finished_cells(output, experiment).values()
        for done in made["cells"]
        for run in range(done["first_run"], done["last_run"] + 1)
    }


def require_same(
    output: str | Path, experiment: str, metadata: Mapping[str, Any], strategies: Sequence[Any]
) -> None:
    """What is finished can be read, and was made as what is left would be.

    Args:
        output: Where the sweep's files are.
        experiment: Its name.
        metadata: Config and seed, as in what ``tables.provenance`` returns.
        strategies: The entries of the sweep that are asked for.

    Raises:
        ResultsError: If not; it names the file, and every setting with both values.
    """
    for path, made in finished_cells(output, experiment).items():
        load(path)
        _refuse_different(path, made, metadata, strategies)


def _refuse_different(
    path: Path, made: Mapping[str, Any], now: Mapping[str, Any], strategies: Sequence[Any]
) -> None:
    different = _different(made, now, strategies)
    if different:
        raise ResultsError(
            f"{path} was made with other settings ({different}); finish that sweep with its "
            "own, or choose another output="
        )


def _different(
    made: Mapping[str, Any], now: Mapping[str, Any], strategies: Sequence[Mapping[str, Any]]
) -> str:
    """What differs between how a cell was made and what is asked for now."""

    def told(of: Mapping[str, Any], entries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        common = {name: of["config"][name] for name in now["config"] if name in made["config"]}
        named = {entry["label"]: dict(entry) for entry in entries if entry["label"] in labels}
        return flat({**common, "seed": of["seed"], "strategy": named})

    labels = {entry["label"] for entry in made["strategies"]}
    labels &= {entry["label"] for entry in strategies}
    return differences(told(made, made["strategies"]), told(now, strategies))


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
        finished = finished_runs(output, experiment)
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
            another config, another seed, or another strategy of this label.
    """
    made = {"strategy": cell.label, "first_run": cell.first_run, "last_run": cell.last_run}
    made |= {"episodes": int(table["episode"].max()), "seconds": seconds}
    metadata = json.loads(json.dumps({**metadata, "strategies": [strategy], "cells": [made]}))
    for path, earlier in finished_cells(output, cell.experiment).items():
        _refuse_different(path, earlier, metadata, metadata["strategies"])
        if any(
            other["first_run"] <= cell.last_run and cell.first_run <= other["last_run"]
            for other in earlier["cells"]
            if other["strategy"] == cell.label
        ):
            raise ResultsError(
                f"runs {cell.first_run}–{cell.last_run} of {cell.label!r} are already in {path}; "
                "ask plan for what is left"
            )
    name = f"{cell.label}.{cell.first_run:04d}-{cell.last_run:04d}.parquet"
    return save(table, Path(output) / cell.experiment / "cells" / name, metadata)


def borrow(
    output: str | Path,
    experiment: str,
    lender: str,
    labels: Collection[str],
    config: Mapping[str, Any],
) -> None:
    """Copy finished cells of one experiment into another that computes them in the same way.

    Args:
        output: Where the sweep's files are.
        experiment: Which borrows; runs that it has are left as they are.
        lender: Which lends.
        labels: The strategies that are the same in both.
        config: What the copies say they were made with.
    """
    finished = finished_runs(output, experiment)
    for path, made in finished_cells(output, lender).items():
        (cell,) = made["cells"]
        runs = range(cell["first_run"], cell["last_run"] + 1)
        if cell["strategy"] in labels and finished.isdisjoint((cell["strategy"], r) for r in runs):
            table = load(path).assign(experiment=experiment)
            save(
                table,
                Path(output) / experiment / "cells" / path.name,
                {**made, "config": dict(config)},
            )


def publish(output: str | Path, experiment: str, target: str | Path | None = None) -> Path:
    """Join an experiment's cells into its table, and make its small tables beside it.

    The result does not depend on the order in which the cells were finished. Jobs that share an
    experiment publish one after the other, each all cells that there are by then: the last one
    publishes the whole.

    Args:
        output: Where the sweep's files are.
        experiment: Its name.
        target: Where the small tables go too, such as ``results/grid_sarsa``.

    Returns:
        Where the small tables are.

    Raises:
        ResultsError: If there is no cell, or a cell, or a table already there, cannot be read, or
            that table holds runs the cells do not, or the target holds more than they do.
    """
    path = Path(output) / experiment / "table.parquet"
    if not finished_cells(output, experiment):
        raise ResultsError(f"{path.parent} holds no finished cell; run bmc reproduce")
    with one_at_a_time(path.with_suffix(".lock")):
        made = finished_cells(output, experiment)
        table = pd.concat([load(cell) for cell in made], ignore_index=True)
        table = table.sort_values(["strategy", "run", "episode"], ignore_index=True)
        if path.exists():
            _refuse_loss(load(path), table, path)
        save(table, path, _joined(list(made.values())))
        metadata = load_metadata(path)
        write_results(table, path.parent, metadata)
        if target is not None:
            counted = table.groupby("strategy")[["run", "episode"]].nunique()
            sizes = zip(counted.index, counted["run"], counted["episode"], strict=True)
            refuse_fewer(Path(target), {label: (runs, most) for label, runs, most in sizes})
            write_results(table, target, metadata)
    return path.parent if target is None else Path(target)


def refuse_fewer(folder: Path, sizes: Mapping[str, tuple[int, int]]) -> None:
    """Results are not replaced by those of fewer strategies, runs or episodes.

    Args:
        folder: Where results may be, such as ``results/grid_sarsa``.
        sizes: Runs and episodes of each strategy that would be written there.

    Raises:
        ResultsError: If the folder holds more.
    """
    if not (folder / "summary.csv").exists():
        return
    old = read_results(folder).summary.set_index("strategy")
    lost = [
        label
        for label, row in old.iterrows()
        if row["runs"] > sizes.get(label, (0, 0))[0] or row["episodes"] > sizes[label][1]
    ]
    if lost:
        have, given = (
            f"{len(counts)} strategies of up to {max(r for r, _ in counts)} runs and "
            f"{max(e for _, e in counts)} episodes"
            for counts in (list(zip(old["runs"], old["episodes"], strict=True)), [*sizes.values()])
        )
        raise ResultsError(
            f"{folder} holds {have}, and would lose results of {len(lost)} strategies to these "
            f"{given}. Nothing was overwritten; leave results= out, or name another folder"
        )


def require_new(path: Path) -> None:
    """Raise :class:`ResultsError` if `path`, which would be published, exists already."""
    if path.exists():
        raise ResultsError(
            f"{path} exists and is not overwritten; move it away, leave results= out, or name "
            "another folder"
        )


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
        workers: number of processes; with one, the work is done in this one.
        hours: nothing is started after so many hours.
        console: where the progress bar goes.
    """
    deadline = time.monotonic() + (float("inf") if hours is None else hours * 3600)
    columns = (
        MofNCompleteColumn(),
        TextColumn("finished"),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    waiting = iter(work)
    running: dict[Future[str], Work] = {}
    with Progress(*columns, console=console) as bar, _processes(workers) as pool:
        task = bar.add_task("", total=len(work))
        while True:
            free = workers - len(running) if time.monotonic() < deadline else 0
            for piece in itertools.islice(waiting, free):
                with _deaf_children():
                    running[pool.submit(compute, piece)] = piece
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                bar.console.print(f"{running.pop(future)}: {future.result()}")
                bar.advance(task)


class _ThisProcess(Executor):
    """Does a piece of work where it is handed over."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*args, **options))
        return done


@contextlib.contextmanager
def _processes(number: int) -> Iterator[Executor]:
    """A pool whose processes are killed where this one is asked to end; one needs no other."""
    if number == 1:
        yield _ThisProcess()
        return
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(number, mp_context=context, initializer=_end_with_parent)
    try:
        yield pool
    except Interrupted:
        for child in set(multiprocessing.active_children()) - others:
            child.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _deaf_children() -> Iterator[None]:
    """Processes started here do not hear Ctrl-C, which a terminal sends to all: they are ended."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent() -> None:
    """In a worker: end when the process that started it has ended, were it killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait_and_end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait_and_end, daemon=True).start()
