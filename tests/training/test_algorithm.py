"""The whole training loop against Algorithm 1 in plain Python, and its order of things."""

from __future__ import annotations

import contextlib

import pytest
import torch
from algorithm import ExpectedSarsa, Grid, bmc_run
from draws import recorded_draws
from jobs import built
from torchrl.envs import RenameTransform, TransformedEnv

from bmc_torchrl import AdaptiveEGreedyModule
from bmc_torchrl.envs import SubgoalGridEnv
from bmc_torchrl.training.interaction import interaction_with
from bmc_torchrl.training.transitions import TransitionStream

SMALL = "{_target_: bmc_torchrl.envs.SubgoalGrid, rows: 2, columns: 3, start: [1, 0], "
SMALL += "goals: [[1, 2], [0, 0]]}"
EPISODES, MAX_STEPS = 100, 30


def overrides(next_action: str, masked: bool) -> list[str]:
    return [
        "experiment=grid_sarsa",
        "engine=torchrl",
        "device=cpu",
        f"+domain.env.grid={SMALL}",
        f"domain.max_steps={MAX_STEPS}",
        f"episodes={EPISODES}",
        f"protocols.published.next_action={next_action}",
        f"protocols.published.mask_terminated={masked}",
    ]


def recorded_steps(learner, stream, count: int) -> tuple[list[dict], list[tuple[float, float]]]:
    """`count` vector steps of the pipeline, and every pair of uniforms that was drawn for them."""
    draws: list[torch.Tensor] = []
    steps = []
    with recorded_draws(draws):
        stream._start()
        draws.clear()
        for transition in stream._chunk():
            learner.step(transition)
            steps.append({"state": int(transition["state"]), "action": int(transition["action"])})
            if len(steps) == count:
                break
    return steps, [tuple(draw.squeeze(-1).tolist()) for draw in draws]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("next_action", ["before", "after"])
def test_one_run_is_algorithm_1_in_plain_python(next_action: str, masked: bool) -> None:
    _, learner, stream, _ = built(*overrides(next_action, masked), "trainer.chunk_steps=100000")
    table = learner.rule.table.weight[0].double().tolist()
    steps, draws = recorded_steps(learner, stream, 400)
    assert len(draws) == 400 * (2 if next_action == "before" else 1)
    reference = ExpectedSarsa(
        Grid(2, 3, (1, 0), [(1, 2), (0, 0)], MAX_STEPS),
        table,
        iter(draws),
        bmc_run(1.0, 1.01),
        learning_rate=0.7,
        gamma=0.99,
        next_action=next_action,
        masked=masked,
    )
    episodes = []
    with contextlib.suppress(StopIteration):
        while True:
            episodes.append(reference.episode())
    assert [step["action"] for step in steps] == reference.actions[: len(steps)]
    assert [step["state"] for step in steps] == reference.states[: len(steps)]
    log = learner.log_of_episodes
    finished = len(episodes)
    assert int(log.done) == finished > 5
    assert 0 < sum(len(episode.rewards) < MAX_STEPS for episode in episodes) < finished
    means = [sum(episode.epsilons) / len(episode.epsilons) for episode in episodes]
    expected = torch.tensor(means, dtype=torch.float64)
    torch.testing.assert_close(log.epsilons[0, :finished].double(), expected, rtol=1e-5, atol=0)
    assert float(log.train_returns[0, int(log.done) - 1]) == pytest.approx(
        sum(episodes[-1].rewards), rel=1e-5
    )
    torch.testing.assert_close(
        learner.rule.table.weight[0].double(),
        torch.tensor(reference.table, dtype=torch.float64),
        rtol=1e-4,
        atol=1e-5,
    )
    strategy = learner.explore.strategy
    assert float(strategy.alpha) == pytest.approx(reference.run.alpha, rel=1e-5)
    assert float(strategy.beta) == pytest.approx(reference.run.beta, rel=1e-5)


def test_returns_come_before_learning_and_the_strategy_after_it() -> None:
    _, learner, stream, _ = built(*overrides("after", True), "strategy=vdbe")
    seen = []
    learn, update = learner.rule.learn, learner.explore.strategy.update

    def learning(transition, *args):
        seen.append("learn")
        assert transition.get("greedy_return") is not None
        assert transition.get("value_change", None) is None
        learn(transition, *args)

    def updating(transition, *args, **options):
        seen.append("update")
        before = transition["action_value"].gather(-1, transition["action"].unsqueeze(-1))
        after = learner.q_actor(transition.select("state"))["action_value"]
        after = after.gather(-1, transition["action"].unsqueeze(-1))
        torch.testing.assert_close(transition["value_change"], (after - before).squeeze(-1))
        update(transition, *args, **options)

    learner.rule.learn, learner.explore.strategy.update = learning, updating
    stream._start()
    for transition in stream._chunk():
        learner.step(transition)
    assert seen == ["learn", "update"] * 22


def test_the_published_next_action_is_drawn_before_learning() -> None:
    _, learner, stream, _ = built(*overrides("before", False))
    stream._start()
    committed = None
    for transition in stream._chunk():
        assert committed in (None, int(transition["action"]))
        before = learner.rule.table.weight.detach().clone()
        commit = learner.next_action.commit

        def checked(transition, before=before, commit=commit):
            assert torch.equal(learner.rule.table.weight, before)
            commit(transition)

        learner.next_action.commit = checked
        learner.step(transition)
        learner.next_action.commit = commit
        over = bool(transition["next", "done"])
        committed = None if over else int(learner.next_action.action)


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("epsilon", {}, "env observes 'epsilon'.*pass epsilon_key= to AdaptiveEGreedyModule"),
        ("collector", {}, "env observes 'collector', which is TorchRL's"),
        ("epsilon", {"epsilon_key": "rate"}, None),
    ],
)
def test_what_an_environment_observes_is_not_written_over(name, keys, message) -> None:
    env = TransformedEnv(
        SubgoalGridEnv(batch_size=[2]), RenameTransform(["state"], [name], create_copy=True)
    )
    explore = AdaptiveEGreedyModule(env.action_spec, **keys)
    if message is None:
        TransitionStream(env, explore, chunk_steps=1, num_chunks=1)
        return
    with pytest.raises(ValueError, match=message):
        TransitionStream(env, explore, chunk_steps=1, num_chunks=1)


def test_the_discrete_state_is_where_the_strategy_says() -> None:
    env = SubgoalGridEnv(batch_size=[2], observation="encoded")
    both = TransformedEnv(env, RenameTransform(["observation"], ["cell"], create_copy=True))
    for key, expected in (("cell", "observation"), (None, "state")):
        interaction = interaction_with(both, "observation", key)
        interaction.start()
        assert torch.equal(interaction.state, both.reset()[expected])
        interaction.step(torch.tensor([0, 1]))
        assert interaction.state_after.dtype == both.observation_spec[expected].dtype
    assert interaction_with(both, "observation", "nowhere")._state(both.reset()) is None
