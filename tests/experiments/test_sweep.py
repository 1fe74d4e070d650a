"""Sweeps: what is planned, computed, joined; and that an interruption leaves no trace."""

import itertools
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bmc_torchrl.analysis.tables import load, load_metadata, provenance, save, tidy
from bmc_torchrl.errors import ResultsError
from bmc_torchrl.experiments.configs import experiment_config
from bmc_torchrl.experiments.reproduce import decisive, effective
from bmc_torchrl.experiments.sweep import Cell, borrow, finished_cells, keep, plan, publish

METADATA = provenance({"gamma": 0.99}, seed=3, command="")


def results(label: str, first: int, runs: int, episodes: int = 2) -> pd.DataFrame:
    values = [np.random.default_rng(run).random(episodes) for run in range(first, first + runs)]
    return tidy("grid_sarsa", [label], [values], [values], [values], first_run=first)


def finish(output: Path, label: str, first: int, runs: int, *, metadata=METADATA, **more) -> Path:
    cell = Cell("grid_sarsa", label, first, runs)
    entry = {"label": label, "family": label, "parameters": more}
    table = results(label, first, runs)
    return keep(output, cell, table, metadata, strategy=entry, seconds=float(runs))


def left(output: Path, labels: list[str], runs: int, size: int) -> list[tuple[str, int, int]]:
    cells = plan(output, ["grid_sarsa"], labels, runs, {"grid_sarsa": size})
    return [(cell.label, cell.first_run, cell.runs) for cell in cells]


def test_a_plan_cuts_runs_at_multiples_of_the_batch_size(tmp_path):
    assert left(tmp_path, ["bmc"], 250, 100) == [
        ("bmc", 0, 100),
        ("bmc", 100, 100),
        ("bmc", 200, 50),
    ]


def test_a_plan_leaves_out_what_is_finished(tmp_path):
    finish(tmp_path, "bmc", 0, 2)
    expected = [("bmc", 2, 2), ("fixed_01", 0, 2), ("fixed_01", 2, 2)]
    assert left(tmp_path, ["bmc", "fixed_01"], 4, 2) == expected
    assert left(tmp_path, ["bmc"], 2, 2) == []


def test_more_runs_than_before_are_the_rest_of_a_batch(tmp_path):
    for label, first, runs in (("bmc", 0, 3), ("bmc", 5, 1), ("fixed_01", 0, 3)):
        finish(tmp_path, label, first, runs)
    expected = [("bmc", 3, 2), ("bmc", 6, 2), ("fixed_01", 3, 5)]
    assert left(tmp_path, ["bmc", "fixed_01"], 8, 8) == expected


def test_a_cells_file_says_what_it_is_and_how_it_was_made(tmp_path):
    path = finish(tmp_path, "bmc", 2, 3, alpha0=1.0)
    assert path == tmp_path / "grid_sarsa/cells/bmc.0002-0004.parquet"
    (made,) = finished_cells(tmp_path, "grid_sarsa").values()
    assert (made["config"], made["seed"]) == ({"gamma": 0.99}, 3)
    assert made["cells"] == [
        {"strategy": "bmc", "first_run": 2, "last_run": 4, "episodes": 2, "seconds": 3.0}
    ]
    assert made["strategies"] == [{"label": "bmc", "family": "bmc", "parameters": {"alpha0": 1.0}}]


def test_finished_runs_other_settings_and_other_strategies_of_a_name_are_refused(tmp_path):
    finish(tmp_path, "bmc", 0, 4)
    with pytest.raises(ResultsError, match="already in"):
        finish(tmp_path, "bmc", 3, 2)
    with pytest.raises(ResultsError, match=r"other settings \(gamma was 0.99, is 1\)"):
        finish(tmp_path, "fixed_01", 0, 4, metadata={**METADATA, "config": {"gamma": 1}})
    with pytest.raises(ResultsError, match=r"other settings \(seed was 3, is 4\)"):
        finish(tmp_path, "fixed_01", 0, 4, metadata={**METADATA, "seed": 4})
    with pytest.raises(ResultsError, match=r"strategy.bmc.parameters.alpha0 was not set, is 2.0"):
        finish(tmp_path, "bmc", 4, 4, alpha0=2.0)
    assert len(finished_cells(tmp_path, "grid_sarsa")) == 1


def test_cells_are_joined_whatever_their_order(tmp_path):
    cells, joined = [("bmc", 0, 4), ("bmc", 4, 4), ("vdbe_1", 0, 8)], []
    for name, order in (("one", cells), ("two", cells[::-1])):
        for cell in order:
            finish(tmp_path / name, *cell)
        publish(tmp_path / name, "grid_sarsa", tmp_path / name / "results")
        path = tmp_path / name / "grid_sarsa/table.parquet"
        joined.append((load(path), load_metadata(path)))
    pd.testing.assert_frame_equal(joined[0][0], joined[1][0])
    assert joined[0][1] == joined[1][1]
    assert len(joined[0][0]) == 16 * 2
    assert joined[0][1]["config"] == {"gamma": 0.99}
    timings = pd.read_csv(tmp_path / "one/results/timings.csv")
    assert timings.columns.tolist() == ["strategy", "first_run", "last_run", "episodes", "seconds"]
    assert timings["seconds"].tolist() == [4.0, 4.0, 8.0]
    named = pd.read_csv(tmp_path / "one/results/strategies.csv")
    assert named["strategy"].tolist() == ["bmc", "vdbe_1"]


