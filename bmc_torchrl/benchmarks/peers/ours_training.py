"""The objects that ``bmc train experiment=cartpole_dqn`` builds, fitted by Lightning as there.

--how eager, compiled or torchrl (TorchRL's loss and replay); --runs side by side; --env a name of
Gymnasium's. Reports run-steps of training, and the seconds until the first update.
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

import common
import torch
from lightning.pytorch.callbacks import Callback

from bmc_torchrl.experiments import train
from bmc_torchrl.experiments.build import build_job
from bmc_torchrl.experiments.configs import experiment_config

EPISODES = 10_000
EXPERIMENTS = {"CartPole-v1": "cartpole_dqn", "LunarLander-v3": "lander_dqn"}


class Clock(Callback):
    """Measures processor time after a warm-up, and stops the trainer when it is used up."""

    def __init__(self, warm_up: int, seconds: float) -> None:
        self.warm_up, self.seconds = warm_up, seconds
        self.wall, self.first = time.perf_counter(), 0.0
        self.began = 0.0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Look at the clock."""
        now = time.process_time()
        if not self.first:
            self.first = time.perf_counter() - self.wall
        if trainer.global_step < self.warm_up:
            return
        if not self.began:
            self.began, self.start = now, trainer.global_step
        self.elapsed, self.steps = now - self.began, trainer.global_step - self.start
        if self.elapsed >= self.seconds:
            trainer.should_stop = True


if __name__ == "__main__":
    parsed = common.arguments(how=str, runs=int, env=str, strategy=str)
    how, runs, env = parsed.how or "eager", parsed.runs or 1, parsed.env or "CartPole-v1"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        cfg = experiment_config(
            EXPERIMENTS[env],
            [
                f"learner.hidden=[{common.HIDDEN},{common.HIDDEN}]",
                f"learner.learning_rate={common.RATE}",
                f"learner.batch_size={common.BATCH}",
                f"learner.capacity={common.CAPACITY}",
                f"learner.warmup={common.LEARNING_STARTS}",
                "learner.target_tau=1.0",
                f"learner.target_interval={common.TARGET_INTERVAL}",
                f"learner.torchrl={str(how == 'torchrl').lower()}",
                f"trainer.compile={str(how == 'compiled').lower()}",
                f"strategy={parsed.strategy or 'bmc'}",
                f"runs={runs}",
                f"episodes={EPISODES}",
                # No tests: the peers have none.
                f"domain.test_every={EPISODES}",
                f"output={folder}",
                "device=cpu",
                f"seed={parsed.seed}",
            ],
        )
        clock = Clock(parsed.warm_up, parsed.seconds)
        module, stream, own = build_job(cfg)
        train.fit(cfg, module, stream, [*own, clock])
        common.report(clock.steps * runs, clock.elapsed, first_update=clock.first)
