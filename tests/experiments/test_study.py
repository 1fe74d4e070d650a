"""The study: its plan, the scores of a run, and that its parts run, resume and publish."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from bmc_torchrl import ConstantEpsilon
from bmc_torchrl.analysis.study_report import page_tables
from bmc_torchrl.envs import TabularEnv, maze
from bmc_torchrl.errors import ResultsError
from bmc_torchrl.experiments import study
from bmc_torchrl.experiments.configs import command_config, plain
from bmc_torchrl.experiments.study_finite import Bounds, build_task, finite_scores, run_scores
from bmc_torchrl.experiments.study_publishing import publish
from bmc_torchrl.experiments.study_tasks import in_random_order, river_swim
from bmc_torchrl.learners.settings import ExpectedSarsaSettings, RunSettings
from bmc_torchrl.lockstep.interface import make_engine

ROOT = Path(__file__).parents[2]
PLAN = plain(command_config("study", []))


def reduced(output: Path) -> dict[str, Any]:
    """A study of four small tasks with few runs."""
    plan = copy.deepcopy(PLAN)
    kept = ("chain5", "corridor", "sea8")
    plan["finite"] |= {"runs": 3, "frames": 300}
    plan["finite"]["tasks"] = {name: plan["finite"]["tasks"][name] for name in kept}
    sea = {**plan["dqn"]["tasks"]["sea6"], "frames": 120, "hidden": [4]}
    plan["dqn"] |= {"runs": 2, "tasks": {"sea6": sea}, "tests": 2, "random_episodes": 4}
    return {**plan, "output": str(output)}


def test_the_plan_has_36_tasks_a_third_held_out_at_three_scales_and_100_runs() -> None:
    finite = PLAN["finite"]
    assert len(finite["tasks"]) == 36
    assert len(study.tasks_of(PLAN, "held_out")) == 12
    assert set(study.tasks_of(PLAN, "development")).isdisjoint(study.tasks_of(PLAN, "held_out"))
    primary = [how["scale"] for how in finite["conditions"].values() if not how["noise"]]
    assert primary == [0.01, 1.0, 100.0]
    assert finite["runs"] == 100
    assert PLAN["dqn"]["runs"] == 10


@pytest.mark.parametrize("task", PLAN["finite"]["tasks"])
def test_every_task_has_something_to_learn(task: str) -> None:
    config = study.decisive(PLAN, "development", task)
    bounds = Bounds.of(build_task({**config, "runs": 1}, task, 1.0), config["gamma"])
    assert (np.diff(bounds.greedy) > 0.01).all()
    assert (np.diff(bounds.online) > 0.01).all()


def test_an_order_of_actions_changes_no_value() -> None:
    river = river_swim(6)
    values = [
        TabularEnv(mdp, max_steps=50, batch_size=[1]).optimal_return(0.9)
        for mdp in (river, in_random_order(river, 3))
    ]
    assert values[0] == pytest.approx(values[1])
    assert not torch.equal(river.successors, in_random_order(river, 3).successors)


def test_always_exploring_scores_zero_online_and_the_best_path_one_in_tests() -> None:
    env = TabularEnv(maze("S...G", step=-0.1), max_steps=20, batch_size=[200])
    run = RunSettings(gamma=0.99, episodes=400, tests=1, seed=0)
    learner = ExpectedSarsaSettings(learning_rate=0.5)
    engine = make_engine(env, ConstantEpsilon(1.0, batch_shape=[200]), run, learner, threads=1)
    engine.advance(1500)
    scores = run_scores(engine, Bounds.of(env, 0.99))
    assert scores["late"].mean() == pytest.approx(1.0, abs=0.02)
    assert (scores["epsilon"] == 1.0).all()
    lengths, returns = engine.train_steps.numpy(), engine.train_returns.numpy()
    low, high = env.random_return(1.0), env.optimal_return(1.0)
    done = np.isfinite(lengths[0])
    by_hand = np.average((returns[0, done] - low) / (high - low), weights=lengths[0, done])
    assert scores["online"][0] == pytest.approx(by_hand)
    assert np.nanmean((returns - low) / (high - low)) == pytest.approx(0.0, abs=0.03)


def test_schedules_and_scale_free_strategies_score_the_same_in_another_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bmc_torchrl.experiments.study_finite.SCHEDULES", ())
    config = study.decisive(reduced(tmp_path), "development", "corridor")
    config["conditions"] = {"x1": {"scale": 1.0, "noise": 0.0}, "x4": {"scale": 4.0, "noise": 0.0}}
    found = finite_scores(config, "corridor").set_index(["strategy", "run"])
    one, four = (
        found[found["condition"] == name].drop(columns="condition") for name in config["conditions"]
    )
    families = {label: entry["family"] for label, entry in config["sweep"].items()}
    same = {label for label in families if one.loc[label].equals(four.loc[label])}
    assert {label for label, family in families.items() if family not in ("bmc", "vdbe")} <= same
    assert "vdbe_005" not in same


@pytest.mark.slow
def test_a_study_resumes_publishes_and_fills_its_page(tmp_path: Path) -> None:
    settings = reduced(tmp_path / "output")
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- results -->\n<!-- /results -->\nafter\n")
    settings["page"] = str(page)
    left = list(study.left(settings))
    assert left[0] == ("development", "chain5")
    assert left[-1] == ("dqn", "sea6")
    threads = torch.get_num_threads()
    for part, task in left:
        study.compute(settings, part, task)
    torch.set_num_threads(threads)
    assert list(study.left(settings)) == []
    with pytest.raises(ResultsError, match=r"other settings \(seed was 0, is 1\)"):
        study.finished({**settings, "seed": 1}, "dqn", "sea6")
    results = tmp_path / "results"
    publish(settings, study.all_finished(settings), [results])
    cells = pd.read_csv(results / "cells.csv")
    assert len(cells) == 3 * 4 * len(settings["sweep"]["strategies"])
    assert set(cells.loc[cells["held_out"], "task"]) == {"sea8"}
    assert (pd.read_csv(results / "families.csv")["sensitivity_held_out"] >= -1e-9).all()
    figures = {path.stem for path in results.glob("*.png")}
    assert figures == {"families", "profiles", "scales", "dqn"}
    assert page.read_text() == (
        f"before\n<!-- results -->\n{page_tables(results)}<!-- /results -->\nafter\n"
    )


def test_minutes_spent_leave_the_last_tasks_with_networks_out(tmp_path: Path) -> None:
    settings = reduced(tmp_path)
    settings["dqn"]["minutes"] = 0
    assert [part for part, _ in study.left(settings)].count("dqn") == 0
