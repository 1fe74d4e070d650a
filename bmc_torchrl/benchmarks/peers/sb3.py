"""Stable-Baselines3's DQN on CartPole-v1; --compiled 1 puts its networks under torch.compile."""

from __future__ import annotations

import common
import torch
from stable_baselines3 import DQN

if __name__ == "__main__":
    parsed = common.arguments(compiled=int)
    torch.set_num_threads(1)
    model = DQN(
        "MlpPolicy",
        "CartPole-v1",
        learning_rate=common.RATE,
        buffer_size=common.CAPACITY,
        learning_starts=common.LEARNING_STARTS,
        batch_size=common.BATCH,
        gamma=common.GAMMA,
        train_freq=1,
        gradient_steps=1,
        target_update_interval=common.TARGET_INTERVAL,
        policy_kwargs={"net_arch": [common.HIDDEN, common.HIDDEN]},
        seed=parsed.seed,
        device="cpu",
    )
    if parsed.compiled:
        for network in (model.q_net, model.q_net_target):
            network.compile(dynamic=False)
    common.measure(lambda n: model.learn(n, reset_num_timesteps=False), parsed, chunk=1000)
