"""The paper's DQN, training steps alone, against the same runs in other ways."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from bmc_torchrl.benchmarks.processes import ask, in_turns, rate
from bmc_torchrl.benchmarks.timing import EFFORT, cost, speed
from bmc_torchrl.benchmarks.workloads import (
    engine,
    run_steps_per_second,
    tensor_steps_per_second,
    torch_dqn,
)

RUNS, EPISODES = 8, 100_000
TENSORS, ALONE, JAX = "the torch engine", "one by one, eager torch", "purejaxrl-style JAX"
FIRST_STEP = 15.0


class Case(NamedTuple):
    """An experiment, how many runs the torch engine has of it, and the goals against each peer."""

    name: str
    domain: str
    runs: int
    goals: dict[str, float]


CASES = (
    Case("cart_dqn", "cart-pole", 1000, {TENSORS: 2.5, ALONE: 40.0, JAX: 2.0}),
    Case("grid_dqn", "grid-world", 100, {TENSORS: 2.0, ALONE: 10.0}),
    Case("supply_dqn", "supply-chain", 25, {TENSORS: 2.5, ALONE: 1.5}),
)


def rows() -> Iterator[dict[str, Any]]:
    """Run-steps per second of each domain against its peers, and the wait for the first step."""
    torch.set_num_threads(1)
    for case in CASES:
        yield from _speeds(case)
        yield from _starts(case)


def _speeds(case: Case) -> Iterator[dict[str, Any]]:
    torch.compiler.reset()
    count = EFFORT.count(case.runs, least=2)
    ours = engine(case.name, RUNS, tests=0, episodes=EPISODES)
    tensors = torch_dqn(case.name, count, episodes=EPISODES)
    run_steps_per_second(ours, EFFORT.seconds / 8)
    tensor_steps_per_second(tensors, EFFORT.seconds / 8)
    peers = {
        TENSORS: partial(tensor_steps_per_second, tensors, EFFORT.seconds),
        ALONE: partial(rate, "torch_loop", "--domain", case.name.removesuffix("_dqn")),
        JAX: partial(rate, "jax_dqn", "--runs", count, environment="jax"),
    }
    works = {"ours": partial(run_steps_per_second, ours, EFFORT.seconds)}
    found = in_turns(works | {peer: peers[peer] for peer in case.goals})
    for peer, goal in case.goals.items():
        many = f" of {count} runs" if peer != ALONE else ""
        work = f"{case.domain} DQN, run-steps/s, against {peer}{many}"
        yield speed(work, found["ours"], found[peer], goal)


def _starts(case: Case) -> Iterator[dict[str, Any]]:
    seconds: dict[str, list[float]] = {"nothing": [], "everything": []}
    for _ in range(EFFORT.repeats):
        with tempfile.TemporaryDirectory() as folder:
            for found in seconds.values():
                cache = {"NUMBA_CACHE_DIR": folder}
                answer = ask("ours_start", "--name", case.name, variables=cache)
                found.append(answer["seconds"])
    for what, goal in (("nothing", FIRST_STEP), ("everything", None)):
        work = f"{case.domain} DQN, seconds to the first step, {what} compiled before"
        yield cost(work, statistics.median(seconds[what]), 1.0, goal)
