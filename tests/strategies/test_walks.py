"""The compiled walk through a batch against one step after the other, and against tensors."""

import warnings

import pytest
import torch
from walk_cases import BMC, PRIOR, assert_equal_states, by_operator, by_tensors, collected

from bmc_torchrl.likelihoods import GaussianLikelihood
from bmc_torchrl.strategies import BMCEpsilon, VDBEEpsilon, bmc, walks

SHAPES = [(), (1,), (4,), (2, 3)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", list(BMC.values()), ids=list(BMC))
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_bmc_walks_as_the_tensor_functions_do(
    monkeypatch, shape, options, masked, in_place, random
):
    if not in_place:
        by_operator(monkeypatch)
    build = lambda: BMCEpsilon(1.0, 1.5, prior=PRIOR, batch_shape=shape, **options)  # noqa: E731
    strategy, expected = build(), build()
    for _ in range(2):
        data, taken = collected(shape, random)
        mark = (taken,) if masked else ()
        strategy.update(data, *mark)
        by_tensors(monkeypatch, expected, data, *mark)
    assert_equal_states(strategy, expected)
    assert (strategy.skipped["nonfinite"] > 0).all()
    assert (strategy.skipped["foreign"] > 0).all() == masked
    assert (strategy.eps < 0.4).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("variance", [None, 3.0])
@pytest.mark.parametrize("options", [{}, {"num_states": 5}])
def test_gaussian_evidence_walks_as_the_tensor_functions_do(
    monkeypatch, shape, variance, options, random
):
    likelihood = GaussianLikelihood(variance)
    build = lambda: BMCEpsilon(1.0, 1.5, likelihood=likelihood, batch_shape=shape, **options)  # noqa: E731
    strategy, expected = build(), build()
    data, taken = collected(shape, random)
    strategy.update(data, taken)
    by_tensors(monkeypatch, expected, data, taken)
    assert_equal_states(strategy, expected)
    assert (strategy.skipped["nonfinite"] > 0).all()
    assert (strategy.eps < 0.4).all()


def test_a_pooled_posterior_walks_by_time_and_then_by_environment(monkeypatch, random):
    strategy, expected = BMCEpsilon(prior=PRIOR), BMCEpsilon(prior=PRIOR)
    data, taken = collected((8,), random)
    strategy.update(data, taken)
    by_tensors(monkeypatch, expected, data, taken)
    assert_equal_states(strategy, expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("states", [1, 5])
def test_vdbe_walks_as_the_tensor_functions_do(monkeypatch, shape, states, random):
    sigma = torch.rand(shape, generator=random) + 0.1
    build = lambda: VDBEEpsilon(states, sigma, 0.25, batch_shape=shape)  # noqa: E731
    strategy, expected = build(), build()
    data, taken = collected(shape, random)
    strategy.update(data, taken)
    by_tensors(monkeypatch, expected, data, taken)
    assert_equal_states(strategy, expected)
    assert (strategy.epsilons != 0.5).any(-1).all()


@pytest.mark.parametrize(
    ("name", "options"), [("bmc_walk_in_place", {}), ("bmc_walk", {"update": "offline"})]
)
def test_one_call_walks_a_batch(monkeypatch, name, options, random):
    calls, walk = [], getattr(walks, name)
    monkeypatch.setattr(bmc, name, lambda *a: calls.append(a) or walk(*a))
    data, _ = collected((), random)
    BMCEpsilon(**options).update(data)
    assert len(calls) == 1
    BMCEpsilon(likelihood=GaussianLikelihood(1.0), **options).update(data)
    assert len(calls) == 1 + (not options), "the operator has the Student-t likelihood only"


@pytest.mark.parametrize("states", [False, True])
def test_operators_pass_the_checks_of_torch(states, random):
    steps, runs, n = 4, 3, 2 if states else 1
    rand = lambda *size: torch.rand(size, generator=random, dtype=torch.float64)  # noqa: E731
    columns = (rand(steps, runs) < 0.8, 2 + rand(steps, runs), rand(steps, runs))
    state, done = (rand(steps, runs) * n).long(), rand(steps, runs) < 0.3
    memory = (1 + rand(runs, 4), 1 + rand(runs, n, 8), 1 + rand(runs, n, 2))
    more = (state, done) if states else (None, None)
    torch.library.opcheck(walks.bmc_walk, (*memory, *columns, *more))
    arguments = (1 + rand(runs, 2), rand(runs, n), rand(steps, runs), columns[0], state)
    torch.library.opcheck(walks.vdbe_walk, arguments)


def test_vmap_maps_over_more_runs(random):
    rand = lambda *size: 1 + torch.rand(size, generator=random, dtype=torch.float64)  # noqa: E731
    parameters, memory, held, greedy = rand(3, 4), rand(7, 3, 2, 8), rand(3, 2, 2), rand(5, 3, 7)
    taken, state = rand(5, 3) < 1.8, (rand(5, 3) > 1.5).long()
    walk = lambda m, g: walks.bmc_walk(parameters, m, held, taken, g, taken * 0.1, state, None)  # noqa: E731
    found = torch.vmap(walk, (0, 2))(memory, greedy)
    for i in range(7):
        for part, expected in zip(found, walk(memory[i], greedy[..., i]), strict=True):
            torch.testing.assert_close(part[i], expected, rtol=0, atol=0)
    sigma, epsilons, change = rand(3, 2) - 0.5, rand(3, 2), rand(7, 5, 3)
    each = lambda c: walks.vdbe_walk(sigma, epsilons, c, taken, state)  # noqa: E731
    expected = torch.stack([each(c) for c in change])
    torch.testing.assert_close(torch.vmap(each)(change), expected, rtol=0, atol=0)


def test_without_numba_there_is_one_hint_and_the_torch_loop(monkeypatch, random):
    monkeypatch.setattr(walks, "_HAS_NUMBA", False)
    walks._has_numba.cache_clear()
    data, _ = collected((), random)
    strategy, expected = BMCEpsilon(), BMCEpsilon()
    with pytest.warns(UserWarning, match="pip install numba"):
        strategy.update(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strategy.update(data)
    monkeypatch.undo()
    walks._has_numba.cache_clear()
    expected.update(data)
    expected.update(data)
    assert_equal_states(strategy, expected)


@pytest.mark.parametrize(
    "other",
    [lambda x: x.float(), lambda x: torch.stack([x, x], -1)[..., 0], lambda x: x[:1].expand(4)],
    ids=["float32", "strided", "expanded"],
)
def test_what_is_not_a_plain_column_of_numbers_is_not_walked_in_its_memory(other, random):
    strategy, expected = (BMCEpsilon(1.0, 1.5, batch_shape=[4]) for _ in range(2))
    strategy.likelihood.b0 = other(strategy.likelihood.b0)
    data, taken = collected((4,), random)
    strategy.update(data, taken)
    expected.update(data, taken)
    torch.testing.assert_close(strategy.alpha, expected.alpha, rtol=1e-12, atol=0)
