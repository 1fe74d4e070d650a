"""A new task: reset and forget of every strategy, and the test that says when."""

import math

import pytest
import torch
from contracts import FACTORIES, RUNS, STATES, memory, same, transitions
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from bmc_torchrl import (
    BMCEpsilon,
    ChangeDetector,
    ConstantEpsilon,
    ExplorationWinsEpsilon,
    StackedEpsilon,
    VDBEEpsilon,
)
from bmc_torchrl.functional import beta_of_strength, forgotten

modest = settings(deadline=None, max_examples=60, derandomize=True)
ADAPTIVE = [name for name in FACTORIES if name.startswith(("bmc", "vdbe", "wins"))]
SOME = {
    "mask": torch.tensor([True, False, True, False]),
    "indices": [0, 2],
    "slice": slice(0, 3, 2),
}


def taught(name, shape=RUNS):
    strategy = FACTORIES[name](shape)
    strategy.update(transitions((*shape, 40)))
    return strategy


def unlearned(strategy):
    """Every buffer but the counts of what was left out."""
    return {key: value for key, value in memory(strategy).items() if "skipped" not in key}


@pytest.mark.parametrize("name", ADAPTIVE)
@pytest.mark.parametrize("shape", [(), RUNS])
def test_reset_is_the_strategy_as_it_was_built(name, shape):
    strategy = taught(name, shape)
    where = {key: buffer.data_ptr() for key, buffer in strategy.named_buffers()}
    assert not same(unlearned(strategy), unlearned(FACTORIES[name](shape)))
    strategy.reset()
    assert same(unlearned(strategy), unlearned(FACTORIES[name](shape)))
    assert where == {key: buffer.data_ptr() for key, buffer in strategy.named_buffers()}


@pytest.mark.parametrize("name", [*ADAPTIVE, "stacked"])
def test_forgetting_nothing_changes_nothing_and_everything_is_a_reset(name):
    strategy, reset = taught(name), FACTORIES[name](RUNS)
    before = memory(strategy)
    reset.load_state_dict(before)
    strategy.forget(0.0)
    assert same(memory(strategy), before)
    strategy.forget(1.0)
    reset.reset()
    assert same(memory(strategy), memory(reset))


@pytest.mark.parametrize("name", ADAPTIVE)
@pytest.mark.parametrize("runs", SOME.values(), ids=SOME)
def test_only_the_chosen_runs_forget(name, runs):
    strategy, chosen = taught(name), SOME["mask"]
    before, first = strategy.eps.clone(), FACTORIES[name](RUNS).eps
    strategy.forget(0.5, runs=runs)
    halfway, kept = strategy.eps.clone(), strategy.eps[~chosen]
    strategy.reset(runs=runs)
    assert torch.equal(strategy.eps[chosen], first[chosen])
    for now in (kept, strategy.eps[~chosen]):
        assert torch.equal(now, before[~chosen])
    adaptive = chosen & (before != first)
    assert adaptive.any()
    between = (halfway - before) * (halfway - first) < 0
    assert between[adaptive].all()


def test_a_reset_can_be_stronger_or_weaker_at_the_same_mean():
    for build in (
        lambda **o: BMCEpsilon(1.0, 3.0, **o),
        lambda **o: BMCEpsilon(1.0, 3.0, num_states=STATES, update="offline", **o),
        lambda **o: ExplorationWinsEpsilon(10.0, **o),
    ):
        strategy, first = build(batch_shape=RUNS), build(batch_shape=RUNS).eps
        strategy.update(transitions((*RUNS, 20)))
        strategy.reset(strength=[4.0, 40.0, 400.0, 4000.0])
        torch.testing.assert_close(strategy.eps, first, rtol=1e-15, atol=0)
        total = (strategy.alpha + strategy.beta).reshape(4, -1)[:, 0]
        torch.testing.assert_close(total, torch.tensor([4.0, 40.0, 400.0, 4000.0]).double())
    for refusing in (strategy, StackedEpsilon([strategy])):
        with pytest.raises(ValueError, match="strength must be positive and finite, got"):
            refusing.reset(strength=0.0)


def test_a_stack_tells_each_strategy_of_its_own_runs():
    parts = [
        BMCEpsilon(batch_shape=[2]),
        VDBEEpsilon(1, 1.0, 0.5, batch_shape=[1]),
        ConstantEpsilon(0.1, batch_shape=[1]),
    ]
    stack = StackedEpsilon(parts)
    stack.update(transitions((*RUNS, 20)))
    before = stack.eps.clone()
    stack.reset(strength=torch.tensor([5.0, 6.0, 7.0, 8.0]), runs=[1, 2, 3])
    assert torch.equal(stack.eps[[0, 3]], before[[0, 3]])
    assert float(parts[0].alpha[1] + parts[0].beta[1]) == pytest.approx(6)
    assert stack.eps[2] == 0.5


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda s: s.forget(1.5), "rate must be between 0 and 1, got 1.5"),
        (lambda s: s.forget([0.1, 0.2]), r"rate must .* batch_shape \(4,\), got shape \(2,\)"),
        (lambda s: s.reset(runs=torch.ones(3, dtype=torch.bool)), r"runs must be a bool mask"),
        (lambda s: s.reset(runs=torch.ones(4)), r"runs must be a bool mask .* torch.float32"),
    ],
)
@pytest.mark.parametrize("name", ["bmc", "vdbe", "wins"])
def test_what_cannot_be_forgotten_is_refused_and_nothing_changes(name, act, message):
    strategy = taught(name)
    before = memory(strategy)
    with pytest.raises(ValueError, match=message):
        act(strategy)
    assert same(memory(strategy), before)


