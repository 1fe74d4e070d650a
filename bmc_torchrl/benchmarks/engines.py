"""What the engines buy: the same job by engine=lockstep and by engine=torchrl, tests included."""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import lightning as L  # noqa: N812
import torch
from lightning.pytorch.callbacks import Callback

from bmc_torchrl.benchmarks.timing import EFFORT, speed
from bmc_torchrl.experiments.build import build_job
from bmc_torchrl.experiments.configs import experiment_config
from bmc_torchrl.experiments.train import fit

RUNS = 100
ENGINES = ("lockstep", "torchrl")


class Clock(Callback):
    """Counts run-steps from everyone's first test on, for some seconds of processor time."""

    def __init__(self) -> None:
        self.steps, self.began, self.elapsed = 0, float("nan"), 0.0

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        """Count a chunk; the job ends before a run does."""
        log, now = module.log_of_episodes, time.process_time()
        if self.began == self.began:
            self.steps += module.chunk_steps * log.runs
            self.elapsed = now - self.began
            over = self.elapsed >= EFFORT.seconds or bool((log.done >= log.episodes).any())
            trainer.should_stop = over
        elif bool(log.steps[:, 0].isfinite().all()):
            self.began = now


def rows() -> Iterator[dict[str, Any]]:
    """Run-steps per second of a tabular job and of a DQN job, as ``bmc train`` runs them."""
    for talkative in ("lightning.pytorch", "torchrl"):
        logging.getLogger(talkative).setLevel(logging.WARNING)
    runs = EFFORT.count(RUNS, least=2)
    for name in ("cart_sarsa", "cart_dqn"):
        found: dict[str, list[float]] = {engine: [] for engine in ENGINES}
        for _ in range(EFFORT.repeats):
            for engine, rates in found.items():
                rates.append(_rate(name, runs, engine))
        ours, peer = (statistics.median(found[engine]) for engine in ENGINES)
        work = f"{name}, {runs} runs, run-steps/s, engine=lockstep against engine=torchrl"
        yield speed(work, ours, peer, None)


def _rate(name: str, runs: int, engine: str) -> float:
    torch.compiler.reset()
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        given = {"engine": engine, "runs": runs, "output": folder, "device": "cpu"}
        cfg = experiment_config(name, ["logger=none", *(f"{k}={v}" for k, v in given.items())])
        learner, stream, own = build_job(cfg)
        fit(cfg, learner, stream, [*own, clock])
    return clock.steps / clock.elapsed
