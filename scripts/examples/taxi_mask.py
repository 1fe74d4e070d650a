"""Taxi-v4 with its action mask: python scripts/examples/taxi_mask.py [frames].

The mask goes to the Q-actor and to the exploration module; the returns take it from the Q-actor, so
that the uniform policy is the one over legal actions.
"""

from __future__ import annotations

import sys

import torch
from loop import learning
from tensordict import TensorDictBase
from torch import nn
from torchrl.data import Binary
from torchrl.envs import DTypeCastTransform, GymEnv, TransformedEnv, default_info_dict_reader
from torchrl.modules import QValueActor
from torchrl.objectives import DQNLoss

from bmc_torchrl import AdaptiveEGreedyModule, BMCEpsilon, OneStepReturns


def taxi() -> TransformedEnv:
    try:
        env = GymEnv("Taxi-v4", categorical_action_encoding=True)
    except ImportError as error:
        sys.exit(f"{error}: pip install -c constraints.txt '.[examples]'")
    masks = {"action_mask": Binary(6, dtype=torch.int8)}
    env.set_info_dict_reader(default_info_dict_reader(list(masks), spec=masks))
    return TransformedEnv(env, DTypeCastTransform(torch.int8, torch.bool, in_keys=list(masks)))


def main(frames: int = 6_000) -> list[TensorDictBase]:
    torch.manual_seed(0)
    env = taxi()
    env.set_seed(0)
    q_actor = QValueActor(
        nn.Embedding(500, 6),
        in_keys=["observation"],
        action_space="categorical",
        action_mask_key="action_mask",
    )
    nn.init.zeros_(q_actor.module[0].module.weight)
    explore = AdaptiveEGreedyModule(
        env.action_spec, BMCEpsilon(alpha0=1.0, beta0=1.01), action_mask_key="action_mask"
    )
    returns = OneStepReturns(q_actor, gamma=0.95)
    loss_module = DQNLoss(q_actor, action_space="categorical")
    loss_module.make_value_estimator(gamma=0.95)
    batches = []
    for data in learning(env, q_actor, explore, returns, loss_module, frames=frames):
        batches.append(data.clone())
    rewards = torch.cat([data["next", "reward"] for data in batches])
    print(f"ε is {float(explore.eps):.4f}; the least reward {rewards.min():.0f}: nothing illegal.")
    return batches


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
