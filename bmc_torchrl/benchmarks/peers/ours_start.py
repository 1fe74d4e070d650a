"""Seconds on the wall until an engine has taken its first step, or ε-BMC seen its first batch.

Imports are not counted.
"""

from __future__ import annotations

import time

import common
import torch
from tensordict import TensorDict

from bmc_torchrl import BMCEpsilon
from bmc_torchrl.benchmarks.workloads import engine

if __name__ == "__main__":
    parsed = common.arguments(name=str)
    returns = {"greedy_return": torch.rand(1000) + 1, "uniform_return": torch.rand(1000)}
    data, strategy = TensorDict(returns, [1000]), BMCEpsilon()
    began = time.perf_counter()
    if parsed.name == "update":
        strategy.update(data)
    else:
        engine(parsed.name, 2).advance(1)
    common.report(2, time.perf_counter() - began)
