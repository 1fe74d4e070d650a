"""Reliable statistics of few runs, after Agarwal et al. (2021), "Deep RL at the Edge".

Scores are arrays ``[runs, tasks]``. The definitions are rliable's: the interquartile mean is the
mean of the middle half of all scores, intervals are percentiles of a bootstrap that resamples runs
within each task, the probability of improvement is the Mann–Whitney statistic averaged over
tasks, and a performance profile is the fraction of scores above a threshold.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy import stats

Array = NDArray[np.float64]

RESAMPLES = 2000
CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A point estimate and its confidence interval.

    Example:
        >>> iqm_interval([[1.0], [1.0], [1.0]])
        Interval(estimate=1.0, low=1.0, high=1.0)
    """

    estimate: float
    low: float
    high: float

    def columns(self, name: str) -> dict[str, float]:
        """As columns of a table: ``name``, ``name_low`` and ``name_high``."""
        return dict(zip((name, f"{name}_low", f"{name}_high"), self, strict=True))


UNKNOWN = Interval(np.nan, np.nan, np.nan)


def interquartile_mean(*tasks: Array, axis: int = 0) -> Array:
    """Mean of the middle half of the scores of all tasks together.

    Args:
        *tasks: One array of runs for each task.
        axis: The dimension of runs.

    Returns:
        The mean over ``axis`` after the lowest and the highest quarter were left out; like
        rliable's, ``n // 4`` scores are left out at either end.

    Example:
        >>> float(interquartile_mean(np.array([0.0, 1.0, 2.0, 100.0])))
        1.5
    """
    return np.asarray(stats.trim_mean(np.concatenate(tasks, axis=axis), 0.25, axis=axis))


