"""The project's own engines as the benchmark's sections build them."""

from __future__ import annotations

import time
from typing import Any

import torch
from hydra.utils import instantiate

from bmc_torchrl import ConstantEpsilon
from bmc_torchrl.experiments.build import (
    build_engine,
    build_strategy,
    learner_settings,
    run_settings,
)
from bmc_torchrl.experiments.configs import experiment_config
from bmc_torchrl.lockstep import DQNLockstep, TabularLockstep


def engine(name: str, runs: int, *, constant: float | None = None, **settings: Any) -> Any:
    """The engine of experiment `name` on one thread, as ``bmc reproduce`` builds it for ε-BMC.

    Args:
        name: of the experiment.
        runs: how many.
        constant: ε, instead of ε-BMC.
        **settings: that differ from the experiment's: ``tests=0``, ``episodes=50``.
    """
    if "tests" in settings:
        settings["domain.tests"] = settings.pop("tests")
    cfg = experiment_config(name, [f"{key}={value}" for key, value in settings.items()])
    strategy = build_strategy(cfg, [cfg.strategy], runs)
    if constant is not None:
        strategy = ConstantEpsilon(constant, batch_shape=[runs])
    return build_engine(cfg, strategy, seed=1, threads=1)


def torch_tabular(name: str, runs: int, tests: int) -> TabularLockstep:
    """What a GPU runs, on the CPU, beside the engine in numba."""
    cfg = experiment_config(name, [f"domain.tests={tests}"])
    env = instantiate(cfg.domain.env)(batch_size=[runs], observation=cfg.observation)
    strategy = build_strategy(cfg, [cfg.strategy], runs)
    return TabularLockstep(env, strategy, run_settings(cfg, seed=1), learner_settings(cfg))


def train(runs: DQNLockstep, steps: int) -> int:
    """At least `steps` vector steps without the tests between them; how many there were."""
    chunks = -(-steps // runs.chunk)
    with torch.no_grad():
        for _ in range(chunks):
            runs.vector_steps(runs.draw(runs.chunk), runs.time)
            runs.time += runs.chunk
    return chunks * runs.chunk


def run_steps_per_second(runs: DQNLockstep, seconds: float) -> float:
    """Of training alone, for about `seconds` of processor time."""
    steps, began = 0, time.process_time()
    while (elapsed := time.process_time() - began) < seconds:
        steps += train(runs, 1)
    return steps * runs.runs / elapsed
