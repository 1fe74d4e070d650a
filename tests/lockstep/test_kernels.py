"""The numba kernels against the tensor functions they restate."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kernel_cases import COUNT, SMALL_NETWORK, called, double, rows, scalars

from bmc_torchrl import functional
from bmc_torchrl.envs import (
    CartPoleEnv,
    SubgoalGridEnv,
    SupplyChainEnv,
    SupplyNetwork,
    cart_pole_bins,
    cart_pole_step,
    subgoal_grid_step,
    supply_chain_step,
)
from bmc_torchrl.envs.factored import ravel_index, unravel_index
from bmc_torchrl.envs.poisson import poisson_cdf, poisson_demand
from bmc_torchrl.functional import epsilon_greedy_action, uniform_action
from bmc_torchrl.learners.objectives import tabular_update
from bmc_torchrl.likelihoods import GaussianLikelihood, NormalGammaPrior, StudentTLikelihood
from bmc_torchrl.lockstep.numba import formulas
from bmc_torchrl.lockstep.numba.arguments import read_strategy
from bmc_torchrl.strategies import (
    ConstantEpsilon,
    GeometricEpsilon,
    LinearEpsilon,
    PowerEpsilon,
)
from bmc_torchrl.strategies.bmc import BMCPosterior, BMCRule, bmc_step, moments_matched, usable
from bmc_torchrl.strategies.compiled import compiled_rule
from bmc_torchrl.strategies.vdbe import VDBERule

NONE = (0.0, 0.0, 0.0, 0.0)
KERNELS = (
    "epsilon_greedy fill_normal mixed move_value next_bits row_argmax row_mean uniform uniform_pair"
)
kernels = SimpleNamespace(**{name: called(getattr(formulas, name)) for name in KERNELS.split()})


def called_rule(function):
    return called(compiled_rule(function))


def test_generators_give_the_reference_numbers_of_their_authors():
    state = np.array([1, 2, 3, 4], np.uint64)
    assert [int(kernels.next_bits(state)) for _ in range(6)] == [
        41943041,
        58720359,
        3588806011781223,
        3591011842654386,
        9228616714210784205,
        9973669472204895162,
    ]
    golden = int(formulas.GOLDEN)
    counters = [np.uint64((1234567 + n * golden) % 2**64) for n in (1, 2, 3)]
    assert [int(kernels.mixed(n)) for n in counters] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_uniforms_are_below_one_and_normal_numbers_are_normal():
    everything = np.uint64(2**64 - 1)
    assert kernels.uniform(everything) == 1 - 2.0**-53
    assert kernels.uniform_pair(everything) == (1 - 2.0**-24, 1 - 2.0**-24)
    values = np.empty(200_001, np.float32)
    kernels.fill_normal(values, np.array([1, 2, 3, 4], np.uint64), 0.1)
    assert abs(values.mean()) < 0.1 * 4 / np.sqrt(values.size)
    np.testing.assert_allclose(values.std(), 0.1, rtol=0.01)
    np.testing.assert_allclose((np.abs(values) < 0.1).mean(), 0.6827, atol=0.005)


@pytest.mark.parametrize("rate", [2.5, 0.3, 40.0])
def test_poisson_draws_are_the_inverse_distribution_function(rate, random):
    network = SupplyNetwork(demand_rate=(rate,), capacity=(2, 200), initial_stocks=(0,))
    cdf = poisson_cdf(rate)
    below = torch.nextafter(cdf, torch.zeros(()).double())
    uniforms = torch.cat([double(COUNT, random=random), cdf[cdf < 1], below, torch.zeros(1)])
    step = scalars(SupplyChainEnv(network)).step
    # With 200 in stock and nothing ordered, what is missing afterwards is the demand.
    drawn = [200 - step(NONE, 200, 0, u)[1] for u in uniforms.tolist()]
    assert drawn == poisson_demand(uniforms, cdf).tolist()


def test_grid_kernel_is_the_transition_of_every_state_and_action():
    step = scalars(SubgoalGridEnv()).step
    state, action = torch.cartesian_prod(torch.arange(150), torch.arange(4)).unbind(-1)
    results = [step(NONE, *row, 0.0)[1:] for row in rows(state, action)]
    expected = [column.tolist() for column in subgoal_grid_step(state, action)]
    assert [list(column) for column in zip(*results, strict=True)] == expected


def physics_states(count, random, dtype):
    scale = torch.tensor([2.6, 3.0, 0.25, 3.0], dtype=torch.float64)
    return ((2 * double(count, 4, random=random) - 1) * scale).to(dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-14)])
def test_cart_kernel_moves_as_the_tensor_function(dtype, tolerance, random):
    step = scalars(CartPoleEnv(dtype=dtype)).step
    physics = physics_states(COUNT, random, dtype)
    action = torch.randint(2, (COUNT,), generator=random)
    expected, reward, terminated = cart_pole_step(physics, action)
    results = [
        step(tuple(p), 0, a, 0.0) for p, a in zip(physics.numpy(), action.tolist(), strict=True)
    ]
    after = torch.tensor([r[0] for r in results], dtype=dtype)
    torch.testing.assert_close(after, expected, rtol=tolerance, atol=tolerance)
    assert [r[2] for r in results] == reward.tolist()
    assert [r[3] for r in results] == terminated.tolist()
    assert 0.05 < terminated.float().mean() < 0.95


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cart_kernel_bins_exactly_as_the_tensor_function(dtype, random):
    cell = scalars(CartPoleEnv(dtype=dtype)).cell
    physics = physics_states(COUNT, random, dtype) * 2
    halfway = torch.tensor([2.4, 0.25, -0.41887902 * 0.6, 0.43633232], dtype=dtype)
    physics[:1000] = halfway + physics[:1000].sign() * torch.finfo(dtype).eps / 4
    cells = [cell(tuple(p), 0) for p in physics.numpy()]
    assert cells == cart_pole_bins(physics).tolist()


@pytest.mark.parametrize("network", [SupplyNetwork(), SMALL_NETWORK])
def test_supply_kernel_steps_exactly_as_the_tensor_function(network, random):
    step = scalars(SupplyChainEnv(network)).step
    state = torch.randint(network.num_states, (COUNT,), generator=random)
    action = torch.randint(network.num_actions, (COUNT,), generator=random)
    uniform = double(COUNT, random=random)
    demand = poisson_demand(uniform, poisson_cdf(network.demand_rate[0])).unsqueeze(-1)
    stocks = torch.stack(unravel_index(state, network.sizes), -1)
    after, reward, _ = supply_chain_step(stocks, action, demand, network)
    results = [step(NONE, *row) for row in rows(state, action, uniform)]
    assert [r[1] for r in results] == ravel_index(after.unbind(-1), network.sizes).tolist()
    assert [r[2] for r in results] == reward.tolist()


@pytest.mark.parametrize(
    ("likelihood", "parameters"),
    [
        (StudentTLikelihood(NormalGammaPrior(0.3, 2.0, 500.0, 20.0)), [0.3, 2.0, 500.0, 20.0]),
        (StudentTLikelihood(NormalGammaPrior(0.0, 2.0, 500.0, None)), [0.0, 2.0, 500.0, 0.0]),
        (GaussianLikelihood(3.0), [0.0, 0.0, 0.0, 3.0]),
        (GaussianLikelihood(), [0.0, 0.0, 0.0, 0.0]),
    ],
    ids=["student", "scale-free", "gaussian", "running"],
)
def test_bmc_kernel_is_bmc_step(likelihood, parameters, random):
    alpha = 10 ** double(COUNT, random=random, low=-6, high=6)
    beta = alpha * 10 ** double(COUNT, random=random, low=-1, high=3)
    count = torch.randint(2000, (COUNT,), generator=random).double()
    mean, m2 = double(COUNT, random=random, low=-5, high=5), 3 * count
    greedy = double(COUNT, random=random, low=-20, high=20)
    uniform = greedy - 10 ** double(COUNT, random=random, low=-6, high=2)
    greedy[:50] = torch.inf
    before = BMCPosterior(alpha, beta, count, mean, m2 * (count > 1))
    learns = usable(greedy, uniform)
    after, ratio = bmc_step(before, greedy, uniform, learns, likelihood)
    zeros = torch.zeros_like(alpha)
    memory = torch.stack([alpha / (alpha + beta), *before, zeros + 9, zeros], -1).numpy()
    parameters, learn = np.array(parameters), called_rule(BMCRule.learn)
    for row, (q, u) in zip(memory, rows(greedy, uniform), strict=True):
        learn(parameters, row, row, 0, q, u, 0.0)
    expected = [after.alpha / (after.alpha + after.beta), *after, 9 + ratio, ~learns]
    np.testing.assert_allclose(memory, torch.stack(expected, -1).numpy(), rtol=1e-12)
    assert memory[:, -1].sum() == 50


def test_moment_matching_agrees_for_every_strength_of_evidence(random):
    alpha, beta = (10 ** double(COUNT, random=random, low=-3, high=5) for _ in range(2))
    ratio = 10 ** double(COUNT, random=random, low=-12, high=3)
    ratio = ratio * torch.where(double(COUNT, random=random) < 0.5, -1.0, 1.0)
    ratio[:10] = 0.0
    match = called_rule(moments_matched)
    result = [match(*row) for row in rows(alpha, beta, ratio)]
    expected = torch.stack(functional.beta_moment_match(alpha, beta, ratio), -1)
    np.testing.assert_allclose(np.array(result), expected, rtol=1e-12)


def test_vdbe_kernel_is_vdbe_epsilon(random):
    epsilon = double(COUNT, random=random)
    change = double(COUNT, random=random, low=-3, high=3)
    sigma = 10 ** double(COUNT, random=random, low=-2, high=2)
    delta = double(COUNT, random=random)
    expected = functional.vdbe_epsilon(epsilon, change, sigma, delta)
    parameters, learn = torch.stack([sigma, delta], -1).numpy(), called_rule(VDBERule.learn)
    local = torch.stack([torch.zeros(COUNT), epsilon], -1).numpy()
    for own, row, moved in zip(parameters, local, change.tolist(), strict=True):
        learn(own, row, row, 1, 0.0, 0.0, moved)
    np.testing.assert_allclose(local[:, 1], expected, rtol=1e-14)
    assert not local[:, 0].any()
    before = local[0, 1]
    learn(parameters[0], local[0], local[0], 1, 0.0, 0.0, float("nan"))
    assert local[0, 1] == before == called_rule(VDBERule.epsilon)(local[0], local[0], 1)


@pytest.mark.parametrize(
    "strategy",
    [
        ConstantEpsilon(0.3, batch_shape=[COUNT]),
        GeometricEpsilon(0.5, torch.linspace(0.8, 1, COUNT), batch_shape=[COUNT]),
        PowerEpsilon(0.5, torch.linspace(0, 2, COUNT), first_index=0, batch_shape=[COUNT]),
        PowerEpsilon(0.7, torch.linspace(0, 2, COUNT), first_index=1, batch_shape=[COUNT]),
    ],
    ids=["constant", "geometric", "power from 0", "power from 1"],
)
def test_schedules_agree_however_the_episodes_were_counted(strategy, random):
    counted = torch.randint(500, (COUNT,), generator=random)
    more = torch.randint(500, (COUNT,), generator=random)
    if hasattr(strategy, "episodes"):
        strategy.episodes.copy_(counted)
    rules, arrays = read_strategy(strategy, COUNT, 1, 1)
    if hasattr(strategy, "episodes"):
        strategy.episodes.add_(more)
    begin = called_rule(rules[arrays.rule[0]].begin)
    for parameters, memory, k in zip(arrays.parameters, arrays.memory, more.tolist(), strict=True):
        begin(parameters, memory, k)
    np.testing.assert_allclose(arrays.memory[:, 0], strategy.eps, rtol=1e-13)


def test_linear_annealing_counts_every_step():
    frames = torch.arange(120)
    strategy = LinearEpsilon(0.9, 0.1, num_frames=100, batch_shape=[120])
    strategy.frames.copy_(frames)
    rules, arrays = read_strategy(strategy, 120, 1, 1)
    learn = called_rule(rules[arrays.rule[0]].learn)
    for parameters, memory in zip(arrays.parameters, arrays.memory, strict=True):
        learn(parameters, memory, memory, 0, 0.0, 0.0, 0.0)
    strategy.frames += 1
    np.testing.assert_array_equal(arrays.memory[:, 0], strategy.eps)


def test_epsilon_greedy_agrees_in_single_precision(random):
    draws = torch.rand(2, COUNT, generator=random)
    epsilon = torch.rand(COUNT, generator=random)
    epsilon[:100] = draws[0, :100]
    draws[1, 100:200] = 1 - 2.0**-24
    for actions in (2, 4, 100):
        greedy = torch.randint(actions, (COUNT,), generator=random)
        columns = (x.numpy() for x in (greedy, epsilon, *draws))
        result = [kernels.epsilon_greedy(*row, actions) for row in zip(*columns, strict=True)]
        random_action = uniform_action(draws[1], actions)
        acted = epsilon_greedy_action(greedy, epsilon, draws[0], random_action)
        assert result == acted.tolist()


def tied(*size, random):
    """Numbers of which many are equal."""
    return torch.randint(-3, 4, size, generator=random).float() / 4


@pytest.mark.parametrize("actions", [1, 2, 4, 100])
def test_table_kernel_is_tabular_update_and_keeps_argmax_and_sum(actions, random):
    states = 3
    table = tied(COUNT, states, actions, random=random)
    state = torch.randint(states, (COUNT,), generator=random)
    action = torch.randint(actions, (COUNT,), generator=random)
    greedy, sums = table.argmax(-1).numpy().astype(np.int16), table.double().sum(-1).numpy()
    mine = table.numpy().copy()
    # Each table is written twice, so that what was kept the first time is used the second time.
    for _ in range(2):
        target = tied(COUNT, random=random)
        rate = torch.where(torch.rand(COUNT, generator=random) < 0.7, 1.0, 0.3)
        expected = tabular_update(table, state, action, target, rate)
        columns = (mine, greedy, sums, *(x.numpy() for x in (state, action, target, rate)))
        changes = [kernels.move_value(*row) for row in zip(*columns, strict=True)]
        assert changes == expected.tolist()
        np.testing.assert_array_equal(mine, table.numpy())
        np.testing.assert_array_equal(greedy, table.argmax(-1).numpy())
        np.testing.assert_allclose(sums, table.double().sum(-1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("actions", "tolerance"), [(2, 0.0), (4, 6e-8), (100, 3e-7)])
def test_row_mean_is_the_mean(actions, tolerance, random):
    table = torch.randn(COUNT, actions, generator=random)
    sums = table.double().sum(-1).tolist()
    mean = [kernels.row_mean(row, total) for row, total in zip(table.numpy(), sums, strict=True)]
    size = table.abs().mean(-1).numpy()
    assert np.all(np.abs(np.array(mean) - table.mean(-1).numpy()) <= tolerance * size)


def test_a_row_that_diverged_to_nan_does_not_hang():
    assert kernels.row_argmax(np.full(100, np.nan, np.float32), 100) == 99
