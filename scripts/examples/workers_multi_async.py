"""Workers that never wait: python scripts/examples/workers_multi_async.py [frames].

The workers of a `MultiAsyncCollector` go on while the learner learns. They share its memory, and a
posterior is several numbers: read while it is written, they give an ε that nobody meant (once in
350 updates, up to 2.7, in an experiment). So the posterior stays in the learner, and what workers
share is one number, its mean.
"""

from __future__ import annotations

import sys
from pathlib import Path

from cart_pole_learner import CartPoleLearner, make_env, show
from tensordict.nn import TensorDictSequential
from torchrl.collectors import MultiAsyncCollector

from bmc_torchrl import AdaptiveEGreedyModule, ConstantEpsilon
from bmc_torchrl.interop.watched_collectors import watched


def main(
    frames: int = 3_000,
    checkpoint: Path = Path("outputs/workers/multi_async.pt"),
    warmup: int = 200,
) -> list[dict]:
    learner, history = CartPoleLearner(checkpoint), []
    shared = ConstantEpsilon(learner.explore.eps)
    acting = AdaptiveEGreedyModule(learner.spec, strategy=shared)
    collector = MultiAsyncCollector(
        [make_env, make_env],
        TensorDictSequential(learner.q_actor, acting),
        frames_per_batch=100,
        total_frames=frames,
        init_random_frames=warmup,
        auto_register_policy_transforms=False,
    )
    with watched(collector, checkpoint=checkpoint):
        for data in collector:  # [time], of one worker
            history.append(learner.learn_epsilon(data))
            shared.value.copy_(learner.explore.eps)
            learner.learn_values(data)
            learner.save()
    return history


if __name__ == "__main__":
    show(main(*map(int, sys.argv[1:])))
