"""The half of the study in tables: what every run of a strategy earned in a finite MDP."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from hydra.utils import instantiate
from numpy.typing import NDArray

from bmc_torchrl import EpsilonStrategy
from bmc_torchrl.envs import TabularEnv
from bmc_torchrl.experiments.build import strategy_seed
from bmc_torchrl.experiments.study_tasks import in_random_order
from bmc_torchrl.learners.settings import ExpectedSarsaSettings, RunSettings
from bmc_torchrl.lockstep.interface import Engine, make_engine

__all__ = ["Bounds", "build_task", "finite_scores", "run_scores"]

Array = NDArray[np.float64]

SCHEDULES = ("constant", "geometric", "power", "linear", "linear_run")
"""Families whose ε does not read rewards. Expected SARSA is linear in these, so that a run in
another unit of reward has the same scores: it is not computed again."""


def finite_scores(config: Mapping[str, Any], name: str) -> pd.DataFrame:
    """The scores of all strategies on a task in all conditions.

    Args:
        config: ``finite`` of the study's settings with its ``task``, ``sweep`` and ``seed``.
        name: Of the task; random numbers depend on it.

    Returns:
        Columns condition, strategy, run, and those of :func:`run_scores`. Runs of the same number
        have the same random numbers in all conditions.
    """
    tables = []
    schedules: dict[tuple[str, float], dict[str, Array]] = {}
    for condition, how in config["conditions"].items():
        env = build_task(config, name, how["scale"])
        bounds = Bounds.of(env, config["gamma"])
        for label, entry in config["sweep"].items():
            known = schedules.get((label, how["noise"]))
            if known is None:
                seed = strategy_seed(config["seed"], f"{name}/{label}")
                engine = _engine(config, env, _strategy(config, env, entry), how, seed)
                engine.advance(frames_of(config))
                known = run_scores(engine, bounds)
            if entry["family"] in SCHEDULES:
                schedules[label, how["noise"]] = known
            runs = range(config["runs"])
            tables.append({"condition": condition, "strategy": label, "run": runs, **known})
    return pd.concat([pd.DataFrame(table) for table in tables], ignore_index=True)


def frames_of(config: Mapping[str, Any]) -> int:
    """Frames of a run of the task."""
    return int(config["task"].get("frames", config["frames"]))


def build_task(config: Mapping[str, Any], name: str, scale: float) -> TabularEnv:
    """The task's environments, one for each run, with rewards times `scale`."""
    task = config["task"]
    order = zlib.crc32(name.encode())
    mdps = [
        in_random_order(instantiate(task[key]), order) for key in ("mdp", "after") if key in task
    ]
    return TabularEnv(
        mdps[0],
        after=mdps[1] if len(mdps) > 1 else None,
        switch_at=task.get("switch_at"),
        reward_scale=scale,
        max_steps=task.get("max_steps", config["max_steps"]),
        batch_size=[config["runs"]],
    )


def _strategy(
    config: Mapping[str, Any], env: TabularEnv, entry: Mapping[str, Any]
) -> EpsilonStrategy:
    given = dict(entry["parameters"])
    if "share" in entry:
        given["num_frames"] = max(1, round(entry["share"] * frames_of(config)))
    if entry["family"] == "vdbe":
        given |= {"num_states": env.num_states, "delta": 1 / env.num_actions}
    made: EpsilonStrategy = instantiate(given, batch_shape=[config["runs"]])
    return made


def _engine(
    config: Mapping[str, Any],
    env: TabularEnv,
    strategy: EpsilonStrategy,
    how: Mapping[str, float],
    seed: int,
) -> Engine:
    random = env.noisy
    learner = ExpectedSarsaSettings(
        learning_rate=config["rate"]["random" if random else "deterministic"],
        initializer="normal" if how["noise"] else "zeros",
        scale=how["noise"] * how["scale"] or 0.1,
    )
    assert env.max_steps is not None
    shortest = min(env.shortest_episode, env.max_steps)
    run = RunSettings(
        gamma=config["gamma"], episodes=frames_of(config) // shortest + 1, tests=1, seed=seed
    )
    return make_engine(env, strategy, run, learner, threads=1)


class Bounds(NamedTuple):
    """What random and optimal policies earn in the task before and after the switch.

    Attributes:
        greedy: Discounted, ``[2 tasks, 2]``.
        online: Undiscounted, likewise.
        switch_at: First episode of the second task, or None.
    """

    greedy: Array
    online: Array
    switch_at: int | None

    @classmethod
    def of(cls, env: TabularEnv, gamma: float) -> Bounds:
        """Those of an environment, by dynamic programming."""
        episodes = (0, env.switch_at or 0)
        greedy, online = (
            np.array([(env.random_return(g, episode=e), env.optimal_return(g, episode=e))
                      for e in episodes])
            for g in (gamma, 1.0)
        )  # fmt: skip
        return cls(greedy, online, env.switch_at)

    def scaled(self, returns: Array, bounds: Array) -> Array:
        """Returns ``[runs, episodes]``, 0 where random and 1 where optimal."""
        episode = np.arange(returns.shape[1])
        later = np.zeros_like(episode) if self.switch_at is None else episode >= self.switch_at
        low, high = bounds[later.astype(int)].T
        return np.asarray((returns - low) / (high - low))


def run_scores(engine: Engine, bounds: Bounds) -> dict[str, Array]:
    """What each run earned, 0 being the random policy and 1 the optimum, averaged over frames.

    Returns:
        ``greedy``, of the greedy test after each episode, discounted; ``online``, of the training
        episodes; ``late``, as ``greedy`` in the second half of the run; ``epsilon``, its mean, and
        ``epsilon_last``; each ``[runs]``.
    """
    length = engine.train_steps.numpy()
    known = np.isfinite(length)
    frames = np.where(known, length, 0.0)
    ends = frames.cumsum(-1)
    halves = np.where(ends > ends[:, -1:] / 2, frames, 0.0)
    greedy = bounds.scaled(engine.returns.numpy(), bounds.greedy)
    online = bounds.scaled(engine.train_returns.numpy(), bounds.online)
    epsilon = engine.epsilons.numpy()
    last = known.sum(-1, keepdims=True) - 1
    return {
        "greedy": np.clip(_mean(greedy, frames), -1, 1),
        "online": np.clip(_mean(online, frames), -1, 1),
        "late": np.clip(_mean(greedy, halves), -1, 1),
        "epsilon": _mean(epsilon, frames),
        "epsilon_last": np.take_along_axis(epsilon, last, -1).squeeze(-1),
    }


def _mean(values: Array, weights: Array) -> Array:
    return np.asarray((np.nan_to_num(values) * weights).sum(-1) / weights.sum(-1))
