"""Finite MDPs: tables in, tables out, and what dynamic programming says of them."""

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bmc_torchrl.envs import (
    FiniteMDP,
    TabularEnv,
    chain,
    cliff_walking,
    deep_sea,
    frozen_lake,
    garnet,
    gymnasium_mdp,
    maze,
    optimal_tabular_values,
    random_tabular_values,
    taxi,
    windy_grid,
)
from bmc_torchrl.envs.grid_world import DOWN, LEFT, RIGHT, UP
from bmc_torchrl.envs.gymnasium_ids import TABULAR_ID

TOY_TEXT = {
    "lake": (frozen_lake, ("FrozenLake-v1", {})),
    "large lake": (lambda: frozen_lake("8x8"), ("FrozenLake-v1", {"map_name": "8x8"})),
    "dry lake": (
        lambda: frozen_lake(slippery=False),
        ("FrozenLake-v1", {"is_slippery": False}),
    ),
    "cliff": (cliff_walking, ("CliffWalking-v1", {})),
    "wet cliff": (lambda: cliff_walking(slippery=True), ("CliffWalking-v1", {"is_slippery": True})),
    "taxi": (taxi, ("Taxi-v4", {})),
    "taxi in rain": (lambda: taxi(rainy=True), ("Taxi-v4", {"is_rainy": True})),
}
ROW = st.integers(0, 2**32 - 1)


def dense(mdp: FiniteMDP):
    """Expected reward [S, A], and the probability of going on to each state [S, A, S], in numpy."""
    p, r = mdp.probabilities.numpy(), mdp.rewards.numpy()
    going = np.zeros((mdp.num_states, mdp.num_actions, mdp.num_states))
    for s, a, k in np.ndindex(p.shape):
        if not mdp.terminated[s, a, k]:
            going[s, a, mdp.successors[s, a, k]] += p[s, a, k]
    return (p * r).sum(-1), going


@pytest.mark.parametrize("name", TOY_TEXT)
def test_the_tables_are_those_of_gymnasium(name):
    make, (theirs, options) = TOY_TEXT[name]
    mdp, env = make(), gymnasium.make(theirs, **options).unwrapped
    np.testing.assert_allclose(mdp.start, env.initial_state_distrib, rtol=1e-12)
    for s, actions in env.P.items():
        for a, outcomes in actions.items():
            for k, (chance, to, reward, over) in enumerate(outcomes):
                assert mdp.probabilities[s, a, k].item() == pytest.approx(chance, rel=1e-12)
                assert mdp.successors[s, a, k] == to
                assert mdp.rewards[s, a, k] == reward
                assert mdp.terminated[s, a, k].item() == over
            assert mdp.probabilities[s, a, len(outcomes) :].sum() == 0


@pytest.mark.parametrize("name", TOY_TEXT)
def test_the_same_seed_walks_as_in_gymnasiums_own_environment(name):
    make, (theirs, options) = TOY_TEXT[name]
    original = gymnasium.make(theirs, max_episode_steps=-1, **options)
    ours = gymnasium.make(TABULAR_ID, mdp=make(), max_episode_steps=-1)
    actions = np.random.default_rng(1).integers(ours.action_space.n, size=400)
    assert original.reset(seed=3)[0] == ours.reset(seed=3)[0]
    for action in actions:
        seen, got = original.step(action)[:4], ours.step(action)[:4]
        assert seen == got
        if seen[2]:
            assert original.reset()[0] == ours.reset()[0]


@given(ROW, st.integers(1, 12), st.integers(1, 4), st.data())
@settings(max_examples=40, deadline=None)
def test_dense_tables_come_back_from_outcomes(seed, states, actions, data):
    branching = data.draw(st.integers(1, states))
    mdp = garnet(states, actions, branching, seed)
    reward, transitions = dense(mdp)
    again = FiniteMDP.from_tables(transitions, reward)
    assert again.num_outcomes <= branching
    for one, other in zip(dense(again), (reward, transitions), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-15)


