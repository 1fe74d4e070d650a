"""Tianshou's DQN on CartPole-v1: collect one step, update once."""

from __future__ import annotations

import warnings

import common
import gymnasium
import numpy as np
import torch
from tianshou.algorithm import DQN
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.utils.net.common import Net
from tianshou.utils.torch_utils import policy_within_training_step, torch_train_mode

warnings.simplefilter("ignore")


class Agent:
    """Collector, buffer and algorithm."""

    def __init__(self, seed: int) -> None:
        np.random.seed(seed)
        torch.manual_seed(seed)
        env = gymnasium.make("CartPole-v1")
        envs = DummyVectorEnv([lambda: gymnasium.make("CartPole-v1")])
        width = common.HIDDEN
        model = Net(
            state_shape=env.observation_space.shape,
            action_shape=int(env.action_space.n),
            hidden_sizes=[width, width],
        )
        policy = DiscreteQLearningPolicy(
            model=model, action_space=env.action_space, eps_training=0.1
        )
        self.algorithm = DQN(
            policy=policy,
            optim=AdamOptimizerFactory(lr=common.RATE),
            gamma=common.GAMMA,
            target_update_freq=common.TARGET_INTERVAL,
            is_double=False,
        )
        self.policy, self.buffer = policy, VectorReplayBuffer(common.CAPACITY, 1)
        self.collector = Collector(self.algorithm, envs, self.buffer, exploration_noise=True)
        self.collector.reset()

    def advance(self, steps: int) -> None:
        """Take `steps` steps, learning after each."""
        for _ in range(steps):
            with policy_within_training_step(self.policy):
                self.collector.collect(n_step=1)
                if len(self.buffer) >= common.LEARNING_STARTS:
                    with torch_train_mode(self.policy):
                        self.algorithm.update(sample_size=common.BATCH, buffer=self.buffer)


if __name__ == "__main__":
    parsed = common.arguments()
    torch.set_num_threads(1)
    common.measure(Agent(parsed.seed).advance, parsed, chunk=100)
