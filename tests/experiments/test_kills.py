"""Jobs and sweeps killed with −9 at random moments: results and metrics are as if they were not."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from commands import bmc, here, started, wait_until
from jobs import _leaves, assert_identical

from bmc_torchrl.analysis.tables import load

ENGINES = {
    "numba": (
        *("train", "experiment=grid_sarsa", "strategies=[bmc,vdbe_005]", "runs=2", "episodes=40"),
        *("domain.max_steps=30", "device=cpu", "figure=false", "output=out"),
        *("trainer.lockstep_chunk_steps=11", "trainer.checkpoint_every_n_chunks=2"),
    ),
    "lightning": (
        *("train", "experiment=grid_dqn", "learner=dqn", "engine=torchrl", "runs=2", "episodes=12"),
        *("domain.max_steps=22", "device=cpu", "figure=false", "output=out", "learner.warmup=8"),
        *("learner.batch_size=4", "trainer.chunk_steps=3", "trainer.checkpoint_every_n_updates=6"),
    ),
}
SWEEP = (
    *("reproduce", "experiments=[grid_sarsa]", "strategies=[bmc,vdbe_005]", "runs=5"),
    *("episodes=3", "batch.grid_sarsa=1", "workers=1", "output=out", "results=results"),
    "overrides=['domain.max_steps=20','domain.tests=2']",
)
KILLS = 7


def changed(folder: Path, kind: str) -> Callable[[], bool]:
    """Whether a job has written a file of a kind since now."""

    def newest() -> int:
        files = [path for path in (folder / "out").rglob(kind) if path.is_file()]
        return max((path.stat().st_mtime_ns for path in files), default=0)

    began = newest()
    return lambda: newest() > began


def killed_often(folder: Path, job: tuple[str, ...], kinds: list[str], chance: Random) -> int:
    """Start a job again and again, and kill it after random moments; returns how often it was."""
    count = 0
    for _ in range(KILLS):
        kind = chance.choice(kinds)
        new = changed(folder, kind)
        process = started(folder, *job)
        wait_until(new, process)
        time.sleep(chance.uniform(0, 0.1))
        count += process.running()
        process.kill()
        process.wait()
    return count


def same_file(name: str, *folders: Path) -> bool:
    first, second = ((folder / name).read_bytes() for folder in folders)
    return first == second


@pytest.mark.parametrize("name", ENGINES)
def test_a_job_killed_seven_times_gives_what_an_uninterrupted_one_gives(
    name: str, tmp_path: Path
) -> None:
    job, whole, parts = (*ENGINES[name], "resume=true"), tmp_path / "whole", tmp_path / "parts"
    assert here(whole, *job) == 0
    assert killed_often(parts, job, ["*", "last.ckpt", "metrics.csv"], Random(7)) >= 6
    assert bmc(parts, *job).status == 0
    assert load(parts / "out/table.parquet").equals(load(whole / "out/table.parquet"))
    assert same_file("out/metrics/metrics.csv", whole, parts)
    states = [
        dict(_leaves("", torch.load(folder / "out/last.ckpt", weights_only=True)["state_dict"]))
        for folder in (whole, parts)
    ]
    assert_identical(*states)


def test_a_sweep_killed_seven_times_gives_what_an_uninterrupted_one_gives(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert here(whole, *SWEEP) == 0
    assert killed_often(parts, SWEEP, ["*", "*.parquet"], Random(3)) >= 6
    assert bmc(parts, *SWEEP).status == 0
    tables = [load(folder / "out/grid_sarsa/table.parquet") for folder in (whole, parts)]
    assert tables[0].equals(tables[1])
    assert len(tables[0]) == 2 * 5 * 3
    for name in ("curves", "summary", "scores", "statistics", "strategies"):
        assert same_file(f"results/grid_sarsa/{name}.csv", whole, parts)
