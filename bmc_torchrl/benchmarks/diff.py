"""The README's diff in a TorchRL DQN script: with ε-BMC against with ``EGreedyModule``.

CartPole-v1, 1,000 frames per batch, 100 updates each. First whole scripts, a process each, imports
and all; then a batch of one and a batch of the other in this process. They take turns in an order
that changes, and what counts is the median of the ratios of neighbours. Both get the same ε and the
same random numbers, so that they take the same actions: how many episodes end is a part of what a
batch costs.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bmc_torchrl.benchmarks.peers.readme_diff import Script
from bmc_torchrl.benchmarks.processes import ask
from bmc_torchrl.benchmarks.timing import EFFORT, cost, seconds

FRAMES, UPDATES, PAIRS, BATCHES = 1000, 100, 40, 20
GOAL = 1.02
_SCRIPT = f"TorchRL DQN script, {FRAMES} frames and {UPDATES} updates"


def rows() -> Iterator[dict[str, Any]]:
    """Processor time of whole scripts, with and without imports, and of a batch."""
    yield from _whole_scripts()
    yield _batch()


def _whole_scripts() -> Iterator[dict[str, Any]]:
    batches = EFFORT.count(BATCHES, least=2)
    size = {"--batches": batches, "--frames": _frames(), "--updates": _updates()}
    arguments = [argument for option in size.items() for argument in option]
    with tempfile.TemporaryDirectory() as folder:
        epsilons = Path(folder) / "epsilons.json"

        def run(adaptive: bool) -> dict[str, Any]:
            return ask(
                "readme_diff", "--adaptive", int(adaptive), "--epsilons", epsilons, *arguments
            )

        run(adaptive=True)
        pairs = []
        for number in range(3 * EFFORT.repeats):
            found = {adaptive: run(adaptive) for adaptive in (bool(number % 2), not number % 2)}
            pairs.append((found[True], found[False]))
    if len({each["actions"] for pair in pairs for each in pair}) > 1:
        raise RuntimeError(_ACTED_DIFFERENTLY)
    for clock, what in (("seconds", "imports and all"), ("without_imports", "without imports")):
        times = [(ours[clock], peer[clock]) for ours, peer in pairs]
        yield _cost(f"{_SCRIPT} a batch, {batches} batches, {what}, the README's diff", times)


def _batch() -> dict[str, Any]:
    torch.set_num_threads(1)
    ours, peer = (Script(adaptive, _frames(), _updates()) for adaptive in (True, False))
    warm_up_and_pairs = []
    for number in range(1 + EFFORT.count(PAIRS, least=2)):
        peer.explore.eps.copy_(ours.explore.eps)
        times = _same_batch(*((ours, peer) if number % 2 else (peer, ours)))
        warm_up_and_pairs.append((times[ours], times[peer]))
    return _cost(f"{_SCRIPT}, a batch, the README's diff", warm_up_and_pairs[1:])


def _cost(work: str, pairs: list[tuple[float, float]]) -> dict[str, Any]:
    ratio = statistics.median(mine / theirs for mine, theirs in pairs)
    theirs = statistics.median(pair[1] for pair in pairs)
    return cost(f"{work}, seconds", ratio * theirs, theirs, GOAL)


def _frames() -> int:
    return EFFORT.count(FRAMES, least=50)


def _updates() -> int:
    return EFFORT.count(UPDATES, least=5)


_ACTED_DIFFERENTLY = "The two scripts acted differently: what they take cannot be compared."


def _same_batch(first: Script, second: Script) -> dict[Script, float]:
    """What a batch takes each, one after the other, from the same random numbers."""
    state, found = torch.get_rng_state(), {}
    for script in (first, second):
        torch.set_rng_state(state)
        found[script] = seconds(script.batch, 1)
    if not first.actions.equal(second.actions):
        raise RuntimeError(_ACTED_DIFFERENTLY)
    return found
