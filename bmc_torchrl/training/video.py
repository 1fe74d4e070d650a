"""A greedy test episode as a moving picture, for trackers that show one."""

from __future__ import annotations

from pathlib import Path

import lightning as L  # noqa: N812
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import WandbLogger
from PIL import Image
from torchrl.envs.utils import ExplorationType, set_exploration_type

from bmc_torchrl.envs.base import BatchedEnv
from bmc_torchrl.training.run_records import RecordedLearner

__all__ = ["GreedyVideo"]


class GreedyVideo(Callback):
    """Films the first run's greedy policy when training ends, if W&B is there to show it.

    Args:
        path: the GIF to write.
        env: test environments, batch size ``[runs, tests]``; nothing is written where its
            :meth:`~bmc_torchrl.envs.base.BatchedEnv.picture` gives none.
        max_steps: where the episode is cut.
    """

    def __init__(self, path: str | Path, env: BatchedEnv, max_steps: int) -> None:
        self.path, self.env, self.max_steps = Path(path), env, max_steps

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Play and film."""
        assert isinstance(pl_module, RecordedLearner)
        shown = any(isinstance(logger, WandbLogger) for logger in trainer.loggers)
        if not shown or not trainer.is_global_zero:
            return
        frames = []
        with (
            torch.no_grad(),
            torch.random.fork_rng(),
            set_exploration_type(ExplorationType.DETERMINISTIC),
        ):
            current = self.env.reset()
            for steps in range(self.max_steps):
                frames.append(self.env.picture(current[0, 0], steps))
                stepped, current = self.env.step_and_maybe_reset(pl_module.q_actor(current))
                if bool(stepped["next", "done"][0, 0]):
                    frames.append(self.env.picture(stepped["next"][0, 0], steps + 1))
                    break
        images = [Image.fromarray(frame) for frame in frames if frame is not None]
        if not images:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        images[0].save(self.path, save_all=True, append_images=images[1:], duration=120, loop=0)
