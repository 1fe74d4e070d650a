"""Jobs of scripts/train.py made small, in this process."""

from __future__ import annotations

from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from torch import Tensor

from bmc_torchrl.experiments import train
from bmc_torchrl.training import EpsilonGreedyLearner

ROOT = Path(__file__).parents[1]
EXPERIMENTS = [f"{d}_{n}" for d in ("grid", "cart", "supply") for n in ("sarsa", "dqn")]
TABULAR = [f"{domain}_sarsa" for domain in ("cliff", "frozen4", "frozen8", "taxi")]
TABLES = ("chain", "garnet", "lake", "maze", "sea", "switch", "windy")
FINITE = ["lake_dqn", *(f"{task}_sarsa" for task in TABLES)]
NETWORKS = ("acrobot", "breakout", "cartpole", "deepsea", "doorkey", "empty", "lander", "swingup")
FOREIGN = [*TABULAR, *(f"{domain}_dqn" for domain in NETWORKS)]


def settings(*overrides: str) -> DictConfig:
    """What `python scripts/train.py *overrides` is given."""
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        return compose("train", overrides=list(overrides))


def tiny(experiment: str, *overrides: str) -> list[str]:
    """Overrides for two runs of two short episodes."""
    domain, learner = experiment.split("_")
    chosen = [f"experiment={experiment}", "engine=torchrl", "runs=2", "episodes=2", "device=cpu"]
    chosen += ["domain.max_steps=24", "domain.tests=2", "logger=none"]
    if domain == "supply":
        chosen.append("domain.shortest_episode=24")
    if learner == "dqn":
        chosen += ["network.batch_size=4", "network.epochs=1"]
    return [*chosen, *overrides]


def built(*overrides: str):
    """Settings, learner, stream and evaluation, checked as main does."""
    cfg = settings(*overrides)
    train.check_settings(cfg)
    return cfg, *train.build_job(cfg)


def trained(output: Path, *overrides: str) -> EpsilonGreedyLearner:
    """The learner after the job has run, its files in `output`."""
    cfg, *job = built(*overrides, f"output={output}")
    train.fit(cfg, *job)
    return job[0]


def everything(learner: EpsilonGreedyLearner) -> dict[str, Tensor]:
    """All tensors that a checkpoint of the learner has."""
    found = dict(_leaves("", learner.state_dict()))
    if not hasattr(learner, "rule"):
        return found | dict(_leaves("replay", learner.learning.contents()))
    replay = getattr(learner.rule, "replay", None)
    if replay is not None:  # Its storage has room that was never written.
        found = {name: value for name, value in found.items() if "_storage/_storage" not in name}
        found |= dict(_leaves("replay", replay[:]))
    return found


def _leaves(prefix, value):
    if isinstance(value, Tensor):
        yield prefix, value
    elif hasattr(value, "items"):
        for key, inner in value.items():
            yield from _leaves(f"{prefix}/{key}", inner)
    elif isinstance(value, list | tuple):
        for key, inner in enumerate(value):
            yield from _leaves(f"{prefix}/{key}", inner)


def assert_identical(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Equal to the bit; NaN equals NaN."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=0, equal_nan=True, msg=name)
