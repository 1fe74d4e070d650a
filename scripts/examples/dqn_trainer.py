"""ε-BMC in TorchRL's DQNTrainer: python scripts/examples/dqn_trainer.py [frames].

The trainer takes the module as its ``greedy_module`` and calls ``.step(frames)``, as it would
``EGreedyModule``'s; the hook ``UpdateEpsilon`` shows it every collected batch.
"""

from __future__ import annotations

import sys

import torch
from tensordict.nn import TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import GymEnv, RewardSum, TransformedEnv
from torchrl.modules import MLP, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate
from torchrl.trainers import LogScalar
from torchrl.trainers.algorithms import DQNTrainer

from bmc_torchrl import AdaptiveEGreedyModule, BMCEpsilon
from bmc_torchrl.interop.trainer_hook import UpdateEpsilon


def build(frames: int, frames_per_batch: int = 100) -> DQNTrainer:
    torch.manual_seed(0)
    env = TransformedEnv(
        GymEnv("CartPole-v1", categorical_action_encoding=True),
        RewardSum(["reward"], ["reward_sum"]),
    )
    env.set_seed(0)
    network = MLP(in_features=4, out_features=2, num_cells=[64, 64], activation_class=nn.ReLU)
    q_actor = QValueActor(network, in_keys=["observation"], spec=env.action_spec)
    explore = AdaptiveEGreedyModule(env.action_spec, BMCEpsilon(alpha0=1.0, beta0=1.01))
    loss_module = DQNLoss(q_actor, action_space=env.action_spec, delay_value=True)
    loss_module.make_value_estimator(gamma=0.99)
    trainer = DQNTrainer(
        collector=Collector(
            env,
            TensorDictSequential(q_actor, explore),
            frames_per_batch=frames_per_batch,
            total_frames=frames,
            auto_register_policy_transforms=False,
        ),
        total_frames=frames,
        frame_skip=1,
        optim_steps_per_batch=25,
        loss_module=loss_module,
        optimizer=torch.optim.Adam(loss_module.parameters(), lr=1e-3),
        replay_buffer=TensorDictReplayBuffer(storage=LazyTensorStorage(frames), batch_size=64),
        target_net_updater=SoftUpdate(loss_module, tau=0.05),
        greedy_module=explore,
    )
    UpdateEpsilon(gamma=0.99).register(trainer)
    LogScalar("epsilon", logname="epsilon", log_pbar=True).register(trainer, "log_epsilon")
    return trainer


def main(frames: int = 4_000) -> DQNTrainer:
    trainer = build(frames)
    trainer.train()
    print(f"ε is {float(trainer.greedy_module.eps):.4f} after {trainer.collected_frames} frames.")
    return trainer


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
