"""What does not belong in a posterior: random frames, padding, values that are not finite."""

import math

import pytest
import torch
from contracts import FACTORIES, LEARNING, RUNS, action_spec, memory, observed, same, transitions
from probes import ProbeEnv, exit_step
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.collectors.utils import split_trajectories

from bmc_torchrl import AdaptiveEGreedyModule, BMCEpsilon, VDBEEpsilon


@pytest.mark.parametrize("name", LEARNING)
@pytest.mark.parametrize("mark", ["padding", "random frames"])
def test_steps_that_the_policy_did_not_take_teach_nothing(name, mark):
    data = transitions((*RUNS, 12))
    real = torch.rand(12) < 0.5
    if mark == "padding":
        data["collector"] = TensorDict({"mask": real.expand(*RUNS, 12)}, data.batch_size)
    else:
        data["epsilon"] = data["epsilon"] * real
    marked, picked = FACTORIES[name](RUNS), FACTORIES[name](RUNS)
    marked.update(data)
    if "offline" in name or name == "stacked":
        data["next", "done"][:, ~real] = False
        marked = FACTORIES[name](RUNS)
        marked.update(data)
    picked.update(data[:, real])
    for key in ("alpha", "beta", "episodes", "frames", "epsilons", "return_count", "return_m2"):
        if key in dict(marked.named_buffers()):
            assert torch.equal(marked.get_buffer(key), picked.get_buffer(key))
    assert torch.equal(marked.eps, picked.eps)
    untouched = FACTORIES[name](RUNS)
    untouched.update(data[:, ~real])
    assert torch.equal(untouched.eps, FACTORIES[name](RUNS).eps)


@pytest.mark.parametrize("name", LEARNING)
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
        data["value_change"] = torch.ones(data.batch_size)
        explore.update(data)
        warm_up = batch < 2
        assert bool((data["epsilon"] == 0).all()) == warm_up
        assert bool((data["epsilon"] > 0).all()) != warm_up
        changed = not torch.equal(explore.eps, FACTORIES[name](RUNS).eps)
        assert changed != warm_up
    collector.shutdown()
    assert not same(start, memory(explore.strategy))


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
    assert float(padded.log_evidence_ratio) == 0  # of the last step, which is padding
    walked.log_evidence_ratio.zero_()
    assert same(memory(padded), memory(walked))
    assert int(padded.return_count) == 24
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
    assert (skipping.skipped == 2).all()
    skipping.skipped.zero_()
    assert same(memory(skipping), memory(spared))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_vdbe_skips_value_changes_that_are_not_finite(bad):
    data = transitions((*RUNS, 10))
    data["value_change"][:, 3:5] = bad
    skipping, spared = FACTORIES["vdbe"](RUNS), FACTORIES["vdbe"](RUNS)
    skipping.update(data)
    spared.update(torch.cat([data[:, :3], data[:, 5:]], 1))
    assert same(memory(skipping), memory(spared))


def test_an_epsilon_that_decayed_to_nothing_can_rise_again():
    explore = AdaptiveEGreedyModule(
        action_spec(False), VDBEEpsilon(1, 1.0, 0.5, initial=0.5, batch_shape=[1])
    )
    data = transitions((1, 200))
    for change, rises in ((0.0, False), (5.0, True)):
        data["epsilon"] = explore(observed((1, 200)))["epsilon"]
        data["value_change"] = torch.full((1, 200), change)
        explore.update(data)
        assert (float(explore.eps) > 0.5) == rises
    explore.update(
        data.set("epsilon", torch.zeros(1, 200)).set("value_change", torch.zeros(1, 200))
    )
    assert float(explore.eps) > 0.5
