"""What a resumed job goes on from: its checkpoint, made with the settings that are given now."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from bmc_torchrl.errors import ResultsError, SettingsError
from bmc_torchrl.experiments.configs import differences, flat, plain, replaces_uniformly
from bmc_torchrl.experiments.settings import chosen_device, chosen_strategies
from bmc_torchrl.training.episodes import EpisodeLog

__all__ = ["Checkpoint", "decisive_settings", "resumable"]

_INDECISIVE = (
    *("output", "resume", "figure", "logger", "device", "sweep", "strategy", "strategies"),
    *("protocols", "table", "network", "families", "trainer", "protocol"),
)
"""What results do not depend on, or what is said elsewhere in other words."""

_TRAINER = ("chunk_steps", "lockstep_chunk_steps", "compile")
_LIGHTNING = ("precision", "devices")


def decisive_settings(cfg: DictConfig) -> dict[str, Any]:
    """The settings that decide what a job gives, by dotted names, as plain values."""
    told = plain(cfg)
    chosen = [dict(entry) for entry in chosen_strategies(told)]
    kept = {name: value for name, value in told.items() if name not in _INDECISIVE}
    if replaces_uniformly(told):
        del kept["explore"]
    if not told["whatif"]["strategies"]:
        del kept["whatif"]
    kept["strategies"] = [entry["label"] for entry in chosen]
    kept["strategy"] = {entry["label"]: entry["parameters"] for entry in chosen}
    used = {entry["family"] for entry in chosen}
    kept["families"] = {name: v for name, v in told["families"].items() if name in used}
    kept["device"] = chosen_device(told["device"]).type
    kept["trainer"] = {name: told["trainer"][name] for name in _TRAINER}
    kept["trainer"]["lightning"] = {name: told["trainer"]["lightning"][name] for name in _LIGHTNING}
    return flat(kept)


@dataclass(frozen=True)
class Checkpoint:
    """A job's checkpoint: where it is, and how far the job was.

    Attributes:
        path: The file.
        episode: What all runs had finished.
        finished: Whether nothing is left to train.
    """

    path: Path
    episode: int
    finished: bool

    def load_log(self, log: EpisodeLog) -> None:
        """Give `log` what the job's runs have measured."""
        state = torch.load(self.path, "cpu", weights_only=True, mmap=True)["state_dict"]
        own = "log_of_episodes."
        log.load_state_dict(
            {name.removeprefix(own): v for name, v in state.items() if name.startswith(own)}
        )


def resumable(cfg: DictConfig) -> Checkpoint | None:
    """The checkpoint in the output folder, if there is one.

    Raises:
        ResultsError: If it cannot be read, or is none of this package's.
        SettingsError: If it was made with other settings.
    """
    path = Path(cfg.output) / "last.ckpt"
    if not path.exists():
        return None
    made, found = _read(path)
    now = decisive_settings(cfg)
    if made.get("strategies") != now["strategies"]:  # Which says enough of their settings.
        shared = made.keys() & now.keys()
        made, now = ({name: of[name] for name in shared} for of in (made, now))
    different = differences(made, now)
    if different:
        raise SettingsError(
            f"resume=true: {path} was made with other settings ({different}). Give those it was "
            "made with, or choose another output=."
        )
    return found


def _read(path: Path) -> tuple[dict[str, Any], Checkpoint]:
    """A checkpoint's settings and what it says of its job; nothing in it is executed."""
    remedy = "Move it away, or choose another output=; without it the job starts from the beginning"
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load would not look at the checksums.
            if archive.testzip() is not None:
                raise zipfile.BadZipFile
        job = torch.load(path, "cpu", weights_only=True, mmap=True)["job"]
        return dict(job["settings"]), Checkpoint(path, int(job["episode"]), bool(job["finished"]))
    except PermissionError as error:
        raise ResultsError(f"{path} cannot be read ({error.strerror}). {remedy}.") from error
    # What torch.load raises for a file that is no checkpoint depends on its content.
    except Exception as error:
        raise ResultsError(
            f"{path} is truncated, corrupt or no checkpoint of this command. {remedy}."
        ) from error
