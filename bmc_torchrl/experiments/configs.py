"""Where the configs are, and how an experiment's settings are composed from them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from bmc_torchrl.experiments.settings import chosen_strategies

__all__ = ["CONFIGS", "DECISIVE", "configured_by", "experiment_config", "plain"]

_INSTALLED = Path(__file__).parents[1] / "configs"
CONFIGS = str(_INSTALLED if _INSTALLED.is_dir() else Path(__file__).parents[2] / "configs")
"""The wheel carries the configs inside the package; in a checkout they are at its top."""

DECISIVE = ("gamma", "episodes", "settings", "learner", "domain", "families")
"""The settings that decide what a run of a strategy gives, beside its seed."""


def experiment_config(name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """The settings of an experiment, as ``bmc train`` has them."""
    wanted = [f"experiment={name}", *overrides]
    if GlobalHydra.instance().is_initialized():
        return cast(DictConfig, compose("train", wanted))
    with initialize_config_dir(CONFIGS, version_base=None):
        return cast(DictConfig, compose("train", wanted))


def configured_by(name: str) -> Callable[[Callable[[DictConfig], None]], Callable[[], None]]:
    """Make a function of settings a command whose settings are ``configs/<name>.yaml``."""
    main: Any = hydra.main(version_base=None, config_path=CONFIGS, config_name=name)
    return cast(Callable[[Callable[[DictConfig], None]], Callable[[], None]], main)


def plain(cfg: DictConfig) -> dict[str, Any]:
    """The settings as plain containers."""
    return cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))


def _size(name: str, *, _root_: DictConfig) -> int:
    """``${environment:num_states}`` or ``num_actions``: what no file need say of an environment."""
    return _sizes(OmegaConf.to_yaml(_root_.domain.env, resolve=True))[name]


@functools.cache
def _sizes(described: str) -> dict[str, int]:
    env = instantiate(OmegaConf.create(described))(batch_size=[1], max_steps=1)
    env.close()
    return {"num_states": env.num_states, "num_actions": env.num_actions}


def _labels(*, _root_: DictConfig) -> str:
    """``${labels:}``: the strategies of a job in a name that W&B takes."""
    labels = [entry.label for entry in chosen_strategies(_root_)]
    joined = "+".join(labels)
    return joined if len(joined) <= 100 else f"{labels[0]}+{len(labels) - 1}"


OmegaConf.register_new_resolver("environment", _size)
OmegaConf.register_new_resolver("labels", _labels)
OmegaConf.register_new_resolver("reciprocal", lambda number: 1 / number)
