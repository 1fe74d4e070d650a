"""What a strategy and its module say of themselves: the numbers that matter, and few of them."""

import pytest
import torch
from contracts import FACTORIES, STRATEGY_SHAPES, exploring, transitions
from fake_accelerator import HostSyncs

from bmc_torchrl import BMCEpsilon, ConstantEpsilon, GaussianLikelihood, NormalGammaPrior
from bmc_torchrl.precision import shown


def test_one_run_is_shown_by_its_numbers():
    strategy = BMCEpsilon(2.0, 6.0, prior=NormalGammaPrior(mu0=-1.5, b0=50.0))
    for text in (repr(strategy), repr(exploring(strategy))):
        assert "eps=0.25, batch_shape=(), alpha=2, beta=6" in text
        assert "StudentTLikelihood(mu0=-1.5, tau0=1, a0=500, b0=50)" in text


def test_what_was_learned_is_shown():
    strategy = BMCEpsilon()
    before = repr(strategy)
    strategy.update(transitions((20,)))
    assert repr(strategy) != before
    assert f"eps={float(strategy.eps):.4g}, " in repr(strategy)


def test_many_runs_are_shown_by_their_range():
    alpha = torch.linspace(1, 5, 1000)
    prior = NormalGammaPrior(b0=torch.linspace(1, 2, 1000))
    text = repr(BMCEpsilon(alpha, 20.0, prior=prior, batch_shape=[1000]))
    assert "eps=0.04762 … 0.2 (1000 values)" in text
    assert "alpha=1 … 5 (1000 values), beta=20 (1000 values)" in text
    assert "a0=500 (1000 values), b0=1 … 2 (1000 values)" in text
    assert len(text) < 400


def test_variants_are_named():
    offline = BMCEpsilon(num_states=3, update="offline", batch_shape=[2])
    assert "alpha=1 (2 × 3 values)" in repr(offline)
    assert "num_states=3, update='offline'" in repr(offline)
    running = BMCEpsilon(likelihood=GaussianLikelihood(), batch_shape=[2])
    assert "GaussianLikelihood(variance=running)" in repr(running)


@pytest.mark.parametrize(("name", "shape"), STRATEGY_SHAPES)
def test_every_strategy_shows_its_epsilon_and_its_shape(name, shape):
    strategy = FACTORIES[name](shape)
    for text in (repr(strategy), repr(exploring(strategy))):
        assert f"eps={shown(strategy.eps)}, batch_shape={shape}" in text
        assert text.count("\n") < 30


@pytest.mark.parametrize("name", FACTORIES)
def test_tensors_without_numbers_can_be_shown(name):
    strategy = FACTORIES[name]((4,)).to("meta")
    if name != "plain":
        assert "eps=(4 values), batch_shape=(4,)" in repr(strategy)


def test_a_repr_waits_for_the_device_and_nothing_else_does():
    explore = exploring(ConstantEpsilon(0.25, batch_shape=[4]))
    with HostSyncs() as syncs:
        explore.update(transitions((4,)))
        assert syncs.seen == []
        repr(explore)
        assert syncs.seen
