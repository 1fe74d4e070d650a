"""Tic-tac-toe against a random player, by TorchRL's own environment.

python scripts/examples/tic_tac_toe.py [frames]. Its mask is called ``"mask"`` and its reward
``("player0", "reward")``; only names change.
"""

from __future__ import annotations

import sys

import torch
from loop import learning
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.envs import TicTacToeEnv
from torchrl.modules import MLP, QValueActor
from torchrl.objectives import DQNLoss

from bmc_torchrl import AdaptiveEGreedyModule, BMCEpsilon, OneStepReturns

REWARD = ("player0", "reward")


class Board(nn.Module):
    """Own stones and the other's, one feature per field."""

    def forward(self, board: Tensor) -> Tensor:
        """``[*batch, 3, 3]`` to ``[*batch, 18]``."""
        return torch.cat([board == 0, board == 1], -1).flatten(-2).float()


def main(frames: int = 4_000) -> tuple[list[TensorDictBase], float]:
    """What was played, and the share of games that the greedy policy then wins."""
    torch.manual_seed(0)
    env = TicTacToeEnv(single_player=True)
    network = nn.Sequential(Board(), MLP(in_features=18, out_features=9, num_cells=[128]))
    q_actor = QValueActor(
        network, in_keys=["board"], action_space="categorical", action_mask_key="mask"
    )
    explore = AdaptiveEGreedyModule(
        env.action_spec, BMCEpsilon(alpha0=1.0, beta0=1.01), action_mask_key="mask"
    )
    returns = OneStepReturns(q_actor, gamma=1.0, reward_key=REWARD)
    loss_module = DQNLoss(q_actor, action_space="categorical")
    loss_module.set_keys(reward=REWARD)
    loss_module.make_value_estimator(gamma=1.0)
    batches = []
    for data in learning(env, q_actor, explore, returns, loss_module, frames=frames):
        batches.append(data.clone())
    games = env.rollout(300, q_actor, break_when_any_done=False)["next"]
    share = float(games[REWARD][games["done"]].eq(1).float().mean())
    print(f"ε is {float(explore.eps):.4f}; the greedy policy wins {share:.0%} of its games.")
    return batches, share


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
