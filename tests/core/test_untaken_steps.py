"""What does not belong in a posterior: frames of others, padding, values that are not finite."""

import math

import pytest
import torch
from contracts import (
    AGENTS,
    FACTORIES,
    LEARNING,
    RUNS,
    alike,
    exploring,
    memory,
    observed,
    recorded,
    same,
    transitions,
)
from probes import ProbeEnv, exit_step
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.collectors.utils import split_trajectories
from torchrl.envs.utils import ExplorationType, set_exploration_type

from bmc_torchrl import AdaptiveEGreedyModule, BMCEpsilon, ConstantEpsilon, VDBEEpsilon

each_learning = pytest.mark.parametrize("name", LEARNING)


def learned(strategy):
    """What was learned; not the last log ratio, which is of the last step even if it is skipped."""
    return {
        key: x
        for key, x in memory(strategy).items()
        if "log_evidence" not in key and "skipped" not in key
    }


def counted(strategy):
    return {cause: count.tolist() for cause, count in strategy.skipped.items()}


@each_learning
@pytest.mark.parametrize("mark", ["argument", "epsilon", ("collector", "mask"), "mask"])
def test_marked_steps_teach_and_no_other(name, mark):
    data = transitions((*RUNS, 12))
    real = torch.rand(12) < 0.5
    # An episode that ends in a step of others still ends, for who holds ε for an episode.
    data["next", "done"][:, ~real] = False
    everywhere = real.expand(*RUNS, 12)

    def taught(data, everywhere):
        explore = exploring(FACTORIES[name](RUNS))
        if mark == "argument":
            explore.strategy.update(data, everywhere)
        else:
            value = recorded(everywhere) if mark == "epsilon" else everywhere
            explore.update(data.clone().set(mark, value))
        return learned(explore.strategy)

    picked = FACTORIES[name](RUNS)
    picked.update(data[:, real])
    assert same(taught(data, everywhere), learned(picked))
    untouched = taught(data[:, ~real], everywhere[:, ~real])
    assert same(untouched, learned(FACTORIES[name](RUNS)))


@each_learning
def test_a_mark_does_not_undo_padding(name):
    data = transitions((*RUNS, 12))
    data["next", "done"].zero_()
    taken, real = torch.rand(*RUNS, 12) < 0.5, torch.rand(*RUNS, 12) < 0.5
    both, one = FACTORIES[name](RUNS), FACTORIES[name](RUNS)
    both.update(data.clone().set(("collector", "mask"), real), taken)
    one.update(data, taken & real)
    assert same(learned(both), learned(one))


def test_every_mask_and_the_mark_must_agree():
    data = transitions((*RUNS, 12))
    masks = [torch.rand(*RUNS, 12) < 0.6 for _ in range(3)]
    explore = exploring(BMCEpsilon(batch_shape=RUNS))
    first, second, taken = masks
    data = data.set(("collector", "mask"), first).set("mask", second)
    explore.update(data.set("epsilon", recorded(taken)))
    assert explore.strategy.learned.tolist() == (first & second & taken).sum(-1).tolist()
    assert counted(explore.strategy) == {
        "mask": (~(first & second)).sum(-1).tolist(),
        "foreign": (first & second & ~taken).sum(-1).tolist(),
        "nonfinite": [0] * 4,
    }


@pytest.mark.parametrize("name", ["geometric", "linear"])
def test_a_step_counts_if_any_of_several_groups_of_agents_took_it(name):
    data, taken = transitions((*RUNS, 6)), torch.zeros(*RUNS, 6, 3, 2, dtype=torch.bool)
    taken[:, 4:, 1, 1] = True
    strategy = FACTORIES[name](RUNS)
    strategy.update(data, taken)
    assert strategy.learned.tolist() == [2] * 4
    assert strategy.skipped["foreign"].tolist() == [4] * 4


