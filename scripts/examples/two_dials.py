"""MultiCategorical actions, Q the sum of one value per dial: python scripts/examples/two_dials.py.

Each step shows where two dials should point and rewards each that does. With γ = ½ the value of
acting well is 4.
"""

from __future__ import annotations

import sys

import torch
from loop import flat, learning
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torchrl.data import Composite, MultiCategorical, Unbounded
from torchrl.envs import EnvBase
from torchrl.modules import QValueModule
from torchrl.objectives import DQNLoss

from bmc_torchrl import AdaptiveEGreedyModule, BMCEpsilon, OneStepReturns

SIZES = [3, 4]


class OneHotDials(nn.Module):
    """Positions as one-hot vectors, side by side."""

    def forward(self, dials: Tensor) -> Tensor:
        """``[*batch, 2]`` to ``[*batch, 7]``."""
        parts = zip(dials.unbind(-1), SIZES, strict=True)
        return torch.cat([one_hot(dial, size) for dial, size in parts], -1).float()


class DialsEnv(EnvBase):
    """Where the dials should point is drawn anew at every step; nothing ever ends."""

    def __init__(self, copies: int) -> None:
        super().__init__(batch_size=[copies])
        self.observation_spec = Composite(
            target=MultiCategorical(SIZES).expand(copies, 2), shape=[copies]
        )
        self.action_spec = MultiCategorical(SIZES).expand(copies, 2)
        self.reward_spec = Unbounded((copies, 1))

    def _reset(self, tensordict: TensorDictBase | None, **_: object) -> TensorDictBase:
        return TensorDict({"target": self.observation_spec["target"].rand()}, self.batch_size)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        right = (tensordict["action"] == tensordict["target"]).float()
        ends = {"reward": right.sum(-1, keepdim=True)} | self.full_done_spec.zero().to_dict()
        return self._reset(None).update(ends)

    def _set_seed(self, seed: int | None) -> None:
        torch.manual_seed(seed)


class EachDial(nn.Module):
    """The best position of each dial; ``var_nums`` tells the returns how Q is made up."""

    var_nums = SIZES

    def forward(self, action_value: Tensor) -> Tensor:
        """``[*batch, 7]`` to ``[*batch, 2]``."""
        return torch.stack([part.argmax(-1) for part in action_value.split(SIZES, -1)], -1)


def one_hot_actions(data: TensorDictBase) -> TensorDictBase:
    """What the buffer gets: TorchRL's DQNLoss knows several variables as one-hot vectors."""
    kept = flat(data).select("target", "action", "next")
    return kept.set("action", OneHotDials()(kept["action"]))


def main(frames: int = 6_400) -> tuple[list[float], TensorDictBase]:
    """ε over training, and the returns of what the greedy policy then does."""
    torch.manual_seed(0)
    env = DialsEnv(32)
    network = nn.Sequential(OneHotDials(), nn.Linear(sum(SIZES), sum(SIZES)))
    values = TensorDictModule(network, ["target"], ["action_value"])
    q_actor = TensorDictSequential(
        values, TensorDictModule(EachDial(), ["action_value"], ["action"])
    )
    explore = AdaptiveEGreedyModule(env.action_spec, BMCEpsilon(alpha0=1.0, beta0=1.01))
    returns = OneStepReturns(q_actor, gamma=0.5)
    one_hot_actor = TensorDictSequential(values, QValueModule("mult_one_hot", var_nums=SIZES))
    loss_module = DQNLoss(one_hot_actor, action_space="mult_one_hot")
    loss_module.make_value_estimator(gamma=0.5)
    epsilon = []
    for _ in learning(
        env,
        q_actor,
        explore,
        returns,
        loss_module,
        frames=frames,
        learning_rate=0.03,
        store=one_hot_actions,
    ):
        epsilon.append(float(explore.eps))
    greedy = returns(env.rollout(20, q_actor))
    value = float(greedy["greedy_return"].mean())
    print(f"ε {epsilon[0]:.3f} → {epsilon[-1]:.4f}; acting well is worth {value:.2f}, of 4.")
    return epsilon, greedy


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
