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
    return TabularLockstep(*_parts(name, runs, **{"domain.tests": tests}))


def torch_dqn(name: str, runs: int, **settings: Any) -> DQNLockstep:
    """What a GPU runs, on the CPU, beside the engine in numba; in blocks that fit its cache."""
    return DQNLockstep(*_parts(name, runs, **settings), block=250)


def _parts(name: str, runs: int, **settings: Any) -> tuple[Any, ...]:
    cfg = experiment_config(name, [f"{key}={value}" for key, value in settings.items()])
    env = instantiate(cfg.domain.env)(batch_size=[runs], observation=cfg.observation)
    strategy = build_strategy(cfg, [cfg.strategy], runs)
    return env, strategy, run_settings(cfg, seed=1), learner_settings(cfg)


STEPS = 200


def run_steps_per_second(runs: Any, seconds: float) -> float:
    """Of an engine in numba, for about `seconds` of processor time."""
    steps, began = 0, time.process_time()
    while (elapsed := time.process_time() - began) < seconds:
        runs.advance(STEPS)
        steps += STEPS
    return steps * runs.runs / elapsed


def tensor_steps_per_second(runs: DQNLockstep, seconds: float) -> float:
    """Of training alone, for about `seconds` of processor time."""
    steps, began = 0, time.process_time()
    while (elapsed := time.process_time() - began) < seconds:
        with torch.no_grad():
            runs.vector_steps(runs.draw(runs.chunk), runs.time)
        runs.time += runs.chunk
        steps += runs.chunk
    return steps * runs.runs / elapsed
