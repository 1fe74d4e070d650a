"""Checks of a job's settings, before anything runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from bmc_torchrl.errors import SettingsError

__all__ = ["check_settings", "chosen_device", "chosen_strategies"]


LEAST = {
    "runs": 1,
    "episodes": 1,
    "seed": 0,
    "domain.max_steps": 1,
    "domain.tests": 1,
    "domain.shortest_episode": 1,
    "trainer.chunk_steps": 1,
    "trainer.checkpoint_every_n_chunks": 0,
    "trainer.checkpoint_every_n_updates": 0,
    "trainer.threads": 1,
}
"""The integers among the settings, and the least that each may be."""


def _require_integer(settings: Mapping[str, Any], name: str, least: int) -> None:
    value: Any = settings
    for part in name.split("."):
        value = value[part]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SettingsError(f"{name} must be an integer of at least {least}, got {value!r}.")


def _require_choice(settings: Mapping[str, Any], name: str, choices: tuple[str, ...]) -> None:
    if settings[name] not in choices:
        raise SettingsError(f"{name} must be one of {', '.join(choices)}; got {settings[name]!r}.")


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise :class:`SettingsError` for what cannot be run."""
    _require_choice(settings, "protocol", ("published", "paper"))
    _require_resolved(settings)
    for name, least in LEAST.items():
        _require_integer(settings, name, least)
    _require_choice(settings, "engine", ("auto", "torchrl", "lockstep"))
    if settings["stop_after_perfect_tests"] is not None:
        _require_integer(settings, "stop_after_perfect_tests", 1)
    device = chosen_device(settings["device"])
    accelerator = settings["trainer"]["lightning"]["accelerator"]
    if accelerator not in ("auto", device.type) and device.type == "cpu":
        raise SettingsError(
            f"trainer.lightning.accelerator={accelerator} needs a GPU, and device="
            f"{settings['device']} is the CPU; use trainer=default."
        )
    chosen_strategies(settings)
    if settings["engine"] == "lockstep" and not settings["domain"]["native"]:
        raise SettingsError(
            "engine=lockstep needs one of this package's own domains; use engine=torchrl."
        )


def _require_resolved(settings: Mapping[str, Any]) -> None:
    """Every setting refers to ones that exist, and the environment whose sizes some are is there.

    A learner's settings come from an experiment of its kind.
    """
    try:
        OmegaConf.to_container(settings, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        reason = str(error).partition("\n    full_key")[0]
        if type(error) is InterpolationResolutionError:
            raise SettingsError(reason.partition("resolving interpolation: ")[2]) from error
        raise SettingsError(
            f"{error.full_key} cannot be set ({reason}): the experiment is of another kind. Those "
            "named …_sarsa go with learner=expected_sarsa, those named …_dqn with the other "
            "learners, and cart_… with domain=cart_pole."
        ) from error


def chosen_device(name: str) -> torch.device:
    """The device called `name`, ``"auto"`` being the GPU of this process if there is one."""
    if name == "auto":
        local = int(os.environ.get("LOCAL_RANK", 0))
        return torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise SettingsError(
            f"device={name!r} cannot be used here ({reason}); use auto or cpu."
        ) from error
    return device


def chosen_strategies(settings: Mapping[str, Any]) -> list[Any]:
    """The entries (label, family, parameters) of the strategies to run side by side."""
    wanted = settings["strategies"]
    if wanted is None:
        return [settings["strategy"]]
    known = {entry["label"]: entry for entry in settings["sweep"]["strategies"]}
    unknown = [label for label in wanted if label not in known]
    if unknown or not wanted:
        raise SettingsError(
            f"strategies={list(wanted)} has unknown labels {unknown}; known: {', '.join(known)}."
        )
    return [known[label] for label in wanted]
