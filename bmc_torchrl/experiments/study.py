"""Every strategy on finite MDPs and with networks: bmc study [overrides].

What is fixed beforehand is in configs/study.yaml. Writes a table of runs for each task to `output`,
and from these tables, figures and provenance; with results=FOLDER also to a folder that has none.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import DictConfig
from rich.console import Console

from bmc_torchrl.analysis.tables import provenance, write_atomically, write_csv
from bmc_torchrl.errors import ResultsError
from bmc_torchrl.experiments.configs import configured_by, differences, flat, plain
from bmc_torchrl.experiments.locks import only_job
from bmc_torchrl.experiments.settings import require_integer, require_list, require_number
from bmc_torchrl.experiments.study_dqn import learning_curves, random_returns
from bmc_torchrl.experiments.study_finite import finite_scores
from bmc_torchrl.experiments.study_publishing import publish
from bmc_torchrl.experiments.sweep import require_new
from bmc_torchrl.signals import Interrupted, StopSignals

__all__ = ["main"]

PARTS = ("development", "held_out", "noise", "dqn")
FOLDERS = {"development": "finite", "held_out": "finite", "noise": "noise", "dqn": "dqn"}


def decisive(settings: Mapping[str, Any], part: str, task: str) -> dict[str, Any]:
    """What decides the results of a task, beside the seed."""
    half = settings["dqn" if part == "dqn" else "finite"]
    common = {name: value for name, value in half.items() if name not in ("tasks", "minutes")}
    entries = {entry["label"]: entry for entry in settings["sweep"]["strategies"]}
    if part == "dqn":
        entries = {label: entries[label] for label in half["strategies"]}
    else:
        noisy = {name for name, how in half["conditions"].items() if how["noise"]}
        wanted = noisy if part == "noise" else half["conditions"].keys() - noisy
        common["conditions"] = {n: how for n, how in half["conditions"].items() if n in wanted}
    found = {**common, "task": half["tasks"][task], "sweep": entries, "seed": settings["seed"]}
    return dict(json.loads(json.dumps(found)))


def tasks_of(settings: Mapping[str, Any], part: str) -> list[str]:
    """The tasks of a part, in order."""
    if part == "dqn":
        return list(settings["dqn"]["tasks"])
    tasks = settings["finite"]["tasks"].items()
    if part == "noise":
        return [name for name, _ in tasks]
    return [name for name, task in tasks if task.get("held_out", False) == (part == "held_out")]


def finished(settings: Mapping[str, Any], part: str, task: str) -> dict[str, Any] | None:
    """How a finished task was made, None if it is not; with other settings is an error."""
    path = _place(settings, part, task).with_suffix(".json")
    if not path.exists():
        return None
    made: dict[str, Any] = json.loads(path.read_text())
    different = differences(flat(made["config"]), flat(decisive(settings, part, task)))
    if different:
        raise ResultsError(
            f"{path} was made with other settings ({different}); set output=, or move it away"
        )
    return made


def _place(settings: Mapping[str, Any], part: str, task: str) -> Path:
    return Path(settings["output"]) / FOLDERS[part] / task


def compute(settings: Mapping[str, Any], part: str, task: str) -> float:
    """Run a task and keep its table; returns the seconds of CPU time it took."""
    began = time.process_time()
    config = decisive(settings, part, task)
    table, known = _dqn_task(config) if part == "dqn" else (finite_scores(config, task), {})
    seconds = time.process_time() - began
    made = _code() | {"config": config, "seed": config["seed"]} | known
    made["cpu_seconds"] = round(seconds, 1)
    place = _place(settings, part, task)
    write_csv(place.with_suffix(".csv"), table)
    content = json.dumps(made, indent=1, sort_keys=True, ensure_ascii=False).encode()
    write_atomically(place.with_suffix(".json"), lambda stream: stream.write(content))
    return seconds


@functools.cache
def _code() -> dict[str, Any]:
    """Command, commit and versions when this process began: the files may change while it runs."""
    return provenance({}, seed=0)


def _dqn_task(config: Mapping[str, Any]) -> tuple[pd.DataFrame, dict[str, Any]]:
    task, seed = config["task"], config["seed"]
    random = pd.Series(random_returns(task, config["random_episodes"], seed))
    table = learning_curves(config, task, list(config["sweep"].values()), seed)
    return table, {"random_mean": random.mean(), "random_sd": random.std()}


def left(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Parts and tasks that are to be run; those with networks until their minutes are spent."""
    for part in settings["parts"]:
        for task in tasks_of(settings, part):
            asked = settings["tasks"] is None or task in settings["tasks"]
            if asked and finished(settings, part, task) is None and not _spent(settings, part):
                yield part, task


def all_finished(settings: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """How every finished task was made, by part and name."""
    return {
        (part, task): known
        for part in PARTS
        for task in tasks_of(settings, part)
        if (known := finished(settings, part, task)) is not None
    }


def _spent(settings: Mapping[str, Any], part: str) -> bool:
    if part != "dqn":
        return False
    made = (finished(settings, part, task) for task in tasks_of(settings, part))
    seconds = sum(found["cpu_seconds"] for found in made if found is not None)
    return bool(seconds >= 60 * settings["dqn"]["minutes"])


def check(settings: Mapping[str, Any]) -> None:
    """Raise for what cannot be run, before anything runs."""
    require_list(settings, "parts", list(PARTS))
    if settings["tasks"] is not None:
        require_list(settings, "tasks", [*settings["finite"]["tasks"], *settings["dqn"]["tasks"]])
    require_integer(settings, "seed", 0)
    for half in ("finite", "dqn"):
        require_integer(settings, f"{half}.runs", 2)
    require_number(settings["dqn"], "minutes", 0, float("inf"))
    for part in settings["parts"]:
        for task in tasks_of(settings, part):
            finished(settings, part, task)
    if settings["results"] is not None:
        require_new(Path(settings["results"]) / "provenance.json")


@configured_by("study")
def main(cfg: DictConfig) -> None:
    """Run what is missing, then publish."""
    console, settings, output = Console(), plain(cfg), Path(cfg.output)
    check(settings)
    _code()
    lock = output / f".{'-'.join([*cfg.parts, *(cfg.tasks or [])])[:100]}.lock"
    with only_job(lock, str(output)), StopSignals() as signals:
        for part, task in left(settings):
            console.print(f"{part} {task}", highlight=False)
            try:
                seconds = compute(settings, part, task)
                signals.raise_pending()
            except Interrupted as stop:
                stop.left = f"; finished tasks are kept in {cfg.output}, the same command goes on"
                raise
            console.print(f"{part} {task}: {seconds:.0f} s of CPU time", highlight=False)
        made = all_finished(settings)
        if made:
            publish(settings, made, [output, *([Path(cfg.results)] if cfg.results else [])])
        console.print(f"{len(made)} tasks: {cfg.results or output}", highlight=False, markup=False)
