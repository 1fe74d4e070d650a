"""The update of ε, Eqs. (7), (10), (12)–(16), against 50 digits, SciPy, quadrature and theory."""

import math
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracles import EXACT, FLOAT, one_step, strength_form
from scipy import integrate, special, stats

from bmc_torchrl import functional as fn

modest = settings(deadline=None, max_examples=40, derandomize=True)

CASES = 10_000
# Largest relative error of one update, over α, β ∈ [1e-6, 1e8]. Measured: 1.3e-15 and 7e-7.
ONE_STEP_TOLERANCE = {torch.float64: 5e-15, torch.float32: 1.5e-6}


def tensor(value):
    return torch.tensor(value, dtype=torch.float64)


@cache
def random_cases(dtype):
    """α, β, Δ, a, b of `CASES` updates: a third β ≥ α, a third near ε = ½, a third free."""
    rng = np.random.default_rng(2019)

    def log_uniform(low, high):
        return np.exp(rng.uniform(np.log(low), np.log(high), CASES))

    alpha, other = log_uniform(1e-6, 1e8), log_uniform(1e-6, 1e8)
    kind = np.arange(CASES) % 3
    beta = np.select([kind == 0, kind == 1], [alpha + other, alpha * (1 + log_uniform(1e-9, 1))])
    beta = np.where(kind == 2, other, beta)
    gap = np.where(rng.random(CASES) < 0.05, 0.0, log_uniform(1e-6, 1e6))
    a, b = log_uniform(0.1, 1e6), log_uniform(1e-4, 1e6)
    return [torch.from_numpy(x).to(dtype) for x in (alpha, beta, gap, a, b)]


def updated(alpha, beta, gap, a, b):
    ratio = fn.student_t_log_evidence_ratio(gap, alpha, beta, a, b)
    return fn.beta_moment_match(alpha, beta, ratio)


