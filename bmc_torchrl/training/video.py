"""A greedy test episode as a moving picture."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import torch
from lightning.pytorch.callbacks import Callback
from PIL import Image
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type

from bmc_torchrl.envs.base import BatchedEnv
from bmc_torchrl.envs.gymnasium_batch import GymBatchEnv
from bmc_torchrl.training.run_records import RecordedLearner

__all__ = ["GreedyVideo"]

LONGEST = 200
"""Frames of a film."""

WIDEST = 400
"""Pixels across."""


class GreedyVideo(Callback):
    """Films the first run's greedy policy when a tracked job ends.

    Args:
        path (str or Path): The GIF to write.
        env (EnvBase or callable): Test environments, batch size ``[runs, tests]``, or a function
            that makes them. Nothing is written where they cannot be made or painted: the package's
            own are by :meth:`~bmc_torchrl.envs.base.BatchedEnv.picture`, Gymnasium's by
            ``render_mode="rgb_array"``.
        max_steps (int): Where the episode is cut.
    """

    def __init__(
        self, path: str | Path, env: EnvBase | Callable[[], EnvBase], max_steps: int
    ) -> None:
        self.path, self.env, self.max_steps = Path(path), env, min(max_steps, LONGEST)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Play and film."""
        assert isinstance(pl_module, RecordedLearner)
        if not trainer.loggers or not trainer.is_global_zero:
            return
        # Pictures need no screen, and pygame complains where there is none.
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        with (
            torch.no_grad(),
            torch.random.fork_rng(),
            set_exploration_type(ExplorationType.DETERMINISTIC),
        ):
            env = self._made()
            frames = [] if env is None else self._frames(env, pl_module.greedy_policy(env))
        images = [_shrunk(Image.fromarray(frame)) for frame in frames if frame is not None]
        if images:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            images[0].save(self.path, save_all=True, append_images=images[1:], duration=120, loop=0)

    def _made(self) -> EnvBase | None:
        if isinstance(self.env, EnvBase):
            return self.env
        try:
            return self.env()
        except Exception:  # Others' environments refuse to paint in their own ways.
            return None

    def _frames(self, env: EnvBase, policy: TensorDictModuleBase) -> list[Any]:
        frames = []
        current = env.reset()
        for steps in range(self.max_steps):
            frames.append(_picture(env, current, steps))
            if frames[0] is None:
                break
            stepped, current = env.step_and_maybe_reset(policy(current))
            if bool(stepped["next", "done"][0, 0]):
                if isinstance(env, BatchedEnv):
                    frames.append(_picture(env, stepped["next"], steps + 1))
                break
        return frames


def _picture(env: EnvBase, current: TensorDictBase, steps: int) -> Any:
    """RGB array of the first environment, or None."""
    if isinstance(env, GymBatchEnv):
        return env.copies[0].render() if env.copies[0].render_mode == "rgb_array" else None
    return env.picture(current[0, 0], steps) if isinstance(env, BatchedEnv) else None


def _shrunk(image: Image.Image) -> Image.Image:
    image.thumbnail((WIDEST, WIDEST))
    return image
