"""Lanes of the lockstep engines: episodes, tests, blocks, freezing, resuming."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lockstep_reference import (
    DOMAINS,
    RUNS,
    make_dqn,
    make_env,
    make_network,
    make_table,
    make_tabular,
)
from torch import Tensor

from bmc_torchrl.envs.lanes import Noise
from bmc_torchrl.learners.values import q_actor
from bmc_torchrl.lockstep import TabularDraws

MAKERS: dict[str, Any] = {"dqn": make_dqn, "sarsa": make_tabular}


def run_to_end(engine: Any, chunk: int = 100) -> Any:
    while not engine.finished:
        engine.advance(chunk)
    return engine


def results(engine: Any) -> Tensor:
    return torch.stack([engine.steps, engine.returns, engine.epsilons])


@pytest.mark.parametrize("learner", MAKERS)
@pytest.mark.parametrize("domain", DOMAINS)
def test_every_lane_gets_its_episodes_and_their_tests(domain: str, learner: str) -> None:
    engine = run_to_end(MAKERS[learner](domain, "bmc", episodes=3, tests=2))
    assert (engine.episodes_done == 3).all()
    assert results(engine).isfinite().all()
    assert (engine.steps <= 12).all()


@pytest.mark.parametrize("learner", MAKERS)
@pytest.mark.parametrize("domain", DOMAINS)
def test_resuming_changes_no_bit(domain: str, learner: str, tmp_path: Any) -> None:
    options = {"episodes": 6, "tests": 2, "test_slots": 3}
    engine = MAKERS[learner](domain, "stacked", **options)
    engine.advance(16)
    engine.advance(15)
    torch.save(engine.state_dict(), tmp_path / "state.pt")
    engine.advance(17)
    other = MAKERS[learner](domain, "stacked", **{**options, "seed": 99})
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    other.advance(17)
    run_to_end(engine, 100), run_to_end(other, 7)
    assert torch.equal(results(engine), results(other))
    for name, buffer in engine.strategy.state_dict().items():
        assert torch.equal(buffer, other.strategy.state_dict()[name])


@pytest.mark.parametrize("learner", MAKERS)
def test_lanes_do_not_touch_each_other(learner: str) -> None:
    first, second = (MAKERS[learner]("grid", "bmc", episodes=8) for _ in range(2))
    values = second.flat if learner == "dqn" else second.table
    values[2] *= -2.0
    if learner == "sarsa":
        second.greedy.copy_(second.table.argmax(-1))
    run_to_end(first), run_to_end(second)
    same = (results(first) == results(second)).flatten(2).all(-1).all(0)
    assert same.tolist() == [True, True, False, True]


def test_blocks_and_compaction_change_no_result() -> None:
    whole = run_to_end(make_dqn("grid", "geometric", runs=6, episodes=9, block=6))
    blocks = make_dqn("grid", "geometric", runs=6, episodes=9, block=2)
    left = set()
    while not blocks.finished:
        blocks.advance(5)
        left.add(blocks.blocks)
    assert left == {1, 2, 3}
    torch.testing.assert_close(results(whole), results(blocks), rtol=1e-5, atol=1e-6)
    networks = [make_network(make_env("grid", 6), 6) for _ in range(2)]
    whole.export(networks[0]), blocks.export(networks[1])
    for ours, theirs in zip(*(network.parameters() for network in networks), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_the_last_block_is_halved_as_its_lanes_finish() -> None:
    options: dict[str, Any] = {"runs": 24, "episodes": 9}
    expected = results(run_to_end(make_dqn("grid", "geometric", block=2, **options)))
    halved = make_dqn("grid", "geometric", **options)
    sizes = [halved.block]
    while not halved.finished:
        halved.advance(1)
        if halved.block != sizes[-1]:
            sizes.append(halved.block)
            state = halved.state_dict()
            halved = make_dqn("grid", "geometric", **{**options, "seed": 99})
            halved.load_state_dict(state)
        unfinished = int((halved.episodes_done < halved.episodes).sum())
        assert unfinished <= halved.block
    assert sizes == [24, 12, 6]
    torch.testing.assert_close(results(halved), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("learner", MAKERS)
def test_grid_tests_are_greedy_episodes_of_the_q_after_the_episode(learner: str) -> None:
    """With one episode nothing is learned after it; the next test covers more."""
    engine = run_to_end(MAKERS[learner]("grid", "constant", episodes=1))
    env = make_env("grid", observation="encoded")
    q = make_network(env) if learner == "dqn" else make_table(env)
    if learner == "dqn":
        engine.network.unpack(engine.snapshot[engine._slots()], q)
        actor = q_actor(q, 4, in_key="observation")
    else:
        q.weight.data.copy_(engine.table)
        actor = q_actor(q, 4)
    with torch.no_grad():
        episode = env.rollout(12, actor, break_when_any_done=False)
    for lane in range(RUNS):
        done = episode["next", "done"][lane].squeeze(-1)
        length = int(done.int().argmax()) + 1
        rewards = episode["next", "reward"][lane, :length].squeeze(-1)
        expected = (rewards * 0.9 ** torch.arange(length)).sum()
        assert engine.steps[lane, 0] == length
        torch.testing.assert_close(engine.returns[lane, 0].float(), expected)


def test_frozen_lanes_repeat_their_last_results() -> None:
    """Supply-chain never ends by itself, so every test is perfect."""
    engine = run_to_end(
        make_tabular("supply", "geometric", episodes=9, tests=2, stop_after_perfect_tests=4)
    )
    assert torch.equal(engine.epsilons[:, 3:], engine.epsilons[:, 3:4].expand(-1, 6))
    assert torch.equal(engine.returns[:, 3:], engine.returns[:, 3:4].expand(-1, 6))
    assert (engine.epsilons[:, 2] != engine.epsilons[:, 3]).all()
    assert (engine.steps == 12).all()


@pytest.mark.parametrize("learner", MAKERS)
def test_the_logged_epsilon_is_the_mean_over_the_episode(learner: str) -> None:
    engine = run_to_end(MAKERS[learner]("supply", "geometric", episodes=3))
    expected = 0.5 * 0.8 ** torch.arange(3.0).expand(RUNS, -1).double()
    torch.testing.assert_close(engine.epsilons, expected, rtol=1e-6, atol=0)


def test_tests_undo_what_a_lane_learned_after_its_episode() -> None:
    """The same draws, looked at after every step and after every chunk."""
    chunked, stepped = (make_tabular("grid", "constant", runs=8, episodes=20) for _ in range(2))
    stepped.chunk = stepped.unroll_steps = 1
    assert chunked.chunk == 2
    seen: list[list[Tensor]] = [[], []]
    for _ in range(60):
        draws = chunked.draw(2)
        with torch.no_grad():
            chunked.vector_steps(draws)
            for step in range(2):
                stepped.vector_steps(
                    TabularDraws(
                        draws.act[step : step + 1],
                        Noise(*(x[step : step + 1] for x in draws.noise)),
                        draws.act_next[step : step + 1],
                    )
                )
                for lane in stepped.ended.nonzero().squeeze(-1):
                    seen[0].append(torch.cat([lane[None], stepped.greedy[lane].long()]))
                stepped.ended.zero_()
        lanes = chunked.ended.nonzero().squeeze(-1)
        policies = chunked._ended_policies(lanes)
        seen[1] += [torch.cat([a[None], p.long()]) for a, p in zip(lanes, policies, strict=True)]
        chunked.ended.zero_()
    ours, theirs = (sorted(x.tolist() for x in one) for one in seen)
    assert len(ours) > 20
    assert ours == theirs
