"""What every peer script shares: its arguments, its clock and its one line of JSON.

Needs nothing beyond Python, so that it works in every peer's own environment. The clock is the
processor time of the process, which is single-threaded and pinned: on an idle core it is the
time on the wall, on a busy one it leaves out what others took.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable

# The problem of the "single" section, the same for every library.
HIDDEN, BATCH, CAPACITY, GAMMA, RATE = 64, 64, 10_000, 0.99, 5e-4
TARGET_INTERVAL, LEARNING_STARTS, WARM_UP = 500, 64, 500


def arguments(**extra: type) -> argparse.Namespace:
    """Parse --seconds, --steps, --seed, --core, --warm-up and `extra`; pin the process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=10**9, help="at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--core", type=int)
    parser.add_argument("--warm-up", type=int, default=WARM_UP)
    for name, kind in extra.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind)
    parsed = parser.parse_args()
    if parsed.core is not None:
        os.sched_setaffinity(0, {parsed.core})
    return parsed


def report(steps: int, seconds: float, **more: object) -> None:
    print(json.dumps({"steps": steps, "seconds": seconds, **more}), flush=True)


def measure(advance: Callable[[int], object], parsed: argparse.Namespace, chunk: int) -> None:
    """Call `advance(chunk)` until the time or the steps are used up, and report."""
    advance(parsed.warm_up)
    steps, began = 0, time.process_time()
    while (elapsed := time.process_time() - began) < parsed.seconds and steps < parsed.steps:
        advance(chunk)
        steps += chunk
    report(steps, elapsed)
