"""The learner that the examples with workers share: one Q-network, one posterior, cart-pole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictSequential
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import GymEnv
from torchrl.modules import MLP, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

from bmc_torchrl import AdaptiveEGreedyModule, BMCEpsilon, OneStepReturns


def make_env() -> GymEnv:
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


class CartPoleLearner:
    """A DQN whose ε is the posterior's mean; saved to `checkpoint` after every batch."""

    def __init__(self, checkpoint: Path) -> None:
        torch.manual_seed(0)
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        self.checkpoint, self.spec = checkpoint, make_env().action_spec
        network = MLP(in_features=4, out_features=2, num_cells=[64])
        self.q_actor = QValueActor(network, in_keys=["observation"], spec=self.spec)
        self.explore = AdaptiveEGreedyModule(self.spec, BMCEpsilon(alpha0=1.0, beta0=1.01))
        self.returns = OneStepReturns(self.q_actor, gamma=0.99)
        self.policy = TensorDictSequential(self.q_actor, self.explore)
        self.loss_module = DQNLoss(self.q_actor, action_space=self.spec)
        self.loss_module.make_value_estimator(gamma=0.99)
        self.target = SoftUpdate(self.loss_module, tau=0.05)
        self.optimiser = torch.optim.Adam(self.loss_module.parameters(), lr=5e-3)
        self.buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=64)

    def learn_epsilon(self, data: TensorDictBase) -> dict[str, Any]:
        """Returns ε as it was before, and that which `data` was taken with, where it was."""
        before = {"epsilon": self.explore.eps.item(), "acted_with": data["epsilon"].clone()}
        self.explore.update(self.returns(data))
        return before

    def learn_values(self, data: TensorDictBase) -> None:
        """Keeps `data` and takes ten steps of the optimiser."""
        self.buffer.extend(data.exclude("collector").reshape(-1))
        for _ in range(10):
            self.loss_module(self.buffer.sample())["loss"].backward()
            self.optimiser.step()
            self.optimiser.zero_grad()
            self.target.step()

    def save(self) -> None:
        """Atomically: a worker may die at any moment."""
        state = {"q_actor": self.q_actor.state_dict(), "explore": self.explore.state_dict()}
        new = self.checkpoint.with_suffix(".new")
        torch.save(state, new)
        new.replace(self.checkpoint)


def show(history: list[dict[str, Any]]) -> None:
    print(f"ε went from {history[0]['epsilon']:.3f} to {history[-1]['epsilon']:.3f}")