@each_learning
def test_data_without_a_mark_count_whole(name):
    data = transitions((*RUNS, 6))
    marked, bare = exploring(FACTORIES[name](RUNS)), exploring(FACTORIES[name](RUNS))
    marked.update(data)
    bare.update(data.exclude("epsilon"))
    assert same(memory(marked), memory(bare))
    assert not same(memory(bare), memory(exploring(FACTORIES[name](RUNS))))


@each_learning
def test_a_mask_of_actions_is_no_mark(name):
    data, plain = transitions((*RUNS, 6)), transitions((*RUNS, 6))
    data = plain.clone().set("mask", torch.zeros(*RUNS, 6, 4, dtype=torch.bool))
    masked, free = FACTORIES[name](RUNS), FACTORIES[name](RUNS)
    masked.update(data)
    free.update(plain)
    assert same(memory(masked), memory(free))


@pytest.mark.parametrize("name", ["vdbe", "bmc"])
def test_each_agent_has_its_own_mark(name):
    data = transitions((*RUNS, 6), agents=(AGENTS,))
    taken = torch.rand(*RUNS, 6, AGENTS) < 0.5
    together = FACTORIES[name]((*RUNS, AGENTS))
    together.update(data, taken)
    for agent in range(AGENTS):
        alone, part = FACTORIES[name](RUNS), data.clone()
        for key in ("greedy_return", "uniform_return", "value_change"):
            part[key] = part[key][..., agent]
        alone.update(part, taken[..., agent])
        assert torch.equal(together.eps[:, agent], alone.eps)


def test_the_mark_is_beside_the_action():
    data = transitions((*RUNS, 6), agents=(AGENTS,)).exclude("epsilon")
    taken = torch.rand(*RUNS, 6, AGENTS) < 0.5
    explore = exploring(BMCEpsilon(batch_shape=(*RUNS, AGENTS)), nested=True)
    marks = TensorDict({"epsilon": recorded(taken)}, taken.shape)
    explore.update(data.clone().set("agents", marks))
    plain = BMCEpsilon(batch_shape=(*RUNS, AGENTS))
    plain.update(data, taken)
    assert same(memory(explore.strategy), memory(plain))
    assert torch.equal(plain.return_count, taken.sum(1).double())


def test_a_mark_must_be_of_every_step():
    strategy = BMCEpsilon(batch_shape=RUNS)
    before = memory(strategy)
    message = r"taken has shape \(4,\), which does not start with .* batch size \(4, 6\): mark"
    with pytest.raises(ValueError, match=message):
        strategy.update(transitions((*RUNS, 6)), torch.ones(RUNS, dtype=torch.bool))
    assert same(memory(strategy), before)


@each_learning
def test_random_frames_of_a_collector_teach_nothing(name):
    env = ProbeEnv(exit_step, batch_size=RUNS)
    explore = AdaptiveEGreedyModule(env.action_spec, FACTORIES[name](RUNS))
    start = memory(explore.strategy)
    greedy = TensorDictModule(torch.zeros_like, in_keys=["state"], out_keys=["action"])
    collector = Collector(
        env,
        TensorDictSequential(greedy, explore),
        frames_per_batch=8,
        total_frames=24,
        init_random_frames=16,
        auto_register_policy_transforms=False,
    )
    for batch, data in enumerate(collector):
        data["greedy_return"] = data["next", "reward"].squeeze(-1) + 1
        data["uniform_return"] = torch.zeros(data.batch_size)
        data["value_change"] = data["promised_value"] = torch.ones(data.batch_size)
        data["chosen_value"] = -data["promised_value"]
        data["acted_greedily"] = torch.zeros(data.batch_size, dtype=torch.bool)
        explore.update(data)
        warm_up = batch < 2
        taken = explore.taken(data)
        assert bool(taken.any()) == bool(taken.all()) != warm_up
        changed = not torch.equal(explore.eps, FACTORIES[name](RUNS).eps)
        assert changed != warm_up
    collector.shutdown()
    assert not same(start, memory(explore.strategy))


