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
from cart_pole_learner import CartPoleLearner, make_env, show
from torchrl.collectors.distributed import RayCollector

from bmc_torchrl.interop.watched_collectors import watched


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
    learner, history = CartPoleLearner(checkpoint), []
    collector = RayCollector(
        [make_env, make_env],
        learner.policy,
        frames_per_batch=100,
        total_frames=frames,
        init_random_frames=warmup,
        sync=True,
        collector_kwargs={"auto_register_policy_transforms": False},
        remote_configs={"num_cpus": 0.5, "num_gpus": 0, "memory": 200 * 2**20},
    )
    with watched(collector, checkpoint=checkpoint):
        collector.update_policy_weights_()
        for data in collector:  # [workers, time]
            history.append(learner.learn_epsilon(data))
            learner.learn_values(data)
            collector.update_policy_weights_()
            learner.save()
    return history


if __name__ == "__main__":
    show(main(*map(int, sys.argv[1:])))
