"""Rewards times a power of two change no bit of a scale-free ε, on any path."""

import warnings
from typing import Any

import pytest
import torch
from chain_domain import ChainEnv, ChainLanes, ChainScalars, chain_step
from tensordict import TensorDict
from wins_cases import KEYS, collected

from bmc_torchrl import BMCEpsilon, ExplorationWinsEpsilon, NormalGammaPrior, StudentTLikelihood
from bmc_torchrl.functional import Moments
from bmc_torchrl.learners.settings import (
    ExpectedSarsaSettings,
    RunSettings,
)
from bmc_torchrl.lockstep import TabularLockstep
from bmc_torchrl.lockstep.numba.tabular import NumbaTabularEngine
from bmc_torchrl.strategies import StackedEpsilon, bmc, wins

FREE = NormalGammaPrior(b0=None)
POWERS = (-30, -1, 7, 40)
STRATEGIES = {
    "bmc": lambda shape: BMCEpsilon(3.0, 3.01, prior=FREE, batch_shape=shape),
    "bmc-offline": lambda shape: BMCEpsilon(prior=FREE, update="offline", batch_shape=shape),
    "wins": lambda shape: ExplorationWinsEpsilon(20.0, batch_shape=shape),
}
each_strategy = pytest.mark.parametrize("name", STRATEGIES)


def scaled(data: TensorDict, power: int) -> TensorDict:
    data = data.clone()
    for key in KEYS[:4]:
        data[key] = data[key] * 2.0**power
    return data


def transitions(shape, random):
    data = collected(shape, random)
    done = torch.rand(data.shape, generator=random) < 0.2
    return data.set("next", TensorDict({"done": done.unsqueeze(-1)}, data.shape))


def in_one(strategy, data):
    strategy.update(data)


def by_steps(strategy, data):
    for time in range(data.shape[-1]):
        strategy.update(data[..., time])


def by_tensors(strategy, data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bmc, "can_walk_in_place", lambda *_: False)
        for module in (bmc, wins):
            patch.setattr(module, "can_walk", lambda column: False)
        strategy.update(data)


def compiled(strategy, data):
    torch._dynamo.reset()
    torch.compile(strategy.update, fullgraph=True, backend=torch._inductor.compile)(data)


@each_strategy
@pytest.mark.parametrize("path", [in_one, by_steps, by_tensors])
def test_epsilon_is_the_same_to_the_bit(name, path, random):
    data, first = transitions((3,), random), STRATEGIES[name]((3,))
    path(first, data)
    assert (first.eps != STRATEGIES[name]((3,)).eps).all()
    for power in POWERS:
        strategy = STRATEGIES[name]((3,))
        path(strategy, scaled(data, power))
        assert torch.equal(strategy.eps, first.eps)
        assert torch.equal(strategy.alpha, first.alpha)
        assert torch.equal(strategy.beta, first.beta)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bmc", "wins"])
def test_a_compiled_graph_agrees_to_the_bit(name, random):
    data, first = transitions((3,), random)[..., :4], STRATEGIES[name]((3,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled(first, data)
        second = STRATEGIES[name]((3,))
        compiled(second, scaled(data, 9))
    assert torch.equal(second.eps, first.eps)
    assert not torch.equal(first.eps, STRATEGIES[name]((3,)).eps)


class ScaledLanes(ChainLanes):
    def step(self, state, action, noise):
        after, reward, ended = chain_step(state, action, noise.squeeze(-1))
        return after, reward * 64, ended


class ScaledScalars(ChainScalars):
    def step(self, p: Any, state: Any, action: Any, u: Any) -> Any:
        right = (action == 1) != (u < self.slip)
        after = min(state + 1, self.goal) if right else max(state - 1, 0)
        return p, after, 64.0 if after == self.goal else -8.0, after == self.goal


class ScaledEnv(ChainEnv):
    def lanes(self):
        return ScaledLanes(self)

    def scalars(self):
        return ScaledScalars(*super().scalars())


@pytest.mark.parametrize("engine", [NumbaTabularEngine, TabularLockstep])
def test_engines_learn_the_same_epsilon_from_rewards_64_times_as_large(engine):
    run = RunSettings(gamma=0.5, episodes=30, tests=1, next_action="before", seed=1)
    sarsa = ExpectedSarsaSettings(learning_rate=0.5)
    own = {"threads": 1} if engine is NumbaTabularEngine else {"compiled": False}
    found = []
    for env in (ChainEnv, ScaledEnv):
        strategy = StackedEpsilon([STRATEGIES["bmc"]((2,)), STRATEGIES["wins"]((2,))])
        made = engine(env(batch_size=[4], max_steps=7), strategy, run, sarsa, **own)
        while not made.finished:
            made.advance(50)
        found.append(made)
    plain, large = found
    assert torch.equal(plain.epsilons, large.epsilons)
    assert torch.equal(plain.table * 64, large.table)
    assert (plain.epsilons[:, -1] < plain.epsilons[:, 0]).all()


def test_nothing_is_learned_until_two_returns_have_differed():
    strategy, expected = STRATEGIES["bmc"](()), STRATEGIES["bmc"](()).eps
    first = {"greedy_return": torch.tensor([3.0]), "uniform_return": torch.tensor([1.0])}
    strategy.update(TensorDict(first, [1]))
    assert torch.equal(strategy.eps, expected)
    assert strategy.return_count == 1
    moments = Moments(*torch.tensor([1.0, 3.0, 0.0]).double())
    one = torch.ones((), dtype=torch.float64)
    assert StudentTLikelihood(FREE).log_evidence_ratio(2 * one, one, 3 * one, moments) == 0


def test_the_prior_is_the_papers_with_the_variance_that_the_returns_have(random):
    greedy = torch.randn(50, generator=random).double()
    moments = Moments(torch.tensor(50.0).double(), greedy.mean(), greedy.var() * 49)
    one = torch.ones((), dtype=torch.float64)
    known = NormalGammaPrior(b0=float(500 * greedy.var()))
    ratios = [
        float(StudentTLikelihood(prior).log_evidence_ratio(2 * one, one, 3 * one, moments))
        for prior in (FREE, known)
    ]
    assert ratios[0] == pytest.approx(ratios[1], rel=1e-14)


def test_a_prior_mean_has_a_unit():
    with pytest.raises(ValueError, match="mu0 must be 0 where b0=None, got 1"):
        NormalGammaPrior(mu0=1.0, b0=None)