@each_learning
def test_greedy_frames_teach_nothing(name):
    env = ProbeEnv(exit_step, batch_size=RUNS)
    explore = AdaptiveEGreedyModule(env.action_spec, FACTORIES[name](RUNS))
    greedy = TensorDictModule(torch.zeros_like, in_keys=["state"], out_keys=["action"])
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        data = env.rollout(5, TensorDictSequential(greedy, explore), break_when_any_done=False)
    assert not explore.taken(data).any()
    before = memory(explore)
    explore.update(transitions(data.batch_size).update(data.select("epsilon")))
    assert same(
        learned(explore),
        {key: x for key, x in before.items() if "log_ev" not in key and "skipped" not in key},
    )


@pytest.mark.parametrize("mask_key", ["mask", ("collector", "mask")])
def test_padding_of_split_trajectories_teaches_nothing(mask_key):
    data = transitions((2, 12))
    data["next", "done"][:] = False
    data["next", "done"][0, [3, 11]] = True
    data["next", "done"][1, [6, 11]] = True
    prefix = None if mask_key == "mask" else "collector"
    split = split_trajectories(data, prefix=prefix, done_key="done")
    mask = split[mask_key]
    assert int((~mask).sum()) > 0
    padded, walked = BMCEpsilon(), BMCEpsilon()
    padded.update(split)
    for time in range(split.shape[1]):
        for trajectory in range(split.shape[0]):
            if mask[trajectory, time]:
                walked.update(split[trajectory, time])
    assert alike(learned(padded), learned(walked))
    assert int(padded.return_count) == 24
    assert int(padded.skipped["mask"]) == int((~mask).sum())
    garbage = split.clone()
    for key in ("greedy_return", "uniform_return"):
        garbage[key] = torch.where(mask, garbage[key], torch.nan)
    other = BMCEpsilon()
    other.update(garbage)
    assert same(memory(other), memory(padded))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e200])
@pytest.mark.parametrize("key", ["greedy_return", "uniform_return"])
@pytest.mark.parametrize("name", [name for name in LEARNING if name.startswith("bmc")])
def test_returns_that_are_not_finite_are_skipped_and_counted(name, key, bad):
    data = transitions((*RUNS, 10))
    data[key] = data[key].double()
    data["next", "done"][:, 3:5] = False
    data[key][:, 3:5] = bad
    skipping, spared = FACTORIES[name](RUNS), FACTORIES[name](RUNS)
    skipping.update(data)
    spared.update(torch.cat([data[:, :3], data[:, 5:]], 1))
    assert counted(skipping) == {"mask": [0] * 4, "foreign": [0] * 4, "nonfinite": [2] * 4}
    assert same(learned(skipping), learned(spared))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_vdbe_skips_value_changes_that_are_not_finite(bad):
    data = transitions((*RUNS, 10))
    data["value_change"][:, 3:5] = bad
    skipping, spared = FACTORIES["vdbe"](RUNS), FACTORIES["vdbe"](RUNS)
    skipping.update(data)
    spared.update(torch.cat([data[:, :3], data[:, 5:]], 1))
    assert counted(skipping) == {"mask": [0] * 4, "foreign": [0] * 4, "nonfinite": [2] * 4}
    assert same(learned(skipping), learned(spared))


def test_an_epsilon_that_decayed_to_nothing_can_rise_again():
    explore = exploring(VDBEEpsilon(1, 1.0, 0.5, initial=0.5, batch_shape=[1]))
    data = transitions((1, 200))
    for change, rises in ((0.0, False), (5.0, True)):
        acted = explore(observed((1, 200)))
        assert bool((acted["epsilon"] < 1e-30).all()) == rises
        data = data.update(acted.select("epsilon"))
        data["value_change"] = torch.full((1, 200), change)
        explore.update(data)
        assert (float(explore.eps) > 0.5) == rises


