"""Steps per second of the three domains beside Gymnasium's vector CartPole, on one core.

The clock is the processor time of this one thread, and ours and Gymnasium's are measured in turns
(the median is reported), so a busy machine hurts little.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch

from bmc_torchrl.benchmarks.timing import EFFORT, speed
from bmc_torchrl.envs import CartPoleEnv, SubgoalGridEnv, SupplyChainEnv
from bmc_torchrl.envs.base import BatchedEnv

DOMAINS = {
    "grid-world": SubgoalGridEnv,
    "cart-pole": CartPoleEnv,
    "supply-chain": SupplyChainEnv,
}
BATCHES = (1, 100, 2200, 22000)
GOAL_BATCH, GOAL = 2200, 50.0
TURNS, SECONDS = 5, 0.3

Row = dict[str, Any]


def steps_per_second(step: Callable[[], None], batch: int) -> float:
    count, start = 0, time.process_time()
    while (elapsed := time.process_time() - start) < SECONDS * EFFORT.share:
        step()
        count += 1
    return batch * count / elapsed


def our_step(env: BatchedEnv) -> Callable[[], None]:
    """A step and its auto-reset, with actions drawn beforehand, as for Gymnasium."""
    action = env.action_spec.rand()
    carrier = env.reset()

    def step() -> None:
        nonlocal carrier
        _, carrier = env.step_and_maybe_reset(carrier.set("action", action))

    return step


def gymnasium_step(batch: int) -> Callable[[], None]:
    env = gymnasium.make_vec("CartPole-v1", num_envs=batch, vectorization_mode="sync")
    env.reset(seed=0)
    action = np.random.default_rng(0).integers(2, size=batch)
    return lambda: env.step(action) and None


def compare(env: BatchedEnv, peer: Callable[[], None], batch: int) -> tuple[float, float, float]:
    ours = our_step(env)
    for _ in range(5):
        ours()
        peer()
    turns = [
        (steps_per_second(ours, batch), steps_per_second(peer, batch))
        for _ in range(TURNS if EFFORT.repeats > 1 else 1)
    ]
    medians = [statistics.median(column) for column in zip(*turns, strict=True)]
    return medians[0], medians[1], statistics.median(a / b for a, b in turns)


def rows(batches: Sequence[int] = BATCHES) -> Iterator[Row]:
    """Rows: work, ours and peer in steps per second, their ratio, the goal, and whether met."""
    torch.set_num_threads(1)
    for batch in batches:
        peer = gymnasium_step(batch)
        for name, domain in DOMAINS.items():
            for observation in ("state", "encoded"):
                for mode in ("eager", "compiled"):
                    torch.compiler.reset()
                    env = domain(batch_size=[batch], observation=observation)
                    if mode == "compiled":
                        env.compile(fullgraph=True, warmup=2)
                    ours, theirs, ratio = compare(env, peer, batch)
                    goal = GOAL if (batch, mode) == (GOAL_BATCH, "compiled") else None
                    work = f"{name}, {observation}, {mode}, batch {batch}, steps/s"
                    yield {**speed(work, ours, theirs, goal), "ratio": ratio}
