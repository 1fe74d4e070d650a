"""Environments in processes of their own: python scripts/examples/workers_parallel_env.py [frames].

The workers of a `ParallelEnv` only step; the learner's process acts for all of them, with one ε.
Its posterior pools the environments: it walks time in order, and the environments within a step.
"""

from __future__ import annotations

import sys
from pathlib import Path

from cart_pole_learner import CartPoleLearner, make_env, show
from torchrl.collectors import Collector
from torchrl.envs import ParallelEnv

from bmc_torchrl.interop.watched_collectors import watched


def main(
    frames: int = 3_000,
    checkpoint: Path = Path("outputs/workers/parallel_env.pt"),
    warmup: int = 200,
) -> list[dict]:
    learner, history = CartPoleLearner(checkpoint), []
    collector = Collector(
        ParallelEnv(2, make_env),
        learner.policy,
        frames_per_batch=100,
        total_frames=frames,
        init_random_frames=warmup,
        auto_register_policy_transforms=False,
    )
    with watched(collector, checkpoint=checkpoint):
        for data in collector:  # [environments, time]
            history.append(learner.learn_epsilon(data))
            learner.learn_values(data)
            learner.save()
    return history


if __name__ == "__main__":
    show(main(*map(int, sys.argv[1:])))