def test_an_epsilon_of_zero_is_taken_all_the_same():
    explore = exploring(ConstantEpsilon(0.0))
    acted = explore(observed(RUNS))
    assert (acted["action"] == 1).all()
    assert (acted["epsilon"] == 2.0**-126).all()
    assert explore.taken(acted).all()


# What was left out is counted, once per frame, by its first cause.


def spoiled(shape):
    """Transitions, and where they are padding, not taken and not finite; some are all of these."""
    data = transitions(shape)
    real, taken, finite = (torch.rand(*shape) < 0.6 for _ in range(3))
    for key in ("greedy_return", "value_change"):
        data[key] = torch.where(finite, data[key], torch.nan)
    return (
        data.set(("collector", "mask"), real).set("epsilon", recorded(taken)),
        real,
        taken,
        finite,
    )


@each_learning
@pytest.mark.parametrize("time", [(), (1,), (9,)])
def test_every_frame_teaches_or_is_counted_with_one_cause(name, time):
    data, real, taken, finite = spoiled((*RUNS, *time))
    explore = exploring(FACTORIES[name](RUNS))
    for _ in range(2):
        explore.update(data)
    over_time = tuple(range(1, real.ndim))
    each = {"mask": ~real, "foreign": real & ~taken, "nonfinite": real & taken & ~finite}
    expected = {
        cause: 2 * (where.sum(over_time) if time else where.long()) for cause, where in each.items()
    }
    for part, runs in explore.strategy.parts():
        assert "mask" in part.skipped
        assert "foreign" in part.skipped
        assert ("nonfinite" in part.skipped) == part.__class__.__name__.startswith(("B", "E", "V"))
        assert counted(part) == {cause: expected[cause][runs].tolist() for cause in part.skipped}
        if "nonfinite" in part.skipped and part.learned is not None:
            frames = part.learned + sum(part.skipped.values())
            assert (frames == 2 * real[0].numel()).all()


@pytest.mark.parametrize("name", ["bmc", "vdbe", "linear"])
def test_a_pooled_strategy_counts_the_frames_of_all_environments(name):
    data, real, taken, _ = spoiled((*RUNS, 9))
    explore = exploring(FACTORIES[name](()))
    explore.update(data)
    assert int(explore.strategy.skipped["mask"]) == int((~real).sum())
    assert int(explore.strategy.skipped["foreign"]) == int((real & ~taken).sum())


def test_of_each_agent_frames_are_counted():
    data = transitions((*RUNS, 6), agents=(AGENTS,))
    taken, real = torch.rand(*RUNS, 6, AGENTS) < 0.5, torch.rand(*RUNS, 6) < 0.5
    each = BMCEpsilon(batch_shape=(*RUNS, AGENTS))
    each.update(data.set(("collector", "mask"), real), taken)
    assert torch.equal(each.skipped["mask"], (~real).sum(1)[:, None].expand(-1, AGENTS))
    assert torch.equal(each.skipped["foreign"], (real[..., None] & ~taken).sum(1))


def test_nothing_is_counted_of_an_update_that_fails():
    data, *_ = spoiled((*RUNS, 9))
    strategy = BMCEpsilon(batch_shape=RUNS)
    with pytest.raises(TypeError, match="floating point"):
        strategy.update(data.set("greedy_return", data["greedy_return"].nan_to_num().long()))
    assert counted(strategy) == {"mask": [0] * 4, "foreign": [0] * 4, "nonfinite": [0] * 4}


def test_what_was_left_out_is_in_the_diagnostics():
    data, real, taken, finite = spoiled(RUNS)
    for strategy in (BMCEpsilon(batch_shape=RUNS), VDBEEpsilon(1, 1.0, 0.5, batch_shape=RUNS)):
        strategy.update(data, taken)
        said = strategy.diagnostics()
        assert torch.equal(said["skipped/mask"], (~real).double())
        assert torch.equal(said["skipped/foreign"], (real & ~taken).double())
        assert torch.equal(said["skipped/nonfinite"], (real & taken & ~finite).double())
