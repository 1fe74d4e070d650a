"""A recurrent Q-network on cart-pole without velocities: python scripts/examples/recurrent_dqn.py.

The GRU leaves its memory in ``("next", "recurrent_state")``, where `OneStepReturns` finds it beside
the next observation: Q(s′) remembers the episode. The loss replays whole sequences.
"""

from __future__ import annotations

import sys

import torch
from loop import learning
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.envs import Compose, InitTracker, TransformedEnv
from torchrl.modules import GRUModule, QValueModule, set_recurrent_mode
from torchrl.objectives import DQNLoss

from bmc_torchrl import AdaptiveEGreedyModule, BMCEpsilon, OneStepReturns
from bmc_torchrl.envs import CartPoleEnv

GAMMA = 0.95


class Positions(nn.Module):
    """Where cart and pole are, not how fast they move."""

    def forward(self, observation: Tensor) -> Tensor:
        """``[*batch, 4]`` to ``[*batch, 2]``, both about 1 at most."""
        return observation[..., [0, 2]] * torch.tensor([1.0, 10.0])


class SequenceDQNLoss(DQNLoss):
    """DQNLoss of ``[batch, time]`` data."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The loss; the GRU runs along time."""
        with set_recurrent_mode(True):
            return super().forward(tensordict)


def sequences(data: TensorDictBase) -> TensorDictBase:
    """What the buffer gets: one element per environment, episodes kept apart in s′ too."""
    # TorchRL marks an episode's start in s only; along s′ the GRU would remember the one before.
    data = data.clone()
    return data.set(("next", "is_init"), data["is_init"].clone())


def build(hidden: int = 32, copies: int = 16) -> tuple[TransformedEnv, TensorDictSequential]:
    gru = GRUModule(input_size=2, hidden_size=hidden, in_key="positions", out_key="memory")
    env = TransformedEnv(
        CartPoleEnv(batch_size=[copies], observation="encoded", max_steps=200),
        Compose(InitTracker(), gru.make_tensordict_primer()),
    )
    q_actor = TensorDictSequential(
        TensorDictModule(Positions(), ["observation"], ["positions"]),
        gru,
        TensorDictModule(nn.Linear(hidden, 2), ["memory"], ["action_value"]),
        QValueModule(action_space="categorical"),
    )
    return env, q_actor


def main(frames: int = 6_400) -> tuple[list[float], TensorDictBase]:
    """ε over training, and the returns of what the greedy policy then does."""
    torch.manual_seed(0)
    env, q_actor = build()
    explore = AdaptiveEGreedyModule(env.action_spec, BMCEpsilon(alpha0=1.0, beta0=1.01))
    returns = OneStepReturns(q_actor, gamma=GAMMA)
    loss_module = SequenceDQNLoss(q_actor, action_space="categorical")
    loss_module.make_value_estimator(gamma=GAMMA)
    replay = {"frames_per_batch": 320, "batch_size": 16, "updates": 20, "store": sequences}
    epsilon = []
    for _ in learning(env, q_actor, explore, returns, loss_module, frames=frames, **replay):
        epsilon.append(float(explore.eps))
    rollout = env.rollout(200, q_actor, break_when_any_done=False)
    fallen = int(rollout["next", "terminated"].sum())
    print(f"ε {epsilon[0]:.3f} → {epsilon[-1]:.4f}; {fallen} falls in 16 × 200 greedy steps")
    return epsilon, returns(rollout)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