def relative_error(value, reference):
    return max(
        float(abs(x - y) / y) if y else float(x != 0)
        for x, y in zip(value.double().tolist(), reference, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_one_update_is_right_to_the_last_digits(dtype):
    cases = random_cases(dtype)
    assert bool((cases[0] > cases[1]).any())
    alpha, beta = updated(*cases)
    assert alpha.dtype == beta.dtype == dtype
    rows = zip(*(x.double().tolist() for x in cases), strict=True)
    exact = [one_step(*row, EXACT) for row in rows]
    tolerance = ONE_STEP_TOLERANCE[dtype]
    assert relative_error(alpha, [x for x, _ in exact]) < tolerance
    assert relative_error(beta, [y for _, y in exact]) < tolerance
    assert relative_error(alpha / (alpha + beta), [x / (x + y) for x, y in exact]) < tolerance


def test_one_update_is_the_printed_equations_as_far_as_floats_carry_them():
    """Eq. (14) divides rounding errors of ε by a variance, and Eq. (10) adds up lgamma's."""
    cases = random_cases(torch.float64)
    alpha, beta = (x.tolist() for x in updated(*cases))
    checked = 0
    for x, y, *row in zip(alpha, beta, *(c.tolist() for c in cases), strict=True):
        n, epsilon, a = x + y, x / (x + y), row[3]
        conditioning = (1 + n * epsilon + 1 / n) / (1 - epsilon) + a + abs(math.log(row[4]))
        if conditioning < 1e11:
            assert one_step(*row, FLOAT) == pytest.approx((x, y), rel=1e-14 * conditioning)
            checked += 1
    assert checked > 0.9 * CASES


def test_update_is_right_where_the_papers_form_underflows():
    alpha, beta, a, b = tensor(49.0), tensor(51.0), tensor(500.0), tensor(500.0)
    gap = tensor([30.0, 115.0, 1e3, 1e6])
    log_ratio = fn.student_t_log_evidence_ratio(gap, alpha, beta, a, b)
    values = updated(alpha, beta, gap, a, b)
    for i, delta in enumerate(gap.tolist()):
        exact = one_step(49.0, 51.0, delta, 500.0, 500.0, EXACT)
        assert [v[i].item() for v in values] == pytest.approx([float(x) for x in exact], rel=1e-15)
    assert log_ratio.isfinite().all()


def test_epsilon_near_one_is_finite_in_every_precision():
    """There log(1 + τΔ²/…) as printed cancels to log 0, or to the log of a negative number."""
    for dtype in (torch.float32, torch.float64):
        alpha, beta, gap, a, b = (
            torch.tensor(x, dtype=dtype) for x in (261303.78, 7.5416, 125578.0, 353.07, 1.2295)
        )
        new_alpha, new_beta = updated(alpha, beta, gap, a, b)
        exact = one_step(*(x.item() for x in (alpha, beta, gap, a, b)), EXACT)
        tolerance = ONE_STEP_TOLERANCE[dtype]
        assert new_alpha.item() == pytest.approx(float(exact[0]), rel=tolerance)
        assert new_beta.item() == pytest.approx(float(exact[1]), rel=tolerance)


def test_strength_form_is_the_same_update():
    alpha, beta, gap, a, b = (x[:2000] for x in random_cases(torch.float64))
    ratio = fn.student_t_log_evidence_ratio(gap, alpha, beta, a, b)
    new_alpha, new_beta = fn.beta_moment_match(alpha, beta, ratio)
    rows = zip(*(x.tolist() for x in (alpha, beta, ratio)), strict=True)
    epsilon, tau, n = zip(*(strength_form_of(*row) for row in rows), strict=True)
    total = new_alpha + new_beta
    assert relative_error(new_alpha / total, epsilon) < 5e-15
    assert relative_error(total, n) < 5e-15
    assert all(abs(1 - 2 * e - t) < 1e-40 for e, t in zip(epsilon, tau, strict=True))


def strength_form_of(alpha, beta, ratio):
    alpha, beta, ratio = map(EXACT.number, (alpha, beta, ratio))
    n = alpha + beta
    return strength_form(alpha / n, (beta - alpha) / n, n, -ratio, EXACT.expm1)


@pytest.mark.parametrize("alpha", [0.05, 1.0, 30.0, 1000.0])
@pytest.mark.parametrize("beta", [0.07, 1.01, 400.0])
@pytest.mark.parametrize("ratio", [-50.0, -1.5, -0.01, 2.0])
def test_matched_beta_has_the_moments_of_the_true_posterior(alpha, beta, ratio):
    """Quadrature of (e^U w + e^Q (1 − w)) Beta(w | α, β), over x = log w/(1−w)."""
    e_u, e_q = math.exp(min(ratio, 0.0)), math.exp(min(-ratio, 0.0))
    mode = math.log(alpha / beta)
    peak = alpha * math.log(special.expit(mode)) + beta * math.log(special.expit(-mode))

    def density(x):
        w, rest = special.expit(x), special.expit(-x)
        return (e_u * w + e_q * rest) * math.exp(
            alpha * special.log_expit(x) + beta * special.log_expit(-x) - peak
        )

    width = math.sqrt(1 / alpha + 1 / beta)
    left, right = mode - 10 * width - 40 / alpha, mode + 10 * width + 40 / beta
    inner = [mode - 3 * width, mode, mode + 3 * width]

    def expectation(of):
        return integrate.quad(
            lambda x: of(special.expit(x)) * density(x),
            left,
            right,
            points=inner,
            limit=800,
            epsabs=0,
            epsrel=1e-11,
        )[0]

    total = expectation(lambda w: 1.0)
    mean = expectation(lambda w: w) / total
    variance = expectation(lambda w: (w - mean) ** 2) / total
    matched = stats.beta(
        *(x.item() for x in fn.beta_moment_match(*map(tensor, (alpha, beta, ratio))))
    )
    assert matched.mean() == pytest.approx(mean, rel=1e-8)
    assert matched.var() == pytest.approx(variance, rel=1e-8)


shapes = st.floats(-6, 8).map(lambda x: 10.0**x)
ratios = st.floats(-1e4, 1e4) | st.floats(-1e-6, 1e-6)


@modest
@given(alpha=shapes, beta=shapes)
def test_equal_evidence_teaches_nothing(alpha, beta):
    assert fn.beta_moment_match(tensor(alpha), tensor(beta), tensor(0.0)) == (alpha, beta)


@modest
@given(alpha=shapes, beta=shapes, ratio=ratios)
def test_no_weight_halves_or_gains_more_than_one_observation(alpha, beta, ratio):
    new_alpha, new_beta = fn.beta_moment_match(tensor(alpha), tensor(beta), tensor(ratio))
    assert alpha / 2 * (1 - 1e-15) <= new_alpha <= (alpha + 1) * (1 + 1e-15)
    assert beta / 2 * (1 - 1e-15) <= new_beta <= (beta + 1) * (1 + 1e-15)
    assert 0 < new_alpha / (new_alpha + new_beta) < 1


@modest
@given(alpha=shapes, beta=shapes, ratio=ratios)
def test_evidence_moves_both_weights_its_own_way(alpha, beta, ratio):
    new_alpha, new_beta = fn.beta_moment_match(tensor(alpha), tensor(beta), tensor(ratio))
    if ratio <= 0:
        assert new_alpha <= alpha
        assert new_beta >= beta
    else:
        assert new_alpha >= alpha
        assert new_beta <= beta


@modest
@given(alpha=shapes, beta=shapes, ratio=ratios)
def test_exchanging_the_models_exchanges_the_weights(alpha, beta, ratio):
    alpha, beta, ratio = map(tensor, (alpha, beta, ratio))
    forward = fn.beta_moment_match(alpha, beta, ratio)
    backward = fn.beta_moment_match(beta, alpha, -ratio)
    torch.testing.assert_close(forward, backward[::-1], rtol=1e-14, atol=0)


@modest
@given(
    alpha=shapes,
    excess=st.just(0.0) | shapes,
    gap=st.floats(0, 1e6),
    a=st.floats(0.1, 1e5),
    b=st.floats(1e-3, 1e6),
)
def test_theorem_1_epsilon_never_rises_and_strength_never_falls(alpha, excess, gap, a, b):
    beta = alpha + excess
    case = [tensor(x) for x in (alpha, beta, gap, a, b)]
    new_alpha, new_beta = updated(*case)
    assert new_alpha <= alpha
    assert new_beta >= beta
    rounding = 1 + 2**-52
    assert new_alpha / (new_alpha + new_beta) <= alpha / (alpha + beta) * rounding
    assert new_alpha + new_beta >= (alpha + beta) / rounding
    if alpha == beta:
        assert (new_alpha, new_beta) == (alpha, beta)


@modest
@given(alpha=shapes, beta=shapes, gap=st.floats(0, 1e3), a=st.floats(0.5, 1e3), b=shapes)
def test_student_t_evidence_is_scipys(alpha, beta, gap, a, b):
    epsilon = alpha / (alpha + beta)
    scale, uniform, observed = math.sqrt(b / a), 1.5, 1.5 + (beta / (alpha + beta)) * gap
    log_density = [
        stats.t.logpdf(observed, 2 * a, loc=mean, scale=scale) for mean in (uniform, uniform + gap)
    ]
    ratio = fn.student_t_log_evidence_ratio(*map(tensor, (gap, alpha, beta, a, b))).item()
    assume(min(epsilon, 1 - epsilon) * gap > 1e-9 or gap == 0)
    assert ratio == pytest.approx(log_density[0] - log_density[1], rel=1e-6, abs=1e-8)


@modest
@given(alpha=shapes, beta=shapes, gap=st.floats(0, 1e3), variance=st.floats(1e-2, 1e4))
def test_gaussian_evidence_is_scipys(alpha, beta, gap, variance):
    scale, observed = math.sqrt(variance), (beta / (alpha + beta)) * gap
    expected = stats.norm.logpdf(observed, 0, scale) - stats.norm.logpdf(observed, gap, scale)
    ratio = fn.gaussian_log_evidence_ratio(*map(tensor, (gap, alpha, beta, variance))).item()
    assert ratio == pytest.approx(expected, rel=1e-9, abs=1e-9)


@modest
@given(alpha=shapes, beta=shapes, gap=st.floats(0.01, 1e3), b=st.floats(0.1, 10))
def test_many_degrees_of_freedom_make_the_student_t_gaussian(alpha, beta, gap, b):
    alpha, beta, gap, b = map(tensor, (alpha, beta, gap, b))
    a = tensor(1e13)
    student = fn.student_t_log_evidence_ratio(gap, alpha, beta, a, b * a)
    gaussian = fn.gaussian_log_evidence_ratio(gap, alpha, beta, b)
    torch.testing.assert_close(student, gaussian, rtol=1e-6, atol=0)


def test_beta_quantile_is_scipys():
    grid = torch.logspace(math.log10(0.05), 6, 25, dtype=torch.float64)
    alpha, beta = torch.meshgrid(grid, grid, indexing="ij")
    law = stats.beta(alpha.numpy(), beta.numpy())
    for probability in (0.025, 0.25, 0.5, 0.75, 0.975):
        quantile = fn.beta_quantile(alpha, beta, probability).numpy()
        expected = law.ppf(probability)
        below_one = quantile < 1 - 1e-9
        assert np.abs(law.cdf(quantile) - probability)[below_one].max() < 1e-5
        np.testing.assert_allclose(quantile, expected, rtol=2e-3)
        assert (np.abs(quantile - expected) / law.std()).max() < 5e-4
        sharp = np.minimum(alpha.numpy(), beta.numpy()) >= 1
        np.testing.assert_allclose(quantile[sharp], expected[sharp], rtol=1e-4)
