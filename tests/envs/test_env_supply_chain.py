"""Supply-chain against a scalar reference, by hand and by its exact optimum."""

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import torch

from bmc_torchrl.envs import (
    SupplyChainEnv,
    SupplyNetwork,
    optimal_supply_chain_values,
    supply_chain_step,
)
from bmc_torchrl.envs.factored import active_features
from bmc_torchrl.envs.poisson import poisson_cdf, poisson_demand
from bmc_torchrl.envs.supply_chain import supply_chain_action

TWO = SupplyNetwork(
    price=0.7,
    kappa_pr=0.15,
    kappa_st=(0.01, 0.02, 0.03),
    kappa_tr=(0.1, 0.25),
    zeta=(2, 3),
    capacity=(6, 4, 5),
    rho_max=3,
    ship_max=(4, 2),
    demand_rate=(1.0, 2.5),
    initial_stocks=(3, 1, 0),
)

FULL_TRUCKS = SupplyNetwork(truck_cost="floor")


def period_by_hand(stocks, ships, produce, demands, network):
    """One period in plain Python: the reward, the next stocks and what moved."""
    factory, *shelves = stocks
    gain = -sum(cost * stock for cost, stock in zip(network.kappa_st, stocks, strict=True))
    after, moved = [], []
    for j, shelf in enumerate(shelves):
        sold = min(demands[j], shelf)
        shelf -= sold
        shipped = min(ships[j], factory)
        if shelf + shipped > network.capacity[j + 1]:
            shipped = network.capacity[j + 1] - shelf
        factory -= shipped
        gain += network.price * sold
        gain -= network.kappa_tr[j] * getattr(math, network.truck_cost)(shipped / network.zeta[j])
        after.append(shelf + shipped)
        moved.append((sold, shipped))
    produced = min(produce, network.capacity[0] - factory)
    gain -= network.kappa_pr * produced
    return gain, (factory + produced, *after), moved, produced


@pytest.mark.parametrize(
    ("network", "count"),
    [(SupplyNetwork(), 100_000), (TWO, 20_000), (replace(TWO, truck_cost="floor"), 20_000)],
)
def test_random_periods_equal_the_scalar_reference(network, count):
    generator = torch.Generator().manual_seed(1)
    sizes = network.sizes
    stocks = torch.stack([torch.randint(s, (count,), generator=generator) for s in sizes], -1)
    action = torch.randint(network.num_actions, (count,), generator=generator)
    demand = torch.randint(12, (count, network.warehouses), generator=generator)
    after, reward, terminated = supply_chain_step(stocks, action, demand, network)
    assert not terminated.any()
    *ships, produce = (part.tolist() for part in supply_chain_action(action, network))
    rows = zip(stocks.tolist(), zip(*ships, strict=True), produce, demand.tolist(), strict=True)
    expected = [period_by_hand(*row, network) for row in rows]
    assert after.tolist() == [list(result[1]) for result in expected]
    gains = torch.tensor([result[0] for result in expected])
    torch.testing.assert_close(reward, gains, atol=2e-6, rtol=0)


