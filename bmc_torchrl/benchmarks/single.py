"""A DQN run as ``bmc train experiment=cartpole_dqn`` trains it, against others' loops.

CartPole-v1 (and LunarLander-v3, whose step is expensive), MLP 64-64, batch 64, one update per step.
Ours is the whole command's path: Lightning's loop, metrics, checkpoints. Several runs at once are
compared with as many processes of the CleanRL-style loop on the same core, whose rates add up to
that of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from bmc_torchrl.benchmarks.processes import ask, in_turns, rate
from bmc_torchrl.benchmarks.timing import EFFORT, cost, speed

TORCHRL, CLEANRL, SB3 = "TorchRL script", "CleanRL-style loop", "SB3"
LANDER = f"{CLEANRL}, LunarLander"
PEERS = {
    SB3: partial(rate, "sb3", environment="sb3"),
    CLEANRL: partial(rate, "cleanrl_style"),
    TORCHRL: partial(rate, "torchrl_style"),
    LANDER: partial(rate, "cleanrl_style", "--env", "LunarLander-v3"),
}
OURS = {
    "eager": ("--how", "eager"),
    "compiled": ("--how", "compiled"),
    "TorchRL's loss and replay": ("--how", "torchrl"),
    "10 runs at once": ("--how", "eager", "--runs", 10),
    "10 runs at once, compiled": ("--how", "compiled", "--runs", 10),
    "LunarLander, compiled": ("--how", "compiled", "--env", "LunarLander-v3"),
}
GOALS: dict[tuple[str, str], float | None] = {
    ("eager", TORCHRL): 2.0,
    ("eager", CLEANRL): 0.6,
    ("compiled", CLEANRL): 1.5,
    ("compiled", SB3): 3.0,
    ("compiled", TORCHRL): None,
    ("TorchRL's loss and replay", TORCHRL): None,
    ("10 runs at once", CLEANRL): 2.0,
    ("10 runs at once, compiled", CLEANRL): None,
    ("LunarLander, compiled", LANDER): None,
}


def rows() -> Iterator[dict[str, Any]]:
    """Ours against each peer, in run-steps per second; then the wait for a compiled update."""
    ours = {name: partial(rate, "ours_training", *how) for name, how in OURS.items()}
    found = in_turns({**ours, **PEERS})
    for (name, peer), goal in GOALS.items():
        work = f"DQN of bmc train, ε-BMC, {name}, run-steps/s, against {peer}"
        yield speed(work, found[name], found[peer], goal)
    answer = ask("ours_training", *OURS["compiled"], "--seconds", EFFORT.seconds)
    work = "DQN of bmc train, compiled, seconds to the first updates, caches as they are"
    yield cost(work, answer["first_update"], 1.0, 60.0)
