"""A checkpoint says what it is of: the likelihood and its prior travel with the posterior."""

import pytest
import torch
from contracts import RUNS, STATES, exploring, memory, same, transitions

from bmc_torchrl import BMCEpsilon, GaussianLikelihood, NormalGammaPrior, StudentTLikelihood
from bmc_torchrl.functional import Moments
from bmc_torchrl.likelihoods import Likelihood

NARROW = NormalGammaPrior(mu0=1.0, tau0=2.0, a0=20.0, b0=3.0)
EACH = NormalGammaPrior(mu0=[0.0, 1.0, -1.0, 3.0], b0=torch.tensor([0.5, 1.0, 5.0, 500.0]))


def student_t(prior=None, **options):
    return BMCEpsilon(prior=prior, batch_shape=RUNS, **options)


def gaussian(variance=None, **options):
    return BMCEpsilon(likelihood=GaussianLikelihood(variance), batch_shape=RUNS, **options)


PAIRS = {
    "numbers": (student_t, lambda: student_t(NARROW)),
    "number, then one per run": (student_t, lambda: student_t(EACH)),
    "one per run, then a number": (lambda: student_t(EACH), lambda: student_t(NARROW)),
    "variances": (lambda: gaussian(1.0), lambda: gaussian(0.1)),
    "variance, then one per run": (lambda: gaussian(1.0), lambda: gaussian([0.1, 1.0, 2.0, 9.0])),
    "fixed, then running": (lambda: gaussian(1.0), gaussian),
    "running, then fixed": (gaussian, lambda: gaussian(0.1)),
    "one per run, then running": (lambda: gaussian([0.1, 1.0, 2.0, 9.0]), gaussian),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_loading_a_checkpoint_restores_its_likelihood(pair):
    other, saved = PAIRS[pair]
    loaded, saved, own_prior = other(), saved(), other()
    saved.update(transitions((*RUNS, 20)))
    state = saved.state_dict()
    loaded.load_state_dict(state)
    posterior = {key: value for key, value in state.items() if "likelihood" not in key}
    own_prior.load_state_dict(posterior, strict=False)
    assert repr(loaded) == repr(saved) != repr(own_prior)
    later = transitions((*RUNS, 20))
    for strategy in (loaded, saved, own_prior):
        strategy.update(later)
    assert same(memory(loaded), memory(saved))
    assert not torch.equal(own_prior.alpha, saved.alpha)


def test_a_checkpoint_says_what_it_is():
    state = student_t(NARROW).state_dict()
    assert [key for key in state if "likelihood" in key] == [
        f"likelihood.{name}" for name in ("mu0", "tau0", "a0", "b0")
    ]
    for name in ("mu0", "tau0", "a0", "b0"):
        expected = torch.full(RUNS, getattr(NARROW, name), dtype=torch.float64)
        assert same({name: state[f"likelihood.{name}"]}, {name: expected})
    each = [1.0, 2.0, 3.0, 4.0]
    for variance, written in ((2.0, [2.0] * 4), (None, [0.0] * 4), (each, each)):
        state = gaussian(variance).state_dict()
        assert state["likelihood.variance"].tolist() == written


def test_a_checkpoint_of_another_likelihood_is_refused():
    with pytest.raises(RuntimeError, match=r"(?s)likelihood\.mu0.*likelihood\.variance"):
        student_t().load_state_dict(gaussian().state_dict())


def test_loading_writes_in_place():
    strategy = student_t()
    where = {key: buffer.data_ptr() for key, buffer in strategy.named_buffers()}
    strategy.load_state_dict(student_t(EACH).state_dict())
    assert where == {key: buffer.data_ptr() for key, buffer in strategy.named_buffers()}


@pytest.mark.parametrize("states", [None, STATES])
@pytest.mark.parametrize("update", ["online", "offline"])
@pytest.mark.parametrize("time", [(), (9,)])
def test_runs_may_have_a_prior_each(states, update, time):
    options = {"num_states": states, "update": update}
    together, data = student_t(EACH, **options), transitions((*RUNS, *time))
    spread = gaussian([0.1, 1.0, 2.0, 9.0], **options)
    together.update(data)
    spread.update(data)
    for run, (mu0, b0) in enumerate(zip(EACH.mu0, EACH.b0.tolist(), strict=True)):
        alone = BMCEpsilon(prior=NormalGammaPrior(mu0=mu0, b0=b0), **options)
        alone.update(data[run])
        assert torch.equal(together.alpha[run], alone.alpha)
        alone = BMCEpsilon(likelihood=GaussianLikelihood([0.1, 1.0, 2.0, 9.0][run]), **options)
        alone.update(data[run])
        assert torch.equal(spread.beta[run], alone.beta)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: BMCEpsilon(prior=NormalGammaPrior(b0=[1.0, 2.0]), batch_shape=[3]),
            r"StudentTLikelihood: b0 .* have the batch_shape \(3,\), got shape \(2,\)",
        ),
        (
            lambda: BMCEpsilon(likelihood=GaussianLikelihood([1.0, 2.0])),
            r"GaussianLikelihood: variance .* have the batch_shape \(\), got shape \(2,\)",
        ),
        (
            lambda: NormalGammaPrior(a0=[1.0, 0.0]),
            r"NormalGammaPrior: a0 must be positive and finite .*, got \[1.0, 0.0\]",
        ),
        (
            lambda: GaussianLikelihood([1.0, -1.0]),
            r"variance must be positive and finite, or None .*, got \[1.0, -1.0\]",
        ),
    ],
)
def test_values_per_run_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_likelihood_must_be_one():
    with pytest.raises(
        TypeError, match=r"must be a Likelihood such as StudentTLikelihood\(\), got"
    ):
        BMCEpsilon(likelihood=NormalGammaPrior())


