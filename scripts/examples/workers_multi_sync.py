"""Processes collect, one learner decides ε: python scripts/examples/workers_multi_sync.py [frames].

The workers of a `MultiSyncCollector` wait while the learner learns, and its policy is in memory
that they share: every batch is taken with the ε and the Q that the update before has left.
"""

from __future__ import annotations

import sys
from pathlib import Path

from cart_pole_learner import CartPoleLearner, make_env, show
from torchrl.collectors import MultiSyncCollector

from bmc_torchrl.interop.watched_collectors import watched


def main(
    frames: int = 3_000,
    checkpoint: Path = Path("outputs/workers/multi_sync.pt"),
    warmup: int = 200,
) -> list[dict]:
    learner, history = CartPoleLearner(checkpoint), []
    collector = MultiSyncCollector(
        [make_env, make_env],
        learner.policy,
        frames_per_batch=100,
        total_frames=frames,
        init_random_frames=warmup,
        auto_register_policy_transforms=False,
    )
    with watched(collector, checkpoint=checkpoint):
        for data in collector:  # [workers, time]
            history.append(learner.learn_epsilon(data))
            learner.learn_values(data)
            learner.save()
    return history


if __name__ == "__main__":
    show(main(*map(int, sys.argv[1:])))
