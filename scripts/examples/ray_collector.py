"""Workers on a Ray cluster, started here: python scripts/examples/ray_collector.py [frames].

The actors of a `RayCollector` share no memory with the learner: they act with its ε and Q because
`update_policy_weights_` sends both after every update.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
try:
    import ray
except ImportError:
    sys.exit("This example needs Ray: pip install -c constraints.txt '.[examples]'")
import torch
from tensordict.nn import TensorDictSequential
from torchrl.collectors.distributed import RayCollector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import GymEnv
from torchrl.modules import MLP, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

from bmc_torchrl import AdaptiveEGreedyModule, BMCEpsilon, OneStepReturns
from bmc_torchrl.workers import watched


def make_env() -> GymEnv:
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def main(
    frames: int = 3_000,
    checkpoint: Path = Path("outputs/workers/ray.pt"),
    warmup: int = 200,
) -> list[dict]:
    settings = {"include_dashboard": False, "log_to_driver": False, "configure_logging": False}
    ray.init(num_cpus=1, object_store_memory=100 * 2**20, **settings)
    try:
        return train(frames, checkpoint, warmup)
    finally:
        ray.shutdown()


def train(frames: int, checkpoint: Path, warmup: int) -> list[dict]:
    torch.manual_seed(0)
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    spec = make_env().action_spec
    network = MLP(in_features=4, out_features=2, num_cells=[64])
    q_actor = QValueActor(network, in_keys=["observation"], spec=spec)
    explore = AdaptiveEGreedyModule(spec, strategy=BMCEpsilon(alpha0=1.0, beta0=1.01))
    returns = OneStepReturns(q_actor, gamma=0.99)
    policy = TensorDictSequential(q_actor, explore)
    loss_module = DQNLoss(q_actor, action_space=spec)
    loss_module.make_value_estimator(gamma=0.99)
    target = SoftUpdate(loss_module, tau=0.05)
    optimiser = torch.optim.Adam(loss_module.parameters(), lr=5e-3)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=64)
    collector = RayCollector(
        [make_env, make_env],
        policy,
        frames_per_batch=100,
        total_frames=frames,
        init_random_frames=warmup,
        sync=True,
        collector_kwargs={"auto_register_policy_transforms": False},
        remote_configs={"num_cpus": 0.5, "num_gpus": 0, "memory": 200 * 2**20},
    )
    history = []
    with watched(collector, checkpoint=checkpoint):
        collector.update_policy_weights_()
        for data in collector:  # [workers, time]
            history.append({"epsilon": explore.eps.item(), "acted_with": data["epsilon"].clone()})
            explore.update(returns(data))
            buffer.extend(data.exclude("collector").reshape(-1))
            for _ in range(10):
                loss_module(buffer.sample())["loss"].backward()
                optimiser.step()
                optimiser.zero_grad()
                target.step()
            collector.update_policy_weights_()
            state = {"q_actor": q_actor.state_dict(), "explore": explore.state_dict()}
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
    return history


if __name__ == "__main__":
    history = main(*map(int, sys.argv[1:]))
    print(f"ε went from {history[0]['epsilon']:.3f} to {history[-1]['epsilon']:.3f}")
