"""Statistics against closed forms and against rliable's published definitions, written out."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from bmc_torchrl.analysis.statistics import (
    improvement_interval,
    interquartile_mean,
    iqm_interval,
    performance_profile,
    probability_of_improvement,
    profile_interval,
    rank_table,
    strategy_statistics,
)

scores_2d = arrays(
    np.float64,
    st.tuples(st.integers(1, 8), st.integers(2, 2)),
    elements=st.integers(-3, 3).map(float),
)


def test_the_interquartile_mean_leaves_out_both_outer_quarters() -> None:
    scores = np.array([-1e9, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 1e9])
    assert interquartile_mean(scores) == 3.5


def test_the_interquartile_mean_pools_tasks_as_rliable_does() -> None:
    scores = np.random.default_rng(0).normal(size=(10, 3))
    assert iqm_interval(scores).estimate == pytest.approx(
        stats.trim_mean(scores, proportiontocut=0.25, axis=None)
    )


def test_the_iqm_interval_is_the_stratified_percentile_bootstrap_of_rliable() -> None:
    scores = np.random.default_rng(1).normal([0, 10], 1, (40, 2))
    generator = np.random.default_rng(2)
    samples = []
    for _ in range(2000):
        drawn = [task[generator.integers(0, 40, 40)] for task in scores.T]
        samples.append(stats.trim_mean(np.concatenate(drawn), 0.25))
    low, high = np.percentile(samples, [2.5, 97.5])
    found = iqm_interval(scores, resamples=2000)
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.05)


def test_the_iqm_interval_covers_the_truth_nineteen_times_in_twenty() -> None:
    generator = np.random.default_rng(3)
    covered = [
        found.low <= 0 <= found.high
        for found in (
            iqm_interval(generator.normal(size=(60, 1)), resamples=300) for _ in range(200)
        )
    ]
    assert 0.89 <= np.mean(covered) <= 0.99


def test_equal_scores_have_an_interval_of_no_width() -> None:
    assert iqm_interval(np.full((5, 2), 22.0)) == (22.0, 22.0, 22.0)


def test_one_run_has_no_interval() -> None:
    found = iqm_interval([[3.0]])
    assert found.estimate == 3
    assert np.isnan(found.low)


@pytest.mark.parametrize(("difference", "expected"), [(0.0, 0.5), (100.0, 1.0), (-100.0, 0.0)])
def test_probability_of_improvement_of_shifted_scores(difference: float, expected: float) -> None:
    scores = np.arange(10.0)[:, None]
    assert probability_of_improvement(scores + difference, scores) == expected


def test_probability_of_improvement_of_normal_scores_is_the_closed_form() -> None:
    generator = np.random.default_rng(4)
    x, y = generator.normal(1, 1, (4000, 1)), generator.normal(0, 1, (4000, 1))
    expected = stats.norm.cdf(1 / np.sqrt(2))
    assert probability_of_improvement(x, y) == pytest.approx(expected, abs=0.02)


@given(better=scores_2d, worse=scores_2d)
@settings(deadline=None, max_examples=50)
def test_probability_of_improvement_is_rliables(better: np.ndarray, worse: np.ndarray) -> None:
    # rliable.metrics.probability_of_improvement, with its shortcut for identical tasks left out.
    by_task = [
        stats.mannwhitneyu(better[:, task], worse[:, task], alternative="greater").statistic
        / (len(better) * len(worse))
        if np.ptp(np.concatenate([better[:, task], worse[:, task]])) > 0
        else 0.5
        for task in range(2)
    ]
    assert probability_of_improvement(better, worse) == pytest.approx(np.mean(by_task))
    assert probability_of_improvement(worse, better) == pytest.approx(1 - np.mean(by_task))


def test_the_improvement_interval_surrounds_its_estimate() -> None:
    generator = np.random.default_rng(5)
    x, y = generator.normal(0.5, 1, (50, 1)), generator.normal(0, 1, (40, 1))
    found = improvement_interval(x, y)
    # Mann–Whitney's standard error when both samples are alike, sqrt((n + m + 1) / 12 n m).
    assert found.high - found.low == pytest.approx(3.92 * np.sqrt(91 / 12 / 2000), rel=0.25)
    assert found.low < found.estimate < found.high


def test_different_tasks_are_not_compared() -> None:
    with pytest.raises(ValueError, match="compare the same tasks"):
        probability_of_improvement(np.zeros((3, 1)), np.zeros((3, 2)))
    with pytest.raises(ValueError, match=r"expected \[runs, tasks\]"):
        iqm_interval(np.zeros(3))


def test_a_profile_is_the_fraction_of_scores_above_a_threshold() -> None:
    scores, levels = np.random.default_rng(6).normal(size=(20, 3)), np.linspace(-2, 2, 9)
    expected = [np.mean(scores > level) for level in levels]
    np.testing.assert_allclose(performance_profile(scores, levels), expected)
    low, high = profile_interval(scores, levels)
    assert (low <= expected).all()
    assert (high >= expected).all()


def test_a_profiles_band_is_binomial() -> None:
    scores = np.arange(100.0)[:, None]
    low, high = profile_interval(scores, [49.5], resamples=8000)
    expected = stats.binom(100, 0.5).ppf([0.025, 0.975]) / 100
    np.testing.assert_allclose([low[0], high[0]], expected, atol=0.011)


def test_ranks_follow_the_direction_of_the_measure_and_ties_share() -> None:
    scores = {"a": [1.0, 1.0], "b": [3.0, 3.0], "c": [1.0, 1.0], "d": [9.0, 9.0]}
    low = rank_table(scores, lower_is_better=True).set_index("strategy")["rank"]
    high = rank_table(scores, lower_is_better=False).set_index("strategy")["rank"]
    assert low.to_dict() == {"a": 1, "c": 1, "b": 3, "d": 4}
    assert high.to_dict() == {"d": 1, "b": 2, "a": 3, "c": 3}


def test_rank_intervals_tell_the_certain_from_the_uncertain() -> None:
    generator = np.random.default_rng(7)
    scores = {
        "near": generator.normal(0, 1, 50),
        "nearer": generator.normal(0, 1, 50),
        "far": generator.normal(50, 1, 50),
    }
    ranks = rank_table(scores, lower_is_better=True).set_index("strategy")
    assert ranks.loc["far", ["rank_low", "rank_high"]].tolist() == [3, 3]
    assert ranks.loc["near", ["rank_low", "rank_high"]].tolist() == [1, 2]


def test_strategy_statistics_has_every_statistic_of_every_strategy() -> None:
    generator = np.random.default_rng(8)
    rows = [
        {"strategy": name, "run": run, "auc": level + generator.random(), "last_50": 22.0}
        for name, level in (("bmc", 40), ("fixed_01", 60), ("vdbe_005", 38))
        for run in range(10)
    ]
    found = strategy_statistics(pd.DataFrame(rows), lower_is_better=True, resamples=200)
    assert found["strategy"].tolist() == ["vdbe_005", "bmc", "fixed_01"]
    improvement = found.set_index("strategy")["improvement"]
    assert improvement["fixed_01"] == 1
    assert improvement["vdbe_005"] == 0
    assert np.isnan(improvement["bmc"])
    assert (found["last_50_iqm_low"] == 22).all()
    assert (found["auc_iqm_low"] <= found["auc_iqm"]).all()


def test_ties_count_half_in_an_interval_too() -> None:
    found = improvement_interval(np.ones((5, 1)), np.ones((7, 1)))
    assert found == pytest.approx((0.5, 0.5, 0.5))


def test_the_bootstraps_seed_is_zero_unless_said() -> None:
    scores = np.random.default_rng(9).normal(size=(12, 1))
    intervals = (
        lambda **seed: iqm_interval(scores, resamples=50, **seed),
        lambda **seed: improvement_interval(scores, scores + 0.3, resamples=50, **seed),
        lambda **seed: profile_interval(scores, [0.0], resamples=50, **seed),
        lambda **seed: (
            rank_table(
                {name: scores + 0.1 * i for i, name in enumerate("abcdef")},
                lower_is_better=True,
                resamples=50,
                **seed,
            )
            .to_numpy()[:, 3:]
            .tolist()
        ),
    )
    for interval in intervals:
        assert interval() == interval(seed=0)
        assert any(interval(seed=seed) != interval() for seed in range(1, 20))
