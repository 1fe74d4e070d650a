"""ε-BMC: its equations, its states, its priors."""

import copy
import itertools
import math
import pickle
import warnings

import pytest
import torch
from contracts import FACTORIES, LEARNING, RUNS, STATES, alike, memory, same, transitions
from scipy import stats

from bmc_torchrl import (
    BMCEpsilon,
    GaussianLikelihood,
    NormalGammaPrior,
    StudentTLikelihood,
    VDBEEpsilon,
)
from bmc_torchrl.strategies import BMCRule, NoScalarFormError


def reference_epsilons(alpha, beta, returns, mu0=0.0, tau0=1.0, a0=500.0, b0=500.0):
    """ε after each (greedy, uniform) return: docs/protocol.md §1 in plain floats."""
    n, epsilon, seen, epsilons = alpha + beta, alpha / (alpha + beta), [], []
    for greedy, uniform in returns:
        seen.append((1 - epsilon) * greedy + epsilon * uniform)
        count, mean = len(seen), math.fsum(seen) / len(seen)
        variance = math.fsum((g - mean) ** 2 for g in seen) / max(count - 1, 1)
        a = a0 + count / 2
        b = b0 + count / 2 * (variance + tau0 / (tau0 + count) * (mean - mu0) ** 2)
        tau, gap2 = 1 - 2 * epsilon, (greedy - uniform) ** 2
        log_ratio = (a + 0.5) * math.log1p(tau * gap2 / (2 * b + epsilon**2 * gap2))
        y = -math.expm1(-log_ratio)
        q = epsilon * (1 - epsilon) * y / (1 - epsilon * y)
        p = epsilon * (1 - y) / (1 - epsilon * y)
        spread = n**2 * epsilon * (1 - epsilon)
        spread += n * (epsilon * (1 - p) + (1 - epsilon) * p) + p * (1 - p) * (n + 2)
        growth = n * q * ((n + 1) * tau + (n + 2) * q) / spread
        epsilon, n = epsilon - q / (n + 1), n + growth
        epsilons.append(epsilon)
    return epsilons


@pytest.mark.parametrize(("alpha0", "beta0"), [(1.0, 1.01), (10.0, 10.01), (750.0, 750.01)])
@pytest.mark.parametrize("prior", [NormalGammaPrior(), NormalGammaPrior(1.0, 2.0, 3.0, 0.5)])
def test_bmc_follows_the_written_equations(alpha0, beta0, prior):
    data = transitions((60,))
    pairs = list(zip(data["greedy_return"].tolist(), data["uniform_return"].tolist(), strict=True))
    expected = reference_epsilons(alpha0, beta0, pairs, prior.mu0, prior.tau0, prior.a0, prior.b0)
    strategy = BMCEpsilon(alpha0, beta0, prior=prior)
    for step, value in zip(data, expected, strict=True):
        strategy.update(step)
        assert float(strategy.eps) == pytest.approx(value, rel=1e-9)
    assert float(strategy.eps) < alpha0 / (alpha0 + beta0)


def test_the_posterior_is_a_beta_distribution():
    strategy = BMCEpsilon([2.0, 0.5], [3.0, 7.0], batch_shape=[2])
    strategy.update(transitions((2, 20)))
    oracle = stats.beta(strategy.alpha.numpy(), strategy.beta.numpy())
    assert strategy.mean.numpy() == pytest.approx(oracle.mean())
    assert strategy.variance.numpy() == pytest.approx(oracle.var())
    assert strategy.distribution.variance.numpy() == pytest.approx(oracle.var())
    for side, bound in zip((0.05, 0.95), strategy.credible_interval(0.9), strict=True):
        assert bound.numpy() == pytest.approx(oracle.ppf(side), rel=1e-4)


def test_the_moments_are_those_of_the_mixture_returns():
    strategy = BMCEpsilon(2.0, 3.0)
    seen = []
    for step in transitions((30,)):
        epsilon = float(strategy.eps)
        greedy, uniform = float(step["greedy_return"]), float(step["uniform_return"])
        seen.append((1 - epsilon) * greedy + epsilon * uniform)
        strategy.update(step)
    assert float(strategy.return_variance) == pytest.approx(
        torch.tensor(seen).double().var().item()
    )
    assert float(strategy.return_mean) == pytest.approx(sum(seen) / 30)


