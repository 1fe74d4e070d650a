"""Tables are written whole or not at all, and summarised as defined."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bmc_torchrl.analysis.overviews import experiment_tables, full_table, readme_table
from bmc_torchrl.analysis.scoring import EXPERIMENTS, MEASURES, TRUCK_OPTIMA, measure
from bmc_torchrl.analysis.summaries import (
    METRICS,
    Results,
    curves,
    read_results,
    scores,
    summary,
    write_results,
)
from bmc_torchrl.analysis.tables import (
    COLUMNS,
    load,
    load_metadata,
    provenance,
    save,
    tidy,
    write_atomically,
)
from bmc_torchrl.errors import ResultsError

METADATA = provenance({"gamma": 0.99}, seed=3, command="python scripts/reproduce.py")
VDBE = {"label": "vdbe_005", "family": "vdbe", "parameters": {"sigma": 0.05}}


def swept(seconds: float) -> dict:
    """The metadata of a sweep that took so long."""
    cell = {"strategy": "bmc", "first_run": 0, "last_run": 3, "episodes": 120, "seconds": seconds}
    return {**METADATA, "cells": [cell], "strategies": [VDBE]}


def table(strategies=("bmc", "fixed_01"), runs=4, episodes=120, first_run=0, name="grid_sarsa"):
    shape = (len(strategies), runs, episodes)
    generator = np.random.default_rng(first_run)
    steps = 22 + 178 * generator.random(shape)
    return tidy(name, strategies, steps, -steps / 10, generator.random(shape), first_run=first_run)


def test_a_saved_table_is_loaded_unchanged(tmp_path: Path) -> None:
    original = table()
    path = save(original, tmp_path / "table.parquet", METADATA)
    pd.testing.assert_frame_equal(load(path), original, check_dtype=False)
    assert tuple(load(path).columns) == COLUMNS


def test_a_table_says_how_it_was_made(tmp_path: Path) -> None:
    path = save(table(), tmp_path / "table.parquet", METADATA)
    metadata = load_metadata(path)
    assert metadata["config"] == {"gamma": 0.99}
    assert metadata["seed"] == 3
    assert metadata["command"] == "python scripts/reproduce.py"
    assert {"python", "torch", "torchrl", "pyarrow"} <= set(metadata["versions"])
    assert metadata["commit"]


def test_tidy_refuses_shapes_that_do_not_match() -> None:
    with pytest.raises(ValueError, match="expected \\[strategies, runs, episodes\\]"):
        tidy("grid_sarsa", ["bmc"], np.zeros((2, 3, 4)), np.zeros((2, 3, 4)), np.zeros((2, 3, 4)))
    with pytest.raises(ValueError, match="epsilon has shape"):
        tidy("grid_sarsa", ["bmc"], np.zeros((1, 3, 4)), np.zeros((1, 3, 4)), np.zeros((1, 3, 5)))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: t.drop(columns="epsilon"), "lacks the columns"),
        (lambda t: t.iloc[:0], "no rows"),
        (lambda t: t.iloc[:-1], "missing or repeated episodes"),
        (lambda t: pd.concat([t, t.iloc[:1]]), "missing or repeated episodes"),
        (lambda t: t.assign(steps=np.nan), "missing or infinite"),
        (lambda t: pd.concat([t, table(name="cart_dqn")]), "mixes the experiments"),
    ],
)
def test_an_incomplete_table_is_not_saved(tmp_path: Path, spoil, message: str) -> None:
    with pytest.raises(ResultsError, match=message):
        save(spoil(table()), tmp_path / "table.parquet", METADATA)
    assert list(tmp_path.iterdir()) == []


def corrupt(path: Path, how: str) -> bytes:
    content = bytearray(path.read_bytes())
    if how == "truncated":
        content = content[: len(content) // 2]
    elif how == "empty":
        content = bytearray()
    elif how == "flipped":
        content[len(content) // 3] ^= 0xFF
    else:
        content = bytearray(b"strategy,run\nbmc,1\n" * 20)
    path.write_bytes(content)
    return bytes(content)


@pytest.mark.parametrize("how", ["truncated", "empty", "flipped", "foreign"])
def test_a_corrupt_table_is_a_clear_error_and_stays_as_it_is(tmp_path: Path, how: str) -> None:
    path = save(table(), tmp_path / "table.parquet", METADATA)
    content = corrupt(path, how)
    with pytest.raises(ResultsError, match=r"table\.parquet is not a readable.*reproduce\.py"):
        load(path)
    assert path.read_bytes() == content


def test_a_missing_table_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="does not exist"):
        load(tmp_path / "table.parquet")


def test_a_foreign_parquet_file_is_a_clear_error(tmp_path: Path) -> None:
    pd.DataFrame({"x": [1.0]}).to_parquet(tmp_path / "x.parquet")
    with pytest.raises(ResultsError, match="lacks the columns"):
        load(tmp_path / "x.parquet")
    with pytest.raises(ResultsError, match="how it was made"):
        load_metadata(tmp_path / "x.parquet")


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail(stream) -> None:
        stream.write(b"half of the n")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        write_atomically(path, fail)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_curves_are_means_and_standard_errors_over_runs() -> None:
    steps = np.array([[[10.0, 1.0], [14.0, 1.0]]])
    found = curves(tidy("cart_dqn", ["bmc"], steps, -steps, steps / 100)).iloc[0]
    assert found["runs"] == 2
    assert found["steps_mean"] == 12
    assert found["steps_se"] == pytest.approx(2.0)
    assert found["return_mean"] == -12
    assert found["epsilon_se"] == pytest.approx(0.02)


def test_scores_are_the_windows_of_the_measure() -> None:
    episode = np.arange(1, 301.0)[None, None]
    for name, sign in (("grid_dqn", 1), ("supply_dqn", -1)):
        row = scores(tidy(name, ["bmc"], episode, -episode, 1 / episode)).iloc[0]
        assert row["auc"] == sign * 150.5
        assert row["first_100"] == sign * 50.5
        assert row["last_50"] == sign * 275.5
        assert row["epsilon_10"] == pytest.approx(0.1)
        assert row["epsilon_100"] == pytest.approx(0.01)
        assert row["epsilon_last"] == pytest.approx(1 / 300)


def test_summary_has_the_standard_error_of_run_means_not_of_episodes() -> None:
    level = np.array([1.0, 2.0, 3.0, 6.0])
    steps = np.broadcast_to(level[None, :, None], (1, 4, 60))
    row = summary(tidy("grid_dqn", ["bmc"], steps, steps, steps / 10)).iloc[0]
    assert row["auc"] == 3
    assert row["auc_se"] == pytest.approx(level.std(ddof=1) / 2)
    assert (row["runs"], row["episodes"]) == (4, 60)


def test_written_results_are_read_back(tmp_path: Path) -> None:
    original, folder = table(), tmp_path / "grid_sarsa"
    write_results(original, folder, swept(90.0))
    found = read_results(folder)
    assert found.experiment == "grid_sarsa"
    pd.testing.assert_frame_equal(found.summary, summary(original), check_dtype=False, rtol=1e-6)
    pd.testing.assert_frame_equal(found.curves, curves(original), check_dtype=False, rtol=1e-6)
    assert found.scores is not None
    assert set(METRICS) <= set(found.scores)
    assert found.timings is not None
    assert found.timings["seconds"].tolist() == [90.0]
    assert found.strategies["vdbe_005"].title == "VDBE, σ = 0.05"
    assert found.strategies["fixed_01"].title == "fixed_01"
    assert '"seed": 3' in (folder / "provenance.json").read_text()


def test_a_single_run_has_no_standard_error(tmp_path: Path) -> None:
    write_results(table(runs=1), tmp_path / "grid_sarsa", METADATA)
    assert read_results(tmp_path / "grid_sarsa").summary["auc_se"].isna().all()


@pytest.mark.parametrize("name", ["curves.csv", "summary.csv"])
@pytest.mark.parametrize("keep", [0.0, 0.3, 0.62])
def test_truncated_results_are_a_clear_error(tmp_path: Path, name: str, keep: float) -> None:
    folder = tmp_path / "grid_sarsa"
    write_results(table(), folder, METADATA)
    path = folder / name
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(ResultsError, match=name.removesuffix(".csv")):
        read_results(folder)


def test_missing_results_are_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="is no folder"):
        read_results(tmp_path / "grid_sarsa")
    with pytest.raises(ResultsError, match=r"curves\.csv does not exist"):
        read_results(tmp_path)


def test_the_readme_table_puts_our_rank_beside_the_published_one(tmp_path: Path) -> None:
    steps = np.repeat([[[30.0]], [[25.0]], [[40.0]]], 5, axis=1) + np.arange(5)[:, None] / 10
    content = tidy("grid_sarsa", ["bmc", "vdbe_005", "fixed_01"], steps, -steps, steps / 100)
    write_results(content, tmp_path / "grid_sarsa", swept(600.0))
    found = read_results(tmp_path / "grid_sarsa")
    assert full_table([found]).splitlines()[-1] == (
        "| grid-world, expected SARSA | 5 | 30.20 ± 0.07 | 30.20 ± 0.07 | 2 (2–2) of 3 | 3 of 22 "
        "| — | — | VDBE, σ = 0.05 (25.20 ± 0.07) | 10 min |"
    )
    assert readme_table([found]).splitlines()[-1] == (
        "| grid-world, expected SARSA | 5 | 30.20 ± 0.07 | 2 (2–2) of 3 | 3 of 22 "
        "| — | VDBE, σ = 0.05 (25.20 ± 0.07) |"
    )


def two_rules(folder: Path) -> Results:
    returns = np.repeat([[[9.0]], [[8.0]], [[12.0]]], 5, axis=1) + np.arange(5)[:, None] / 10
    labels = ["bmc", "fixed_01", "power_1"]
    content = tidy("supply_dqn", labels, returns, returns, returns / 100)
    families = ("bmc", "constant", "power")
    parameters = ({}, {"value": 0.1}, {"power": 1.0})
    made = swept(600.0)
    made["strategies"] = [
        {"label": label, "family": family, "parameters": given}
        for label, family, given in zip(labels, families, parameters, strict=True)
    ]
    made["config"] = {
        "domain": {"env": {"network": {"truck_cost": "floor"}}},
        "settings": {"by_family": {"power": {"truck_cost": "ceil"}}},
    }
    write_results(content, folder / "supply_dqn", made)
    return read_results(folder / "supply_dqn")


def test_strategies_are_ranked_within_one_truck_cost_rule(tmp_path: Path) -> None:
    found = two_rules(tmp_path)
    assert dict(zip(found.statistics["strategy"], found.statistics["rank"], strict=True)) == {
        "bmc": 1,
        "fixed_01": 2,
        "power_1": 1,
    }
    improvement = found.statistics.set_index("strategy")["improvement"]
    assert (improvement["fixed_01"], improvement.isna()["power_1"]) == (1.0, True)
    assert "| 1 (1–1) of 2 | 2 of 22, two rules | — | ε-BMC" in readme_table([found])
    text = experiment_tables([found])
    assert "ranks are within each" in text
    assert "reduced: 5 of 100 runs, 1 of 500 episodes, 3 of 22 strategies" in text
    assert "| power, β = 1 (every truck paid) | 5 |" in text
    assert "| 1 (1–1) of 1 |" in text


def test_a_recorded_comparison_is_in_the_tables_until_the_results_change(tmp_path: Path) -> None:
    found = two_rules(tmp_path)
    rows = [("bmc", metric, 1.5, True) for metric in METRICS]
    kept = pd.DataFrame(rows, columns=["strategy", "metric", "z", "informative"])
    kept.to_csv(tmp_path / "supply_dqn/comparison.csv", index=False)
    found = read_results(tmp_path / "supply_dqn")
    assert "| 1.50 | 6 |" in full_table([found])
    assert "| 1.5 | 1.5 | 1.5 | 1.5 | 1.5 | 1.5 |" in experiment_tables([found])
    assert two_rules(tmp_path).comparison is None


def test_every_experiment_has_a_measure() -> None:
    assert [measure(name).column for name in EXPERIMENTS] == ["steps"] * 4 + ["return"] * 2
    assert [measure(name).lower_is_better for name in EXPERIMENTS] == [True] * 2 + [False] * 4
    with pytest.raises(ResultsError, match="no known domain"):
        measure("moon_sarsa")


@pytest.mark.slow
def test_the_supply_chains_optimum_is_that_of_dynamic_programming() -> None:
    from bmc_torchrl.envs import SupplyNetwork
    from bmc_torchrl.envs.optimal import optimal_supply_chain_values

    values = optimal_supply_chain_values(horizon=200).values
    assert MEASURES["supply"].optimum == pytest.approx(float(values[0, 10 * 51]), abs=0.005)
    network = SupplyNetwork(truck_cost="floor")
    floor = optimal_supply_chain_values(network, horizon=200).values
    assert TRUCK_OPTIMA["floor"] == pytest.approx(float(floor[0, 10 * 51]), abs=0.005)
