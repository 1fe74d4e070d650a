"""The paper's DQN one run after the other: a plain eager torch loop, environments in plain Python.

docs/protocol.md §4 for --domain cart, grid or supply, ε-BMC in plain floats; training steps only.
"""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import common
import numpy as np
import torch
from torch import nn


class Settings(NamedTuple):
    """Table 2 of the paper."""

    hidden: int
    rate: float
    batch: int
    capacity: int
    epochs: int
    gamma: float
    alpha0: float
    actions: int
    features: int
    l2: float = 0.0


SETTINGS = {
    "cart": Settings(12, 5e-4, 32, 2000, 3, 0.95, 5.0, 2, 4, 1e-6),
    "grid": Settings(25, 1e-3, 24, 2000, 5, 0.99, 1.0, 4, 16),
    "supply": Settings(100, 1e-3, 64, 3000, 2, 0.95, 25.0, 100, 102),
}
LIMIT = 200


class Cart:
    """Cart-pole on floats."""

    def start(self):
        """State of a new episode."""
        return [random.uniform(-0.05, 0.05) for _ in range(4)]

    def step(self, s, action):
        """Next state, reward, termination."""
        x, v, angle, spin = s
        force = 10.0 if action else -10.0
        sine, cosine = math.sin(angle), math.cos(angle)
        push = (force + 0.05 * spin * spin * sine) / 1.1
        bend = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine * cosine / 1.1))
        pull = push - 0.05 * bend * cosine / 1.1
        s = [x + 0.02 * v, v + 0.02 * pull, angle + 0.02 * spin, spin + 0.02 * bend]
        fell = abs(s[0]) > 2.4 or abs(s[2]) > 0.20943951
        return s, 0.0 if fell else 1.0, fell

    def encode(self, s):
        """Network inputs."""
        return s


class Grid:
    """The grid-world as row, column and stage."""

    goals = ((3, 4), (1, 1), (3, 0), (4, 4), (0, 4))
    moves = ((-1, 0), (1, 0), (0, -1), (0, 1))

    def start(self):
        """State of a new episode."""
        return 4, 0, 0

    def step(self, s, action):
        """Next state, reward, termination."""
        row, column, stage = s
        row, column = row + self.moves[action][0], column + self.moves[action][1]
        inside = 0 <= row < 5 and 0 <= column < 5
        if not inside or (row, column) in self.goals[stage + 1 :]:
            return s, -0.2, False
        stage += (row, column) == self.goals[stage]
        return (row, column, stage), -0.1, stage == 5

    def encode(self, s):
        """Network inputs."""
        x = [0.0] * 16
        x[s[0]] = x[5 + s[1]] = x[10 + s[2]] = 1.0
        return x


