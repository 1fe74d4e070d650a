"""Learners on two-state probes whose action values are known on paper, in the whole loop."""

from __future__ import annotations

import pytest
import torch
from probes import LOOP_HALF_GREEDY, LOOP_OPTIMAL, ProbeEnv, exit_step, loop_step
from tensordict import TensorDict
from torch import Tensor, nn
from torchrl.data import Categorical
from torchrl.envs import EnvBase

from bmc_torchrl import AdaptiveEGreedyModule, ConstantEpsilon, OneStepReturns
from bmc_torchrl.learners.values import QTable, q_actor
from bmc_torchrl.training import (
    EpsilonGreedyLearner,
    PublishedDQN,
    TabularSarsa,
    TransitionStream,
)

GAMMA = 0.5


def learned(rule, actor, env: EnvBase, steps: int, *, epsilon: float = 1.0, strategy=None):
    """The learner after `steps` vector steps of `env`."""
    runs = env.batch_size.numel()
    strategy = strategy or ConstantEpsilon(epsilon, batch_shape=env.batch_size)
    learner = EpsilonGreedyLearner(
        actor,
        AdaptiveEGreedyModule(env.action_spec, strategy),
        OneStepReturns(actor, GAMMA),
        rule,
        runs=runs,
        episodes=10**6,
    )
    stream = TransitionStream(env, learner.policy, chunk_steps=steps, num_chunks=1)
    stream._start()
    for transition in stream._chunk():
        learner.step(transition)
    stream.shutdown()
    return learner


def table_and_actor(runs=()) -> tuple[QTable, nn.Module]:
    table = QTable(2, 2, runs=runs)
    return table, q_actor(table, 2)


def assert_values(found: Tensor, expected: Tensor, within: float) -> None:
    torch.testing.assert_close(found, expected.expand_as(found), rtol=0, atol=within)


def test_expected_sarsa_learns_the_values_of_its_policy() -> None:
    table, actor = table_and_actor(runs=3)
    learned(TabularSarsa(table, 0.5), actor, ProbeEnv(batch_size=[3]), 400, epsilon=0.5)
    assert_values(table.weight.detach(), LOOP_HALF_GREEDY, 1e-3)


def test_expected_sarsa_with_little_exploration_learns_the_optimal_values() -> None:
    table, actor = table_and_actor(runs=2)
    table.weight.data.copy_(LOOP_OPTIMAL + 0.1)
    learned(TabularSarsa(table, 0.5), actor, ProbeEnv(batch_size=[2]), 400, epsilon=0.02)
    assert_values(table.weight.detach().amax(-1), LOOP_OPTIMAL.amax(-1), 0.03)


def test_a_terminal_state_is_worth_nothing() -> None:
    table, actor = table_and_actor(runs=2)
    table.weight.data[:, 1] = 100.0
    learned(TabularSarsa(table, 0.5), actor, ProbeEnv(exit_step, [2]), 60)
    assert_values(table.weight.detach()[:, 0], torch.tensor([0.0, 1.0]), 1e-3)


def test_the_published_dqn_learns_the_optimal_values() -> None:
    table, actor = table_and_actor(runs=2)
    rule = PublishedDQN(
        table, runs=2, gamma=GAMMA, learning_rate=0.03, batch_size=8, capacity=200, epochs=2
    )
    learned(rule, actor, ProbeEnv(batch_size=[2]), 300)
    assert_values(table.weight.detach(), LOOP_OPTIMAL, 0.02)


def test_the_published_dqn_stops_at_the_end_of_an_episode() -> None:
    table, actor = table_and_actor(runs=2)
    table.weight.data[:, 1] = 100.0
    rule = PublishedDQN(
        table, runs=2, gamma=GAMMA, learning_rate=0.05, batch_size=4, capacity=50, epochs=2
    )
    learned(rule, actor, ProbeEnv(exit_step, [2]), 100)
    assert_values(table.weight.detach()[:, 0], torch.tensor([0.0, 1.0]), 0.01)