@given(ROW, st.sampled_from([0.0, 0.5, 0.95]))
@settings(max_examples=25, deadline=None)
def test_values_are_those_of_plain_value_iteration_and_of_a_linear_system(seed, gamma):
    mdp = garnet(9, 3, 4, seed)
    reward, going = dense(mdp)
    values = np.zeros(9)
    for _ in range(2000):
        values = (reward + gamma * going @ values).max(-1)
    optimum = optimal_tabular_values(mdp, gamma)
    np.testing.assert_allclose(optimum.values, values, atol=1e-8)
    taken = reward + gamma * going @ values
    policy = optimum.policy.numpy()
    np.testing.assert_allclose(taken[np.arange(9), policy], values, atol=1e-7)
    average = np.linalg.solve(np.eye(9) - gamma * going.mean(1), reward.mean(1))
    np.testing.assert_allclose(random_tabular_values(mdp, gamma), average, atol=1e-8)


def test_a_horizon_counts_the_steps_that_are_left():
    mdp = garnet(6, 2, 3, seed=4)
    reward, going = dense(mdp)
    best, average = np.zeros(6), np.zeros(6)
    for _ in range(7):
        best = (reward + 0.9 * going @ best).max(-1)
        average = (reward + 0.9 * going @ average).mean(-1)
    np.testing.assert_allclose(optimal_tabular_values(mdp, 0.9, horizon=7).values[0], best)
    np.testing.assert_allclose(random_tabular_values(mdp, 0.9, horizon=7), average)


@pytest.mark.parametrize(
    ("make", "gamma", "max_steps", "expected", "tolerance"),
    [
        # Slippery 4×4: the goal is reached with probability 14/17 in the end.
        (frozen_lake, 1.0, 5000, 14 / 17, 1e-9),
        (lambda: frozen_lake(slippery=False), 0.9, 100, 0.9**5, 1e-12),
        (cliff_walking, 1.0, 200, -13.0, 1e-12),
        (windy_grid, 1.0, 200, -15.0, 1e-12),
        (lambda: deep_sea(8), 1.0, 8, 0.99, 1e-12),
        (lambda: deep_sea(8, seed=3), 1.0, 8, 0.99, 1e-12),
        (lambda: chain(slip=0.0), 1.0, 10, 60.0, 1e-9),
    ],
)
def test_optima_that_are_known(make, gamma, max_steps, expected, tolerance):
    env = TabularEnv(make(), max_steps=max_steps)
    assert env.optimal_return(gamma) == pytest.approx(expected, abs=tolerance)


def test_a_thousand_steps_of_the_chain_pay_what_strens_has():
    long, longer = (
        TabularEnv(chain(), max_steps=steps).optimal_return(1.0) for steps in (200, 1200)
    )
    assert round(longer - long) == 3677


@pytest.mark.parametrize("make", [frozen_lake, taxi, lambda: garnet(10, 3, 4, seed=0)])
def test_random_actions_earn_what_dynamic_programming_says(make):
    env = TabularEnv(make(), batch_size=[20_000], max_steps=30, reward_scale=0.5)
    env.set_seed(1)
    steps = env.rollout(30, break_when_any_done=False)["next"]
    reward, done = (steps[key].squeeze(-1) for key in ("reward", "done"))
    going = torch.cat([torch.ones(20_000, 1), (~done).cumprod(-1)[:, :-1]], -1)
    returns = (0.9 ** torch.arange(30) * reward * going).sum(-1).double()
    error = returns.std() / 20_000**0.5
    assert abs(returns.mean() - env.random_return(0.9)) < 4 * error


def test_deep_sea_is_that_of_bsuite():
    bsuite = pytest.importorskip("bsuite.environments.deep_sea")
    theirs, ours = bsuite.DeepSea(6, mapping_seed=7), deep_sea(6)
    right = theirs._action_mapping
    for path in np.random.default_rng(0).integers(2, size=(200, 6)):
        theirs.reset()
        state = 0
        for action in path:
            row, column = divmod(state, 6)
            step = theirs.step(action)
            chosen = int(action == right[row, column])
            assert ours.rewards[state, chosen, 0].item() == pytest.approx(step.reward, abs=1e-12)
            assert ours.terminated[state, chosen, 0].item() == step.last()
            state = ours.successors[state, chosen, 0].item()
        assert state == 36


def test_a_seed_hides_which_action_of_deep_sea_is_right():
    plain, hidden = deep_sea(9), deep_sea(9, seed=1)
    right = hidden.rewards[:81, 1, 0] != 0
    assert 0.3 < right.double().mean() < 0.7
    for state in range(81):
        actions = [0, 1] if right[state] else [1, 0]
        assert torch.equal(hidden.successors[state, actions], plain.successors[state])


