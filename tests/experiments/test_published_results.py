"""Sweeps as a user runs them: nothing is overwritten, joined or lost without a word."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from commands import Ended, bmc, here, started, wait_until
from jobs import ROOT

from bmc_torchrl.analysis.scoring import EXPERIMENTS
from bmc_torchrl.analysis.tables import load
from bmc_torchrl.errors import SettingsError
from bmc_torchrl.experiments.configs import command_config, plain
from bmc_torchrl.experiments.reproduce import of_experiment
from bmc_torchrl.experiments.settings import chosen_strategies
from bmc_torchrl.experiments.sweep import finished_cells

SHORT = "overrides=['domain.max_steps=20','domain.tests=2']"
SWEEP = (
    *("reproduce", "experiments=[grid_sarsa]", "strategies=[bmc]", "runs=2", "episodes=3"),
    *("workers=1", "output=out", SHORT),
)
CELLS = "out/grid_sarsa/cells"


def refusal(ended: Ended) -> str:
    assert (ended.status, ended.out) == (2, ""), ended
    (line,) = ended.err.splitlines()
    assert line.startswith("bmc reproduce: ")
    return line


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    assert here(folder, *SWEEP) == 0
    return folder


@pytest.fixture
def swept(finished: Path, tmp_path: Path) -> Path:
    """A folder with a finished sweep of its own."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_a_trial_goes_to_output_and_leaves_committed_results_alone(tmp_path: Path) -> None:
    committed = tmp_path / "results/grid_sarsa"
    shutil.copytree(ROOT / "results/grid_sarsa", committed)
    before = content(committed)
    assert here(tmp_path, *SWEEP) == 0
    assert content(committed) == before
    assert pd.read_csv(tmp_path / "out/grid_sarsa/summary.csv")["runs"].tolist() == [2]
    line = refusal(bmc(tmp_path, *SWEEP, "results=results"))
    assert line == (
        "bmc reproduce: results/grid_sarsa holds 22 strategies of up to 100 runs and 500 episodes, "
        "and would lose results of 22 strategies to these 1 strategies of up to 2 runs and 3 "
        "episodes. Nothing was overwritten; leave results= out, or name another folder"
    )
    assert content(committed) == before


QUICK = (
    *("reproduce", "size=quick", "runs=2", "episodes=2", "workers=1", "output=out"),
    *("experiments=[grid_sarsa]", "strategies=[bmc,geom_09]", SHORT),
)


def test_the_quick_size_draws_every_figure_and_says_that_it_is_reduced(tmp_path: Path) -> None:
    ended = bmc(tmp_path, *QUICK)
    assert ended.status == 0, ended.err
    said = "reduced: 2 of 100 runs, 2 of 500 episodes, 2 of 22 strategies"
    assert f"grid-world, expected SARSA: {said}\n" in ended.out
    assert "2 of 100 runs" in ended.out.split("Results so far")[1]
    drawn = {path.name for path in (tmp_path / "out/figures").iterdir()}
    kinds = ("", "_profiles", "_sensitivity", "_posterior")
    assert drawn == {f"grid_sarsa{kind}.png" for kind in kinds}
    assert not (tmp_path / "results").exists()
    assert "reduced sweep is not published" in refusal(bmc(tmp_path, *QUICK, "results=results"))


def test_the_quick_size_is_of_all_six_experiments_and_never_more_than_is_asked_for() -> None:
    quick = plain(command_config("reproduce", ["size=quick"]))
    assert set(quick["at_most"]) == set(quick["experiments"]) == set(EXPERIMENTS)
    for name in EXPERIMENTS:
        its, fewer = of_experiment(quick, name), of_experiment({**quick, "runs": 1}, name)
        assert (its["runs"] > 1, fewer["runs"]) == (True, 1)
        families = {entry["family"] for entry in chosen_strategies(its)}
        assert families == {"bmc", "vdbe", "geometric", "constant", "power"}
    assert of_experiment({**quick, "episodes": 7}, "supply_dqn")["episodes"] == 7
    assert of_experiment({**quick, "episodes": 700}, "supply_dqn")["episodes"] == 100
    with pytest.raises(SettingsError, match="supply_dqn is reduced to"):
        of_experiment({**quick, "strategies": ["fixed_05"]}, "supply_dqn")


def test_results_are_refused_before_anything_is_computed(swept: Path) -> None:
    assert bmc(swept, *SWEEP, "results=results").status == 0
    before = content(swept / "results/grid_sarsa")
    for fewer in ("strategies=[fixed_01]", "runs=1", "episodes=2"):
        line = refusal(bmc(swept, *SWEEP, "results=results", "output=other", fewer))
        assert "would lose results of 1 strategies" in line
        assert not (swept / "other").exists()
    assert content(swept / "results/grid_sarsa") == before


def test_results_grow(swept: Path) -> None:
    assert bmc(swept, *SWEEP, "results=results").status == 0
    assert bmc(swept, *SWEEP, "results=results", "strategies=[fixed_01]", "runs=3").status == 0
    summary = pd.read_csv(swept / "results/grid_sarsa/summary.csv")
    assert dict(zip(summary["strategy"], summary["runs"], strict=True)) == {"bmc": 2, "fixed_01": 3}


OTHER = {
    "episodes=4": "episodes was 3, is 4",
    "seed=9 runs=4": "seed was 0, is 9",
    "protocol=paper": "protocol was published, is paper",
    "strategies=[fixed_01] overrides=['gamma=0.5']": "gamma was 0.99, is 0.5",
    "sweep.strategies.0.parameters.alpha0=7": "strategy.bmc.parameters.alpha0 was not set, is 7",
}


