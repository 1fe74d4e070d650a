"""A sweep across processes: the tables of one process, whoever is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from hydra import compose, initialize_config_dir
from jobs import ROOT
from omegaconf import OmegaConf

from bmc_torchrl.analysis.tables import load
from bmc_torchrl.experiments import reproduce
from bmc_torchrl.experiments.sweep import plan, publish

LABELS = ["bmc", "vdbe_005"]
TINY = [
    "runs=4",
    "episodes=3",
    "batch.grid_sarsa=2",
    "overrides=['domain.max_steps=20','domain.tests=2']",
]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def outputs(folder: Path) -> list[str]:
    return [f"output={folder}/out", f"results={folder}/results"]


def in_this_process(folder: Path) -> None:
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        cfg = compose("reproduce", overrides=[*TINY, *outputs(folder)])
    settings = OmegaConf.to_container(cfg, resolve=True)
    for cell in plan(cfg.output, ["grid_sarsa"], LABELS, cfg.runs, cfg.batch):
        reproduce.compute({cell.experiment: settings}, cell)
    publish(cfg.output, "grid_sarsa", f"{cfg.results}/grid_sarsa")


@pytest.mark.slow
def test_jobs_that_share_an_experiment_give_the_tables_of_one_process(tmp_path: Path) -> None:
    alone, jobs = tmp_path / "alone", tmp_path / "jobs"
    in_this_process(alone)
    command = [sys.executable, "scripts/reproduce.py", "--multirun", *TINY, *outputs(jobs)]
    command += ["hydra/launcher=submitit_local", "experiments=[grid_sarsa]", "workers=1"]
    command += ["strategies=[bmc],[vdbe_005]"]
    subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=True, timeout=500)
    tables = [load(folder / "out/grid_sarsa/table.parquet") for folder in (alone, jobs)]
    pd.testing.assert_frame_equal(*tables, check_exact=True)
    assert set(tables[0]["strategy"]) == set(LABELS)
    for name in ("curves", "summary", "scores", "statistics", "strategies"):
        written = [folder / f"results/grid_sarsa/{name}.csv" for folder in (alone, jobs)]
        assert written[0].read_bytes() == written[1].read_bytes()


def descendants(pid: int) -> set[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    found = {int(child) for child in children.read_text().split()} if children.exists() else set()
    return found.union(*(descendants(child) for child in found))


@pytest.mark.slow
def test_workers_end_when_the_sweep_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/reproduce.py", *outputs(tmp_path), "workers=2"]
    command += [
        "experiments=[grid_sarsa]",
        "strategies=[fixed_05,bmc]",
        "runs=4",
        "episodes=1000000",
    ]
    process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    busy: set[int] = set()
    while not busy and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.2)
        busy = {pid for pid in descendants(process.pid) if cpu_seconds(pid) > 2}
    family = descendants(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert busy, "the sweep has not started a worker"
    while any(alive(pid) for pid in family) and time.monotonic() < deadline + 30:
        time.sleep(0.1)
    left = [pid for pid in family if alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
