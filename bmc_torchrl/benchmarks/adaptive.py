"""What it costs to adapt ε: the whole step with ε-BMC against the same step with a constant."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from bmc_torchrl.benchmarks.timing import EFFORT, cost
from bmc_torchrl.benchmarks.workloads import engine, run_steps_per_second

MANY = 1.05
FIXED = 0.4
DQN_RUNS = 8
DQN = {"cart_dqn": "cart-pole", "grid_dqn": "grid-world", "supply_dqn": "supply-chain"}
REPEATS = 7


def rows() -> Iterator[dict[str, Any]]:
    """The three DQN, and tabular of 2200 runs."""
    for name, domain in DQN.items():
        works = []
        for constant in (None, FIXED):
            made = engine(name, DQN_RUNS, constant=constant, tests=0, episodes=100_000)
            run_steps_per_second(made, EFFORT.seconds / 8)
            works.append(partial(_seconds_per_step, made))
        ours, peer = _in_turns(*works)
        yield cost(
            f"adaptive against fixed ε, {domain} DQN, seconds per run-step", ours, peer, MANY
        )
    for tests, what in ((10, "tests included"), (0, "training alone")):
        runs = EFFORT.count(2200, least=4)
        _tabular(2, tests, None)
        sides = (partial(_tabular, runs, tests, constant) for constant in (None, FIXED))
        ours, peer = _in_turns(*sides)
        work = f"adaptive against fixed ε, cart-pole tabular, {runs} runs, {what}, seconds per step"
        yield cost(work, ours, peer, MANY)


def _in_turns(ours: Callable[[], float], peer: Callable[[], float]) -> tuple[float, float]:
    repeats = max(EFFORT.repeats, REPEATS) if EFFORT.repeats > 1 else 1
    pairs = [(ours(), peer()) for _ in range(repeats)]
    mine, theirs = zip(*pairs, strict=True)
    return statistics.median(mine), statistics.median(theirs)


def _seconds_per_step(made: Any) -> float:
    return 1 / run_steps_per_second(made, EFFORT.seconds / 4)


def _tabular(runs: int, tests: int, constant: float | None) -> float:
    steps = EFFORT.count(1000, least=200)
    made = engine("cart_sarsa", runs, tests=tests, constant=constant)
    began = time.process_time()
    made.advance(steps)
    seconds = time.process_time() - began
    return seconds / (runs * steps + float(made.steps.nansum()) * tests)