@pytest.mark.parametrize("other", OTHER)
def test_a_sweep_is_not_continued_with_other_settings(other: str, finished: Path) -> None:
    other = other.replace("sweep.", "+sweep.") if "alpha0" in other else other
    line = refusal(bmc(finished, *SWEEP, *other.split()))
    assert "cells/bmc.0000-0001.parquet was made with other settings (" in line
    assert OTHER[other.replace("+", "")] in line


@pytest.mark.parametrize("how", ["truncated", "empty", "corrupt", "foreign", "foreign table"])
def test_a_broken_cell_is_named_with_the_remedy(how: str, swept: Path) -> None:
    (cell,) = (swept / CELLS).glob("*.parquet")
    whole = cell.read_bytes()
    if how == "foreign table":
        pd.DataFrame({"x": [1.0]}).to_parquet(cell)
    else:
        cell.write_bytes(
            {
                "truncated": whole[: len(whole) // 3],
                "empty": b"",
                "corrupt": whole[:60] + bytes(255 - byte for byte in whole[60:80]) + whole[80:],
                "foreign": b"strategy,run\nbmc,1\n" * 30,
            }[how]
        )
    broken = cell.read_bytes()
    line = refusal(bmc(swept, *SWEEP, "runs=3"))
    assert "cells/bmc.0000-0001.parquet is not a readable results table" in line
    assert "Move it away" in line
    assert cell.read_bytes() == broken
    if how == "corrupt":
        cell.unlink()
        assert bmc(swept, *SWEEP).status == 0, "the remedy"


def test_a_table_of_a_job_among_the_cells_is_named(swept: Path) -> None:
    table = swept / "out/grid_sarsa/table.parquet"
    job = ("train", "runs=2", "episodes=1", "device=cpu", "figure=false", "logger=none")
    assert bmc(swept, *job, "output=job").status == 0
    shutil.copy(swept / "job/table.parquet", swept / CELLS / "foreign.parquet")
    before = table.read_bytes()
    assert "foreign.parquet is no part of a sweep" in refusal(bmc(swept, *SWEEP))
    assert table.read_bytes() == before


LONG = (*SWEEP, "runs=40", "batch.grid_sarsa=1", "strategies=[bmc,fixed_01]")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_sweep_that_is_asked_to_end_says_what_is_kept(
    number: int, status: int, tmp_path: Path
) -> None:
    process = started(tmp_path, *LONG)
    wait_until(lambda: len(list((tmp_path / CELLS).glob("*.parquet"))) >= 2, process)
    process.kill(number)
    ended = process.wait()
    done = len(finished_cells(tmp_path / "out", "grid_sarsa"))
    assert ended.status == status
    assert 2 <= done < 80
    assert [line for line in ended.err.splitlines() if not line.startswith("compil")] == [
        f"bmc reproduce: interrupted with {done} of 80 cells finished, which are kept in out; the "
        "same command computes the rest"
    ]
    assert not list(tmp_path.rglob("*.tmp"))


def test_two_sweeps_share_a_folder_but_not_a_strategy(tmp_path: Path) -> None:
    first = started(tmp_path, *LONG)
    wait_until(lambda: any((tmp_path / CELLS).glob("*.parquet")), first)
    line = refusal(bmc(tmp_path, *SWEEP, "runs=40"))
    other = bmc(tmp_path, *SWEEP, "strategies=[vdbe_1]")
    running = first.running()
    first.kill()
    first.wait()
    assert running, "the first sweep was still at work"
    assert line == (
        f"bmc reproduce: bmc in out/grid_sarsa is being written by another job (process "
        f"{first.pid}); wait for it, or choose another output=."
    )
    assert other.status == 0


@pytest.mark.slow
def test_processes_of_a_sweep_end_with_it(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "scripts/reproduce.py", *SWEEP[1:], "workers=2"]
    command += ["strategies=[bmc,fixed_05]", "episodes=1000000"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 300
    while len(workers(process.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    found = workers(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # As a terminal does.
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(found) >= 2
    assert [pid for pid in found if Path(f"/proc/{pid}").exists()] == []
    assert "Traceback" not in said
    assert said.startswith("bmc reproduce: interrupted with 0 of 2 cells finished")


def workers(parent: int) -> list[int]:
    children = Path(f"/proc/{parent}/task/{parent}/children")
    found = [int(pid) for pid in children.read_text().split()] if children.exists() else []
    return [pid for pid in found if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]


def test_sensitivity_goes_to_output_and_is_published_where_there_is_none(tmp_path: Path) -> None:
    small = ("sensitivity", "runs=1", "episodes=2", "alpha0=[1]", "reward_scale=[1]", "threads=1")
    assert bmc(tmp_path, *small).status == 0
    made = pd.read_csv(tmp_path / "outputs/sensitivity/grid_sarsa/sensitivity.csv")
    assert made["auc_se"].isna().all()
    assert not (tmp_path / "results").exists()
    assert bmc(tmp_path, *small, "results=results").status == 0
    again = bmc(tmp_path, *small, "results=results")
    (line,) = again.err.splitlines()
    assert again.status == 2
    assert "results/grid_sarsa/sensitivity.csv exists and is not overwritten; move it away" in line


def test_a_sweep_killed_after_its_last_cell_publishes_when_it_is_run_again(swept: Path) -> None:
    table = swept / "out/grid_sarsa/table.parquet"
    before = load(table)
    table.unlink()
    ended = bmc(swept, *SWEEP)
    assert ended.out.splitlines()[0] == "0 cells to compute, 1 at a time"
    assert load(table).equals(before)
