"""The study's tables: what they say of known scores, and what docs/study.md says of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bmc_torchrl.analysis.study import (
    cell_means,
    clustered_iqm,
    dimensions,
    dqn_scores,
    dqn_summary,
    family_table,
    paired_difference,
    setting_table,
    strategy_table,
)
from bmc_torchrl.analysis.study_report import page_tables

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results/study"
ENTRIES = [
    {"label": "low", "family": "constant", "parameters": {"value": 0.1}},
    {"label": "high", "family": "constant", "parameters": {"value": 0.9}},
    {"label": "only", "family": "bmc", "parameters": {"alpha0": 1.0, "beta0": 1.01}},
]
LEVELS = {
    ("easy", "low"): 0.8,
    ("easy", "high"): 0.2,
    ("easy", "only"): 0.5,
    ("hard", "low"): 0.1,
    ("hard", "high"): 0.5,
    ("hard", "only"): 0.5,
    ("new", "low"): 0.4,
    ("new", "high"): 0.6,
    ("new", "only"): 0.5,
}


def scores() -> pd.DataFrame:
    """Four runs in two conditions; ``only`` loses 0.1 in the second."""
    rows = [
        {"task": task, "condition": condition, "strategy": label, "run": run,
         "greedy": level + 0.01 * run - loss * (label == "only"), "online": level / 2,
         "late": level, "epsilon": 0.5, "epsilon_last": 0.5}
        for (task, label), level in LEVELS.items()
        for condition, loss in (("x1", 0.0), ("x100", 0.1))
        for run in range(4)
    ]  # fmt: skip
    return pd.DataFrame(rows)


NAMED = setting_table(ENTRIES)


def test_a_familys_single_setting_is_chosen_without_the_held_out_tasks() -> None:
    families = family_table(cell_means(scores()), NAMED, ["new"]).set_index("family")
    constant = families.loc["constant"]
    assert constant["single"] == "low"
    assert constant["greedy_development"] == pytest.approx(0.45 + 0.015)
    assert constant["greedy_held_out"] == pytest.approx(0.4 + 0.015)
    assert constant["tuned_development"] == pytest.approx(0.65 + 0.015)
    assert constant["sensitivity_held_out"] == pytest.approx(0.2)
    assert constant["dimensions"] == 1
    assert (families.loc["bmc", "parameters"], families.loc["bmc", "dimensions"]) == (0, 0)


def test_one_of_two_parameters_may_be_enough_to_tune() -> None:
    given = {f"{a}{b}": {"initial": a, "rate": b} for a in (0, 1) for b in (0, 1)}
    greedy = pd.DataFrame({"00": [1.0, 0.0], "01": [0.0, 1.0], "10": [0.9, 0.0], "11": [0.0, 0.9]})
    assert dimensions(greedy, pd.Series(given), "00") == 1
    crossed = greedy.assign(**{"01": [0.0, 0.2], "10": [0.0, 0.2], "11": [0.0, 1.0]})
    assert dimensions(crossed, pd.Series(given), "00") == 2


def test_a_strategys_unit_is_how_much_its_score_changes_between_conditions() -> None:
    table = strategy_table(scores(), NAMED, intervals=["only"]).set_index("strategy")
    assert table.loc["only", "unit"] == pytest.approx(0.1)
    assert table.loc["low", "unit"] == pytest.approx(0.0)
    assert table.loc["low", "greedy_worst"] == pytest.approx(0.1 + 0.015)
    only = table.loc["only"]
    assert only["greedy_low"] <= only["greedy_iqm"] <= only["greedy_high"]
    assert np.isnan(table.loc["low", "greedy_low"])


def test_copies_of_a_run_in_other_conditions_do_not_narrow_its_interval() -> None:
    once = np.random.default_rng(0).normal(size=(3, 1, 20))
    one, copied = clustered_iqm(once), clustered_iqm(np.repeat(once, 3, axis=1))
    assert copied.high - copied.low == pytest.approx(one.high - one.low, rel=0.1)


def test_a_difference_that_is_the_same_in_every_task_is_certain() -> None:
    first = pd.Series({"a": 0.1, "b": 0.9, "c": 0.4})
    assert tuple(paired_difference(first + 0.2, first)) == pytest.approx((0.2, 0.2, 0.2))


def test_a_network_scores_one_where_it_is_the_best_and_nothing_where_none_learned() -> None:
    curves = pd.DataFrame(
        [(label, run, frame, greedy, 2.0, 0.1)
         for label, greedy in (("bmc", 10.0), ("wins", 6.0)) for run in range(2)
         for frame in (1, 2)],
        columns=["strategy", "run", "frame", "greedy", "online", "epsilon"],
    )  # fmt: skip
    found = dqn_scores(curves, random_mean=2.0).set_index(["strategy", "run"])
    assert found.loc[("bmc", 0), "greedy"] == 1.0
    assert found.loc[("wins", 1), "greedy"] == 0.5
    assert found.loc[("wins", 1), "online"] == 0.0
    summary = dqn_summary({"a": found.reset_index()}, counted=[])
    assert summary["greedy"].isna().all()


def test_the_page_has_the_tables_of_the_results() -> None:
    page = (ROOT / "docs/study.md").read_text()
    told = page.partition("<!-- results -->\n")[2].partition("<!-- /results -->")[0]
    assert told == page_tables(RESULTS)


def committed(name: str) -> pd.DataFrame:
    return pd.read_csv(RESULTS / f"{name}.csv")


def means(split: str) -> pd.DataFrame:
    found = committed("strategies")
    return found[found["split"] == split].set_index("strategy")


def difference(one: str, other: str, tasks: str, measure: str) -> pd.Series:
    found = committed("differences").set_index(["strategy", "against", "tasks", "measure"])
    return found.loc[one, other, tasks, measure]


def test_what_the_page_says_of_families_is_so() -> None:
    families = committed("families").set_index("family")
    for split in ("development", "held_out"):
        assert families[f"greedy_{split}"].idxmax() == "wins"
        assert families[f"greedy_{split}"].idxmin() == "vdbe"
    assert (families["dimensions"] == 1).all()
    lost = families["sensitivity_development"]
    assert (lost["bmc"] < lost[["constant", "linear", "linear_run", "geometric"]]).all()
    ours, wins = "ε-BMC (α₀ = 10)", "exploration wins (strength = 100, corrected = false)"
    assert difference(wins, ours, "held-out", "greedy")["difference_low"] > 0
    for linear in (
        "share of the run (ε₀ = 1, share = 1)",
        "fixed frames (ε₀ = 1, frames = 100000)",
    ):
        assert difference(f"linear, {linear}", wins, "held-out", "greedy")["difference_high"] > 0


def test_what_the_page_says_of_settings_is_so() -> None:
    noise, held = means("noise"), means("held_out")
    assert len(held) == len(noise) == 43
    assert noise["online"].idxmax() == "bmc"
    assert noise.loc["bmc", "greedy"] == pytest.approx(
        noise.loc["linear_run_1", "greedy"], abs=0.02
    )
    assert noise.loc["wins_uncorrected_100", "greedy"] - noise.loc["bmc_10", "greedy"] < (
        held.loc["wins_uncorrected_100", "greedy"] - held.loc["bmc_10", "greedy"]
    )
    assert (
        noise.loc["free_10", ["greedy", "online"]] < noise.loc["bmc", ["greedy", "online"]]
    ).all()
    for split in ("development", "held_out"):
        found = means(split)
        assert found.loc["free_10", "online"] > found.loc["bmc", "online"]
        assert found.loc["wins_100", "online"] > found.loc["wins", "online"] + 0.05
        constants = found[found["family"] == "constant"]
        assert constants["greedy"].idxmax() == "fixed_1"


def test_what_the_page_says_of_networks_is_so() -> None:
    every = committed("dqn").query("task == 'all'").set_index("strategy")["online"].sort_values()
    assert every.index[0] == "wins"
    assert set(every.index[-2:]) == {"bmc", "free_10"}
    greedy = committed("dqn").query("task == 'all'").set_index("strategy")
    assert greedy["greedy"].idxmax() == "bmc"
    assert greedy.loc["linear", "final"] > greedy.loc["bmc", "final"]
    apart = greedy.index[greedy["greedy_high"] < greedy.loc["bmc", "greedy_low"]]
    assert list(apart) == ["fixed_01"]
    assert not set(committed("dqn")["task"]) & {"asterix", "freeway", "seaquest"}
    sea = committed("dqn").query("task == ['sea6', 'sea10']")
    assert (sea.groupby("task")["greedy"].idxmin().map(sea["strategy"]) == "fixed_01").all()


def test_what_the_page_says_of_units_is_so() -> None:
    found = committed("strategies").query("split == 'development'").set_index("strategy")["unit"]
    assert found[["free_1", "free_10", "free_100", "wins", "wins_100"]].max() < 0.001
    assert found[["bmc", "bmc_10"]].min() > 0.05
    assert found.idxmax().startswith("vdbe")
