"""A plain single-file DQN loop on CartPole-v1 in the manner of CleanRL, of our own writing."""

from __future__ import annotations

import random

import common
import gymnasium
import numpy as np
import torch
from torch import nn


class Replay:
    """A ring of transitions in NumPy arrays."""

    def __init__(self, capacity: int, features: int) -> None:
        self.capacity, self.size, self.head = capacity, 0, 0
        self.before = np.zeros((capacity, features), np.float32)
        self.after = np.zeros((capacity, features), np.float32)
        self.action = np.zeros((capacity, 1), np.int64)
        self.reward = np.zeros(capacity, np.float32)
        self.terminated = np.zeros(capacity, np.float32)

    def add(self, before, action, reward, after, terminated) -> None:
        """Keep a transition."""
        i = self.head
        self.before[i], self.after[i], self.action[i, 0] = before, after, action
        self.reward[i], self.terminated[i] = reward, terminated
        self.head, self.size = (i + 1) % self.capacity, min(self.size + 1, self.capacity)

    def sample(self, count: int) -> list[torch.Tensor]:
        """Columns of `count` rows, with replacement."""
        rows = np.random.randint(0, self.size, count)
        arrays = (self.before, self.action, self.reward, self.after, self.terminated)
        return [torch.from_numpy(array[rows]) for array in arrays]


def network(features: int, actions: int) -> nn.Module:
    width = common.HIDDEN
    return nn.Sequential(
        nn.Linear(features, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, actions),
    )


class Agent:
    """The loop, which can be continued."""

    def __init__(self, seed: int, env: str = "CartPole-v1") -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.env = gymnasium.make(env)
        self.features = self.env.observation_space.shape[0]
        self.actions = int(self.env.action_space.n)
        self.online = network(self.features, self.actions)
        self.target = network(self.features, self.actions)
        self.target.load_state_dict(self.online.state_dict())
        self.optimizer = torch.optim.Adam(self.online.parameters(), lr=common.RATE)
        self.replay = Replay(common.CAPACITY, self.features)
        self.time = 0
        self.observation, _ = self.env.reset(seed=seed)

    def advance(self, steps: int) -> None:
        """Take `steps` steps, learning after each."""
        for _ in range(steps):
            epsilon = max(1.0 - 0.95 * self.time / 10_000, 0.05)
            if random.random() < epsilon:
                action = random.randrange(self.actions)
            else:
                with torch.no_grad():
                    action = int(self.online(torch.from_numpy(self.observation)).argmax())
            after, reward, terminated, truncated, _ = self.env.step(action)
            self.replay.add(self.observation, action, reward, after, terminated)
            self.observation = self.env.reset()[0] if terminated or truncated else after
            self.time += 1
            if self.time >= common.LEARNING_STARTS:
                self.learn()

    def learn(self) -> None:
        """One Adam step on a minibatch."""
        before, action, reward, after, terminated = self.replay.sample(common.BATCH)
        with torch.no_grad():
            bootstrap = self.target(after).amax(1)
            goal = reward + common.GAMMA * (1 - terminated) * bootstrap
        value = self.online(before).gather(1, action).squeeze(1)
        loss = nn.functional.mse_loss(value, goal)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if self.time % common.TARGET_INTERVAL == 0:
            self.target.load_state_dict(self.online.state_dict())


if __name__ == "__main__":
    parsed = common.arguments(env=str)
    torch.set_num_threads(1)
    common.measure(Agent(parsed.seed, parsed.env or "CartPole-v1").advance, parsed, chunk=200)