def test_a_garnet_has_its_branches_and_its_seed():
    mdp, again, other = (garnet(30, 4, 5, seed=seed) for seed in (2, 2, 3))
    assert all(row.unique().numel() == 5 for row in mdp.successors.reshape(-1, 5))
    assert torch.equal(mdp.probabilities, again.probabilities)
    assert not torch.equal(mdp.rewards, other.rewards)
    assert mdp.shortest_episode is None


def test_a_maze_moves_as_it_is_drawn():
    mdp = maze("S.#\n.XG", goal=5.0, trap=-5.0, step=-1.0, bump=-2.0)
    wanted = {
        (0, LEFT): (0, -2.0, False),
        (0, UP): (0, -2.0, False),
        (0, RIGHT): (1, -1.0, False),
        (0, DOWN): (3, -1.0, False),
        (1, RIGHT): (1, -2.0, False),
        (1, DOWN): (4, -6.0, True),
        (3, RIGHT): (4, -6.0, True),
    }
    for (state, action), (to, reward, ends) in wanted.items():
        at = state, action, 0
        assert (mdp.successors[at], mdp.rewards[at], mdp.terminated[at]) == (to, reward, ends)
    slippery = maze("S.G\n...", slip=0.2)
    assert slippery.probabilities[0, RIGHT].tolist() == pytest.approx([0.8, 0.1, 0.1])
    assert slippery.successors[0, RIGHT].tolist() == [1, 3, 0]
    assert maze("SSG").start.tolist() == [0.5, 0.5, 0.0]


def test_wind_lifts_the_agent_that_leaves_a_column():
    calm, wild = windy_grid(), windy_grid(stochastic=True)
    assert calm.successors[3 * 10 + 6, RIGHT, 0] == 1 * 10 + 7
    assert calm.successors[0 * 10 + 4, UP, 0] == 4
    assert wild.successors[3 * 10 + 6, RIGHT].tolist() == [27, 17, 7]
    assert wild.probabilities[30, RIGHT].tolist() == [1.0, 0.0, 0.0]


def test_tables_grow_with_outcomes_and_not_with_states_squared():
    assert taxi().successors.shape == (500, 6, 1)
    assert deep_sea(40).successors.shape == (1601, 2, 1)


GOOD = {
    "transitions": [[[0.5, 0.5], [1.0, 0.0]], [[0.0, 1.0], [0.0, 1.0]]],
    "rewards": [[0.0, 1.0], [0.0, 0.0]],
    "terminal": [False, True],
    "start": [1.0, 0.0],
}


def test_the_rows_of_terminal_states_are_not_read():
    nonsense = [[0.3, np.nan], [-1.0, 7.0]]
    rows = {**GOOD, "transitions": [GOOD["transitions"][0], nonsense]}
    mdp = FiniteMDP.from_tables(**rows)
    assert optimal_tabular_values(mdp, 0.9).values[1] == 0
    assert mdp.probabilities[1].sum() == 2


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"transitions": [[0.5, 0.5]]}, r"transitions must have the shape \[states, actions, st"),
        ({"transitions": np.ones((2, 2, 3)) / 3}, r"transitions .* got \[2, 2, 3\]"),
        ({"transitions": "probabilities"}, "transitions must be an array of numbers"),
        (
            {"transitions": [[[0.5, 0.4], [1.0, 0.0]], [[0.0, 1.0]] * 2]},
            r"transitions must sum to 1 over next states, got 0.9 at \[0, 0\]: divide by the sum",
        ),
        (
            {"transitions": [[[1.5, -0.5], [1.0, 0.0]], [[0.0, 1.0]] * 2]},
            r"transitions must be probabilities.* got -0.5 at \[0, 0, 1\]",
        ),
        (
            {"transitions": [[[np.nan, 0.5], [1.0, 0.0]], [[0.0, 1.0]] * 2]},
            r"transitions must be probabilities.* got nan",
        ),
        ({"rewards": [0.0, 1.0]}, r"rewards must have the shape \[states, actions\] = \[2, 2\]"),
        ({"rewards": [[0.0, np.inf], [0.0, 0.0]]}, r"rewards must be finite, got inf at \[0, 1\]"),
        ({"rewards": None}, "rewards must be an array of numbers, got None"),
        ({"terminal": [True]}, r"terminal must be true or false for each state, bool \[2\]"),
        ({"terminal": [0, 1]}, "terminal must be true or false for each state"),
        ({"start": [0.5, 0.4]}, "start must sum to 1 over states, got 0.9"),
        ({"start": [1.5, -0.5]}, "start must be probabilities"),
        ({"start": [1.0]}, r"start must be a state in \[0, 2\) or a distribution"),
        ({"start": 2}, r"start must be a state in \[0, 2\)"),
        ({"start": 1}, "start may not be a terminal state, got 1"),
        ({"reward_scale": 0.0}, "reward_scale must be finite and positive, got 0.0"),
        ({"reward_scale": np.nan}, "reward_scale must be finite and positive, got nan"),
        ({"reward_scale": 1e39}, "larger than float32 holds: lower it"),
        ({"switch_at": 3}, "after and switch_at go together, got no after and switch_at=3"),
        ({"after": chain(2)}, "after and switch_at go together, got after and switch_at=None"),
        ({"after": chain(3), "switch_at": 3}, "after must have as many .* 2 and 2; got 3 and 2"),
        ({"after": chain(2), "switch_at": 0}, "switch_at must be a number of episodes .* got 0"),
        ({"after": [[1.0]], "switch_at": 1}, "after must be a FiniteMDP, got list"),
        ({"transitions": chain(2)}, "rewards, terminal, start: a FiniteMDP has its own"),
    ],
)
def test_bad_tables_are_refused_by_name(changed, words):
    TabularEnv(**GOOD)
    with pytest.raises(ValueError, match=words):
        TabularEnv(**{**GOOD, **changed})


