"""What turns a gap into evidence, against SciPy's distributions and direct marginalisation."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from bmc_torchrl import GaussianLikelihood, NormalGammaPrior, StudentTLikelihood
from bmc_torchrl.functional import Moments, mixture_return, precision_posterior

PRIOR = dict(mu0=0.3, tau0=2.0, a0=3.0, b0=1.5)
OBSERVATIONS = [1.2, -0.4, 2.2, 0.9, 1.1]


def moments_of(observations, ddof=1):
    """Moments whose `variance` has the given `ddof`: Eq. (9) is conjugate with 0, used with 1."""
    count = len(observations)
    squares = np.var(observations, ddof=ddof) * (count - 1) if count > 1 else 0.0
    values = (float(count), np.mean(observations), squares)
    return Moments(*torch.tensor(values, dtype=torch.float64))


def tensors(*values):
    return [torch.tensor(value, dtype=torch.float64) for value in values]


def numerical_precision_density(tau, mu0, tau0, a0, b0):
    """The joint density of τ and the observations, its mean integrated out by quadrature."""

    def joint(mu):
        likelihood = stats.norm.logpdf(OBSERVATIONS, mu, tau**-0.5).sum()
        return math.exp(likelihood + stats.norm.logpdf(mu, mu0, (tau0 * tau) ** -0.5))

    over_mean = integrate.quad(joint, -30, 30, points=[0, 1], epsabs=0, epsrel=1e-10, limit=200)[0]
    return over_mean * stats.gamma.pdf(tau, a0, scale=1 / b0)


def test_precision_posterior_is_the_marginal_of_the_normal_gamma_model():
    a, b = precision_posterior(moments_of(OBSERVATIONS, ddof=0), **PRIOR)
    posterior = stats.gamma(a.item(), scale=1 / b.item())
    grid = np.linspace(0.2, 6.0, 8)
    density = np.array([numerical_precision_density(tau, **PRIOR) for tau in grid])
    evidence = density / posterior.pdf(grid)
    np.testing.assert_allclose(evidence, evidence[0], rtol=1e-8)


def test_precision_posterior_is_conjugate():
    """b₀ + ½Σ(x−x̄)² + ½ τ₀n(x̄−μ₀)²/(τ₀+n), term by term."""
    x, count = np.array(OBSERVATIONS), len(OBSERVATIONS)
    a, b = precision_posterior(moments_of(x, ddof=0), **PRIOR)
    shift = PRIOR["tau0"] * count * (x.mean() - PRIOR["mu0"]) ** 2 / (PRIOR["tau0"] + count)
    assert a.item() == PRIOR["a0"] + count / 2
    expected = PRIOR["b0"] + ((x - x.mean()) ** 2).sum() / 2 + shift / 2
    assert b.item() == pytest.approx(expected, rel=1e-14)


def test_precision_posterior_uses_the_sample_variance_as_published():
    _, b = precision_posterior(moments_of(OBSERVATIONS), **PRIOR)
    _, conjugate = precision_posterior(moments_of(OBSERVATIONS, ddof=0), **PRIOR)
    squares = np.var(OBSERVATIONS) * len(OBSERVATIONS)
    expected = squares / 2 * (len(OBSERVATIONS) / (len(OBSERVATIONS) - 1) - 1)
    assert (b - conjugate).item() == pytest.approx(expected, rel=1e-12)


def test_first_observation_has_no_variance():
    a, b = precision_posterior(moments_of([4.0]), mu0=1.0, tau0=3.0, a0=5.0, b0=7.0)
    assert (a.item(), b.item()) == (5.5, 7 + 0.5 * 0.75 * 9)


def test_no_observations_leave_the_prior():
    nothing = Moments(*torch.zeros(3, dtype=torch.float64))
    a, b = precision_posterior(nothing, **PRIOR)
    assert (a.item(), b.item()) == (PRIOR["a0"], PRIOR["b0"])


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.01), (2.0, 9.0), (9.0, 2.0)])
@pytest.mark.parametrize(("greedy", "uniform"), [(3.0, 1.0), (0.2, 0.1), (-1.0, -40.0)])
def test_student_t_evidence_integrates_the_precision_out(alpha, beta, greedy, uniform):
    """Eq. (10) against quadrature of N(G | G^m, 1/τ) over the Gamma posterior of τ, and SciPy."""
    moments = moments_of(OBSERVATIONS)
    a, b = (x.item() for x in precision_posterior(moments, **PRIOR))
    observed = mixture_return(*tensors(greedy, uniform, alpha / (alpha + beta))).item()

    def evidence(mean):
        def joint(tau):
            return stats.norm.pdf(observed, mean, tau**-0.5) * stats.gamma.pdf(tau, a, scale=1 / b)

        rate = b + (observed - mean) ** 2 / 2
        return integrate.quad(joint, 0, (a + 60) / rate, epsabs=0, epsrel=1e-11, limit=200)[0]

    scale = math.sqrt(b / a)
    scipys = stats.t.logpdf(observed, 2 * a, [uniform, greedy], scale)
    assert math.log(evidence(uniform)) == pytest.approx(scipys[0], abs=1e-9)
    likelihood = StudentTLikelihood(NormalGammaPrior(**PRIOR))
    ratio = likelihood.log_evidence_ratio(*tensors(greedy - uniform, alpha, beta), moments)
    assert ratio.item() == pytest.approx(scipys[0] - scipys[1], abs=1e-12)
    quadrature = math.log(evidence(uniform)) - math.log(evidence(greedy))
    assert ratio.item() == pytest.approx(quadrature, abs=1e-8)


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.01), (2.0, 9.0), (9.0, 2.0)])
@pytest.mark.parametrize("variance", [0.25, 10.0, None])
def test_gaussian_evidence_is_scipys(alpha, beta, variance):
    greedy, uniform, moments = 3.0, 1.5, moments_of(OBSERVATIONS)
    scale = math.sqrt(np.var(OBSERVATIONS, ddof=1) if variance is None else variance)
    observed = mixture_return(*tensors(greedy, uniform, alpha / (alpha + beta))).item()
    expected = stats.norm.logpdf(observed, [uniform, greedy], scale)
    ratio = GaussianLikelihood(variance).log_evidence_ratio(
        *tensors(greedy - uniform, alpha, beta), moments
    )
    assert ratio.item() == pytest.approx(expected[0] - expected[1], abs=1e-12)


@pytest.mark.parametrize("observations", [[4.0], [4.0, 4.0, 4.0]])
def test_running_variance_of_zero_is_no_evidence(observations):
    ratio = GaussianLikelihood().log_evidence_ratio(
        *tensors(100.0, 1.0, 2.0), moments_of(observations)
    )
    assert ratio == 0


@pytest.mark.parametrize("likelihood", [StudentTLikelihood(), GaussianLikelihood(2.0)])
def test_no_gap_is_no_evidence(likelihood):
    ratio = likelihood.log_evidence_ratio(*tensors(0.0, 1.0, 2.0), moments_of(OBSERVATIONS))
    assert ratio == 0


@pytest.mark.parametrize(
    "likelihood", [StudentTLikelihood(), GaussianLikelihood(2.0), GaussianLikelihood()]
)
def test_evidence_of_a_batch_is_that_of_its_members(likelihood):
    torch.manual_seed(0)
    gap, alpha, beta, num, mean, m2 = (torch.rand(6, 3, 4, dtype=torch.float64) + 0.1).unbind()
    batch = Moments(2 + num, mean, m2)
    ratio = likelihood.log_evidence_ratio(gap, alpha, beta, batch)
    assert ratio.shape == (3, 4)
    for i in np.ndindex(3, 4):
        alone = Moments(*(x[i] for x in batch))
        single = likelihood.log_evidence_ratio(gap[i], alpha[i], beta[i], alone)
        torch.testing.assert_close(ratio[i], single, rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", ["tau0", "a0", "b0"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_prior_parameters_must_be_positive_and_finite(name, value):
    with pytest.raises(ValueError, match=rf"NormalGammaPrior: {name} must be positive.*{value}"):
        NormalGammaPrior(**{name: value})


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_prior_mean_must_be_finite(value):
    with pytest.raises(ValueError, match=rf"mu0 must be finite, got {value}"):
        NormalGammaPrior(mu0=value)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_variance_must_be_positive_and_finite(value):
    with pytest.raises(ValueError, match=rf"variance must be positive.*{value}"):
        GaussianLikelihood(value)


def test_small_variances_and_priors_are_allowed():
    assert GaussianLikelihood(1e-9).variance == 1e-9
    prior = NormalGammaPrior(mu0=-1e9, tau0=1e-9, a0=1e-9, b0=1e-9)
    assert StudentTLikelihood(prior).b0 == 1e-9


def test_a_likelihood_keeps_its_numbers_when_the_users_tensor_changes():
    mine = torch.ones(2, dtype=torch.float64)
    student, gaussian = StudentTLikelihood(NormalGammaPrior(b0=mine)), GaussianLikelihood(mine)
    mine.mul_(5)
    assert student.b0.tolist() == gaussian.variance.tolist() == [1, 1]
