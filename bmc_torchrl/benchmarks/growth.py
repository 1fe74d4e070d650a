"""How time grows with the number of runs and of states; every ratio is large against small."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDict

from bmc_torchrl import BMCEpsilon
from bmc_torchrl.benchmarks.timing import EFFORT, cost, interleaved
from bmc_torchrl.benchmarks.workloads import engine, run_steps_per_second

FEW, MANY, FLAT = 100, 2200, 1.2
STATES = (10, 1000, 100_000)


def rows() -> Iterator[dict[str, Any]]:
    """Time per run-step of 2200 runs against 100, and of many states against ten."""
    torch.set_num_threads(1)
    for name, domain in (("cart_sarsa", "cart-pole"), ("supply_sarsa", "supply-chain")):
        yield _row(f"{domain} tabular", *_tabular(name))
    yield _row("cart-pole DQN", *(_dqn(EFFORT.count(n, 2)) for n in (MANY, FEW)))
    yield from _states()


def _row(what: str, many: float, few: float) -> dict[str, Any]:
    work = f"growth, {what}, seconds per run-step at {MANY} runs against {FEW}"
    return cost(work, many, few, FLAT)


def _tabular(name: str) -> tuple[float, float]:
    """2200 runs at once and 100 at a time, as many steps of each run and as many runs in all."""
    engine(name, 2, tests=0).advance(10)
    steps, found = EFFORT.count(1000, least=100), {MANY: [], FEW: []}
    for _ in range(EFFORT.repeats):
        for size, times in found.items():
            runs, seconds = EFFORT.count(size, 2), 0.0
            for _ in range(MANY // size):
                made = engine(name, runs, tests=0)
                began = time.process_time()
                made.advance(steps)
                seconds += time.process_time() - began
            times.append(seconds / (MANY // size * runs * steps))
    return statistics.median(found[MANY]), statistics.median(found[FEW])


def _dqn(runs: int) -> float:
    made = engine("cart_dqn", runs, tests=0, episodes=2000)
    made.advance(70)
    rates = [run_steps_per_second(made, EFFORT.seconds) for _ in range(EFFORT.repeats)]
    return 1 / statistics.median(rates)


def _states(runs: int = 10) -> Iterator[dict[str, Any]]:
    works = {}
    for states in STATES:
        strategy = BMCEpsilon(num_states=states, batch_shape=[runs])
        columns = {
            "greedy_return": torch.rand(runs) + 1,
            "uniform_return": torch.rand(runs),
            "state": torch.randint(states, (runs,)),
        }
        data = TensorDict(columns, [runs])
        works[states] = {
            "update": lambda strategy=strategy, data=data: strategy.update(data),
            "ε": lambda strategy=strategy, data=data: strategy.epsilon(data),
        }
    for what in ("update", "ε"):
        for states in STATES[1:]:
            many, few = interleaved(
                works[states][what], works[STATES[0]][what], calls=EFFORT.count(500, 5)
            )
            work = f"growth, state-dependent ε-BMC {what}, seconds at {states} states against 10"
            yield cost(work, many, few, FLAT)
