"""Finite MDPs in the engines: equal draws, equal runs; rewards in any unit; tasks that change."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import FINITE, tiny, trained
from kernel_cases import double, rows, scalars
from tensordict import TensorDict

from bmc_torchrl.envs import TabularEnv, cliff_walking, frozen_lake, garnet, taxi
from bmc_torchrl.envs.lanes import Noise
from bmc_torchrl.envs.tabular import tabular_step
from bmc_torchrl.learners.settings import (
    ExpectedSarsaSettings,
    PublishedDQNSettings,
    RunSettings,
)
from bmc_torchrl.learners.values import QTable
from bmc_torchrl.lockstep import DQNLockstep, TabularDraws, TabularLockstep
from bmc_torchrl.lockstep.interface import make_engine
from bmc_torchrl.lockstep.numba.tabular import NumbaTabularEngine
from bmc_torchrl.strategies import BMCEpsilon, ConstantEpsilon, StackedEpsilon

NONE = (0.0, 0.0, 0.0, 0.0)
SARSA = ExpectedSarsaSettings(learning_rate=0.5)
NETWORK = PublishedDQNSettings(hidden=(4,), learning_rate=0.01, batch_size=4, capacity=20, epochs=1)


def edges(cdf, random):
    """Uniforms, and the numbers at and just below the steps of distribution functions."""
    below = torch.nextafter(cdf, torch.zeros(()).double())
    return torch.cat([double(2000, random=random), cdf[cdf < 1], below.clamp(min=0), cdf[:1] * 0])


@pytest.mark.parametrize("make", [frozen_lake, taxi, lambda: garnet(12, 3, 5, seed=1)])
def test_the_scalar_form_is_tabular_step(make, random):
    env = TabularEnv(make(), reward_scale=3.0)
    uniform = edges(env.task.cdf.flatten().unique()[:500], random)
    state = torch.randint(env.num_states, uniform.shape, generator=random)
    action = torch.randint(env.num_actions, uniform.shape, generator=random)
    expected = [column.tolist() for column in tabular_step(state, action, uniform, env.task)]
    step = scalars(env).step
    found = [step(NONE, *row)[1:] for row in rows(state, action, uniform)]
    assert [list(column) for column in zip(*found, strict=True)] == expected


@given(st.integers(0, 2**32 - 1), st.integers(1, 6))
@settings(max_examples=25, deadline=None)
def test_outcomes_are_drawn_as_often_as_the_tables_say(seed, branching):
    mdp = garnet(6, 2, branching, seed)
    env = TabularEnv(mdp)
    grid = (torch.arange(4096, dtype=torch.float64) + 0.5) / 4096
    for state in range(6):
        for action in range(2):
            at = torch.full((2, 4096), state)
            at[1] = action
            after, _, _ = tabular_step(*at, grid, env.task)
            counted = torch.bincount(after, minlength=6) / 4096
            expected = torch.zeros(6).double()
            expected[mdp.successors[state, action]] = mdp.probabilities[state, action]
            torch.testing.assert_close(counted.double(), expected, atol=2 / 4096, rtol=0)


def test_every_form_starts_alike(random):
    env = TabularEnv(taxi(), after=taxi(rainy=True), switch_at=2, batch_size=[300])
    draws = torch.rand(300, 4, generator=random)
    episode = torch.arange(300) % 4
    start = env.scalars().start
    found = [start(tuple(row), k) for row, k in rows(draws, episode)]
    lanes = env.lanes()
    expected = lanes.start(draws[:, :1], episode)
    assert [p[0] + state for p, state in found] == expected.tolist()
    assert [state for _, state in found] == lanes.index(expected).tolist()
    assert torch.equal(expected // 500, (episode >= 2).long())
    assert expected.unique().numel() > 150


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("switch_at", [None, 3])
def test_both_engines_learn_equal_tables_from_equal_draws(order, switch_at, random):
    runs, steps = 5, 300
    after = None if switch_at is None else frozen_lake(slippery=False)
    make = lambda: TabularEnv(  # noqa: E731
        frozen_lake(), after=after, switch_at=switch_at, batch_size=[runs], max_steps=9
    )
    build = lambda: StackedEpsilon(  # noqa: E731
        [BMCEpsilon(batch_shape=[3]), ConstantEpsilon(0.25, batch_shape=[2])]
    )
    run = RunSettings(gamma=0.5, episodes=10_000, next_action=order)
    table = QTable(16, 4, runs=runs, initializer="normal")
    tensors = TabularLockstep(make(), build(), run, SARSA, table=table, compiled=False)
    loops = NumbaTabularEngine(make(), build(), run, SARSA, table=table.weight, threads=1)
    uniforms = torch.rand(steps, runs, 9, generator=random)
    act, noise, act_next = (uniforms[..., part] for part in (slice(2), slice(2, 3), slice(7, 9)))
    loops.advance(steps, uniforms=uniforms)
    with torch.no_grad():
        given = Noise(noise.double(), uniforms[..., :0])
        tensors.vector_steps(TabularDraws(act.mT, given, act_next.mT.contiguous()))
    assert (loops.episodes_done > 20).all()
    assert torch.equal(loops.episodes_done, tensors.episodes_done)
    torch.testing.assert_close(loops.table, tensors.table, rtol=0, atol=1e-6)


def ended(engine):
    while not engine.finished:
        engine.advance(200)
    return engine


@pytest.mark.parametrize("power", [-10, 3])
def test_rewards_in_another_unit_give_the_same_run_in_that_unit(power):
    scale = 2.0**power
    run = RunSettings(gamma=0.9, episodes=40, tests=3, seed=2)

    def trained_at(scale):
        env = TabularEnv(cliff_walking(slippery=True), reward_scale=scale, batch_size=[6])
        return ended(make_engine(env, ConstantEpsilon(0.3, batch_shape=[6]), run, SARSA, threads=1))

    plain, scaled = trained_at(1.0), trained_at(scale)
    assert torch.equal(scaled.table, scale * plain.table)
    assert torch.equal(scaled.returns, scale * plain.returns)
    assert torch.equal(scaled.train_returns, scale * plain.train_returns)
    assert torch.equal(scaled.steps, plain.steps)
    mdp = cliff_walking(slippery=True)
    for name in ("optimal_return", "random_return"):
        unit, other = (TabularEnv(mdp, reward_scale=s) for s in (1.0, scale))
        assert getattr(other, name)(0.9) == scale * getattr(unit, name)(0.9)


def test_greedy_learning_from_optimistic_values_comes_to_the_optimum():
    env = TabularEnv(cliff_walking(), batch_size=[10], max_steps=100)
    run = RunSettings(gamma=1.0, episodes=300)
    strategy = ConstantEpsilon(0.0, batch_shape=[10])
    learner = ExpectedSarsaSettings(learning_rate=1.0)
    engine = ended(make_engine(env, strategy, run, learner, threads=1))
    assert (engine.returns[:, -1] == env.optimal_return(1.0)).all()


SWITCH, EPISODES, LENGTH = 3, 6, 4
TOTALS = torch.tensor([4, 4, 4, 8, 8, 8], dtype=torch.float64)
"""What every episode pays whose steps pay 1, and after the switch 2."""


def paying(**options):
    """Every step pays 1, and after the switch 2, whatever is done."""
    tables = [[[0.5, 0.5]] * 2] * 2
    one, two = (TabularEnv(tables, [[pay] * 2] * 2).mdps[0] for pay in (1.0, 2.0))
    return TabularEnv(one, after=two, switch_at=SWITCH, max_steps=LENGTH, **options)


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("loops", id="numba, tables"),
        pytest.param("tensors", id="torch, tables"),
        pytest.param("loops of networks", id="numba, networks", marks=pytest.mark.slow),
        pytest.param("tensors of networks", id="torch, networks"),
    ],
)
def test_episodes_and_tests_from_the_switch_on_are_those_of_the_other_task(engine):
    env, strategy = paying(batch_size=[5]), ConstantEpsilon(0.5, batch_shape=[5])
    run = RunSettings(gamma=1.0, episodes=EPISODES, tests=3)
    learner = NETWORK if "networks" in engine else SARSA
    if "loops" in engine:
        made = make_engine(env, strategy, run, learner, threads=1)
    else:
        kind = DQNLockstep if "networks" in engine else TabularLockstep
        made = kind(env, strategy, run, learner, compiled=False)
    ended(made)
    assert torch.equal(made.train_returns, TOTALS.expand(5, -1))
    assert torch.equal(made.returns, TOTALS.expand(5, -1))
    assert env.optimal_return(1.0) == env.optimal_return(1.0, episode=SWITCH - 1) == LENGTH
    assert env.random_return(1.0, episode=SWITCH) == pytest.approx(2 * LENGTH)


@pytest.mark.parametrize("learner", ["expected_sarsa", "dqn"])
def test_a_job_on_torchrl_switches_where_the_engines_do(learner, tmp_path):
    after = "{_target_: bmc_torchrl.envs.maze, text: S....G, step: 2.0}"
    job = trained(
        tmp_path,
        *("experiment=maze_sarsa", "engine=torchrl", f"learner={learner}", "runs=2", "gamma=1.0"),
        *("task.text=S....G", "+task.step=1.0", f"after={after}", f"switch_at={SWITCH}"),
        *(f"episodes={EPISODES}", f"domain.max_steps={LENGTH}", "domain.shortest_episode=4"),
        *("domain.tests=3", "strategy=constant", "logger=none", "device=cpu", "figure=false"),
    )
    log = job.log_of_episodes
    assert torch.equal(log.train_returns.double(), TOTALS.expand(2, -1))
    assert torch.equal(log.returns.double(), TOTALS.expand(2, -1))


def test_resets_count_the_episodes_of_each_copy():
    env = paying(batch_size=[3])
    current = env.reset()
    assert current["episode"].tolist() == [0, 0, 0]
    current["step_count"][1] = LENGTH - 1
    for _ in range(2):
        _, current = env.step_and_maybe_reset(current.set("action", torch.zeros(3).long()))
    assert current["episode"].tolist() == [0, 1, 0]
    mask = torch.tensor([[True], [False], [False]])
    assert env.reset(current.clone().set("_reset", mask))["episode"].tolist() == [1, 1, 0]
    later = TensorDict({"episode": torch.tensor([0, SWITCH, 9])}, [3])
    start = env.reset(later)
    assert start["episode"].tolist() == [0, SWITCH, 9]
    paid = env.step(start.set("action", torch.zeros(3).long()))["next", "reward"]
    assert paid.flatten().tolist() == [1, 2, 2]


@pytest.mark.parametrize("experiment", FINITE)
def test_every_experiment_trains(experiment, tmp_path):
    given = ["episodes=3", "switch_at=2"] if experiment == "switch_sarsa" else ["episodes=3"]
    engine = "torchrl" if experiment == "lake_dqn" else "lockstep"
    learner = trained(tmp_path, *tiny(experiment, *given, "figure=false"), f"engine={engine}")
    log = learner.log_of_episodes
    assert (log.steps > 0).all()
    assert (log.train_steps <= 24).all()
