"""Peak memory of the largest tabular experiment, in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bmc_torchrl.benchmarks.processes import ask
from bmc_torchrl.benchmarks.timing import EFFORT, cost

RUNS, LIMIT = 2200, 8.0


def rows() -> Iterator[dict[str, Any]]:
    """GiB of 2200 supply-chain tabular runs, tests included, against 8."""
    runs = EFFORT.count(RUNS, least=2)
    found = ask("ours_memory", "--runs", runs)["gibibytes"]
    yield cost(f"memory of {runs} supply-chain tabular runs, GiB, against 8", found, LIMIT, 1.0)
