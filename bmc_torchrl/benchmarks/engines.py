"""The project's own engines as the benchmark's sections build them."""

from __future__ import annotations

import time
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from bmc_torchrl import ConstantEpsilon, EpsilonStrategy
from bmc_torchrl.benchmarks.timing import EFFORT
from bmc_torchrl.experiments.build import build_engine, build_strategy
from bmc_torchrl.experiments.configs import experiment_config
from bmc_torchrl.learners.values import QTable
from bmc_torchrl.lockstep import DQNLockstep
from bmc_torchrl.lockstep.torch_tabular import TabularLockstep

LABEL = "bmc"


def strategy(name: str, runs: int, *, constant: float | None = None) -> EpsilonStrategy:
    """ε-BMC with the prior of experiment `name`, or a constant."""
    if constant is not None:
        return ConstantEpsilon(constant, batch_shape=[runs])
    cfg = experiment_config(name)
    entries = [entry for entry in cfg.sweep.strategies if entry.family == LABEL]
    return build_strategy(cfg, entries, runs)


def engine(name: str, runs: int, *, constant: float | None = None, **overrides: Any) -> Any:
    """The engine of experiment `name` on one thread, as scripts/reproduce.py builds it.

    `overrides` replace entries of the settings: ``tests=0``, ``episodes=50``.
    """
    cfg = experiment_config(name)
    if "tests" in overrides:
        OmegaConf.update(cfg, "domain.tests", overrides.pop("tests"), force_add=True)
    for key, value in overrides.items():
        OmegaConf.update(cfg, key, value, force_add=True)
    if EFFORT.hurried and "capacity" in cfg.learner:
        OmegaConf.update(cfg, "learner.compiled", False, force_add=True)
    chosen = strategy(name, runs, constant=constant)
    return build_engine(cfg, chosen, seed=1, threads=1)


def torch_tabular(name: str, runs: int, **options: Any) -> TabularLockstep:
    """The tabular engine on tensors, beside the one in numba."""
    cfg = experiment_config(name)
    env = instantiate(cfg.domain.env)(batch_size=[runs], observation=cfg.observation)
    learner = cfg.learner
    table = QTable(
        env.num_states, env.num_actions, runs=runs, initializer=learner.initializer, scale=0.1
    )
    return TabularLockstep(
        env,
        table,
        strategy(name, runs),
        learning_rate=learner.learning_rate,
        decay=learner.decay,
        floor=learner.floor,
        episodes=cfg.episodes,
        gamma=cfg.gamma,
        seed=1,
        **options,
    )


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
