"""One DQN run on Gymnasium's CartPole-v1: MLP 64-64, batch 64, one update per step.

The goal "≥ 3× SB3 compiled, ≥ 1× SB3 default" is read as: our compiled step, which is how the class
runs by default, at least three times SB3 as it is installed; our eager step at least as fast as it.
SB3 with its networks under torch.compile, the CleanRL-style loop, Tianshou and the TorchRL script
stand beside, without a goal.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from scripts.benchmarks.processes import in_turns, rate
from scripts.benchmarks.timing import speed

PEERS = {
    "SB3": partial(rate, "sb3", environment="sb3"),
    "SB3, its networks compiled": partial(rate, "sb3", "--compiled", 1, environment="sb3"),
    "CleanRL-style loop": partial(rate, "cleanrl_style"),
    "Tianshou": partial(rate, "tianshou_dqn", environment="tianshou"),
    "TorchRL script": partial(rate, "torchrl_style"),
}
OURS = {how: partial(rate, "ours_single", "--how", how) for how in ("compiled", "eager")}
GOALS = {("compiled", "SB3"): 3.0, ("eager", "SB3"): 1.0}


def rows() -> Iterator[dict[str, Any]]:
    """Ours, compiled and eager, against each peer, in steps per second."""
    found = in_turns({**OURS, **PEERS})
    for how in OURS:
        for peer in PEERS:
            work = f"single DQN run, ε-BMC, {how}, steps/s, against {peer}"
            yield speed(work, found[how], found[peer], GOALS.get((how, peer)))