@pytest.mark.parametrize("network", [SupplyNetwork(), TWO])
def test_stock_is_conserved_and_limits_hold_in_every_state(network):
    state = torch.arange(network.num_states)[:: max(1, network.num_states // 500)]
    env = SupplyChainEnv(network, batch_size=state.shape)
    stocks = env.stocks(state).reshape(-1, 1, 1, network.warehouses + 1)
    action = torch.arange(network.num_actions).reshape(1, -1, 1)
    demand = torch.arange(8).reshape(1, 1, -1, 1).expand(-1, -1, -1, network.warehouses)
    after, _, _ = supply_chain_step(stocks, action, demand, network)
    sold = torch.minimum(demand, stocks[..., 1:])
    shipped = after[..., 1:] - stocks[..., 1:] + sold
    produced = after[..., 0] - stocks[..., 0] + shipped.sum(-1)
    assert (after >= 0).all()
    assert (after <= torch.tensor(network.capacity)).all()
    assert (shipped >= 0).all()
    assert (shipped <= torch.tensor(network.ship_max)).all()
    assert (shipped.sum(-1) <= stocks[..., 0]).all()
    assert (produced >= 0).all()
    assert (produced <= network.rho_max).all()


@pytest.mark.parametrize(
    ("stocks", "action", "demand", "after", "reward"),
    [
        # ship 6 (2 trucks), produce 7, sell 3 of 4
        ((10, 4), 67, 3, (11, 7), 0.5 * 3 - 0.1 * 7 - 0.02 * 14 - 0.1 * 2),
        # nothing in the warehouse: the demand of 5 is lost, not owed
        ((10, 0), 0, 5, (10, 0), -0.2),
        # the factory has only 2 to ship, then produces 9
        ((2, 0), 99, 0, (9, 2), -0.9 - 0.04 - 0.1),
        # the warehouse is full but sells 4, so 4 of the 9 fit
        ((20, 50), 90, 4, (16, 50), 2.0 - 1.4 - 0.1),
        # the factory is full: what it ships is the room for production
        ((50, 10), 39, 0, (50, 13), -0.3 - 1.2 - 0.1),
        # exactly one truck, and one item more
        ((10, 0), 50, 0, (5, 5), -0.2 - 0.1),
        ((10, 0), 60, 0, (4, 6), -0.2 - 0.2),
    ],
)
def test_listed_periods(stocks, action, demand, after, reward):
    got = supply_chain_step(torch.tensor(stocks), torch.tensor(action), torch.tensor([demand]))
    assert tuple(got[0].tolist()) == after
    assert got[1].item() == pytest.approx(reward, abs=1e-6)


def test_the_hundred_actions_are_ship_times_ten_plus_produce():
    ship, produce = supply_chain_action(torch.arange(100))
    assert ship.tolist() == [a // 10 for a in range(100)]
    assert produce.tolist() == [a % 10 for a in range(100)]


def test_joint_actions_of_two_warehouses_count_production_fastest():
    first, second, produce = supply_chain_action(torch.arange(TWO.num_actions), TWO)
    expected = [(i, j, p) for i in range(5) for j in range(3) for p in range(4)]
    assert list(zip(first.tolist(), second.tolist(), produce.tolist(), strict=True)) == expected


def test_both_stocks_can_be_told_from_the_state():
    state = torch.arange(2601)
    env = SupplyChainEnv()
    assert torch.equal(env.state(env.stocks(state)), state)
    assert active_features(torch.tensor(10 * 51 + 3), env.sizes).tolist() == [10, 51 + 3]


@pytest.mark.parametrize("rate", [0.3, 2.5, 40.0, 1000.0])
def test_the_table_is_scipys_distribution_function(rate):
    cdf = poisson_cdf(rate)
    expected = scipy.stats.poisson.cdf(np.arange(len(cdf)), rate)
    np.testing.assert_allclose(cdf.numpy(), expected, atol=2e-12, rtol=0)
    assert cdf[-1] == 1.0
    assert scipy.stats.poisson.sf(len(cdf) - 1, rate) < 2.0**-54


def test_demand_inverts_the_table_on_both_sides_of_every_jump():
    cdf = poisson_cdf(2.5)
    jumps = cdf[:20]  # beyond, neighbours are too close to tell apart
    below = torch.nextafter(jumps, torch.zeros(()).double())
    assert poisson_demand(below, cdf).tolist() == list(range(20))
    assert poisson_demand(jumps, cdf).tolist() == list(range(1, 21))
    largest = torch.tensor(1 - 2.0**-53, dtype=torch.float64)
    assert poisson_demand(largest, cdf) < len(cdf)
    assert poisson_demand(torch.zeros(1).double(), poisson_cdf(0.0)).tolist() == [0]


def test_the_environment_draws_poisson_demand():
    torch.manual_seed(3)
    env = SupplyChainEnv(batch_size=[200_000])
    start = env.reset().set("state", torch.full((200_000,), 20))  # empty factory, 20 in stock
    after = env.step(start.set("action", torch.zeros(200_000, dtype=torch.int64)))["next"]
    sold = 20 - env.stocks(after["state"])[:, 1]
    counts = torch.bincount(sold, minlength=12)
    observed = [*counts[:10].tolist(), counts[10:].sum().item()]
    chances = [*scipy.stats.poisson.pmf(range(10), 2.5), scipy.stats.poisson.sf(9, 2.5)]
    expected = 200_000 * np.array(chances) / sum(chances)
    assert scipy.stats.chisquare(observed, expected).pvalue > 1e-3


def test_action_values_are_expectations_over_the_truncated_poisson():
    generator = np.random.default_rng(0)
    for network in (SupplyNetwork(), FULL_TRUCKS, TWO):
        short = optimal_supply_chain_values(network, 0.9, horizon=1).values[0]
        longer = optimal_supply_chain_values(network, 0.9, horizon=2)
        demands = [range(25)] * network.warehouses
        for _ in range(15):
            stocks = [int(generator.integers(size)) for size in network.sizes]
            action = int(generator.integers(network.num_actions))
            *ships, produce = (p.item() for p in supply_chain_action(torch.tensor(action), network))
            expected = 0.0
            for wanted in np.stack(np.meshgrid(*demands), -1).reshape(-1, network.warehouses):
                chance = np.prod(scipy.stats.poisson.pmf(wanted, network.demand_rate))
                gain, after, _, _ = period_by_hand(stocks, ships, produce, wanted, network)
                state = int(np.ravel_multi_index(after, network.sizes))
                expected += chance * (gain + 0.9 * short[state].item())
            at = int(np.ravel_multi_index(stocks, network.sizes)), action
            assert longer.action_values[at].item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.slow
def test_simulating_the_optimal_policy_earns_the_optimal_return():
    optimum = optimal_supply_chain_values(gamma=0.95, horizon=200)
    env = SupplyChainEnv(batch_size=[10_000])
    env.set_seed(11)
    tensordict = env.reset()
    total = torch.zeros(10_000, dtype=torch.float64)
    for t in range(200):
        action = optimum.policy[t][tensordict["state"]]
        tensordict = env.step(tensordict.set("action", action))["next"]
        total += 0.95**t * tensordict["reward"].squeeze(-1)
    assert tensordict["truncated"].all()
    error = total.std() / 100
    promised = optimum.values[0, 10 * 51]
    assert (total.mean() - promised).abs() < 3 * error


@pytest.mark.parametrize(("rule", "paid"), [("ceil", [0, 1, 2]), ("floor", [0, 0, 1])])
def test_the_numba_engine_pays_for_the_same_trucks(rule, paid):
    cost = SupplyChainEnv(SupplyNetwork(truck_cost=rule)).scalars().truck_cost
    assert [round(10 * float(cost[shipped])) for shipped in (0, 4, 9)] == paid


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "optimum"), [("ceil", 13.570), ("floor", 14.947)])
def test_what_a_truck_costs_decides_what_can_be_earned(rule, optimum):
    network = SupplyNetwork(truck_cost=rule)
    values = optimal_supply_chain_values(network, gamma=0.95, horizon=200).values[0]
    assert values[network.start_state].item() == pytest.approx(optimum, abs=5e-4)


@pytest.mark.slow
def test_the_endless_optimum_is_a_fixed_point_close_to_the_long_horizon():
    optimum = optimal_supply_chain_values(gamma=0.95)
    finite = optimal_supply_chain_values(gamma=0.95, horizon=200)
    gap = (optimum.values - finite.values[0]).abs().max().item()
    largest = 0.5 * 50 / 0.05  # no step earns more than a sold warehouse
    assert gap < 0.95**200 * largest
    torch.testing.assert_close(optimum.action_values.amax(-1), optimum.values, atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"initial_stocks": (-1, 0)}, "initial_stocks must be between 0 and capacity"),
        ({"initial_stocks": (51, 0)}, "initial_stocks must be between 0 and capacity"),
        ({"initial_stocks": (1, 2, 3)}, "initial_stocks needs 1 or 2 values"),
        ({"capacity": (-1,)}, "capacity"),
        ({"zeta": (0,)}, "zeta"),
        ({"kappa_tr": (0.1, 0.1)}, "kappa_tr needs 1 or 1 values"),
        ({"kappa_tr": 0.1}, r"kappa_tr must be a sequence; write \(0.1,\)"),
        ({"demand_rate": 2.5}, "demand_rate must hold one rate per warehouse"),
        ({"demand_rate": (-1.0,)}, "demand_rate"),
        ({"rho_max": -1}, "rho_max"),
        ({"truck_cost": "round"}, "truck_cost must be 'ceil' or 'floor', got 'round'"),
    ],
)
def test_bad_networks_are_refused_by_name(arguments, words):
    with pytest.raises(ValueError, match=words):
        SupplyNetwork(**arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"gamma": 1.0}, "gamma"), ({"gamma": -0.1}, "gamma"), ({"horizon": 0}, "horizon")],
)
def test_bad_references_are_refused_by_name(arguments, words):
    with pytest.raises(ValueError, match=words):
        optimal_supply_chain_values(TWO, **arguments)


