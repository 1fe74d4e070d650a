"""A sweep: which cells are left, computing them in processes, joining what they give."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import cloudpickle  # type: ignore[import-untyped]
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
from bmc_torchrl.analysis.summaries import write_results
from bmc_torchrl.analysis.tables import load_metadata, tidy
from bmc_torchrl.experiments.sweep_cells import TableParts
from bmc_torchrl.lockstep.interface import Engine

__all__ = ["Batch", "execute", "finished_table", "parts_of", "plan", "publish"]

CHUNK_STEPS = 2000


@dataclass(frozen=True)
class Batch:
    """Runs of one strategy, or of several joined by ``+``, that are computed together."""

    experiment: str
    label: str
    first_run: int
    runs: int

    @property
    def labels(self) -> list[str]:
        """The strategies; each has `runs` runs."""
        return self.label.split("+")

    def __str__(self) -> str:
        last = self.first_run + self.runs - 1
        return f"{self.experiment} {self.label} runs {self.first_run}–{last}"


def parts_of(output: str | Path, experiment: str) -> TableParts:
    """Where the finished cells of an experiment are kept."""
    return TableParts(Path(output) / experiment / "table.parts")


def plan(
    output: str | Path,
    experiments: Sequence[str],
    labels: Sequence[str],
    runs: int,
    sizes: Mapping[str, int],
    stack: int = 1,
) -> Iterator[Batch]:
    """What is left to do, in the order of the experiments.

    Runs are cut at multiples of the experiment's batch size, and strategies into stacks of so many
    as are computed side by side, whatever is finished: a batch is the same in a sweep that was
    interrupted and in one that was not. Where a sweep of fewer runs, or in smaller batches, came
    before, what it left out of a batch is a batch.
    """
    stacks = [labels[first : first + stack] for first in range(0, len(labels), stack)]
    for experiment in experiments:
        left = parts_of(output, experiment).missing(labels, range(runs))
        for together in stacks:
            for first in range(0, runs, sizes[experiment]):
                cut = range(first, min(first + sizes[experiment], runs))
                spans = {
                    label: _spans([run for run in left.get(label, ()) if run in cut])
                    for label in together
                }
                for span in dict.fromkeys(itertools.chain.from_iterable(spans.values())):
                    due = [label for label in together if span in spans[label]]
                    yield Batch(experiment, "+".join(due), *span)


def _spans(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Where consecutive numbers start, and how many they are.

    >>> _spans([0, 1, 4, 5, 6])
    [(0, 2), (4, 3)]
    """
    starts = [n for i, n in enumerate(numbers) if i == 0 or numbers[i - 1] != n - 1]
    ends = [n for i, n in enumerate(numbers) if i + 1 == len(numbers) or numbers[i + 1] != n + 1]
    return [(start, end - start + 1) for start, end in zip(starts, ends, strict=True)]


def finished_table(batch: Batch, engine: Engine) -> pd.DataFrame:
    """Run `engine` to its end; the tidy table of its results."""
    while not engine.finished:
        engine.advance(CHUNK_STEPS)
    found = (engine.steps, engine.returns, engine.epsilons)
    shape = (len(batch.labels), batch.runs, -1)
    arrays = (values.reshape(shape).cpu().numpy() for values in found)
    return tidy(batch.experiment, batch.labels, *arrays, first_run=batch.first_run)


def execute(
    batches: Sequence[Batch],
    compute: Callable[[Batch], float],
    *,
    workers: int,
    hours: float | None,
    console: Console,
) -> None:
    """Compute `batches` in `workers` processes, showing what is known so far.

    The processes end when this one does, however it ends.

    Args:
        batches: what to do, in order.
        compute: computes a batch and keeps it; returns its mean performance.
        workers: number of processes.
        hours: no batch is started after so many hours.
        console: where the progress bar goes.
    """
    deadline = time.monotonic() + (float("inf") if hours is None else hours * 3600)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    context = multiprocessing.get_context("spawn")
    # By value where it must be: in a launcher's job the script is no module that can be imported.
    pickled = cloudpickle.dumps(compute)
    waiting = iter(batches)
    running: dict[Future[float], Batch] = {}
    with (
        Progress(*columns, console=console) as bar,
        ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_parent) as pool,
    ):
        task = bar.add_task("batches", total=len(batches))
        while True:
            while len(running) < workers and time.monotonic() < deadline:
                batch = next(waiting, None)
                if batch is None:
                    break
                running[pool.submit(_call, pickled, batch)] = batch
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                batch = running.pop(future)
                judged = measure(batch.experiment)
                bar.console.print(f"{batch}: {judged.label} {future.result():.2f} on average")
                bar.advance(task)


def _call(pickled: bytes, batch: Batch) -> float:
    return float(cloudpickle.loads(pickled)(batch))


def _end_with_parent() -> None:
    """In a worker: end when the process that started it has ended, were it killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait_and_end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait_and_end, daemon=True).start()


def publish(output: str | Path, experiment: str, target: str | Path) -> None:
    """Join the parts of an experiment into its table, and write its small tables to `target`.

    Jobs that share an experiment publish one after the other, each all parts that there are by
    then: the last one publishes the whole.
    """
    parts = parts_of(output, experiment)
    path = Path(output) / experiment / "table.parquet"
    with _only_one(path.with_suffix(".lock")):
        table = parts.merge(path)
        write_results(table, target, load_metadata(path), timings=parts.cells())


@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """A section that one process at a time is in; the lock of a killed process is free."""
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
