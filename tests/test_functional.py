"""The equations of `functional.py` against 50 digits, SciPy, quadrature and the paper's laws."""

import math
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from oracles import EXACT, FLOAT, one_step, strength_form
from scipy import integrate, special, stats
from torchrl.data import Categorical
from torchrl.modules import EGreedyModule

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
    assert alpha / 2 * (1 - 1e-15) <= new_alpha <= alpha + 1
    assert beta / 2 * (1 - 1e-15) <= new_beta <= beta + 1
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


def values_of(shape, low=-100, high=100):
    return arrays(np.float64, shape, elements=st.floats(low, high)).map(torch.from_numpy)


@st.composite
def masked_values(draw):
    """Rewards [4], action values [4, actions], and a mask with a legal action in every row."""
    actions = draw(st.integers(1, 6))
    mask = torch.from_numpy(draw(arrays(np.bool_, (4, actions))))
    legal = torch.tensor(draw(st.lists(st.integers(0, actions - 1), min_size=4, max_size=4)))
    mask = mask.scatter(-1, legal.unsqueeze(-1), True)
    return draw(values_of((4,))), draw(values_of((4, actions))), mask


@modest
@given(masked_values(), st.floats(0, 1))
def test_returns_are_the_reward_and_the_discounted_maximum_or_mean(case, gamma):
    reward, values, mask = case
    greedy = fn.greedy_return(reward, values, gamma, action_mask=mask)
    uniform = fn.uniform_return(reward, values, gamma, action_mask=mask)
    for i in range(4):
        legal = [v for v, m in zip(values[i].tolist(), mask[i].tolist(), strict=True) if m]
        r = reward[i].item()
        assert greedy[i].item() == pytest.approx(r + gamma * max(legal), abs=1e-12)
        mean = math.fsum(legal) / len(legal)
        assert uniform[i].item() == pytest.approx(r + gamma * mean, abs=1e-12)
    assert bool((uniform <= greedy + 1e-12).all())


@modest
@given(masked_values(), st.floats(0, 1))
def test_full_mask_and_no_mask_agree(case, gamma):
    reward, values, _ = case
    full = torch.ones_like(values, dtype=torch.bool)
    for one_step_return in (fn.greedy_return, fn.uniform_return):
        torch.testing.assert_close(
            one_step_return(reward, values, gamma),
            one_step_return(reward, values, gamma, action_mask=full),
            rtol=0,
            atol=1e-12,
        )


@modest
@given(masked_values(), st.floats(0, 1))
def test_terminal_transition_has_no_gap(case, gamma):
    reward, values, mask = case
    ended = torch.tensor([True, False, True, False])
    for returns in (fn.greedy_return, fn.uniform_return):
        bootstrapped = returns(reward, values, gamma, terminated=ended, action_mask=mask)
        free = returns(reward, values, gamma, action_mask=mask)
        assert torch.equal(bootstrapped[ended], reward[ended])
        assert torch.equal(bootstrapped[~ended], free[~ended])
        assert torch.equal(
            returns(reward, values * torch.inf, gamma, terminated=ended)[ended], reward[ended]
        )


@modest
@given(masked_values(), st.floats(0, 1), st.floats(0, 1))
def test_mixture_return_is_expected_sarsas(case, gamma, epsilon):
    """Eq. (5): the decomposition equals Σ π(a|s′) Q(s′, a) with the ε-greedy π of Eq. (4)."""
    reward, values, mask = case
    policy = fn.epsilon_greedy_probabilities(values, tensor([epsilon] * 4), mask)
    expected = reward + gamma * (policy * values).sum(-1)
    greedy = fn.greedy_return(reward, values, gamma, action_mask=mask)
    uniform = fn.uniform_return(reward, values, gamma, action_mask=mask)
    mixture = fn.mixture_return(greedy, uniform, tensor(epsilon))
    torch.testing.assert_close(mixture, expected, rtol=0, atol=1e-11)


def test_sarsa_return_by_hand():
    reward, values = tensor([1.0, -2.0, 0.5]), tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    action, ended = torch.tensor([1, 0, 1]), torch.tensor([False, False, True])
    result = fn.sarsa_return(reward, values, action, 0.5, terminated=ended)
    assert result.tolist() == [2.0, -0.5, 0.5]


def test_epsilon_greedy_policy_by_hand():
    values, epsilon = tensor([[0.0, 3.0, 3.0, 1.0]]), tensor([0.4])
    policy = fn.epsilon_greedy_probabilities(values, epsilon)
    torch.testing.assert_close(policy, tensor([[0.1, 0.7, 0.1, 0.1]]))
    mask = torch.tensor([[True, False, True, False]])
    policy = fn.epsilon_greedy_probabilities(values, epsilon, mask)
    torch.testing.assert_close(policy, tensor([[0.2, 0.0, 0.8, 0.0]]))


@modest
@given(masked_values(), st.floats(0, 1))
def test_policy_is_a_distribution_over_legal_actions(case, epsilon):
    _, values, mask = case
    policy = fn.epsilon_greedy_probabilities(values, tensor([epsilon] * 4), mask)
    torch.testing.assert_close(policy.sum(-1), torch.ones(4, dtype=torch.float64))
    assert bool((policy >= 0).all())
    assert not policy[~mask].any()


