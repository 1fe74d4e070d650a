"""Act and update with ε-BMC against EGreedyModule's forward and step."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import Categorical
from torchrl.modules import EGreedyModule

from bmc_torchrl import AdaptiveEGreedyModule, BMCEpsilon
from bmc_torchrl.benchmarks.processes import ask
from bmc_torchrl.benchmarks.timing import EFFORT, cost, interleaved, seconds

WALKS = (
    ([1000], True, False),
    ([8, 128], True, False),
    ([64, 1000], False, False),
    ([64, 1000], False, True),
)
"""Shapes, whether all transitions have one posterior, and whether the update is compiled."""


def _works(
    batch: int, compiled: bool, frames: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    spec = Categorical(4)
    ours = AdaptiveEGreedyModule(spec, BMCEpsilon(batch_shape=[batch]))
    peer = EGreedyModule(Categorical(4, shape=[batch]), annealing_num_steps=10**9)
    td = TensorDict({"action": torch.zeros(batch, dtype=torch.int64)}, [batch])
    returns = TensorDict(
        {"greedy_return": torch.rand(batch) + 1, "uniform_return": torch.rand(batch)}, [batch]
    )
    act, update, peer_act, peer_step = ours.forward, ours.update, peer.forward, peer.step
    if compiled:
        # What is compiled first stays about 10 µs slower, whichever side it belongs to.
        torch.compile(EGreedyModule(Categorical(4, shape=[batch])).forward)(td.copy())
        act, update = torch.compile(act, fullgraph=True), torch.compile(update, fullgraph=True)
        peer_act, peer_step = torch.compile(peer_act), torch.compile(peer_step)

    def adaptive() -> None:
        act(td.copy())
        update(returns)

    def fixed() -> None:
        peer_act(td.copy())
        peer_step(frames)

    return adaptive, fixed


def rows() -> Iterator[dict[str, Any]]:
    """One row per batch size, eager and compiled, and the time walk.

    ``EGreedyModule.step`` anneals frame by frame; the peer takes one frame per vector step, the
    cheapest it can do, and then every frame of it, as in ``greedy.step(data.numel())``.
    """
    torch.set_num_threads(1)
    for compiled, goals in ((False, (5, 5, 5)), (True, (1.25, 1.25, 2))):
        for batch, goal in zip((1, 64, 4096), goals, strict=True):
            for frames in sorted({1, batch}):
                torch.compiler.reset()
                # Compiling unrolls the peer's loop over frames.
                if compiled and frames > 64:
                    continue
                # Short turns, so that both sides meet the same noise.
                quick = frames == 1 or compiled
                turns = {"calls": 10, "repeats": 300} if quick else {"calls": 2}
                ours, peer = interleaved(*_works(batch, compiled, frames), **turns)
                how = "compiled" if compiled else "eager"
                work = f"ε-BMC act + update, batch {batch}, {how}, against step({frames}), seconds"
                yield cost(work, ours, peer, goal)
    yield _imports()
    yield from _walk()


def _imports() -> dict[str, Any]:
    """Everything of ours, torchrl with it, against torchrl's modules alone; both afresh."""
    names = ("bmc_torchrl", "torchrl.modules")
    ask("imports", "--name", names[0])
    pairs = [
        [ask("imports", "--name", name)["seconds"] for name in names] for _ in range(EFFORT.repeats)
    ]
    ours, peer = map(statistics.median, zip(*pairs, strict=True))
    return cost("import of every name, against torchrl.modules, seconds", ours, peer, 1.1)


def _walk() -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        answer = ask("ours_start", "--name", "update", variables={"NUMBA_CACHE_DIR": folder})
    yield cost("ε-BMC update, seconds of the very first", answer["seconds"], 1.0, 2.0)
    for shape, pooled, compiled in WALKS:
        torch.compiler.reset()
        returns = {"greedy_return": torch.rand(shape) + 1, "uniform_return": torch.rand(shape)}
        data = TensorDict(returns, shape)
        strategy = BMCEpsilon(batch_shape=[] if pooled else shape[:1])
        update = torch.compile(strategy.update, fullgraph=True) if compiled else strategy.update

        def work(update: Callable[[Any], object] = update, data: TensorDict = data) -> None:
            with torch.no_grad():
                update(data)

        work()
        each = sorted(seconds(work, 20) for _ in range(9))[4] / data.numel()
        what = "pooled" if pooled else "a posterior per run"
        how = "compiled" if compiled else "eager"
        name = f"ε-BMC update of {shape}, {what}, µs per transition, {how}"
        yield cost(name, each * 1e6, 1.0, 0.5)