@pytest.mark.parametrize("states", [None, STATES])
def test_offline_holds_epsilon_for_an_episode_and_then_replays_it(states):
    offline = BMCEpsilon(num_states=states, update="offline", batch_shape=RUNS)
    online = BMCEpsilon(num_states=states, batch_shape=RUNS)
    data = transitions((*RUNS, 30))
    shown = online.mean.clone()
    for time in range(30):
        step = data[:, time]
        torch.testing.assert_close(offline.mean, shown, rtol=0, atol=0)
        online.update(step)
        offline.update(step)
        ended = step["next", "done"] if states else step["next", "done"].squeeze(-1)
        shown = torch.where(ended, online.mean, shown)
    assert not torch.equal(offline.mean, online.mean)
    assert same(
        {key: value for key, value in memory(online).items() if key.startswith("return_")},
        {key: value for key, value in memory(offline).items() if key.startswith("return_")},
    )


@pytest.mark.parametrize("update", ["online", "offline"])
@pytest.mark.parametrize("shape", [(), RUNS])
def test_one_state_is_no_state(update, shape):
    free = BMCEpsilon(update=update, batch_shape=shape)
    single = BMCEpsilon(num_states=1, update=update, batch_shape=shape)
    data = transitions((*shape, 20))
    data["state"].zero_()
    free.update(data)
    single.update(data)
    for key, value in memory(free).items():
        assert torch.equal(value, single.get_buffer(key).reshape(value.shape))
    assert torch.equal(single.epsilon(data[..., 0]), free.epsilon(data[..., 0]))


@pytest.mark.parametrize("encoding", ["index", "column", "one_hot", "bool one_hot"])
@pytest.mark.parametrize("name", ["bmc-state", "vdbe"])
def test_each_state_learns_only_from_leaving_it(name, encoding):
    data = transitions((*RUNS, 40))
    index = data["state"].clone()
    one_hot = torch.nn.functional.one_hot(index, STATES)
    encodings = {"index": index, "column": index[..., None], "one_hot": one_hot}
    data["state"] = encodings.get(encoding, one_hot.bool())
    strategy = FACTORIES[name](RUNS)
    strategy.update(data)
    table = strategy.mean if name == "bmc-state" else strategy.epsilons
    for run in range(*RUNS):
        for state in range(STATES):
            alone = BMCEpsilon() if name == "bmc-state" else VDBEEpsilon(1, 1.0, 0.25)
            alone.update(data[run][index[run] == state])
            assert torch.equal(table[run, state], alone.eps)
    now = strategy.epsilon(data[:, 0])
    assert torch.equal(now, table.gather(-1, index[:, :1]).squeeze(-1))
    torch.testing.assert_close(strategy.eps, table.mean(-1))


@pytest.mark.parametrize("name", LEARNING[:-2])
def test_a_pooled_strategy_sees_every_environment_time_slowest(name):
    data = transitions((3, 5, 4))
    pooled, walked = FACTORIES[name](()), FACTORIES[name](())
    pooled.update(data)
    for time in range(4):
        for first in range(3):
            for second in range(5):
                walked.update(data[first, second, time])
    assert alike(memory(pooled), memory(walked))


def test_runs_with_their_own_prior_keep_it():
    strategy = BMCEpsilon([1.0, 5.0], torch.tensor([1.01, 20.0]), num_states=2, batch_shape=[2])
    assert strategy.mean[:, 0].tolist() == pytest.approx([1 / 2.01, 0.2])
    assert torch.equal(strategy.alpha, torch.tensor([[1.0, 1.0], [5.0, 5.0]]).double())


@pytest.mark.parametrize(("alpha0", "beta0"), [(1.0, 1.0), (2.0, 1.0), ([1.0, 3.0], 2.0)])
def test_a_prior_above_one_half_warns(alpha0, beta0):
    with pytest.warns(UserWarning, match="Theorem 1 does not hold") as caught:
        BMCEpsilon(alpha0, beta0, batch_shape=[2])
    assert caught[0].filename == __file__


def test_a_prior_below_one_half_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        BMCEpsilon([1.0, 2.0], [1.01, 2.01], batch_shape=[2])