def test_cells_are_borrowed_once_and_say_whose_they_are_now(tmp_path):
    for label, first in (("bmc", 0), ("bmc", 2), ("power_1", 0)):
        finish(tmp_path, label, first, 2)
    for _ in range(2):
        borrow(tmp_path, "grid_other", "grid_sarsa", {"bmc"}, {"gamma": 0.9})
        taken = finished_cells(tmp_path, "grid_other")
        assert [path.name for path in taken] == ["bmc.0000-0001.parquet", "bmc.0002-0003.parquet"]
    for path, made in taken.items():
        assert (made["config"], made["seed"]) == ({"gamma": 0.9}, 3)
        table = load(path)
        assert set(table["experiment"]) == {"grid_other"}
        lent = load(tmp_path / "grid_sarsa/cells" / path.name)
        pd.testing.assert_frame_equal(
            table.drop(columns="experiment"), lent.drop(columns="experiment")
        )


def test_floor_for_all_borrows_every_strategy_but_those_of_the_other_rule():
    cfg, other = (experiment_config(name) for name in ("supply_dqn_floor", "supply_dqn"))
    entries = experiment_config("supply_dqn", ["sweep=paper"]).sweep.strategies
    alike = {e.label for e in entries if effective(cfg, e) == effective(other, e)}
    assert len(alike) == 18
    assert {e.label for e in entries} - alike == {e.label for e in entries if e.family == "power"}


def test_another_rule_for_a_family_is_another_sweep():
    ways = [[], ["by_family={}"], ["truck_cost=ceil"]]
    made = [decisive(experiment_config("supply_dqn", overrides)) for overrides in ways]
    assert all(one != other for one, other in itertools.combinations(made, 2))


def test_nothing_to_publish_is_a_clear_error(tmp_path):
    with pytest.raises(ResultsError, match="no finished cell"):
        publish(tmp_path, "grid_sarsa", tmp_path / "results")
    assert list(tmp_path.iterdir()) == []


def test_a_corrupt_cell_is_named_and_nothing_is_overwritten(tmp_path):
    finish(tmp_path, "bmc", 0, 4)
    publish(tmp_path, "grid_sarsa", tmp_path / "results")
    target = tmp_path / "grid_sarsa/table.parquet"
    before = target.read_bytes()
    broken = finish(tmp_path, "bmc", 4, 4)
    broken.write_bytes(broken.read_bytes()[:200])
    for read in (
        lambda: publish(tmp_path, "grid_sarsa", tmp_path / "results"),
        lambda: left(tmp_path, ["bmc"], 8, 4),
    ):
        with pytest.raises(ResultsError, match=broken.name):
            read()
    assert target.read_bytes() == before


def test_a_corrupt_or_a_larger_table_is_not_replaced(tmp_path):
    finish(tmp_path, "bmc", 0, 4)
    target = save(results("bmc", 0, 9), tmp_path / "grid_sarsa/table.parquet", METADATA)
    for content, message in (
        (target.read_bytes(), "5 runs that are not among the cells"),
        (target.read_bytes()[:200], "not a readable"),
    ):
        target.write_bytes(content)
        with pytest.raises(ResultsError, match=message):
            publish(tmp_path, "grid_sarsa", tmp_path / "results")
        assert target.read_bytes() == content


def test_the_last_of_concurrent_jobs_publishes_what_all_have_finished(tmp_path, monkeypatch):
    listed, published = threading.Event(), threading.Event()

    def slow_load(path: Path) -> pd.DataFrame:
        if threading.current_thread() is slow and not listed.is_set():
            listed.set()
            published.wait(1.0)
        return load(path)

    monkeypatch.setattr("bmc_torchrl.experiments.sweep.load", slow_load)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(threading.current_thread).result()
        finish(tmp_path, "bmc", 0, 2)
        first = pool.submit(publish, tmp_path, "grid_sarsa", tmp_path / "results")
        assert listed.wait(30)
        finish(tmp_path, "fixed_01", 0, 2)
        publish(tmp_path, "grid_sarsa", tmp_path / "results")
        published.set()
        first.result()
    table = load(tmp_path / "grid_sarsa/table.parquet")
    assert set(table["strategy"]) == {"bmc", "fixed_01"}
    assert len(pd.read_csv(tmp_path / "results/summary.csv")) == 2


def sweep(output: Path) -> None:
    """Computes what is missing, one run after the other, and publishes it."""
    for cell in plan(output, ["grid_sarsa"], ["bmc", "fixed_01", "vdbe_1"], 6, {"grid_sarsa": 1}):
        finish(output, cell.label, cell.first_run, cell.runs)
    publish(output, "grid_sarsa", output / "results")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_sweep_killed_at_work_resumes_to_the_same_table(tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    child = os.fork()
    if child == 0:
        try:
            sweep(killed)
        finally:
            os._exit(0)
    deadline = time.monotonic() + 60
    while len(list(killed.rglob("*.parquet"))) < 5 and time.monotonic() < deadline:
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not (killed / "grid_sarsa/table.parquet").exists()
    assert 0 < len(left(killed, ["bmc", "fixed_01", "vdbe_1"], 6, 1)) <= 13
    for output in (killed, whole):
        sweep(output)
    tables = [load(output / "grid_sarsa/table.parquet") for output in (killed, whole)]
    pd.testing.assert_frame_equal(*tables)
