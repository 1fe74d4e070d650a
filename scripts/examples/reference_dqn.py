"""A plain TorchRL DQN, the script that the README's diff is about.

python scripts/examples/reference_dqn.py [frames]. Nothing here knows ε-BMC; a test applies the diff
to these very lines and runs the result.
"""

from __future__ import annotations

import sys

import torch
from tensordict.nn import TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import GymEnv, StepCounter, TransformedEnv
from torchrl.modules import MLP, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate


def main(frames: int = 4_000) -> list[float]:
    torch.manual_seed(0)
    env = TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True), StepCounter())
    env.set_seed(0)
    network = MLP(in_features=4, out_features=2, num_cells=[64, 64], activation_class=nn.ReLU)
    q_actor = QValueActor(network, in_keys=["observation"], spec=env.action_spec)
    explore = EGreedyModule(env.action_spec, eps_init=1.0, eps_end=0.05, annealing_num_steps=50_000)
    policy = TensorDictSequential(q_actor, explore)
    loss_module = DQNLoss(q_actor, action_space=env.action_spec)
    loss_module.make_value_estimator(gamma=0.99)
    target = SoftUpdate(loss_module, tau=0.05)
    optimiser = torch.optim.Adam(loss_module.parameters(), lr=1e-3)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(frames), batch_size=64)
    collector = Collector(
        env,
        policy,
        frames_per_batch=100,
        total_frames=frames,
        auto_register_policy_transforms=False,
    )
    epsilon = []
    for data in collector:
        explore.step(data.numel())
        buffer.extend(data)
        for _ in range(25):
            loss_module(buffer.sample())["loss"].backward()
            optimiser.step()
            optimiser.zero_grad()
            target.step()
        epsilon.append(float(explore.eps))
    collector.shutdown()
    print(f"ε went from {epsilon[0]:.3f} to {epsilon[-1]:.4f} in {frames} frames.")
    return epsilon


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
