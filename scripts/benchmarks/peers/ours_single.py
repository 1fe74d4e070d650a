"""The project's own single run: --how compiled or eager, --strategy bmc or constant."""

from __future__ import annotations

import sys
from pathlib import Path

import common

sys.path.insert(0, str(Path(__file__).parents[3]))

import gymnasium
import torch

from bmc_torchrl import BMCEpsilon, ConstantEpsilon
from bmc_torchrl.lockstep.single import SingleDQN

if __name__ == "__main__":
    parsed = common.arguments(how=str, strategy=str)
    torch.set_num_threads(1)
    kinds = {"bmc": BMCEpsilon, "constant": lambda **how: ConstantEpsilon(0.1, **how)}
    agent = SingleDQN(
        gymnasium.make("CartPole-v1"),
        kinds[parsed.strategy or "bmc"](batch_shape=[1]),
        hidden=(common.HIDDEN, common.HIDDEN),
        gamma=common.GAMMA,
        learning_rate=common.RATE,
        batch_size=common.BATCH,
        capacity=common.CAPACITY,
        learning_starts=common.LEARNING_STARTS,
        target_interval=common.TARGET_INTERVAL,
        seed=parsed.seed,
        compiled=parsed.how != "eager",
    )
    common.measure(agent.advance, parsed, chunk=200)
