"""Your own Gymnasium environment, with Lightning and W&B.

An environment in plain Gymnasium, a network in plain torch, and `EpsilonGreedyDQN`, a Lightning
module that steps the one with the other. Metrics go to W&B, offline.
"""

# %% [markdown]
# ## An environment
#
# A corridor of eight fields. The agent starts on the left, each step costs 0.1, the door on the
# right pays 1. Nothing in it knows about exploration.

# %%
import gymnasium
import lightning as L
import numpy as np
import pandas as pd
import torch
import wandb
from torch import nn

from bmc_torchrl import BMCEpsilon
from bmc_torchrl.training import EpisodeMetrics, EpsilonGreedyDQN
from bmc_torchrl.training.tracking import wandb_loggers

FIELDS = 8


class Corridor(gymnasium.Env):
    """Left is action 0, right is action 1."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (FIELDS,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def _seen(self) -> np.ndarray:
        return np.eye(FIELDS, dtype=np.float32)[self.field]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.field = 0
        return self._seen(), {}

    def step(self, action):
        self.field = max(0, self.field + (1 if action == 1 else -1))
        arrived = self.field == FIELDS - 1
        return self._seen(), 1.0 if arrived else -0.1, arrived, False, {}


def make_env() -> gymnasium.Env:
    return gymnasium.wrappers.TimeLimit(Corridor(), max_episode_steps=50)


# %% [markdown]
# ## Training
#
# `L.Trainer` does what Lightning documents: here steps, and loggers. `EpisodeMetrics` logs a row
# per episode by the names of [What is logged](../logging.md). `offline=True` keeps W&B on this
# machine; `wandb sync` sends it later. Without W&B: `logger=False`, or any Lightning logger.

# %%
L.seed_everything(0, verbose=False)
module = EpsilonGreedyDQN(
    make_env,
    nn.Sequential(nn.Linear(FIELDS, 32), nn.ReLU(), nn.Linear(32, 2)),
    strategy=BMCEpsilon(alpha0=1.0, beta0=1.01),
    gamma=0.95,
    lr=3e-3,
    batch_size=32,
    episodes=60,
)
trainer = L.Trainer(
    max_steps=3_000,
    logger=wandb_loggers(save_dir="corridor", project="tutorial", offline=True),
    callbacks=[EpisodeMetrics()],
    accelerator="cpu",
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module)

# %% [markdown]
# ## The log
#
# The same rows are in `metrics.csv`, so that a figure needs no account.

# %%
log = pd.read_csv("corridor/metrics/metrics.csv").dropna(subset="train/epsilon")
axes = log.plot(x="episode", y=["train/return", "train/epsilon"], subplots=True, legend=False)
axes[0].set_ylabel("return")
axes[1].set_ylabel("ε")

# %% [markdown]
# ## Check
#
# The shortest way is seven steps, six of which cost 0.1.

# %%
(found,) = trainer.validate(module, verbose=False)
print({name: round(value, 3) for name, value in found.items()})
assert abs(found["eval/return"] - (1.0 - 0.1 * (FIELDS - 2))) < 1e-5
with torch.no_grad():
    values = module(torch.eye(FIELDS))[:-1]
assert (values.argmax(-1) == 1).all(), "every field but the door should lead right"
wandb.finish()  # A script's end does it, a notebook does not.
