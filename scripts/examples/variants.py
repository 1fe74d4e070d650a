"""ε-BMC in six variants of DQN on cart-pole: python scripts/examples/variants.py [name] [frames].

Only the network and the loss differ; what ε learns from is always `OneStepReturns(q_actor)`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from loop import flat, learning
from tensordict import TensorDictBase
from torch import nn
from torchrl.data import MultiStep
from torchrl.modules import MLP, DistributionalQValueActor, NoisyLinear, QValueActor
from torchrl.modules.models import DuelingMlpDQNet
from torchrl.objectives import DistributionalDQNLoss, DQNLoss

from bmc_torchrl import AdaptiveEGreedyModule, BMCEpsilon, OneStepReturns
from bmc_torchrl.envs import CartPoleEnv
from bmc_torchrl.learners.replay import ProportionalSampler

GAMMA = 0.95
SHAPE = {"in_features": 4, "num_cells": [64, 64], "activation_class": nn.ReLU}
Q_ACTOR = {"in_keys": ["observation"], "action_space": "categorical"}
Variant = tuple[nn.Module, nn.Module, dict[str, Any]]


def dqn(network: nn.Module | None = None, double: bool = False, **options: Any) -> Variant:
    q_actor = QValueActor(network or MLP(out_features=2, **SHAPE), **Q_ACTOR)
    return q_actor, DQNLoss(q_actor, action_space="categorical", double_dqn=double), options


def n_step(steps: int = 3) -> Variant:
    multi_step = MultiStep(gamma=GAMMA, n_steps=steps)

    def store(data: TensorDictBase) -> TensorDictBase:
        # MultiStep rewrites what it is given.
        return flat(multi_step(data.clone()))

    return dqn(store=store)


def c51(atoms: int = 21) -> Variant:
    q_actor = DistributionalQValueActor(
        MLP(out_features=(atoms, 2), **SHAPE), support=torch.linspace(0, 20, atoms), **Q_ACTOR
    )
    return q_actor, DistributionalDQNLoss(q_actor, gamma=GAMMA, delay_value=True), {}


VARIANTS: dict[str, Callable[[], Variant]] = {
    "double": lambda: dqn(double=True),
    "dueling": lambda: dqn(
        DuelingMlpDQNet(
            out_features=2,
            mlp_kwargs_feature=SHAPE | {"out_features": 64},
            mlp_kwargs_output={"in_features": 64, "num_cells": 64},
        )
    ),
    "n_step": n_step,
    "prioritized": lambda: dqn(sampler=ProportionalSampler(100_000, alpha=0.6, beta=0.4)),
    "c51": c51,
    "noisy": lambda: dqn(MLP(out_features=2, layer_class=NoisyLinear, **SHAPE)),
}


def main(name: str, frames: int = 4_800) -> tuple[list[float], TensorDictBase]:
    """ε over training, and what the greedy policy then does."""
    torch.manual_seed(0)
    env = CartPoleEnv(batch_size=[16], observation="encoded", max_steps=200)
    q_actor, loss_module, options = VARIANTS[name]()
    if name != "c51":
        loss_module.make_value_estimator(gamma=GAMMA)
    explore = AdaptiveEGreedyModule(env.action_spec, BMCEpsilon(alpha0=1.0, beta0=1.01))
    returns = OneStepReturns(q_actor, gamma=GAMMA)
    epsilon = []
    for _ in learning(env, q_actor, explore, returns, loss_module, frames=frames, **options):
        epsilon.append(float(explore.eps))
    rollout = env.rollout(200, q_actor, break_when_any_done=False)
    fallen = int(rollout["next", "terminated"].sum())
    print(
        f"{name}: ε {epsilon[0]:.3f} → {epsilon[-1]:.4f}; {fallen} falls in 16 × 200 greedy steps"
    )
    return epsilon, returns(rollout)


if __name__ == "__main__":
    names = sys.argv[1:2] or list(VARIANTS)
    for each in names:
        main(each, *map(int, sys.argv[2:3]))
