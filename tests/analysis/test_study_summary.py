"""The study of others' environments: what its summary says, and that its jobs run and resume."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from jobs import FOREIGN, ROOT, settings
from omegaconf import OmegaConf

from bmc_torchrl.analysis.statistics import iqm_interval
from bmc_torchrl.analysis.study_summary import ALL_TASKS, study_figure, study_scores, study_summary
from bmc_torchrl.analysis.tables import load, tidy
from bmc_torchrl.analysis.titles import Strategies
from bmc_torchrl.errors import ResultsError
from bmc_torchrl.experiments import study

EPISODES = 20


def results(task: str, levels: dict[str, float], scale: float = 1.0) -> pd.DataFrame:
    """Ten runs for each strategy whose return is `level` plus the run's number, then rises by 1."""
    curve = np.where(np.arange(EPISODES) >= 16, 1.0, 0.0)
    runs = np.arange(10)[None, :, None] / 10
    returns = scale * (np.array(list(levels.values()))[:, None, None] + runs + curve)
    epsilon = np.full(returns.shape, 0.25)
    return tidy(task, list(levels), np.ones_like(returns), returns, epsilon)


TABLES = {
    "cliff_sarsa": results("cliff_sarsa", {"bmc": 5.0, "fixed_01": 0.0}),
    "taxi_sarsa": results("taxi_sarsa", {"bmc": 0.0, "fixed_01": 0.05}, scale=100.0),
}


def test_a_runs_final_score_is_the_mean_of_the_last_fifth_and_auc_that_of_all() -> None:
    scores = study_scores(TABLES["cliff_sarsa"]).set_index(["strategy", "run"])
    assert scores.loc[("bmc", 3), "final"] == pytest.approx(5.3 + 1.0)
    assert scores.loc[("bmc", 3), "auc"] == pytest.approx(5.3 + 0.2)
    assert scores.loc[("bmc", 3), "epsilon_last"] == 0.25


def test_fewer_steps_are_better_where_the_measure_says_so() -> None:
    table = tidy("grid_sarsa", ["bmc"], [[[200, 22]]], [[[-30, -2.2]]], [[[0.5, 0.4]]])
    assert study_scores(table)["auc"].tolist() == [-111.0]


def test_the_summary_has_iqms_of_every_task_and_of_all_scaled() -> None:
    summary = study_summary(TABLES).set_index(["task", "strategy"])
    assert len(summary) == 6
    assert (summary["runs"] == 10).all()
    bmc = summary.loc[("cliff_sarsa", "bmc")]
    expected = iqm_interval(np.arange(10)[:, None] / 10 + 5.2)
    assert tuple(bmc[["auc", "auc_low", "auc_high"]]) == pytest.approx(tuple(expected))
    assert summary.loc[("cliff_sarsa", "fixed_01"), "improvement"] == 1.0
    assert 0.3 < summary.loc[("taxi_sarsa", "fixed_01"), "improvement"] < 0.5
    both = summary.xs(ALL_TASKS)
    scaled = both[["auc", "final"]].to_numpy()
    assert ((scaled >= 0) & (scaled <= 1)).all()
    assert both.loc["bmc", "auc"] > both.loc["fixed_01", "auc"]
    assert both.loc["fixed_01", "improvement"] == pytest.approx(
        np.mean([summary.loc[(task, "fixed_01"), "improvement"] for task in TABLES])
    )


def test_scores_are_scaled_task_by_task() -> None:
    larger = {task: table.copy() for task, table in TABLES.items()}
    larger["taxi_sarsa"]["return"] = larger["taxi_sarsa"]["return"] * 7 - 3
    ours, theirs = (
        study_summary(tables).query("task == @ALL_TASKS")[["auc", "final"]]
        for tables in (TABLES, larger)
    )
    np.testing.assert_allclose(ours, theirs)


def test_the_figure_has_two_panels_for_each_task_and_for_all() -> None:
    figure = study_figure(TABLES, study_summary(TABLES), Strategies(), columns=2)
    seen = [axes for axes in figure.axes if axes.get_visible()]
    assert len(seen) == 6
    assert [axes.get_title() for axes in seen if axes.get_title()] == [
        "CliffWalking, expected SARSA",
        "Taxi, expected SARSA",
        "all tasks",
    ]
    (line,) = [line for line in seen[0].lines if line.get_color() == "#000000"]
    assert line.get_ydata().tolist() == pytest.approx([5.45] * 16 + [6.45] * 4)


def test_the_studys_tasks_are_experiments_with_one_prior() -> None:
    chosen = OmegaConf.load(ROOT / "configs/study.yaml")
    assert len(chosen.tasks) >= 6
    assert chosen.runs >= 10
    assert set(chosen.tasks) <= set(FOREIGN)
    for task, overrides in chosen.tasks.items():
        cfg = settings(f"experiment={task}", "sweep=study", *overrides)
        assert (cfg.families.bmc.alpha0, cfg.families.bmc.beta0) == (1.0, 1.01)
        labels = [entry.label for entry in cfg.sweep.strategies]
        assert labels == ["bmc", "fixed_01", "linear", "geom_099", "vdbe_005"]


def test_a_task_is_one_job_of_all_strategies_whose_results_are_published(tmp_path: Path) -> None:
    sweep = OmegaConf.to_container(OmegaConf.load(ROOT / "configs/sweep/study.yaml"))
    tasks = {"cliff_sarsa": ["episodes=2", "domain.max_steps=20"], "taxi_sarsa": []}
    chosen = {"sweep": sweep, "output": str(tmp_path), "seed": 0, "tasks": tasks, "runs": 2}
    chosen["results"] = str(tmp_path / "results")
    assert not study.finished(chosen, "cliff_sarsa")
    threads = torch.get_num_threads()
    known = study.compute(chosen, "cliff_sarsa")
    torch.set_num_threads(threads)
    table = load(tmp_path / "cliff_sarsa/table.parquet")
    assert table.groupby("strategy")["run"].nunique().to_dict() == dict.fromkeys(
        ("bmc", "fixed_01", "linear", "geom_099", "vdbe_005"), 2
    )
    assert known == f"return {table['return'].mean():.2f} on average"
    assert study.finished(chosen, "cliff_sarsa")
    with pytest.raises(ResultsError, match=r"made with other \['seed'\]; move it away"):
        study.finished({**chosen, "seed": 1}, "cliff_sarsa")
    assert study.publish(chosen) == ["cliff_sarsa"]
    assert len(pd.read_csv(tmp_path / "results/summary.csv")) == 5
    assert (tmp_path / "results/study.png").stat().st_size > 1000
