"""The kernels for CUDA, in Triton's interpreter: run by test_triton_walks.py, which sets it up."""

import oracles
import pytest
import torch
from tensordict import TensorDict
from walk_cases import (
    BMC,
    PRIOR,
    STATES,
    assert_equal_states,
    by_operator,
    by_tensors,
    collected,
)

from bmc_torchrl.likelihoods import NormalGammaPrior
from bmc_torchrl.strategies import BMCEpsilon, VDBEEpsilon, bmc, vdbe

triton = pytest.importorskip("triton")
triton_walks = pytest.importorskip("bmc_torchrl.strategies.triton_walks")
tl = triton.language

STEPS = 12
TOLERANCE = 2e-15
SHAPES = [(), (2, 3), (triton_walks.LANES + 3,)]


@pytest.fixture(autouse=True)
def _by_triton(monkeypatch):
    by_operator(monkeypatch)
    monkeypatch.setattr(bmc, "bmc_walk", triton_walks.bmc_walk_on_gpu)
    monkeypatch.setattr(vdbe, "vdbe_walk", triton_walks.vdbe_walk_on_gpu)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", list(BMC.values()), ids=list(BMC))
def test_bmc_walks_as_the_tensor_functions_do(monkeypatch, shape, options, random):
    build = lambda: BMCEpsilon(1.0, 1.5, prior=PRIOR, batch_shape=shape, **options)  # noqa: E731
    strategy, expected = build(), build()
    data = collected(shape, random, STEPS)
    strategy.update(*data)
    by_tensors(monkeypatch, expected, *data)
    assert_equal_states(strategy, expected, TOLERANCE, TOLERANCE)
    assert (strategy.skipped["nonfinite"] > 0).any()
    assert (strategy.return_count > 1).any()


def test_a_scale_free_prior_walks_as_the_tensor_functions_do(monkeypatch, random):
    build = lambda: BMCEpsilon(1.0, 1.5, prior=NormalGammaPrior(b0=None), batch_shape=(3,))  # noqa: E731
    strategy, expected, large = build(), build(), build()
    data, taken = collected((3,), random, STEPS)
    strategy.update(data, taken)
    by_tensors(monkeypatch, expected, data, taken)
    assert_equal_states(strategy, expected, TOLERANCE, TOLERANCE)
    for key in ("greedy_return", "uniform_return"):
        data[key] = torch.where(data[key] < 1e100, data[key] * 32, data[key])
    large.update(data, taken)
    assert torch.equal(large.eps, strategy.eps)
    assert (strategy.eps < build().eps).all()


def test_a_pooled_posterior_walks_by_time_and_then_by_environment(monkeypatch, random):
    strategy, expected = BMCEpsilon(prior=PRIOR), BMCEpsilon(prior=PRIOR)
    data = collected((4,), random, STEPS)
    strategy.update(*data)
    by_tensors(monkeypatch, expected, *data)
    assert_equal_states(strategy, expected, TOLERANCE, TOLERANCE)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("states", [1, STATES])
def test_vdbe_walks_as_the_tensor_functions_do(monkeypatch, shape, states, random):
    sigma = torch.rand(shape, generator=random) + 0.1
    build = lambda: VDBEEpsilon(states, sigma, 0.25, batch_shape=shape)  # noqa: E731
    strategy, expected = build(), build()
    data = collected(shape, random, STEPS)
    strategy.update(*data)
    by_tensors(monkeypatch, expected, *data)
    assert_equal_states(strategy, expected, TOLERANCE, TOLERANCE)


def test_bmc_walks_as_algorithm_1_in_50_digits(random):
    values = torch.randn(40, 3, generator=random, dtype=torch.float64)
    run = oracles.Run(1.0, 1.01, oracles.EXACT, b0=5.0)
    for row in values.tolist():
        run.update(0.5, row, 0.9)
    strategy = BMCEpsilon(1.0, 1.01, prior=NormalGammaPrior(b0=5.0))
    columns = {
        "greedy_return": 0.5 + 0.9 * values.amax(-1),
        "uniform_return": 0.5 + 0.9 * values.mean(-1),
    }
    strategy.update(TensorDict(columns, [len(values)]))
    for found, exact in ((strategy.alpha, run.alpha), (strategy.beta, run.beta)):
        assert float(found) == pytest.approx(float(exact), rel=TOLERANCE)


@triton.jit
def logarithms(x, log1p, tanh, size: tl.constexpr):
    at = tl.arange(0, size)
    tl.store(log1p + at, triton_walks.log1p_of(tl.load(x + at)))
    tl.store(tanh + at, triton_walks.tanh_of_half(tl.load(x + at)))


def test_small_and_large_numbers_keep_their_digits():
    x = torch.cat([torch.zeros(1), torch.logspace(-300, 300, 1023, dtype=torch.float64)])
    log1p, tanh = torch.empty_like(x), torch.empty_like(x)
    logarithms[(1,)](x, log1p, tanh, len(x))
    torch.testing.assert_close(log1p, x.log1p(), rtol=5e-16, atol=0)
    torch.testing.assert_close(tanh, (x / 2).tanh(), rtol=5e-16, atol=0)
