"""A greedy test episode as a moving picture, for trackers that show one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import lightning as L  # noqa: N812
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import WandbLogger
from PIL import Image
from tensordict import TensorDictBase
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type

from bmc_torchrl.envs import CartPoleEnv, SubgoalGridEnv, SupplyChainEnv
from bmc_torchrl.envs.factored import unravel_index
from bmc_torchrl.envs.rendering import draw_grid, draw_supply_chain
from bmc_torchrl.training.algorithm import EpsilonGreedyLearner

__all__ = ["GreedyVideo", "painter"]


def painter(env: EnvBase) -> Callable[[TensorDictBase, int], Any] | None:
    """What draws one environment of a native domain; None for other domains.

    The function takes a tensordict of batch size ``[]`` and the number of steps, and returns an
    RGB array. Cart-pole is drawn by Gymnasium's own renderer.
    """
    if isinstance(env, SubgoalGridEnv):

        def grid(current: TensorDictBase, steps: int) -> Any:
            row, column, stage = (int(x) for x in unravel_index(current["state"], env.sizes))
            return draw_grid(env.grid, row, column, stage, steps)

        return grid
    if isinstance(env, SupplyChainEnv):

        def supply(current: TensorDictBase, steps: int) -> Any:
            stocks = env.stocks(current["state"]).tolist()
            return draw_supply_chain(env.network, stocks, steps=steps)

        return supply
    if isinstance(env, CartPoleEnv):
        cart = gymnasium.make("CartPole-v1", render_mode="rgb_array")
        cart.reset()

        def pole(current: TensorDictBase, steps: int) -> Any:
            cart.unwrapped.state = current["physics"].tolist()
            return cart.render()

        return pole
    return None


class GreedyVideo(Callback):
    """Films the first run's greedy policy when training ends, if W&B is there to show it.

    Args:
        path: the GIF to write.
        env: test environments, batch size ``[runs, tests]``.
        max_steps: where the episode is cut.
    """

    def __init__(self, path: str | Path, env: EnvBase, max_steps: int) -> None:
        self.path, self.env, self.max_steps = Path(path), env, max_steps

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Play and film."""
        assert isinstance(pl_module, EpsilonGreedyLearner)
        paint = painter(self.env)
        shown = any(isinstance(logger, WandbLogger) for logger in trainer.loggers)
        if paint is None or not shown or not trainer.is_global_zero:
            return
        frames = []
        with (
            torch.no_grad(),
            torch.random.fork_rng(),
            set_exploration_type(ExplorationType.DETERMINISTIC),
        ):
            current = self.env.reset()
            for steps in range(self.max_steps):
                frames.append(Image.fromarray(paint(current[0, 0], steps)))
                stepped, current = self.env.step_and_maybe_reset(pl_module.q_actor(current))
                if bool(stepped["next", "done"][0, 0]):
                    frames.append(Image.fromarray(paint(stepped["next"][0, 0], steps + 1)))
                    break
        self.path.parent.mkdir(parents=True, exist_ok=True)
        frames[0].save(self.path, save_all=True, append_images=frames[1:], duration=120, loop=0)
