"""Where the configs are, and how an experiment's settings are composed from them."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torchrl.envs import EnvBase

from bmc_torchrl.experiments.exits import ends_in_a_line
from bmc_torchrl.experiments.settings import chosen_strategies

__all__ = [
    "CONFIGS",
    "DECISIVE",
    "command_config",
    "configured_by",
    "differences",
    "environment_of",
    "experiment_config",
    "flat",
    "plain",
    "replaces_uniformly",
]

_INSTALLED = Path(__file__).parents[1] / "configs"
CONFIGS = str(_INSTALLED if _INSTALLED.is_dir() else Path(__file__).parents[2] / "configs")
"""The wheel carries the configs inside the package; in a checkout they are at its top."""

LONGEST_NAME = 120
"""Of a folder."""

DECISIVE = (
    *("gamma", "episodes", "settings", "learner", "domain", "families"),
    *("observation", "stop_after_perfect_tests"),
)
"""The settings that decide what a run of a strategy gives, beside its seed."""


UNIFORM = "bmc_torchrl.UniformAction"
"""What tables and checkpoints were made with that do not say."""


def experiment_config(name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """The settings of an experiment, as ``bmc train`` has them."""
    return command_config("train", [f"experiment={name}", *overrides])


def command_config(command: str, overrides: Sequence[str]) -> DictConfig:
    """The settings of ``bmc COMMAND`` with these overrides."""
    if GlobalHydra.instance().is_initialized():
        return cast(DictConfig, compose(command, list(overrides)))
    with initialize_config_dir(CONFIGS, version_base=None):
        return cast(DictConfig, compose(command, list(overrides)))


def configured_by(name: str) -> Callable[[Callable[[DictConfig], None]], Callable[[], None]]:
    """Make a function of settings a command whose settings are ``configs/<name>.yaml``.

    What cannot be run, or composed, is one line; see :mod:`bmc_torchrl.experiments.exits`.
    """
    ending: Any = ends_in_a_line(f"bmc {name}")
    configured: Any = hydra.main(version_base=None, config_path=CONFIGS, config_name=name)

    def decorate(function: Callable[[DictConfig], None]) -> Callable[[], None]:
        # Within Hydra, which would say more of an error than a line, and around it.
        command = configured(ending(function))

        @functools.wraps(function)
        def main() -> None:
            os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra's own errors come to us.
            command()

        return cast(Callable[[], None], ending(main))

    return decorate


def replaces_uniformly(settings: Mapping[str, Any]) -> bool:
    """Whether actions are replaced by uniform ones, as they were before there was a choice."""
    explore = settings.get("explore", {"_target_": UNIFORM})
    return bool(explore["_target_"] == UNIFORM)


def plain(cfg: DictConfig) -> dict[str, Any]:
    """The settings as plain containers."""
    return cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted names, as trackers show them.

    >>> flat({"domain": {"tests": 3}, "runs": 2})
    {'domain.tests': 3, 'runs': 2}
    """
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Every setting that differs, with both values; empty where all are the same.

    >>> differences({"seed": 0, "gamma": 0.9}, {"seed": 1, "gamma": 0.9, "runs": 2})
    'runs was not set, is 2; seed was 0, is 1'
    """
    missing = "not set"
    pairs = {name: (before.get(name, missing), now.get(name, missing)) for name in {*before, *now}}
    return "; ".join(
        f"{name} was {was}, is {value}"
        for name, (was, value) in sorted(pairs.items())
        if was != value
    )


def environment_of(cfg: DictConfig) -> EnvBase:
    """One environment of the settings, to be looked at only; it is made once."""
    return _environment(OmegaConf.to_yaml(cfg.domain.env, resolve=True))


@functools.cache
def _environment(described: str) -> EnvBase:
    env: EnvBase = instantiate(OmegaConf.create(described))(batch_size=[1], max_steps=1)
    env.close()
    return env


def _size(name: str, *, _root_: DictConfig) -> int:
    """``${environment:num_states}`` or ``num_actions``: what no file need say of an environment."""
    return int(getattr(environment_of(_root_), name))


def _labels(*, _root_: DictConfig) -> str:
    """``${labels:}``: the strategies of a job in a name that W&B takes."""
    labels = [entry.label for entry in chosen_strategies(_root_)]
    joined = "+".join(labels)
    return joined if len(joined) <= 100 else f"{labels[0]}+{len(labels) - 1}"


def _folder_name(overrides: str) -> str:
    """``${folder_name:…}``: overrides as the name of one folder, not too long for any disk.

    >>> _folder_name("seed=1,strategy=bmc"), _folder_name(""), len(_folder_name("x=1," * 100))
    ('seed=1,strategy=bmc', 'defaults', 120)
    """
    name = overrides.replace("/", "_") or "defaults"
    digest = hashlib.sha256(overrides.encode()).hexdigest()[:8]
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 9]}-{digest}"


OmegaConf.register_new_resolver("environment", _size)
OmegaConf.register_new_resolver("folder_name", _folder_name)
OmegaConf.register_new_resolver("labels", _labels)
OmegaConf.register_new_resolver("reciprocal", lambda number: 1 / number)
