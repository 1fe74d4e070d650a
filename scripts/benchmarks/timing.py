"""Ratios of times that were measured side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any


def seconds(work: Callable[[], object], calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - began) / calls


def interleaved(
    ours: Callable[[], object], peer: Callable[[], object], *, calls: int, repeats: int = 7
) -> tuple[float, float]:
    """Median seconds per call of both, taken in turns after a warm-up."""
    ours()
    peer()
    pairs = [(seconds(ours, calls), seconds(peer, calls)) for _ in range(repeats)]
    mine, theirs = zip(*pairs, strict=True)
    return statistics.median(mine), statistics.median(theirs)


def row(
    work: str, ours: float, peer: float, goal: float, *, at_most: bool = True
) -> dict[str, Any]:
    """A row whose ratio is ours / peer (a cost, `at_most`) or peer / ours (a speed-up)."""
    ratio = ours / peer if at_most else peer / ours
    met = ratio <= goal if at_most else ratio >= goal
    sign = "≤" if at_most else "≥"
    return {
        "work": work,
        "ours": ours,
        "peer": peer,
        "ratio": ratio,
        "goal": f"{sign} {goal:g}",
        "met": met,
    }