def test_epsilon_above_one_half_is_allowed_and_may_rise():
    with pytest.warns(UserWarning, match="may rise"):
        strategy = BMCEpsilon(3.0, 1.0)
    strategy.update(transitions((200,)))
    assert float(strategy.eps) > 0.75


@pytest.mark.parametrize("likelihood", [StudentTLikelihood(), GaussianLikelihood(4.0)])
def test_evidence_adds_up_over_transitions_and_where_there_is_no_gap_nothing(likelihood):
    at_once, one_by_one = BMCEpsilon(likelihood=likelihood), BMCEpsilon(likelihood=likelihood)
    data = transitions((40,))
    at_once.update(data)
    said = []
    for step in data.unbind(0):
        one_by_one.update(step)
        said.append(float(one_by_one.log_evidence))
    assert float(at_once.log_evidence) == pytest.approx(said[-1], rel=1e-12)
    # ε < ½ falls, so that all evidence is against "uniform".
    assert all(later < sooner for sooner, later in itertools.pairwise([0.0, *said]))
    terminal = transitions(())
    one_by_one.update(terminal.set("uniform_return", terminal["greedy_return"]))
    assert float(one_by_one.log_evidence) == said[-1]


def test_the_running_variance_needs_two_different_returns():
    strategy = BMCEpsilon(likelihood=GaussianLikelihood())
    step = transitions(())
    strategy.update(step)
    assert float(strategy.eps) == pytest.approx(1 / 2.01)
    assert float(strategy.log_evidence) == 0
    strategy.update(transitions(()))
    assert float(strategy.eps) < 1 / 2.01


MOVES = {
    "copied": copy.deepcopy,
    "pickled": lambda strategy: pickle.loads(pickle.dumps(strategy)),
    "shared": lambda strategy: strategy.share_memory(),
    "loaded": lambda strategy: (
        strategy.load_state_dict(copy.deepcopy(strategy.state_dict()), assign=True) and strategy
    ),
    "cast": lambda strategy: strategy.half().float(),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("options", [{}, {"num_states": STATES}, {"update": "offline"}])
def test_one_step_is_learned_where_the_buffers_are_now(move, options):
    data = transitions((2, *RUNS))
    strategy = BMCEpsilon(batch_shape=RUNS, **options)
    strategy.update(data[0])
    moved = MOVES[move](strategy)
    before = {name: value.clone() for name, value in strategy.state_dict().items()}
    moved.update(data[1])
    expected = BMCEpsilon(batch_shape=RUNS, **options)
    expected.update(data[0])
    expected.update(data[1])
    assert same(memory(moved), memory(expected))
    if moved is not strategy:
        assert same(strategy.state_dict(), before)


def test_diagnostics_of_states_are_means_over_them():
    strategy = BMCEpsilon(num_states=STATES, batch_shape=RUNS)
    strategy.update(transitions((*RUNS, 40)))
    said = strategy.diagnostics()
    for name in ("alpha", "beta", "return_variance"):
        table = getattr(strategy, name)
        each = [math.fsum(row) / STATES for row in table.tolist()]
        assert said[f"posterior/{name}"].tolist() == pytest.approx(each)
        assert len(set(each)) == 4
    assert strategy.learned.tolist() == [40.0] * 4


class AnotherLikelihood(StudentTLikelihood):
    """Whose evidence nobody but itself knows."""


@pytest.mark.parametrize(
    "options",
    [{"update": "offline"}, {"num_states": 3}, {"likelihood": AnotherLikelihood()}],
    ids=["offline", "states", "likelihood"],
)
def test_what_is_a_function_of_numbers(options):
    with pytest.raises(NoScalarFormError, match="Only ε-BMC with"):
        BMCEpsilon(**options).scalars()
    form = BMCEpsilon(2.0, 6.0, prior=NormalGammaPrior(1.0, 2.0, 3.0, 4.0)).scalars()
    assert form.rule is BMCRule
    assert [float(x) for x in form.parameters] == [1, 2, 3, 4]
    assert [float(x) for x in form.memory] == [0.25, 2, 6, 0, 0, 0, 0, 0]
    gaussian = BMCEpsilon(likelihood=GaussianLikelihood(7.0)).scalars()
    assert [float(x) for x in gaussian.parameters] == [0, 0, 0, 7]
