"""One DQN run on a Gymnasium environment: all but the environment's own step is one graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from bmc_torchrl.functional import epsilon_greedy_action, greedy_return, uniform_return
from bmc_torchrl.lockstep.compiling import Announce, CompiledOnce
from bmc_torchrl.lockstep.network import BETA1, BETA2, FlatNetwork, adam
from bmc_torchrl.strategies import EpsilonStrategy
from bmc_torchrl.values import QNetwork

__all__ = ["SingleDQN"]

CHUNK = 1024
"""Steps whose uniforms are drawn at once."""


class SingleDQN:
    """DQN with a target network, one update per step, on one Gymnasium environment.

    A step of the environment is followed by one call: keep the transition, sample a minibatch with
    replacement, take an Adam step on the Huber loss, update the target network and ε, and choose
    the next action. On a CPU the calls between small operations are most of a DQN's time; compiled,
    there are none.

    Args:
        env: a Gymnasium environment with a flat observation and discrete actions.
        strategy: the source of ε, of batch shape ``[1]``, reading no state; changed in place.
        hidden: widths of the Q-network's hidden layers.
        gamma: discount factor.
        learning_rate: Adam's.
        batch_size: of the minibatch.
        capacity: transitions in replay.
        learning_starts: steps before the first update.
        target_interval: steps between copies to the target network.
        seed: of weights, draws and the environment.
        compiled: whether to compile.
        announce: is told when the graph is being compiled.

    >>> import gymnasium
    >>> from bmc_torchrl.strategies import BMCEpsilon
    >>> agent = SingleDQN(
    ...     gymnasium.make("CartPole-v1"), BMCEpsilon(batch_shape=[1]), seed=0, compiled=False
    ... )
    >>> agent.advance(100)
    >>> agent.steps, len(agent.returns) > 1
    (100, True)
    """

    def __init__(
        self,
        env: Any,
        strategy: EpsilonStrategy,
        *,
        hidden: Sequence[int] = (64, 64),
        gamma: float = 0.99,
        learning_rate: float = 5e-4,
        batch_size: int = 64,
        capacity: int = 10_000,
        learning_starts: int = 64,
        target_interval: int = 500,
        seed: int = 0,
        compiled: bool = True,
        announce: Announce | None = None,
    ) -> None:
        if strategy.batch_shape != (1,) or strategy.state_key is not None:
            raise ValueError(
                f"strategy must have batch_shape=[1] and no num_states, got batch_shape="
                f"{list(strategy.batch_shape)} and state_key={strategy.state_key!r}."
            )
        if "value_change" in strategy.in_keys:
            raise ValueError(f"{type(strategy).__name__} needs value_change: use the TorchRL path.")
        self.env, self.strategy, self.gamma = env, strategy, gamma
        self.learning_rate, self.batch_size, self.capacity = learning_rate, batch_size, capacity
        self.learning_starts, self.target_interval = learning_starts, target_interval
        self.features, self.actions = int(env.observation_space.shape[0]), int(env.action_space.n)
        self.network = FlatNetwork((self.features, *hidden, self.actions))
        self.generator = torch.Generator().manual_seed(seed)
        self.steps, self._return = 0, 0.0
        self.returns: list[float] = []
        self._make_tensors(hidden, seed)
        self._call = CompiledOnce(self._step, "DQN step", enabled=compiled, announce=announce)

    def _make_tensors(self, hidden: Sequence[int], seed: int) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            network = QNetwork(self.features, self.actions, tuple(hidden), runs=1)
        self.flat = self.network.pack(network)
        self.target = self.flat.clone()
        self.mean, self.square = torch.zeros_like(self.flat), torch.zeros_like(self.flat)
        self.replay = torch.zeros(self.capacity, 2 * self.features + 3)
        self.time = torch.zeros(1, dtype=torch.int64)
        self.observation = torch.zeros(self.features)
        self.action = torch.zeros(1, dtype=torch.int64)
        self.inbox = torch.zeros(2 * self.features + 3)
        self._inbox, self._chosen = self.inbox.numpy(), self.action.numpy()
        start, _ = self.env.reset(seed=seed)
        self.observation.copy_(torch.from_numpy(start))

    def advance(self, steps: int) -> None:
        """Take `steps` steps of the environment, learning after each."""
        with torch.no_grad():
            while steps > 0:
                chunk = min(steps, CHUNK)
                for draws in torch.rand(
                    chunk, 2 + self.batch_size, generator=self.generator
                ).unbind():
                    self._environment_step()
                    self._call(draws)
                steps -= chunk

    def _environment_step(self) -> None:
        """Step, reset where an episode ends, and leave in the inbox what was seen.

        The inbox is s′, the state acted on next, the reward, termination and truncation.
        """
        after, reward, terminated, truncated, _ = self.env.step(int(self._chosen[0]))
        self.steps += 1
        self._return += float(reward)
        inbox, n = self._inbox, self.features
        inbox[:n] = after
        if terminated or truncated:
            self.returns.append(self._return)
            self._return = 0.0
            after, _ = self.env.reset()
        inbox[n : 2 * n] = after
        inbox[2 * n :] = reward, terminated, truncated

    def _step(self, draws: Tensor) -> None:
        """All that follows a step of the environment, from uniforms ``[2 + batch]``."""
        n = self.features
        after, fresh, (reward, terminated, truncated) = (
            self.inbox[:n],
            self.inbox[n : 2 * n],
            self.inbox[2 * n :].unbind(),
        )
        row = torch.cat([self.observation, self.inbox[:n], self.action, self.inbox[2 * n : -1]])
        self.replay.index_copy_(0, self.time % self.capacity, row.unsqueeze(0))
        filled = (self.time + 1).clamp(max=self.capacity)
        batch = self.replay.index_select(0, (draws[2:] * filled).long())
        next_value = self._learn(batch, after)
        self._reflect(reward, terminated > 0, (terminated + truncated) > 0, next_value)
        value = self.network.forward(self.flat, fresh.view(1, n, 1))[-1].view(1, self.actions)
        epsilon = self.strategy.epsilon(TensorDict({}, [1])).float()
        greedy = value.argmax(-1)
        self.action.copy_(
            epsilon_greedy_action(greedy, epsilon, draws[:2].unsqueeze(-1), self.actions)
        )
        self.observation.copy_(fresh)
        self.time += 1

    def _learn(self, batch: Tensor, after: Tensor) -> Tensor:
        """One Adam step on the minibatch; Q(s′) of the last transition before it, ``[actions]``."""
        n, count = self.features, self.batch_size
        before, following, action, reward, terminated = (
            x.T for x in torch.split(batch, [n, n, 1, 1, 1], 1)
        )
        inputs = torch.cat([before, after.unsqueeze(-1)], 1).unsqueeze(0)
        activations = self.network.forward(self.flat, inputs)
        next_value = activations[-1][0, :, count]
        bootstrap = self.network.forward(self.target, following.unsqueeze(0))[-1].amax(1)
        goal = reward + self.gamma * (1 - terminated) * bootstrap
        taken = action == torch.arange(self.actions).view(-1, 1)
        activations = [layer[..., :count] for layer in activations]
        slope = (activations[-1] - goal.unsqueeze(1)).clamp(-1, 1) / count
        gradient = self.network.gradient(
            self.flat, inputs[..., :count], activations, torch.where(taken, slope, 0.0)
        )
        self._adam(gradient)
        return next_value

    def _adam(self, gradient: Tensor) -> None:
        learns = self.time + 1 >= self.learning_starts
        step = (self.time + 2 - self.learning_starts).clamp(min=1).double()
        rate = self.learning_rate * (1 - BETA2**step).sqrt() / (1 - BETA1**step)
        old = (self.flat, self.mean, self.square)
        new = adam(*old, gradient, rate.float())
        for buffer, value in zip(old, new, strict=True):
            buffer.copy_(torch.where(learns, value, buffer))
        copies = (self.time + 1) % self.target_interval == 0
        self.target.copy_(torch.where(copies, self.flat, self.target))

    def _reflect(
        self, reward: Tensor, terminated: Tensor, done: Tensor, next_value: Tensor
    ) -> None:
        """Let the strategy learn from the transition, valued before learning."""
        value, reward, terminated = next_value.unsqueeze(0), reward.view(1), terminated.view(1)
        columns = {
            "greedy_return": greedy_return(reward, value, self.gamma, terminated=terminated),
            "uniform_return": uniform_return(reward, value, self.gamma, terminated=terminated),
            "next": {"done": done.view(1, 1)},
        }
        self.strategy.update(TensorDict(columns, [1]))