@pytest.mark.parametrize("rate", [math.nan, math.inf, -0.1])
def test_a_rate_that_is_not_a_number_is_refused(rate):
    with pytest.raises(ValueError, match="rate must be finite and not negative"):
        poisson_cdf(rate)


def test_without_demand_the_distribution_function_is_one_at_once():
    assert poisson_cdf(0.0).tolist() == [1.0]


def test_the_network_is_the_papers():
    network = SupplyNetwork()
    assert (network.price, network.kappa_pr, network.kappa_st) == (0.5, 0.1, (0.02, 0.02))
    assert (network.kappa_tr, network.zeta, network.capacity) == ((0.1,), (5,), (50, 50))
    assert (network.rho_max, network.ship_max, network.demand_rate) == (9, (9,), (2.5,))
    assert network.initial_stocks == (10, 0)
    assert network.start_state == 10 * 51


def test_nothing_need_be_produced_stored_or_shipped():
    idle = SupplyNetwork(
        rho_max=0, ship_max=(0,), capacity=(0,), kappa_st=(0.0,), initial_stocks=(0,)
    )
    assert (idle.num_states, idle.num_actions) == (1, 1)
    assert SupplyNetwork(demand_rate=(0.0,), kappa_tr=(0.0,), zeta=(1,)).num_actions == 100
    assert SupplyNetwork(initial_stocks=(50, 50)).start_state == 2600