def one_step(action: Tensor, actor) -> TensorDict:
    state = torch.zeros_like(action)
    ended = torch.zeros(*action.shape, 1, dtype=torch.bool)
    following = {"state": torch.ones_like(state), "done": ended, "terminated": ended}
    following["reward"] = torch.ones(*action.shape, 1)
    transition = TensorDict({"state": state, "action": action, "next": following}, action.shape)
    actor(transition)
    transition["action"] = action
    return OneStepReturns(actor, GAMMA)(transition)


@pytest.mark.parametrize("kind", ["tabular", "published"])
def test_value_change_is_q_after_minus_q_before_and_zero_before_learning_starts(kind: str) -> None:
    runs = 2
    table, actor = table_and_actor(runs)
    rule = {
        "tabular": lambda: TabularSarsa(table, 0.5),
        "published": lambda: PublishedDQN(
            table, runs=runs, gamma=GAMMA, learning_rate=0.1, batch_size=2, capacity=4
        ),
    }[kind]()
    action = torch.arange(runs)
    for count in range(3):
        transition = one_step(action, actor)
        transition[("collector", "mask")] = torch.ones(runs, dtype=torch.bool)
        transition["next", "epsilon"] = torch.zeros(runs)
        before = transition["action_value"].gather(-1, action.unsqueeze(-1)).squeeze(-1)
        rule.learn(transition, torch.zeros(runs, dtype=torch.int64), True)
        after = table(transition["state"]).gather(-1, action.unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(transition["value_change"], (after - before).detach())
        changes = kind == "tabular" or count > 0
        assert bool((transition["value_change"] != 0).all()) == changes
        assert transition["loss"].shape == (runs,)


def test_a_finished_run_changes_its_table_no_more() -> None:
    table, actor = table_and_actor(runs=2)
    transition = one_step(torch.tensor([0, 1]), actor)
    transition[("collector", "mask")] = torch.tensor([True, False])
    transition["next", "epsilon"] = torch.zeros(2)
    TabularSarsa(table, 0.5).learn(transition, torch.zeros(2, dtype=torch.int64), True)
    assert (table.weight[0] != 0).sum() == 1
    assert (table.weight[1] == 0).all()


def test_the_learning_rate_decays_by_episode_down_to_its_floor() -> None:
    rule = TabularSarsa(QTable(2, 2), 0.5, decay=0.99, floor=0.01)
    rates = rule.rate(torch.tensor([0, 1, 10, 1000]))
    torch.testing.assert_close(rates, torch.tensor([0.5, 0.495, 0.5 * 0.99**10, 0.01]))


def test_impossible_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"learning_rate must be in \(0, 1\], got 1.5"):
        TabularSarsa(QTable(2, 2), 1.5)
    with pytest.raises(ValueError, match="capacity=3 must hold a batch of batch_size=4"):
        PublishedDQN(QTable(2, 2, runs=1), runs=1, gamma=0.9, batch_size=4, capacity=3)
    table, actor = table_and_actor(runs=1)
    explore = AdaptiveEGreedyModule(Categorical(2, shape=[1]))
    returns = OneStepReturns(actor, 0.9)
    rule = PublishedDQN(table, runs=1, gamma=0.9, batch_size=4)
    with pytest.raises(ValueError, match="'before' is for on-policy rules such as TabularSarsa"):
        EpsilonGreedyLearner(
            actor, explore, returns, rule, runs=1, episodes=1, next_action="before"
        )
    with pytest.raises(ValueError, match="next_action must be 'before' or 'after', got 'now'"):
        EpsilonGreedyLearner(actor, explore, returns, rule, runs=1, episodes=1, next_action="now")
    with pytest.raises(ValueError, match="chunk_steps and num_chunks must be positive, got 0"):
        TransitionStream(ProbeEnv(loop_step), None, chunk_steps=0, num_chunks=1)


@pytest.mark.parametrize("batch_size", [(), (1,), (3,)])
def test_a_vector_step_has_a_dimension_of_runs_and_none_of_time(batch_size):
    stream = TransitionStream(ProbeEnv(loop_step, batch_size), None, chunk_steps=2, num_chunks=1)
    steps = [step for chunk in stream for step in chunk]
    stream.shutdown()
    for step in steps:
        assert step.batch_size == (batch_size or (1,))
        assert step.names == [None]
