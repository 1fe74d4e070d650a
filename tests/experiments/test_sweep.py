"""Sweeps: what is planned, computed, joined; and that an interruption leaves no trace."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from bmc_torchrl.analysis.tables import load, load_metadata, provenance, tidy
from bmc_torchrl.experiments.sweep import Batch, parts_of, plan
from bmc_torchrl.experiments.sweep_cells import TableParts

ROOT = Path(__file__).parents[2]
TINY = [
    "experiments=[grid_sarsa,cart_sarsa]",
    "strategies=[bmc,vdbe_005,fixed_01]",
    "runs=4",
    "episodes=3",
    "batch.grid_sarsa=2",
    "batch.cart_sarsa=4",
    "overrides=['domain.max_steps=20','domain.tests=2']",
]


def command(folder: Path, *more: str) -> list[str]:
    outputs = [f"output={folder}/out", f"results={folder}/results"]
    return [sys.executable, "scripts/reproduce.py", *TINY, *outputs, *more]


def run(folder: Path, *more: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    subprocess.run(command(folder, *more), cwd=ROOT, check=True, env=environment)


def cell(label: str, first: int, runs: int) -> pd.DataFrame:
    values = [[[1.0, 2.0]] * runs]
    return tidy("grid_sarsa", [label], values, values, values, first_run=first)


def test_a_plan_cuts_runs_at_multiples_of_the_batch_size(tmp_path):
    batches = list(plan(tmp_path, ["grid_sarsa"], ["bmc"], 250, {"grid_sarsa": 100}))
    assert batches == [
        Batch("grid_sarsa", "bmc", 0, 100),
        Batch("grid_sarsa", "bmc", 100, 100),
        Batch("grid_sarsa", "bmc", 200, 50),
    ]


def test_a_plan_leaves_out_what_is_finished(tmp_path):
    parts_of(tmp_path, "grid_sarsa").add(cell("bmc", 0, 2), provenance({}, 0), 1.0)
    batches = list(plan(tmp_path, ["grid_sarsa"], ["bmc", "fixed_01"], 4, {"grid_sarsa": 2}))
    assert [(b.label, b.first_run) for b in batches] == [
        ("bmc", 2),
        ("fixed_01", 0),
        ("fixed_01", 2),
    ]


def test_more_runs_than_before_are_the_rest_of_a_batch(tmp_path):
    parts = parts_of(tmp_path, "grid_sarsa")
    for label, first, runs in (("bmc", 0, 3), ("bmc", 5, 1), ("fixed_01", 0, 3)):
        parts.add(cell(label, first, runs), provenance({}, 0), 1.0)
    batches = plan(tmp_path, ["grid_sarsa"], ["bmc", "fixed_01"], 8, {"grid_sarsa": 8}, stack=2)
    assert [(b.label, b.first_run, b.runs) for b in batches] == [
        ("bmc", 3, 2),
        ("bmc", 6, 2),
        ("fixed_01", 3, 5),
    ]


def test_strategies_are_stacked_whatever_is_finished(tmp_path):
    labels = ["bmc", "vdbe_005", "fixed_01"]
    parts_of(tmp_path, "grid_sarsa").add(cell("vdbe_005", 0, 2), provenance({}, 0), 1.0)
    batches = plan(tmp_path, ["grid_sarsa"], labels, 4, {"grid_sarsa": 2}, stack=2)
    assert [(b.labels, b.first_run) for b in batches] == [
        (["bmc"], 0),
        (["bmc", "vdbe_005"], 2),
        (["fixed_01"], 0),
        (["fixed_01"], 2),
    ]


@pytest.mark.slow
def test_stacked_strategies_keep_their_own_rows(tmp_path):
    run(tmp_path, "stack=3", "experiments=[grid_sarsa]")
    table = load(tmp_path / "out" / "grid_sarsa" / "table.parquet")
    epsilon = table.groupby("strategy")["epsilon"]
    assert set(epsilon.count()) == {4 * 3}
    assert epsilon.min()["fixed_01"] == epsilon.max()["fixed_01"] == pytest.approx(0.1)
    assert 0.4 < epsilon.min()["bmc"] < epsilon.max()["bmc"] < 0.498
    assert epsilon.max()["vdbe_005"] > 0.5


@pytest.mark.slow
def test_an_interrupted_sweep_gives_the_table_of_an_uninterrupted_one(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(whole)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(command(broken), cwd=ROOT, env=environment, start_new_session=True)
    parts = TableParts(broken / "out" / "grid_sarsa" / "table.parts")
    while process.poll() is None and len(parts.cells()) < 2:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    run(broken)
    for experiment in ("grid_sarsa", "cart_sarsa"):
        paths = [folder / "out" / experiment / "table.parquet" for folder in (whole, broken)]
        pd.testing.assert_frame_equal(*(load(path) for path in paths))
        table = load(paths[0])
        assert set(table["strategy"]) == {"bmc", "vdbe_005", "fixed_01"}
        assert table.groupby(["strategy", "run"]).size().eq(3).all()
        assert load_metadata(paths[0])["config"]["episodes"] == 3
        small = {path.name for path in (whole / "results" / experiment).iterdir()}
        assert {"curves.csv", "summary.csv", "timings.csv", "provenance.json"} <= small
