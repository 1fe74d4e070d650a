"""From configs to objects, for the scripts that train: env, strategies, lockstep engine."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.utils import instantiate
from omegaconf import DictConfig

from bmc_torchrl import EpsilonStrategy, StackedEpsilon
from bmc_torchrl.lockstep import engines
from bmc_torchrl.training.settings import chosen_strategies

CONFIGS = Path(__file__).parents[1] / "configs"
DECISIVE = ("gamma", "episodes", "settings", "learner", "domain", "families")
"""The settings that decide what a run of a strategy gives, beside its seed."""


def experiment_config(name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """The settings of an experiment, as scripts/train.py has them."""
    if GlobalHydra.instance().is_initialized():
        return compose("train", [f"experiment={name}", *overrides])
    with initialize_config_dir(str(CONFIGS), version_base=None):
        return compose("train", [f"experiment={name}", *overrides])


def build_strategy(cfg: DictConfig, entries: Sequence[Any], runs: int) -> EpsilonStrategy:
    """The strategies of `entries`, `runs` runs each, side by side."""
    parts = [
        instantiate({**cfg.families.get(entry.family, {}), **entry.parameters}, batch_shape=[runs])
        for entry in entries
    ]
    return parts[0] if len(parts) == 1 else StackedEpsilon(parts)


def _kind(cfg: DictConfig) -> str:
    return str(cfg.learner._target_).rsplit(".", 1)[-1]


def has_engine(cfg: DictConfig) -> bool:
    """Whether there is a lockstep engine for the settings' learner and strategies."""
    families = {entry.family for entry in chosen_strategies(cfg)}
    return _kind(cfg) in engines.__all__ and "linear" not in families


def build_engine(
    cfg: DictConfig,
    strategy: EpsilonStrategy,
    *,
    device: Any = "cpu",
    seed: int,
    first_run: int = 0,
    threads: int | None = None,
) -> engines.Engine:
    """The lockstep engine of the settings' learner."""
    kind = _kind(cfg)
    if not has_engine(cfg):
        raise ValueError(f"learner={kind} has no lockstep engine; use engine=torchrl.")
    runs = strategy.batch_shape.numel()
    env = instantiate(cfg.domain.env)(batch_size=[runs], device=device, observation=cfg.observation)
    arguments: Mapping[str, Any] = {k: v for k, v in cfg.learner.items() if k[0] != "_"}
    return getattr(engines, kind)(
        env,
        strategy,
        gamma=cfg.gamma,
        episodes=cfg.episodes,
        tests=cfg.domain.tests,
        seed=seed,
        mask_terminated=cfg.settings.mask_terminated,
        next_action=cfg.settings.next_action,
        stop_after_perfect_tests=cfg.stop_after_perfect_tests,
        first_run=first_run,
        threads=threads,
        **arguments,
    )


def strategy_seed(seed: int, label: str) -> int:
    """A seed of its own for each strategy: what a cell gives does not depend on its neighbours."""
    return zlib.crc32(f"{seed}/{label}".encode())
