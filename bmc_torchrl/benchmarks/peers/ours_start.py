"""Seconds on the wall until an engine has taken its first step; imports are not counted."""

from __future__ import annotations

import time

import common

from bmc_torchrl.benchmarks.workloads import engine

if __name__ == "__main__":
    parsed = common.arguments(name=str)
    began = time.perf_counter()
    engine(parsed.name, 2).advance(1)
    common.report(2, time.perf_counter() - began)
