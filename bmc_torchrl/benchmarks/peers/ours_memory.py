"""Peak resident memory of supply-chain tabular runs: builds them, takes some steps, reports it."""

from __future__ import annotations

import resource

import common

from bmc_torchrl.benchmarks.workloads import engine

if __name__ == "__main__":
    parsed = common.arguments(runs=int)
    runs = engine("supply_sarsa", parsed.runs)
    runs.advance(min(parsed.steps, 400))
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    common.report(parsed.runs * 400, parsed.seconds, gibibytes=kibibytes / 2**20)
