"""The half of the study with networks: all strategies and runs of a task as one batch of DQNs."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import pandas as pd
import torch
from hydra.utils import instantiate
from lightning.pytorch.callbacks import Callback

from bmc_torchrl import EpsilonStrategy, StackedEpsilon
from bmc_torchrl.envs.gymnasium_batch import GymBatchEnv
from bmc_torchrl.learners.builders import build_network
from bmc_torchrl.training import EpsilonGreedyDQN
from bmc_torchrl.training.greedy_tests import greedy_tests
from bmc_torchrl.training.transitions import seed_everything

__all__ = ["learning_curves", "random_returns"]

SHORTEST = 4
"""No episode of these tasks is shorter."""


def learning_curves(
    settings: Mapping[str, Any], task: Mapping[str, Any], entries: Sequence[Any], seed: int
) -> pd.DataFrame:
    """Train all strategies on a task: what each run showed between two greedy tests.

    Args:
        settings: ``dqn`` of the study's settings.
        task: One of its tasks.
        entries: The strategies (label, family, parameters).
        seed: Of all random numbers.

    Returns:
        Columns strategy, run, frame (of the test), greedy (mean return of the tests), online
        (return of the training episodes that ended since the last test, by length, or NaN) and
        epsilon (their mean ε, likewise).
    """
    seed_everything(seed)
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "torchrl"):
        logging.getLogger(name).setLevel(logging.WARNING)
    runs = settings["runs"]
    parts: list[EpsilonStrategy] = [
        instantiate(dict(entry["parameters"]), batch_shape=[runs]) for entry in entries
    ]
    module = _module(settings, task, StackedEpsilon(parts))
    updates = task["frames"] // task["frames_per_update"]
    every = -(-updates // settings["tests"])
    tests = GreedyTests(_env(task, [runs * len(parts), task["episodes"]]), every, seed)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        trainer = L.Trainer(
            max_steps=updates,
            callbacks=[tests],
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
        )
        trainer.fit(module)
    labels = [entry["label"] for entry in entries]
    return _table(labels, runs, tests.found, module.log_of_episodes)


def random_returns(task: Mapping[str, Any], episodes: int, seed: int) -> list[float]:
    """Return of each of so many episodes of uniformly random actions."""
    seed_everything(seed)
    env = _env(task, [1])
    found = []
    for _ in range(episodes):
        env.begin([0])
        over, total = False, 0.0
        while not over:
            reward, *ends = env.advance(0, int(torch.randint(env.num_actions, ())))
            total, over = total + reward, any(ends)
        found.append(total)
    env.close()
    return found


class GreedyTests(Callback):
    """Tests the greedy policy of every run each so many updates.

    Args:
        env: The test environments, batch size ``[runs, episodes]``.
        every: Updates between two tests, a multiple of the module's chunk.
        seed: Of the tests' random numbers.
    """

    def __init__(self, env: GymBatchEnv, every: int, seed: int) -> None:
        self.env, self.every, self.seed = env, every, seed
        self.found: list[tuple[int, np.ndarray[Any, Any]]] = []
        self.began = time.process_time()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Test, if it is time."""
        assert isinstance(pl_module, EpsilonGreedyDQN)
        if trainer.global_step % self.every and trainer.global_step < trainer.max_steps:
            return
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed + 1 + trainer.global_step)
            assert self.env.max_steps is not None
            returns = greedy_tests(
                self.env,
                pl_module.q_actor,
                gamma=1.0,
                max_steps=self.env.max_steps,
                one_by_one=True,
            )[1]
        self.found.append((pl_module.online.vector_steps, returns.mean(-1).numpy()))
        spent = time.process_time() - self.began
        print(f"  frame {self.found[-1][0]}, {spent:.0f} s of CPU", flush=True)


def _env(task: Mapping[str, Any], shape: Sequence[int]) -> GymBatchEnv:
    make = instantiate(dict(task["make"]), _partial_=True)
    return GymBatchEnv(make, max_steps=task["max_steps"], batch_size=shape)


def _module(
    settings: Mapping[str, Any], task: Mapping[str, Any], strategy: EpsilonStrategy
) -> EpsilonGreedyDQN:
    runs = strategy.batch_shape.numel()
    env = _env(task, [runs])
    network, key = build_network(env, runs, task["hidden"])
    updates = task["frames"] // task["frames_per_update"]
    return EpsilonGreedyDQN(
        env,
        network,
        strategy,
        gamma=settings["gamma"],
        lr=settings["learning_rate"],
        loss_function="l2",
        batch_size=settings["batch_size"],
        buffer_size=settings["capacity"],
        frames_per_update=task["frames_per_update"],
        target_tau=settings["target_tau"],
        runs=runs,
        episodes=2 * task["frames"] // SHORTEST,
        observation_key=key,
        epoch_steps=updates,
        chunk_steps=-(-updates // settings["tests"]),
    )


def _table(labels: Sequence[str], runs: int, tests: Sequence[Any], log: Any) -> pd.DataFrame:
    """What :func:`learning_curves` returns, from the tests and the log of training episodes."""
    names = ("train_returns", "train_steps", "epsilons")
    returns, steps, epsilons = (getattr(log, name).double().numpy() for name in names)
    ends = np.nan_to_num(steps, nan=np.inf).cumsum(-1)
    rows, before = [], 0
    for frame, greedy in tests:
        weight = np.where((ends > before) & (ends <= frame), np.nan_to_num(steps), 0.0)
        total = weight.sum(-1)
        with np.errstate(invalid="ignore"):
            online, epsilon = (
                np.where(total > 0, (weight * np.nan_to_num(values)).sum(-1) / total, np.nan)
                for values in (returns, epsilons)
            )
        for row in range(len(greedy)):
            label, run = labels[row // runs], row % runs
            rows.append((label, run, frame, float(greedy[row]), online[row], epsilon[row]))
        before = frame
    return pd.DataFrame(rows, columns=["strategy", "run", "frame", "greedy", "online", "epsilon"])