@pytest.mark.parametrize("network", [SupplyNetwork(), TWO])
def test_lanes_step_as_the_tensor_function(network):
    lanes = SupplyChainEnv(network, batch_size=[7]).lanes()
    state = torch.randint(network.num_states, (7,))
    action = torch.randint(network.num_actions, (7,))
    noise = lanes.transition_noise(torch.rand(7, network.warehouses, dtype=torch.float64))
    env = SupplyChainEnv(network, batch_size=[7])
    after, reward, ended = supply_chain_step(env.stocks(state), action, noise, network)
    found = lanes.step(state, action, noise)
    for part, expected in zip(found, (env.state(after), reward, ended), strict=True):
        assert torch.equal(part, expected)
    first = lanes.start(torch.rand(7, lanes.resets), torch.zeros(7, dtype=torch.int64))
    assert first.tolist() == [network.start_state] * 7


def test_the_endless_optimum_is_where_an_ever_longer_horizon_leads():
    small = SupplyNetwork(capacity=(4,), rho_max=2, ship_max=(2,), initial_stocks=(2, 0))
    endless = optimal_supply_chain_values(small, 0.8, tolerance=1e-6)
    finite = optimal_supply_chain_values(small, 0.8, horizon=100)
    torch.testing.assert_close(endless.values, finite.values[0], atol=2e-6, rtol=0)
    assert torch.equal(endless.policy, finite.policy[0])
    loose = optimal_supply_chain_values(small, 0.8, tolerance=1e-2)
    gap = (loose.values - finite.values[0]).abs().max().item()
    assert 1e-6 < gap <= 1e-2
