"""Tabular expected SARSA with ε-BMC against a bare numba loop: training, and greedy tests.

Both sides start from fresh tables, made outside the clock, and take the same number of training
steps. The time of the tests is that of training with 10 tests per episode less that of the same
training without.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from bmc_torchrl.benchmarks.peers import numba_loops as bare
from bmc_torchrl.benchmarks.timing import EFFORT, speed
from bmc_torchrl.benchmarks.workloads import engine, torch_tabular

RUNS, STEPS, TESTS, GOAL = 2200, 1000, 10, 0.5
DOMAINS = {"cart-pole": "cart_sarsa", "supply-chain": "supply_sarsa"}


class Taken(NamedTuple):
    """Seconds of some training, and how many test steps were in them."""

    seconds: float
    tested: float


def rows() -> Iterator[dict[str, Any]]:
    """Training steps and test steps per second, of each domain."""
    runs, steps = EFFORT.count(RUNS, least=4), EFFORT.count(STEPS, least=400)
    for domain in DOMAINS:
        yield from _domain(domain, runs, steps)
        yield _tensors(domain, max(runs // 10, 4), steps)


def _domain(domain: str, runs: int, steps: int) -> Iterator[dict[str, Any]]:
    sides: dict[str, Callable[[int, int, int], Taken]] = {
        "ours": lambda *sizes: _ours(domain, *sizes),
        "peer": lambda *sizes: _bare(domain, *sizes),
    }
    for side in sides.values():
        side(2, 300, TESTS)
        side(2, 300, 0)
    trained, tested = ({name: [] for name in sides} for _ in range(2))
    for _ in range(EFFORT.repeats):
        for name, side in sides.items():
            plain, full = side(runs, steps, 0), side(runs, steps, TESTS)
            trained[name].append(runs * steps / plain.seconds)
            tested[name].append(full.tested / max(full.seconds - plain.seconds, 1e-9))
    for what, found in (("run-steps/s", trained), ("greedy test steps/s", tested)):
        ours, peer = (statistics.median(found[name]) for name in sides)
        yield speed(f"tabular {domain}, {runs} runs, {what}, against bare numba", ours, peer, GOAL)


def _ours(domain: str, runs: int, steps: int, tests: int) -> Taken:
    made = engine(DOMAINS[domain], runs, tests=tests)
    began = time.process_time()
    made.advance(steps)
    seconds = time.process_time() - began
    return Taken(seconds, float(made.steps.nansum()) * tests)


def _bare(domain: str, runs: int, steps: int, tests: int) -> Taken:
    random = np.random.default_rng(0)
    if domain == "cart-pole":
        tables = np.zeros((runs, bare.CART_STATES, 2), np.float32)
        arrays = (tables, np.zeros(tables.shape[:2], np.int16), steps, tests, 1)
        work: Callable[..., tuple[int, float]] = bare.cart_pole
    else:
        shape = (runs, bare.SUPPLY_STATES, 100)
        tables = 0.1 * random.standard_normal(shape, np.float32)
        best, sums = tables.argmax(-1).astype(np.int16), tables.sum(-1, dtype=np.float64)
        arrays = (tables, best, sums, steps, tests, 1, bare.POISSON)
        work = bare.supply_chain
    began = time.process_time()
    tested, _ = work(*arrays)
    return Taken(time.process_time() - began, tested)


def _tensors(domain: str, runs: int, steps: int) -> dict[str, Any]:
    """The engine on tensors, tests included, as training calls it; beside the one in numba."""
    made = torch_tabular(DOMAINS[domain], runs, TESTS)
    made.advance(100)
    before = float(made.steps.nansum())
    began = time.process_time()
    made.advance(steps)
    seconds = time.process_time() - began
    total = runs * steps + (float(made.steps.nansum()) - before) * TESTS
    numba = _ours(domain, runs, steps, TESTS)
    work = f"tabular {domain}, {runs} runs, tests included, steps/s, torch against our numba"
    return speed(work, total / seconds, (runs * steps + numba.tested) / numba.seconds, None)