class Supply:
    """The supply-chain as both stocks."""

    def start(self):
        """State of a new episode."""
        return 10, 0

    def step(self, s, action):
        """Next state, reward, termination."""
        factory, shelf = s
        demand, left = 0, random.random() - math.exp(-2.5)
        mass = math.exp(-2.5)
        while left >= 0 and demand < 30:
            demand += 1
            mass *= 2.5 / demand
            left -= mass
        sold = min(demand, shelf)
        shipped = min(action // 10, factory, 50 - shelf + sold)
        produced = min(action % 10, 50 - factory + shipped)
        reward = 0.5 * sold - 0.1 * produced - 0.02 * (factory + shelf) - 0.1 * -(-shipped // 5)
        return (factory - shipped + produced, shelf - sold + shipped), reward, False

    def encode(self, s):
        """Network inputs."""
        x = [0.0] * 102
        x[s[0]] = x[51 + s[1]] = 1.0
        return x


class BMC:
    """ε-BMC on floats."""

    def __init__(self, alpha0):
        self.alpha, self.beta = alpha0, alpha0 + 0.01
        self.count = self.mean = self.m2 = 0.0

    @property
    def epsilon(self):
        """Its mean."""
        return self.alpha / (self.alpha + self.beta)

    def update(self, greedy, uniform):
        """Learn from the two returns of a transition."""
        alpha, beta, total = self.alpha, self.beta, self.alpha + self.beta
        observed = greedy + self.epsilon * (uniform - greedy)
        self.count += 1
        deviation = observed - self.mean
        self.mean += deviation / self.count
        self.m2 += deviation * (observed - self.mean)
        a = 500 + self.count / 2
        spread = self.m2 / max(self.count - 1, 1) + self.mean**2 / (1 + self.count)
        b = 500 + self.count / 2 * spread
        epsilon, tau, squared = alpha / total, (beta - alpha) / total, (greedy - uniform) ** 2
        evidence = math.exp(-(a + 0.5) * math.log1p(tau * squared / (2 * b + epsilon**2 * squared)))
        scale = alpha * evidence + beta
        gain, p = evidence / scale, beta / scale
        c = beta + p + beta * gain
        kappa = c / (c + gain * p * (total + 2))
        self.alpha, self.beta = alpha * (1 + gain) * kappa, (beta + p) * kappa


class Agent:
    """One run."""

    def __init__(self, domain, seed):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.s = SETTINGS[domain]
        self.env = {"cart": Cart, "grid": Grid, "supply": Supply}[domain]()
        s = self.s
        self.network = nn.Sequential(
            nn.Linear(s.features, s.hidden),
            nn.ReLU(),
            nn.Linear(s.hidden, s.hidden),
            nn.ReLU(),
            nn.Linear(s.hidden, s.actions),
        )
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=s.rate, fused=True)
        self.kernels = [p for p in self.network.parameters() if p.ndim == 2]
        self.before, self.after = (np.zeros((s.capacity, s.features), np.float32) for _ in "ab")
        self.action = np.zeros((s.capacity, 1), np.int64)
        self.reward, self.alive = (np.zeros(s.capacity, np.float32) for _ in "ab")
        self.bmc, self.time, self.length = BMC(s.alpha0), 0, 0
        self.state = self.env.start()

    def values(self, x):
        """Q without gradient."""
        with torch.no_grad():
            return self.network(torch.tensor(x)).numpy()

    def advance(self, steps):
        """Take `steps` steps, learning after each."""
        s = self.s
        value = self.values(self.env.encode(self.state))
        for _ in range(steps):
            explores = random.random() < self.bmc.epsilon
            action = random.randrange(s.actions) if explores else int(value.argmax())
            after, reward, terminated = self.env.step(self.state, action)
            self.length += 1
            done = terminated or self.length >= LIMIT
            x = self.env.encode(after)
            row = self.time % s.capacity
            self.before[row], self.after[row] = self.env.encode(self.state), x
            self.action[row, 0], self.reward[row], self.alive[row] = action, reward, not done
            self.time += 1
            following = self.values(x)
            greedy = reward + s.gamma * float(following.max())
            uniform = reward + s.gamma * float(following.mean())
            self.learn()
            self.bmc.update(greedy, uniform)
            self.state = after
            if done:
                self.state, self.length = self.env.start(), 0
            value = self.values(self.env.encode(self.state))

    def learn(self):
        """The epochs on one minibatch."""
        s, filled = self.s, min(self.time, self.s.capacity)
        if filled < s.batch:
            return
        rows = random.sample(range(filled), s.batch)
        before, after, action, reward, alive = (
            torch.from_numpy(x[rows])
            for x in (self.before, self.after, self.action, self.reward, self.alive)
        )
        with torch.no_grad():
            target = reward + s.gamma * alive * self.network(after).amax(1)
            fixed = self.network(before).scatter(1, action, target.unsqueeze(1))
        for _ in range(s.epochs):
            loss = nn.functional.mse_loss(self.network(before), fixed)
            if s.l2:
                loss = loss + s.l2 * sum((kernel**2).sum() for kernel in self.kernels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()


if __name__ == "__main__":
    parsed = common.arguments(domain=str)
    torch.set_num_threads(1)
    common.measure(Agent(parsed.domain, parsed.seed).advance, parsed, chunk=50)
