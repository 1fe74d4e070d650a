"""ε-BMC over many transitions: against the scalar oracle, and under the laws of the method."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import EXACT, FLOAT, Run, strength_form
from tensordict import TensorDict

from bmc_torchrl import BMCEpsilon, GaussianLikelihood, NormalGammaPrior, StudentTLikelihood
from bmc_torchrl import functional as fn
from bmc_torchrl.strategies.bmc import BMCPosterior, bmc_step, usable

modest = settings(deadline=None, max_examples=25, derandomize=True)


def start(alpha, beta):
    alpha, beta = (torch.as_tensor(x, dtype=torch.float64).clone() for x in (alpha, beta))
    return BMCPosterior(alpha, beta, *(torch.zeros_like(alpha) for _ in range(3)))


def walk(posterior, greedy, uniform, likelihood, taken=None):
    """Every posterior along ``[steps, *batch]`` returns, the first one included."""
    taken = torch.ones_like(greedy, dtype=torch.bool) if taken is None else taken
    path = [posterior]
    for step in zip(greedy, uniform, taken & usable(greedy, uniform), strict=True):
        path.append(bmc_step(path[-1], *step, likelihood)[0])
    return path


def trajectory(steps, runs, actions=5, seed=0):
    """Rewards ``[steps, runs]`` and action values ``[steps, runs, actions]`` that grow apart."""
    rng = np.random.default_rng(seed)
    reward = rng.normal(size=(steps, runs))
    spread = np.linspace(0.05, 3.0, steps)[:, None, None] * rng.uniform(0, 2, (1, runs, 1))
    values = rng.normal(size=(steps, runs, actions)) * spread + rng.normal(size=(1, runs, 1))
    return torch.from_numpy(reward), torch.from_numpy(values)


def returns_of(reward, values, gamma):
    return fn.greedy_return(reward, values, gamma), fn.uniform_return(reward, values, gamma)


def assert_follows_oracle(alpha0, prior, ops, steps, tolerance, excess=0.01):
    runs, gamma = len(alpha0), 0.9
    reward, values = trajectory(steps, runs)
    beta0 = [x + excess for x in alpha0]
    likelihood = StudentTLikelihood(NormalGammaPrior(**prior))
    path = walk(start(alpha0, beta0), *returns_of(reward, values, gamma), likelihood)
    for run in range(runs):
        oracle = Run(alpha0[run], beta0[run], ops, **prior)
        for t in range(steps):
            oracle.update(reward[t, run].item(), values[t, run].tolist(), gamma)
            after = path[t + 1]
            alpha, beta = after.alpha[run].item(), after.beta[run].item()
            assert abs(alpha / oracle.alpha - 1) <= tolerance
            assert abs(beta / oracle.beta - 1) <= tolerance
            assert abs(alpha / (alpha + beta) / oracle.epsilon - 1) <= tolerance
        assert abs(after.return_mean[run].item() - oracle.mean) <= tolerance
        assert abs(after.return_m2[run].item() / oracle.squares - 1) <= tolerance
    assert bool((path[-1].alpha / path[-1].beta < 0.9 * path[0].alpha / path[0].beta).any())


PRIORS = [
    dict(mu0=0.0, tau0=1.0, a0=500.0, b0=500.0),
    dict(mu0=-1.0, tau0=0.1, a0=1.5, b0=0.2),
]


@pytest.mark.slow
@pytest.mark.parametrize("prior", PRIORS)
def test_a_thousand_transitions_follow_algorithm_1_in_fifty_digits(prior):
    alpha0 = [0.01, 10.0, 1000.0]
    assert_follows_oracle(alpha0, prior, EXACT, steps=1000, tolerance=1e-10)


@pytest.mark.parametrize("prior", PRIORS)
def test_a_thousand_transitions_follow_algorithm_1_in_floats(prior):
    alpha0 = [0.5, 1.0, 2.0, 5.0]
    assert_follows_oracle(alpha0, prior, FLOAT, steps=1000, tolerance=1e-10)


@pytest.mark.parametrize("prior", PRIORS)
def test_epsilon_above_half_follows_algorithm_1_too(prior):
    reward, values = trajectory(300, 1)
    likelihood = StudentTLikelihood(NormalGammaPrior(**prior))
    path = walk(start([3.0], [2.0]), *returns_of(reward, values, 0.9), likelihood)
    oracle = Run(3.0, 2.0, EXACT, **prior)
    for t, after in enumerate(path[1:]):
        oracle.update(reward[t, 0].item(), values[t, 0].tolist(), 0.9)
        assert after.alpha.item() == pytest.approx(float(oracle.alpha), rel=1e-10)
        assert after.beta.item() == pytest.approx(float(oracle.beta), rel=1e-10)


# α₀ = 1000, β₀ = 1000.01, a = b = 500: the third hazard of docs/protocol.md §1.
STEPS, GAP, SHAPE, RATE = 50_000, 0.821, 500.0, 500.0


def strength_walk(number, log1p, expm1):
    """ε after the updates in the form of docs/protocol.md §1, which carries τ while τ < ½."""
    alpha, beta = 1000.0, 1000.01
    tau, n = number((beta - alpha) / (alpha + beta)), number(alpha + beta)
    shape, rate, squared, one = number(SHAPE + 0.5), number(2 * RATE), number(GAP**2), number(1.0)
    for _ in range(STEPS):
        epsilon = (one - tau) / 2
        ratio = shape * log1p(tau * squared / (rate + epsilon * epsilon * squared))
        _, tau, n = strength_form(epsilon, tau, n, ratio, expm1)
    return float((one - tau) / 2)


@pytest.mark.slow
@torch.inference_mode()
def test_epsilon_does_not_freeze_under_a_strong_prior():
    alpha, beta = (torch.tensor(x, dtype=torch.float64) for x in (1000.0, 1000.01))
    gap, a, b = (torch.tensor(x, dtype=torch.float64) for x in (GAP, SHAPE, RATE))
    for _ in range(STEPS):
        ratio = fn.student_t_log_evidence_ratio(gap, alpha, beta, a, b)
        alpha, beta = fn.beta_moment_match(alpha, beta, ratio)
    epsilon = (alpha / (alpha + beta)).item()
    assert epsilon == pytest.approx(0.499831, abs=5e-7)
    assert epsilon == pytest.approx(strength_walk(float, math.log1p, math.expm1), abs=1e-10)


@pytest.mark.slow
def test_strength_form_does_not_freeze_in_single_precision():
    assert strength_walk(np.float32, np.log1p, np.expm1) == pytest.approx(0.499831, abs=1e-6)


LIKELIHOODS = [StudentTLikelihood(), GaussianLikelihood(2.0), GaussianLikelihood()]
likelihoods = st.sampled_from(LIKELIHOODS)
seeds = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("runs", [3, 18])
def test_a_batch_of_runs_equals_each_run_alone_to_the_bit(likelihood, runs):
    reward, values = trajectory(50, runs, seed=runs)
    greedy, uniform = returns_of(reward, values, 0.95)
    alpha0 = torch.logspace(-2, 3, runs, dtype=torch.float64)
    together = walk(start(alpha0, alpha0 + 0.01), greedy, uniform, likelihood)[-1]
    for run in range(runs):
        prior = start(alpha0[run], alpha0[run] + 0.01)
        alone = walk(prior, greedy[:, run], uniform[:, run], likelihood)[-1]
        assert all(torch.equal(x[run], y) for x, y in zip(together, alone, strict=True))


@modest
@given(seeds, likelihoods, st.floats(1e-3, 1e4), st.floats(1e-6, 10))
def test_theorem_1_epsilon_never_rises_along_a_trajectory(seed, likelihood, alpha0, excess):
    reward, values = trajectory(40, 3, seed=seed)
    path = walk(
        start([alpha0] * 3, [alpha0 + excess] * 3), *returns_of(reward, values, 0.9), likelihood
    )
    alpha, beta = (torch.stack([getattr(p, name) for p in path]) for name in ("alpha", "beta"))
    assert bool((alpha.diff(dim=0) <= 0).all())
    assert bool((beta.diff(dim=0) >= 0).all())
    total = alpha + beta
    assert bool((total[1:] >= total[:-1] * (1 - 2**-52)).all())
    epsilon = alpha / total
    assert bool(((epsilon > 0) & (epsilon < 1)).all())


@modest
@given(seeds, likelihoods, st.floats(1e-3, 1e6))
def test_even_prior_never_learns(seed, likelihood, alpha0):
    reward, values = trajectory(20, 3, seed=seed)
    first, *_, last = walk(
        start([alpha0] * 3, [alpha0] * 3), *returns_of(reward, values, 0.9), likelihood
    )
    assert torch.equal(first.alpha, last.alpha)
    assert torch.equal(first.beta, last.beta)


@st.composite
def dyadic_returns(draw):
    """Greedy and uniform returns ``[steps]`` whose sums with eighths are exact."""
    steps = draw(st.integers(1, 30))
    eighths = st.lists(st.integers(-4096, 4096), min_size=steps, max_size=steps)
    uniform = torch.tensor(draw(eighths), dtype=torch.float64) / 8
    return uniform + torch.tensor(draw(eighths), dtype=torch.float64).abs() / 8, uniform


@modest
@given(dyadic_returns(), st.integers(-8000, 8000))
def test_shifting_all_values_changes_nothing_but_the_variance(returns, shift):
    """With the variance fixed, nothing at all."""
    greedy, uniform = returns
    likelihood = GaussianLikelihood(50.0)
    base = walk(start(1.0, 1.01), greedy, uniform, likelihood)[-1]
    moved = walk(start(1.0, 1.01), greedy + shift, uniform + shift, likelihood)[-1]
    assert (moved.alpha, moved.beta) == (base.alpha, base.beta)
    torch.testing.assert_close(moved.return_mean, base.return_mean + shift)


@modest
@given(dyadic_returns(), st.integers(-8000, 8000))
def test_shifting_values_and_prior_mean_changes_nothing(returns, shift):
    greedy, uniform = returns
    still = StudentTLikelihood(NormalGammaPrior(mu0=1.0))
    along = StudentTLikelihood(NormalGammaPrior(mu0=1.0 + shift))
    base = walk(start(1.0, 1.01), greedy, uniform, still)[-1]
    moved = walk(start(1.0, 1.01), greedy + shift, uniform + shift, along)[-1]
    torch.testing.assert_close(
        (moved.alpha, moved.beta), (base.alpha, base.beta), rtol=1e-8, atol=0
    )


@modest
@given(seeds, st.integers(-20, 20))
def test_scaling_rewards_values_and_b0_changes_nothing_to_the_bit(seed, exponent):
    """Powers of two scale floats exactly."""
    k = 2.0**exponent
    greedy, uniform = returns_of(*trajectory(30, 3, seed=seed), 0.9)
    scaled = StudentTLikelihood(NormalGammaPrior(a0=20.0, b0=20.0 * k**2))
    base = walk(
        start([1.0] * 3, [1.01] * 3),
        greedy,
        uniform,
        StudentTLikelihood(NormalGammaPrior(a0=20.0, b0=20.0)),
    )[-1]
    other = walk(start([1.0] * 3, [1.01] * 3), greedy * k, uniform * k, scaled)[-1]
    assert torch.equal(other.alpha, base.alpha)
    assert torch.equal(other.beta, base.beta)


@modest
@given(seeds, st.floats(1e-3, 1e3))
def test_scaling_by_any_factor_changes_nothing(seed, k):
    greedy, uniform = returns_of(*trajectory(30, 3, seed=seed), 0.9)
    prior = start([1.0] * 3, [1.01] * 3)
    base = walk(prior, greedy, uniform, StudentTLikelihood())[-1]
    scaled = StudentTLikelihood(NormalGammaPrior(b0=500.0 * k**2))
    other = walk(prior, greedy * k, uniform * k, scaled)[-1]
    torch.testing.assert_close(
        (other.alpha, other.beta), (base.alpha, base.beta), rtol=1e-10, atol=0
    )


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_terminal_transition_is_a_return_but_no_evidence(likelihood):
    reward, values = trajectory(30, 4)
    before = walk(start([1.0] * 4, [1.01] * 4), *returns_of(reward, values, 0.9), likelihood)[-1]
    ended = torch.ones(4, dtype=torch.bool)
    greedy = fn.greedy_return(reward[0], values[0], 0.9, terminated=ended)
    uniform = fn.uniform_return(reward[0], values[0], 0.9, terminated=ended)
    after, ratio = bmc_step(before, greedy, uniform, ended, likelihood)
    assert not ratio.any()
    assert torch.equal(after.alpha, before.alpha)
    assert torch.equal(after.beta, before.beta)
    assert torch.equal(after.return_count, before.return_count + 1)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_skipped_transitions_leave_no_trace(likelihood, bad):
    reward, values = trajectory(40, 3)
    greedy, uniform = returns_of(reward, values, 0.9)
    taken = torch.from_numpy(np.random.default_rng(1).random((40, 3)) < 0.5)
    spoiled = torch.where(taken, greedy, bad)
    prior = start([1.0] * 3, [1.01] * 3)
    masked = walk(prior, greedy, uniform, likelihood, taken)[-1]
    spoiled = walk(prior, spoiled, uniform, likelihood)[-1]
    for run in range(3):
        kept = taken[:, run]
        alone = walk(start(1.0, 1.01), greedy[kept, run], uniform[kept, run], likelihood)[-1]
        for x, y, z in zip(masked, spoiled, alone, strict=True):
            assert x[run] == y[run] == z


def test_moments_are_those_of_the_mixture_returns_with_epsilon_before_the_update():
    greedy, uniform = returns_of(*trajectory(200, 2), 0.9)
    path = walk(start([1.0, 5.0], [1.01, 5.5]), greedy, uniform, StudentTLikelihood())
    epsilon = torch.stack([p.alpha / (p.alpha + p.beta) for p in path[:-1]])
    observed = (1 - epsilon) * greedy + epsilon * uniform
    torch.testing.assert_close(path[-1].return_mean, observed.mean(0), rtol=1e-12, atol=1e-14)
    variance = fn.Moments(*path[-1][2:]).variance
    torch.testing.assert_close(variance, observed.var(0), rtol=1e-12, atol=0)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(
    ("greedy", "uniform", "learned"),
    [
        (1e99, -1e99, True),
        (1e60, 0.0, True),
        (0.0, 1e60, True),
        (1e100, 0.0, False),
        (0.0, 1e100, False),
        (1e150, 0.0, False),
        (0.0, 1e150, False),
        (-1e150, 1.0, False),
        (8e99, 8e99, False),
    ],
)
def test_returns_are_used_up_to_a_norm_of_1e100(greedy, uniform, learned, steps):
    pair = torch.tensor([greedy, uniform], dtype=torch.float64)
    assert bool(usable(*pair)) == learned
    data = TensorDict({"greedy_return": pair[0], "uniform_return": pair[1]}).expand(steps).clone()
    strategy = BMCEpsilon()
    strategy.update(data)
    assert int(strategy.learned) == steps * learned
    assert int(strategy.skipped["nonfinite"]) == steps * (not learned)
    assert strategy.return_m2.isfinite()