OUTCOMES = {
    "successors": [[[0]]],
    "probabilities": [[[1.0]]],
    "rewards": 0.0,
    "terminated": False,
    "start": 0,
}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"successors": [[0]]}, r"successors must have the shape \[states, actions, outcomes\]"),
        ({"successors": [[[0.0]]]}, "successors must be integers"),
        ({"successors": [[[1]]]}, r"successors must be states in \[0, 1\)"),
        ({"probabilities": [[[0.5, 0.5]]]}, r"probabilities must have the shape \[1, 1, 1\]"),
        ({"probabilities": [[[0.5]]]}, "probabilities must sum to 1 over outcomes, got 0.5"),
        ({"rewards": [1.0, 2.0]}, r"rewards must have the shape \[1, 1, 1\] of successors"),
        ({"terminated": 1.0}, "terminated must be true or false"),
    ],
)
def test_bad_outcomes_are_refused_by_name(changed, words):
    FiniteMDP(**OUTCOMES)
    with pytest.raises(ValueError, match=words):
        FiniteMDP(**{**OUTCOMES, **changed})


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: gymnasium_mdp("CartPole-v1"), "'CartPole-v1' has no tables P"),
        (lambda: gymnasium_mdp("Taxi-v4", fickle_passenger=True), "fickle_passenger=True is not"),
        (lambda: gymnasium_mdp("NoSuchLake-v1"), "Gymnasium cannot make 'NoSuchLake-v1'"),
        (lambda: FiniteMDP.from_outcomes({0: {0: [(1.0, 0)]}}, 0), r"outcomes\[state\]\[action\]"),
        (lambda: FiniteMDP.from_outcomes({0: {1: []}}, 0), r"outcomes\[state\]\[action\]"),
        (lambda: maze("S.\nG"), "lines of one length"),
        (lambda: maze("S?G"), "letters # . S G X"),
        (lambda: maze("..G"), "a start S and a goal G"),
        (lambda: maze("SG", slip=1.5), "slip must be a probability, got 1.5"),
        (lambda: chain(1), "length must be at least 2, got 1"),
        (lambda: deep_sea(0), "size must be at least 1, got 0"),
        (lambda: garnet(3, 2, 4, seed=0), "branching must be at most states=3, got 4"),
        (lambda: windy_grid(goal=(7, 0)), r"goal: cell \(7, 0\) is outside the 7 × 10 grid"),
        (lambda: optimal_tabular_values(chain(), 1.0), "an endless sum must be discounted"),
        (lambda: random_tabular_values(chain(), 0.9, horizon=0), "horizon must be at least 1"),
    ],
)
def test_tasks_that_cannot_be_are_refused_by_name(call, words):
    with pytest.raises(ValueError, match=words):
        call()
