"""The paper's DQN for many runs, training steps alone, against the same runs in other ways."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from bmc_torchrl.benchmarks.processes import in_turns, rate
from bmc_torchrl.benchmarks.timing import EFFORT, speed
from bmc_torchrl.benchmarks.workloads import engine, run_steps_per_second, train

CASES = (
    ("cart_dqn", "cart-pole", 1000, 40.0),
    ("grid_dqn", "grid-world", 100, 10.0),
    ("supply_dqn", "supply-chain", 10, 1.5),
    ("supply_dqn", "supply-chain", 25, 1.5),
)
JAX_GOAL = 0.8
EPISODES = 2000


def rows() -> Iterator[dict[str, Any]]:
    """Run-steps per second of each domain, one by one eager, and of cart-pole in JAX."""
    torch.set_num_threads(1)
    for name, domain, runs, goal in CASES:
        torch.compiler.reset()
        count = EFFORT.count(runs, least=2)
        ours = engine(name, count, episodes=EPISODES)
        train(ours, EFFORT.count(300, least=70))
        works = {
            "ours": partial(run_steps_per_second, ours, EFFORT.seconds),
            "one by one, eager torch": partial(
                rate, "torch_loop", "--domain", name.removesuffix("_dqn")
            ),
        }
        if name == "cart_dqn":
            works["purejaxrl-style JAX"] = partial(
                rate, "jax_dqn", "--runs", count, environment="jax"
            )
        found = in_turns(works)
        for peer in list(works)[1:]:
            work = f"{domain} DQN, {count} runs, run-steps/s, against {peer}"
            aim = JAX_GOAL if "JAX" in peer else goal
            yield speed(work, found["ours"], found[peer], aim)