def test_strategies_do_not_share_a_likelihood():
    b0 = torch.ones(RUNS, dtype=torch.float64)
    likelihood = StudentTLikelihood(NormalGammaPrior(b0=b0))
    first, second = (BMCEpsilon(likelihood=likelihood, batch_shape=RUNS) for _ in range(2))
    first.load_state_dict(student_t(NARROW).state_dict())
    for kept in (b0, likelihood.b0, second.likelihood.b0):
        assert (kept == 1).all()


class Flat(Likelihood):
    """A user's own: the evidence is the gap, in some units."""

    def __init__(self, unit):
        super().__init__()
        self.register_buffer("unit", torch.tensor(unit))

    def log_evidence_ratio(self, gap, alpha, beta, moments):
        return -gap / self.unit


def test_a_users_own_likelihood_travels_too():
    loaded, saved = (
        exploring(BMCEpsilon(likelihood=Flat(x), batch_shape=RUNS)) for x in (1.0, 9.0)
    )
    loaded.load_state_dict(saved.state_dict())
    data = transitions((*RUNS, 9))
    for explore in (loaded, saved):
        explore.half().update(data)
    assert same(memory(loaded), memory(saved))
    assert repr(loaded.strategy.likelihood) == "Flat(unit=9 (4 values))"


def test_vmap_reaches_the_prior():
    scales = (1.0, 50.0, 500.0)
    modules = [BMCEpsilon(prior=NormalGammaPrior(b0=b0)) for b0 in scales]
    _, buffers = torch.func.stack_module_state([module.likelihood for module in modules])
    one, nothing = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    evidence = (2 * one, one, 3 * one, Moments(nothing, nothing, nothing))

    class Evidence(torch.nn.Module):
        def __init__(self, likelihood):
            super().__init__()
            self.likelihood = likelihood

        def forward(self):
            return self.likelihood.log_evidence_ratio(*evidence)

    def ratio(own):
        own = {f"likelihood.{key}": value for key, value in own.items()}
        return torch.func.functional_call(Evidence(modules[0].likelihood), own)

    expected = [module.likelihood.log_evidence_ratio(*evidence) for module in modules]
    assert torch.equal(torch.vmap(ratio)(buffers), torch.stack(expected))
