"""Time is the dimension that TorchRL names so, wherever it is, and the last one without names."""

import pytest
import torch
from contracts import (
    AGENTS,
    FACTORIES,
    LEARNING,
    RUNS,
    STRATEGY_SHAPES,
    alike,
    exploring,
    memory,
    recorded,
    same,
    transitions,
)
from probes import ProbeEnv, exit_step
from tensordict import LazyStackedTensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector

from bmc_torchrl import AdaptiveEGreedyModule, BMCEpsilon

STEPS = 7
each_strategy = pytest.mark.parametrize(("name", "shape"), STRATEGY_SHAPES)


def named(data, time):
    """The same transitions with time, their last dimension, at another place and named."""
    names = [None] * (data.batch_dims - 1) + ["time"]
    data = data.clone()
    data.names = names
    order = list(range(data.batch_dims - 1))
    order.insert(time, data.batch_dims - 1)
    moved = data.permute(*order)
    assert moved.names[time] == "time"
    return moved


@each_strategy
@pytest.mark.parametrize("where", ["last, unnamed", "last", "first"])
def test_any_place_of_time_is_a_loop_over_single_steps(name, shape, where):
    data = transitions((*shape, STEPS))
    taken = torch.rand(*shape, STEPS) < 0.7
    data["collector", "mask"] = torch.rand(*shape, STEPS) < 0.9
    walked, stepped = FACTORIES[name](shape), FACTORIES[name](shape)
    for time in range(STEPS):
        stepped.update(data[..., time], taken[..., time])
    if where == "last, unnamed":
        walked.update(data, taken)
    elif where == "last":
        walked.update(named(data, len(shape)), taken)
    else:
        walked.update(named(data, 0), taken.movedim(-1, 0))
    assert alike(memory(walked), memory(stepped))


@each_strategy
def test_the_modules_mark_moves_with_time(name, shape):
    data = transitions((*shape, STEPS))
    data["epsilon"] = recorded(torch.rand(*shape, STEPS) < 0.7)
    last, first = exploring(FACTORIES[name](shape)), exploring(FACTORIES[name](shape))
    last.update(data)
    first.update(named(data, 0))
    assert same(memory(last), memory(first))


@pytest.mark.parametrize("time", [0, 1, 2])
@pytest.mark.parametrize("name", [name for name in LEARNING if "offline" not in name][:-1])
def test_a_pooled_strategy_walks_named_time_slowest(name, time):
    data = transitions((3, 2, STEPS))
    pooled, walked = FACTORIES[name](()), FACTORIES[name](())
    pooled.update(named(data, time))
    for step in range(STEPS):
        for first in range(3):
            for second in range(2):
                walked.update(data[first, second, step])
    assert alike(memory(pooled), memory(walked))


@pytest.mark.parametrize("name", ["vdbe", "bmc", "bmc-state", "bmc-offline"])
def test_agents_stay_agents_when_time_comes_first(name):
    data = transitions((*RUNS, STEPS), agents=(AGENTS,))
    for shape in (RUNS, (*RUNS, AGENTS)):
        last, first = FACTORIES[name](shape), FACTORIES[name](shape)
        last.update(data)
        first.update(named(data, 0))
        assert same(memory(last), memory(first))


@pytest.mark.parametrize("name", LEARNING)
def test_a_lazy_stack_of_steps_is_walked_in_order(name):
    data = transitions((*RUNS, STEPS))
    lazy = LazyStackedTensorDict(*data.unbind(-1), stack_dim=0)
    lazy.names = ["time", None]
    stacked, dense = FACTORIES[name](RUNS), FACTORIES[name](RUNS)
    stacked.update(lazy)
    dense.update(data)
    assert same(memory(stacked), memory(dense))


@pytest.mark.parametrize("name", LEARNING)
def test_named_time_is_never_taken_for_runs(name):
    data = named(transitions(RUNS), 0)
    strategy = FACTORIES[name](RUNS)
    with pytest.raises(ValueError, match=r"batch size \(4,\).* does not start with"):
        strategy.update(data)
    assert same(memory(strategy), memory(FACTORIES[name](RUNS)))


def test_one_step_of_an_unbatched_environment_is_one_run():
    step = named(transitions((1,)), 0)
    run, unnamed = BMCEpsilon(batch_shape=[1]), BMCEpsilon(batch_shape=[1])
    run.update(step)
    unnamed.update(transitions((1,)).update(step))
    assert same(memory(run), memory(unnamed))


def test_collectors_and_rollouts_name_time():
    env = ProbeEnv(exit_step, batch_size=[STEPS])
    explore = AdaptiveEGreedyModule(env.action_spec, BMCEpsilon(batch_shape=[STEPS]))
    greedy = TensorDictModule(torch.zeros_like, in_keys=["state"], out_keys=["action"])
    policy = TensorDictSequential(greedy, explore)
    collector = Collector(
        env,
        policy,
        frames_per_batch=STEPS**2,
        total_frames=STEPS**2,
        auto_register_policy_transforms=False,
    )
    (collected,) = collector
    collector.shutdown()
    rollout = env.rollout(STEPS, policy, break_when_any_done=False)
    for data in (collected, rollout):
        assert data.names == [None, "time"]
        assert data.batch_size == (STEPS, STEPS)
        data = data.select("epsilon").update(transitions(data.batch_size).exclude("epsilon"))
        last, first = BMCEpsilon(batch_shape=[STEPS]), BMCEpsilon(batch_shape=[STEPS])
        last.update(data)
        first.update(data.permute(1, 0))
        assert same(memory(last), memory(first))
