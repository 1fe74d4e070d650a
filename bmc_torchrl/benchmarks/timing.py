"""Ratios of times that were measured side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Effort:
    """How much is measured; ``benchmark.py --quick`` only shows that everything runs.

    Attributes:
        seconds: processor time of one measurement.
        repeats: measurements of which the median is taken.
        share: of the runs and steps of in-process measurements.
        timeout: of a peer's process, in seconds.
    """

    seconds: float = 8.0
    repeats: int = 3
    share: float = 1.0
    timeout: float = 1800.0

    def hurry(self) -> None:
        """As little as possible; what takes long to compile runs eagerly."""
        self.seconds, self.repeats, self.share = 0.2, 1, 0.02
        torch.compiler.set_stance("force_eager")

    def count(self, number: int, least: int = 1) -> int:
        """`number`, or the share of it that is asked for."""
        return max(int(number * self.share), least)


EFFORT = Effort()


def seconds(work: Callable[[], object], calls: int) -> float:
    """Processor time of one call."""
    began = time.process_time()
    for _ in range(calls):
        work()
    return (time.process_time() - began) / calls


def interleaved(
    ours: Callable[[], object], peer: Callable[[], object], *, calls: int, repeats: int = 7
) -> tuple[float, float]:
    """Median seconds of a call of both, taken in turns after a warm-up."""
    ours()
    peer()
    pairs = [(seconds(ours, calls), seconds(peer, calls)) for _ in range(repeats)]
    mine, theirs = zip(*pairs, strict=True)
    return statistics.median(mine), statistics.median(theirs)


def speed(work: str, ours: float, peer: float | Exception, goal: float | None) -> dict[str, Any]:
    """A row of two rates, ratio ours / peer; says so where the peer could not be measured."""
    if isinstance(peer, Exception):
        missing = float("nan")
        work = f"{work}: not measured, {str(peer).splitlines()[0]}"
        return _row(work, ours, missing, missing, "≥", goal)
    return _row(work, ours, peer, ours / peer, "≥", goal)


def cost(work: str, ours: float, peer: float, goal: float | None) -> dict[str, Any]:
    """A row of two costs, ratio ours / peer, with a goal that may be None."""
    return _row(work, ours, peer, ours / peer, "≤", goal)


def _row(
    work: str, ours: float, peer: float, ratio: float, sign: str, goal: float | None
) -> dict[str, Any]:
    met = None
    if goal is not None and ratio == ratio:
        met = ratio >= goal if sign == "≥" else ratio <= goal
    return {
        "work": work,
        "ours": ours,
        "peer": peer,
        "ratio": ratio,
        "goal": "" if goal is None else f"{sign} {goal:g}",
        "met": met,
    }
