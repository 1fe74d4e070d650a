"""Records the streams of returns of the interactive page: python docs/interactive/record.py.

Each stream is the beginning of one run of an experiment of the paper with ε-BMC, on the path of
`bmc train engine=torchrl runs=1`. It is written to `streams.js` beside this file: JSON behind an
assignment, since a page that is opened from disk may load a script but not fetch a file.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from bmc_torchrl.experiments.build import build_job
from bmc_torchrl.experiments.configs import experiment_config
from bmc_torchrl.strategies import BMCEpsilon

STREAMS = Path(__file__).with_name("streams.js")
ASSIGNMENT = "globalThis.bmcStreams = "
TITLES = {"grid_sarsa": "Grid-world", "cart_sarsa": "Cart-pole"}
TRANSITIONS = 7500
PER_UNIT = 10_000
"""Returns are stored as whole numbers, this many to 1."""


def recorded(experiment: str, transitions: int) -> dict[str, Any]:
    """The first transitions of a run: both returns of each, and where and how episodes ended."""
    overrides = ["strategy=bmc", "engine=torchrl", "runs=1", "seed=0", "device=cpu"]
    learner, stream, _ = build_job(experiment_config(experiment, overrides))
    strategy = learner.strategy
    assert isinstance(strategy, BMCEpsilon)
    buffers = {"alpha0": strategy.alpha0, "beta0": strategy.beta0}
    buffers |= dict(strategy.likelihood.named_buffers())
    greedy, uniform, ends, final_rewards = [], [], [], []
    steps = itertools.islice(itertools.chain.from_iterable(stream), transitions)
    for index, transition in enumerate(steps):
        learner.step(transition)
        greedy.append(_stored(transition["greedy_return"]))
        uniform.append(_stored(transition["uniform_return"]))
        if transition["next", "done"]:
            ends.append(index)
            terminated = transition["next", "terminated"]
            final_rewards.append(_stored(transition["next", "reward"]) if terminated else None)
    return {
        "title": TITLES[experiment],
        "command": f"bmc train experiment={experiment} {' '.join(overrides)}",
        "prior": {name: value.item() for name, value in buffers.items()},
        "perUnit": PER_UNIT,
        "greedyReturns": greedy,
        "uniformReturns": uniform,
        "episodeEnds": ends,
        "terminalRewards": final_rewards,
    }


def _stored(value: Any) -> int:
    return round(value.item() * PER_UNIT)


def streams() -> dict[str, dict[str, Any]]:
    """What the page shows, by experiment."""
    found: dict[str, dict[str, Any]] = json.loads(STREAMS.read_text()[len(ASSIGNMENT) : -2])
    return found


if __name__ == "__main__":
    made = {experiment: recorded(experiment, TRANSITIONS) for experiment in TITLES}
    STREAMS.write_text(f"{ASSIGNMENT}{json.dumps(made, separators=(',', ':'))};\n")