@pytest.mark.parametrize("actions", [1, 2, 3, 7, 10, 100])
def test_every_legal_action_owns_an_equal_share_of_the_draws(actions):
    torch.manual_seed(actions)
    mask = torch.rand(20, actions) < 0.5
    mask[:, actions // 2] = True
    for row in mask:
        legal = row.nonzero().flatten()
        repeats = 50
        draws = (torch.arange(legal.numel() * repeats, dtype=torch.float64) + 0.5) / (
            legal.numel() * repeats
        )
        chosen = fn.legal_action_at(draws, row.expand(draws.numel(), -1))
        assert torch.equal(chosen.bincount(minlength=actions), row * repeats)


LARGEST_DRAW = {torch.float32: 1 - 2**-24, torch.float64: 1 - 2**-53}


@pytest.mark.parametrize("dtype", LARGEST_DRAW)
def test_extreme_draws_stay_legal(dtype):
    for actions in [*range(1, 300), 1000, 4097, 65_537]:
        for draw, position in ((0.0, 0), (LARGEST_DRAW[dtype], actions - 1)):
            uniform = torch.tensor(draw, dtype=dtype)
            mask = torch.ones(actions, dtype=torch.bool)
            assert fn.legal_action_at(uniform, mask) == position
            padded = torch.nn.functional.pad(mask, (2, 3))
            assert fn.legal_action_at(uniform, padded) == position + 2
            draws = torch.stack([torch.zeros_like(uniform), uniform])
            explore = torch.ones_like(uniform)
            assert fn.epsilon_greedy_action(torch.tensor(0), explore, draws, actions) == position


def test_row_without_a_legal_action_gives_index_zero():
    assert fn.legal_action_at(torch.tensor(0.7), torch.zeros(4, dtype=torch.bool)) == 0


def test_coin_decides_between_the_greedy_and_the_drawn_action():
    draws = tensor([[0.2, 0.3, 0.29], [0.9, 0.9, 0.1]])
    chosen = fn.epsilon_greedy_action(torch.tensor([1, 1, 1]), tensor(0.3), draws, 5)
    assert chosen.tolist() == [4, 1, 0]


def streams(min_size=0):
    return st.lists(st.floats(-1e3, 1e3), min_size=min_size, max_size=30)


def moments_of(observations):
    moments = fn.Moments(*torch.zeros(3, dtype=torch.float64))
    for x in observations:
        moments = fn.welford_update(moments, tensor(x))
    return moments


def assert_same_moments(first, second):
    torch.testing.assert_close(tuple(first), tuple(second), rtol=1e-10, atol=1e-8)


@modest
@given(streams(min_size=2), st.floats(-1e4, 1e4))
def test_welford_is_numpys_mean_and_variance(observations, offset):
    observations = [x + offset for x in observations]
    moments = moments_of(observations)
    assert moments.num == len(observations)
    assert moments.mean.item() == pytest.approx(np.mean(observations), rel=1e-12, abs=1e-10)
    assert moments.variance.item() == pytest.approx(
        np.var(observations, ddof=1), rel=1e-9, abs=1e-9
    )


def test_welford_does_not_cancel_far_from_zero():
    deviations = np.random.default_rng(0).standard_normal(1000)
    variance = moments_of(1e8 + deviations).variance.item()
    assert variance == pytest.approx(np.var(deviations, ddof=1), rel=1e-7)


@pytest.mark.parametrize("observations", [[], [5.0]])
def test_variance_is_zero_before_the_second_observation(observations):
    assert moments_of(observations).variance == 0


@modest
@given(streams(), streams())
def test_merged_moments_are_those_of_one_stream(first, second):
    merged = fn.welford_merge(moments_of(first), moments_of(second))
    assert_same_moments(merged, moments_of(first + second))


@modest
@given(streams(), streams(), streams())
def test_order_of_merging_does_not_matter(first, second, third):
    a, b, c = map(moments_of, (first, second, third))
    merge = fn.welford_merge
    assert_same_moments(merge(a, b), merge(b, a))
    assert_same_moments(merge(merge(a, b), c), merge(a, merge(b, c)))


@modest
@given(
    epsilon=st.floats(0, 1),
    change=st.floats(-50, 50),
    sigma=st.floats(0.1, 100),
    delta=st.floats(0, 1),
)
def test_vdbe_is_tokics_boltzmann_form(epsilon, change, sigma, delta):
    decay = math.exp(-abs(change) / sigma)
    expected = delta * (1 - decay) / (1 + decay) + (1 - delta) * epsilon
    result = fn.vdbe_epsilon(tensor(epsilon), tensor(change), sigma, delta).item()
    assert result == pytest.approx(expected, rel=1e-13, abs=1e-15)
    assert 0 <= result <= 1


def test_vdbe_of_an_enormous_change_is_one():
    assert fn.vdbe_epsilon(tensor(0.5), tensor(-1e300), 0.01, 1.0) == 1


def test_schedules_by_hand():
    episodes, half = torch.arange(5), tensor(0.5)
    geometric = fn.geometric_decay(half, tensor(0.9), episodes)
    assert geometric.tolist() == pytest.approx([0.5, 0.45, 0.405, 0.3645, 0.32805])
    power = fn.power_decay(half, tensor(1.5), episodes)
    assert power.tolist() == pytest.approx([0.5 * k**-1.5 for k in (1, 2, 3, 4, 5)])
    published = fn.power_decay(half, tensor(1.5), episodes, first_index=0)
    assert published.tolist() == pytest.approx([0.5 * k**-1.5 for k in (1, 1, 2, 3, 4)])


def test_linear_schedule_is_torchrls():
    module = EGreedyModule(Categorical(3), eps_init=0.9, eps_end=0.05, annealing_num_steps=40)
    for frames in range(60):
        epsilon = fn.linear_decay(tensor(0.9), tensor(0.05), tensor(float(frames)), 40)
        assert epsilon.item() == pytest.approx(module.eps.item(), abs=1e-5)
        module.step(1)
