"""Workers that never wait: python scripts/examples/workers_multi_async.py [frames].

The workers of a `MultiAsyncCollector` go on while the learner learns. They share its memory, and a
posterior is several numbers: read while it is written, they give an ε that nobody meant (once in
350 updates, up to 2.7, in an experiment). So the posterior stays in the learner, and what workers
share is one number, its mean.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tensordict.nn import TensorDictSequential
from torchrl.collectors import MultiAsyncCollector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import GymEnv
from torchrl.modules import MLP, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

from bmc_torchrl import AdaptiveEGreedyModule, BMCEpsilon, ConstantEpsilon, OneStepReturns
from bmc_torchrl.workers import watched


def make_env() -> GymEnv:
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def main(
    frames: int = 3_000,
    checkpoint: Path = Path("outputs/workers/multi_async.pt"),
    warmup: int = 200,
) -> list[dict]:
    torch.manual_seed(0)
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    spec = make_env().action_spec
    network = MLP(in_features=4, out_features=2, num_cells=[64])
    q_actor = QValueActor(network, in_keys=["observation"], spec=spec)
    explore = AdaptiveEGreedyModule(spec, strategy=BMCEpsilon(alpha0=1.0, beta0=1.01))
    returns = OneStepReturns(q_actor, gamma=0.99)
    shared = ConstantEpsilon(explore.eps)
    policy = TensorDictSequential(q_actor, AdaptiveEGreedyModule(spec, strategy=shared))
    loss_module = DQNLoss(q_actor, action_space=spec)
    loss_module.make_value_estimator(gamma=0.99)
    target = SoftUpdate(loss_module, tau=0.05)
    optimiser = torch.optim.Adam(loss_module.parameters(), lr=5e-3)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=64)
    collector = MultiAsyncCollector(
        [make_env, make_env],
        policy,
        frames_per_batch=100,
        total_frames=frames,
        init_random_frames=warmup,
        auto_register_policy_transforms=False,
    )
    history = []
    with watched(collector, checkpoint=checkpoint):
        for data in collector:  # [time], of one worker
            history.append({"epsilon": explore.eps.item(), "acted_with": data["epsilon"].clone()})
            explore.update(returns(data))
            shared.value.copy_(explore.eps)
            buffer.extend(data.exclude("collector").reshape(-1))
            for _ in range(10):
                loss_module(buffer.sample())["loss"].backward()
                optimiser.step()
                optimiser.zero_grad()
                target.step()
            state = {"q_actor": q_actor.state_dict(), "explore": explore.state_dict()}
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
    return history


if __name__ == "__main__":
    history = main(*map(int, sys.argv[1:]))
    print(f"ε went from {history[0]['epsilon']:.3f} to {history[-1]['epsilon']:.3f}")
