"""Checks of a job's settings, before anything runs."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from bmc_torchrl.errors import SettingsError

__all__ = [
    "check_settings",
    "chosen_device",
    "chosen_strategies",
    "require_choice",
    "require_integer",
    "require_list",
    "require_number",
]


LEAST = {
    "runs": 1,
    "episodes": 1,
    "seed": 0,
    "domain.max_steps": 1,
    "domain.tests": 1,
    "domain.shortest_episode": 1,
    "trainer.chunk_steps": 1,
    "trainer.lockstep_chunk_steps": 1,
    "trainer.checkpoint_every_n_chunks": 0,
    "trainer.checkpoint_every_n_updates": 0,
    "trainer.threads": 1,
}
"""The integers among the settings, and the least that each may be."""

LARGEST = 2**63 - 1
"""Of an integer: generators are seeded with 64 bits."""

YES_OR_NO = ("resume", "figure", "shared_posterior")


def _value(settings: Mapping[str, Any], name: str) -> Any:
    value: Any = settings
    for part in name.split("."):
        value = value[part]
    return value


def require_integer(settings: Mapping[str, Any], name: str, least: int) -> None:
    """The setting called `name`, with dots, is an integer from `least` to 2⁶³ − 1."""
    value = _value(settings, name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= LARGEST:
        most = "" if not isinstance(value, int) or value <= LARGEST else " and at most 2**63 - 1"
        raise SettingsError(f"{name} must be an integer of at least {least}{most}, got {value!r}.")


def require_number(settings: Mapping[str, Any], name: str, least: float, most: float) -> None:
    """The setting called `name` is a finite number from `least` to `most`."""
    value = _value(settings, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        bounds = f"in [{least:g}, {most:g}]" if most < math.inf else f"of at least {least:g}"
        raise SettingsError(f"{name} must be a number {bounds}, got {value!r}.")


def require_list(settings: Mapping[str, Any], name: str, known: Sequence[str]) -> list[str]:
    """The setting called `name` is a list of different names, all of them `known`."""
    given = settings[name]
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise SettingsError(f"{name} must be a list, such as {name}=[{known[0]}]; got {given!r}.")
    unknown = [each for each in given if each not in known]
    if unknown or not given:
        raise SettingsError(
            f"{name}={list(given)} has unknown names {unknown}; known: {', '.join(known)}."
        )
    twice = sorted({each for each in given if list(given).count(each) > 1})
    if twice:
        raise SettingsError(f"{name}={list(given)} names {twice} twice; name each once.")
    return list(given)


def require_choice(settings: Mapping[str, Any], name: str, choices: tuple[str, ...]) -> None:
    """The setting called `name` is one of the choices."""
    if settings[name] not in choices:
        raise SettingsError(f"{name} must be one of {', '.join(choices)}; got {settings[name]!r}.")


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise :class:`SettingsError` for what cannot be run."""
    require_choice(settings, "protocol", ("published", "paper"))
    _require_resolved(settings)
    for name, least in LEAST.items():
        require_integer(settings, name, least)
    if "test_every" in settings["domain"]:
        require_integer(settings, "domain.test_every", 1)
    for name in YES_OR_NO:
        if not isinstance(settings[name], bool):
            raise SettingsError(f"{name} must be true or false, got {settings[name]!r}.")
    require_number(settings, "gamma", 0, 1)
    require_choice(settings, "engine", ("auto", "torchrl", "lockstep"))
    if settings["stop_after_perfect_tests"] is not None:
        require_integer(settings, "stop_after_perfect_tests", 1)
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
    return [known[label] for label in require_list(settings, "strategies", list(known))]