positive = st.floats(1e-3, 1e6)
share = st.floats(0, 1)


@modest
@given(alpha=positive, beta=positive, alpha0=positive, beta0=positive, first=share, second=share)
def test_forgetting_is_the_power_prior(alpha, beta, alpha0, beta0, first, second):
    tensor = lambda x: torch.tensor(x, dtype=torch.float64)  # noqa: E731
    left = [
        forgotten(tensor(x), tensor(y), tensor(first)) for x, y in ((alpha, alpha0), (beta, beta0))
    ]
    # The log density of what is left, up to a constant, is that of prior and posterior, weighted.
    for w in (0.1, 0.7):
        parts = [(a - 1) * math.log(w) + (b - 1) * math.log1p(-w) for a, b in (
            (alpha, beta), (alpha0, beta0), (float(left[0]), float(left[1])))]  # fmt: skip
        expected = (1 - first) * parts[0] + first * parts[1]
        assert parts[2] == pytest.approx(expected, rel=1e-9, abs=1e-9 * max(map(abs, parts)))
    means = sorted((alpha / (alpha + beta), alpha0 / (alpha0 + beta0)))
    mean = float(left[0] / (left[0] + left[1]))
    assert means[0] * (1 - 1e-12) <= mean <= means[1] * (1 + 1e-12)
    twice = forgotten(left[0], tensor(alpha0), tensor(second))
    once = forgotten(tensor(alpha), tensor(alpha0), tensor(1 - (1 - first) * (1 - second)))
    torch.testing.assert_close(twice, once, rtol=1e-9, atol=1e-9)
    same_mean = beta_of_strength(tensor(alpha), tensor(beta), 7.0)
    assert float(sum(same_mean)) == pytest.approx(7)
    assert float(same_mean[0]) / 7 == pytest.approx(alpha / (alpha + beta))


def scalar_test(returns, threshold, tolerance, least):
    """Where Page–Hinkley fires, in plain floats, from definitions."""
    fired, seen, sums = [], [], [0.0]
    for at, value in enumerate(returns):
        if not math.isfinite(value):
            continue
        seen.append(value)
        mean = sum(seen) / len(seen)
        variance = sum((x - mean) ** 2 for x in seen) / max(len(seen) - 1, 1)
        if variance > 0:
            sums.append(sums[-1] + (value - mean) / math.sqrt(variance) + tolerance)
        if len(seen) >= least and max(sums) - sums[-1] > threshold:
            fired.append(at)
            seen, sums = [], [0.0]
    return fired


@pytest.mark.parametrize("power", [-20, 0, 9])
def test_the_detector_fires_where_scalar_arithmetic_does(power, random):
    returns = torch.randn(5, 300, generator=random, dtype=torch.float64)
    returns[1:, 150:] -= 3
    returns[2:, 220:] -= torch.tensor([[3.0], [9.0], [1.0]])
    returns[0, 7] = torch.nan
    returns[3, :20] = 1.0
    detector = ChangeDetector(8.0, 0.25, 25, batch_shape=[5])
    fired = torch.stack([detector.observe(x * 2.0**power) for x in returns.unbind(-1)])
    for run in range(5):
        expected = scalar_test(returns[run].tolist(), 8.0, 0.25, 25)
        assert fired[:, run].nonzero().flatten().tolist() == expected
        assert detector.changes[run] == len(expected)
    assert detector.changes.tolist()[1:3] == [1, 2]
    first = fired[:, 1].nonzero().flatten().tolist()
    assert 150 <= first[0] < 160


def test_collected_data_is_episodes_that_end(random):
    returns = torch.randn(2, 400, 1, generator=random)
    returns[0, 200:] -= 8
    done = torch.rand(2, 400, 1, generator=random) < 0.5
    data = TensorDict(
        {"next": {"episode_reward": returns, "done": done}}, [2, 400], names=[None, "time"]
    )
    whole, stepped = (ChangeDetector(batch_shape=[2]) for _ in range(2))
    strategy = BMCEpsilon(batch_shape=[2])
    strategy.update(transitions((2, 40)))
    before = strategy.eps.clone()
    fired = whole.update(data)
    strategy.reset(runs=fired)
    assert fired.tolist() == [True, False]
    assert strategy.eps.tolist() == [BMCEpsilon().eps, before[1]]
    for step in data.unbind(1):
        stepped.update(step)
    assert same(memory(whole), memory(stepped))
    with pytest.raises(KeyError, match=r"append RewardSum\(\)"):
        whole.update(data.exclude(("next", "episode_reward")))


@pytest.mark.parametrize("options", [{"threshold": 0.0}, {"tolerance": -1}, {"least_episodes": 1}])
def test_a_detectors_settings_are_checked(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"{name} must be"):
        ChangeDetector(**options)