def iqm_interval(
    scores: ArrayLike,
    *,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Interquartile mean with its stratified percentile bootstrap interval.

    Args:
        scores: ``[runs, tasks]``.
        confidence: Probability that the interval covers.
        resamples: Bootstrap samples.
        seed: Of the bootstrap's generator.
    """
    array = _scores(scores)
    estimate = float(interquartile_mean(*array.T))
    if len(array) == 1:
        return Interval(estimate, np.nan, np.nan)
    found = stats.bootstrap(
        tuple(array.T),
        interquartile_mean,
        vectorized=True,
        confidence_level=confidence,
        n_resamples=resamples,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(estimate, float(found.low), float(found.high))


def probability_of_improvement(better: ArrayLike, worse: ArrayLike) -> float:
    """Probability that a run of one strategy scores above a run of another.

    Args:
        better: Scores of the strategy that may be better, ``[runs, tasks]``; high is good.
        worse: Scores of the other, ``[other runs, tasks]``.

    Returns:
        U / (n m), the Mann–Whitney statistic over the number of pairs, ties counting half;
        averaged over tasks.

    Example:
        >>> probability_of_improvement([[1.0], [2.0]], [[1.0], [0.0]])
        0.875
    """
    one, other = _scores(better), _scores(worse)
    if one.shape[1] != other.shape[1]:
        raise ValueError(
            f"better has {one.shape[1]} tasks, worse {other.shape[1]}: compare the same tasks"
        )
    return float(np.mean([_superiority(x, y) for x, y in zip(one.T, other.T, strict=True)]))


def _superiority(x: Array, y: Array) -> float:
    rank_sum = stats.rankdata(np.concatenate([x, y]))[: len(x)].sum()
    return float((rank_sum - len(x) * (len(x) + 1) / 2) / (len(x) * len(y)))


def improvement_interval(
    better: ArrayLike,
    worse: ArrayLike,
    *,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Probability of improvement with a bootstrap interval over both strategies' runs."""
    one, other = _scores(better), _scores(worse)
    generator = np.random.default_rng(seed)
    samples = np.mean(
        [_resampled(x, y, generator, resamples) for x, y in zip(one.T, other.T, strict=True)],
        axis=0,
    )
    low, high = _percentiles(samples, confidence)
    return Interval(probability_of_improvement(one, other), float(low), float(high))


def _resampled(x: Array, y: Array, generator: np.random.Generator, resamples: int) -> Array:
    # Resampling runs only reweights the pairs, so that no ranks need be computed again.
    wins = (x[:, None] > y) + 0.5 * (x[:, None] == y)
    rows, columns = (_weights(generator, resamples, len(runs)) for runs in (x, y))
    return np.asarray(((rows @ wins) * columns).sum(axis=-1))


def _weights(generator: np.random.Generator, resamples: int, runs: int) -> Array:
    return generator.multinomial(runs, np.full(runs, 1 / runs), size=resamples) / runs


def _percentiles(samples: Array, confidence: float) -> Array:
    tail = (1 - confidence) / 2
    return np.asarray(np.quantile(samples, [tail, 1 - tail], axis=0))


def performance_profile(scores: ArrayLike, thresholds: ArrayLike) -> Array:
    """Fraction of scores above each threshold, ``[thresholds]``.

    Example:
        >>> performance_profile([[1.0], [2.0], [3.0], [4.0]], [0.0, 2.0, 4.0]).tolist()
        [1.0, 0.5, 0.0]
    """
    array, levels = _scores(scores), np.asarray(thresholds, dtype=np.float64)
    return np.asarray((array[..., None] > levels).mean(axis=(0, 1)))


def profile_interval(
    scores: ArrayLike,
    thresholds: ArrayLike,
    *,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[Array, Array]:
    """Pointwise bootstrap interval of a performance profile: low and high, ``[thresholds]``."""
    array, levels = _scores(scores), np.asarray(thresholds, dtype=np.float64)
    generator = np.random.default_rng(seed)
    above = (array[..., None] > levels).astype(np.float64)
    samples = np.mean(
        [_weights(generator, resamples, len(array)) @ task for task in above.swapaxes(0, 1)], axis=0
    )
    low, high = _percentiles(samples, confidence)
    return low, high


def rank_table(
    scores: dict[str, ArrayLike],
    *,
    lower_is_better: bool,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> pd.DataFrame:
    """Ranks of strategies by mean score, with bootstrap intervals, best first.

    Args:
        scores: The runs' scores ``[runs]`` by strategy.
        lower_is_better: Whether rank 1 has the smallest mean.
        confidence: Probability that the interval covers.
        resamples: Bootstrap samples; the runs of every strategy are resampled separately.
        seed: Of the bootstrap's generator.

    Returns:
        Columns strategy, score, rank, rank_low, rank_high; ties share the better rank.
    """
    arrays = {name: np.asarray(runs, dtype=np.float64).reshape(-1) for name, runs in scores.items()}
    sign = 1.0 if lower_is_better else -1.0
    generator = np.random.default_rng(seed)
    means = np.array([runs.mean() for runs in arrays.values()])
    samples = np.stack(
        [_weights(generator, resamples, len(runs)) @ runs for runs in arrays.values()], axis=1
    )
    # Rounding keeps equal scores tied although their sums were taken in different orders.
    low, high = _percentiles(
        stats.rankdata(np.round(sign * samples, 9), method="min", axis=1), confidence
    )
    table = pd.DataFrame(
        {
            "strategy": list(arrays),
            "score": means,
            "rank": stats.rankdata(np.round(sign * means, 9), method="min").astype(int),
            "rank_low": low,
            "rank_high": high,
        }
    )
    return table.sort_values(["rank", "strategy"], ignore_index=True)


def strategy_statistics(
    scores: pd.DataFrame,
    *,
    lower_is_better: bool,
    reference: str = "bmc",
    resamples: int = RESAMPLES,
) -> pd.DataFrame:
    """All statistics of one experiment, by strategy, best first.

    Args:
        scores: Columns strategy, run, auc and last_50, as ``summaries.scores`` returns them.
        lower_is_better: Of the experiment's measure.
        reference: The strategy whose probability of improvement over each is given.
        resamples: Bootstrap samples.

    Returns:
        Columns strategy, runs, rank, rank_low, rank_high; for ``auc`` and ``last_50`` each
        ``<metric>_iqm``, ``_iqm_low``, ``_iqm_high``; and ``improvement``, ``improvement_low``,
        ``improvement_high``: the probability that a run of the reference has a better AUC (missing
        for the reference itself, or if it was not run).
    """
    runs = {name: rows for name, rows in scores.groupby("strategy")}
    auc = {name: rows["auc"].to_numpy() for name, rows in runs.items()}
    ranks = rank_table(auc, lower_is_better=lower_is_better, resamples=resamples)
    sign = -1.0 if lower_is_better else 1.0
    rows = []
    for entry in ranks.itertuples():
        row = {"strategy": entry.strategy, "runs": len(auc[entry.strategy]), "rank": entry.rank}
        row |= {"rank_low": entry.rank_low, "rank_high": entry.rank_high}
        for metric in ("auc", "last_50"):
            found = iqm_interval(runs[entry.strategy][[metric]].to_numpy(), resamples=resamples)
            row |= found.columns(f"{metric}_iqm")
        improvement = UNKNOWN
        if reference in auc and entry.strategy != reference:
            improvement = improvement_interval(
                sign * auc[reference][:, None],
                sign * auc[entry.strategy][:, None],
                resamples=resamples,
            )
        rows.append(row | improvement.columns("improvement"))
    return pd.DataFrame(rows)


def _scores(scores: ArrayLike) -> Array:
    array = np.asarray(scores, dtype=np.float64)
    if array.ndim != 2 or array.size == 0:
        raise ValueError(f"scores have shape {array.shape}; expected [runs, tasks], not empty")
    return array
