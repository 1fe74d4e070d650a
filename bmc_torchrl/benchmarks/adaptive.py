"""What it costs to adapt ε: the whole step with ε-BMC against the same step with a constant."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from bmc_torchrl.benchmarks.timing import EFFORT, cost
from bmc_torchrl.benchmarks.workloads import engine, train

MANY = 1.05
FIXED = 0.4
REPEATS = 7


def rows() -> Iterator[dict[str, Any]]:
    """DQN of 100 and 1000 runs, and tabular of 2200."""
    torch.set_num_threads(1)
    for runs in (100, 1000):
        works = []
        for constant in (None, FIXED):
            torch.compiler.reset()
            made = engine("cart_dqn", EFFORT.count(runs, least=2), constant=constant, episodes=2000)
            train(made, 70)
            steps = EFFORT.count(20_000 // runs, least=5)
            works.append(partial(_train, made, steps))
        ours, peer = _in_turns(*works)
        work = f"adaptive against fixed ε, cart-pole DQN, {runs} runs, seconds per run-step"
        yield cost(work, ours, peer, MANY)
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


def _train(made: Any, steps: int) -> float:
    began = time.process_time()
    taken = train(made, steps)
    return (time.process_time() - began) / (taken * made.runs)


def _tabular(runs: int, tests: int, constant: float | None) -> float:
    steps = EFFORT.count(1000, least=200)
    made = engine("cart_sarsa", runs, tests=tests, constant=constant)
    began = time.process_time()
    made.advance(steps)
    seconds = time.process_time() - began
    return seconds / (runs * steps + float(made.steps.nansum()) * tests)
