"""The contract that every strategy keeps, inside the module."""

import copy
import pickle

import pytest
import torch
from contracts import (
    AGENTS,
    FACTORIES,
    LEARNING,
    MASK,
    RUNS,
    STRATEGY_SHAPES,
    alike,
    exploring,
    memory,
    observed,
    same,
    stacked,
    transitions,
)
from tensordict import TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type

from bmc_torchrl import BMCEpsilon, StackedEpsilon, VDBEEpsilon

each_strategy = pytest.mark.parametrize(("name", "shape"), STRATEGY_SHAPES)


@each_strategy
@pytest.mark.parametrize("one_hot", [False, True], ids=["categorical", "one_hot"])
@pytest.mark.parametrize("masked", [False, True], ids=["free", "masked"])
@pytest.mark.parametrize("nested", [False, True], ids=["root", "nested"])
def test_every_strategy_acts_with_its_epsilon(name, shape, one_hot, masked, nested):
    layout = {"one_hot": one_hot, "masked": masked, "nested": nested}
    explore = exploring(FACTORIES[name](shape), **layout)
    before = memory(explore)
    legal = torch.tensor([allowed or not masked for allowed in MASK])
    for time in ((), (300,)):
        td = observed((*shape, *time), **layout)
        old = td.clone()
        expected = explore.eps.float()
        explore(td)
        where = ("agents", "{}") if nested else ("{}",)
        action, epsilon = (
            td[tuple(part.format(key) for part in where)] for key in ("action", "epsilon")
        )
        previous = old["agents", "action"] if nested else old["action"]
        assert action.shape == previous.shape
        assert action.dtype == previous.dtype
        batch = (*shape, *time, AGENTS) if nested else (*shape, *time)
        wide = expected.reshape((*shape, *[1] * (len(batch) - len(shape)))).expand(batch)
        torch.testing.assert_close(epsilon, wide)
        if one_hot:
            assert (action.sum(-1) == 1).all()
            action = action.int().argmax(-1)
        assert legal[action].all()
        for key in old.keys(True, True):
            if key not in explore.out_keys:
                assert torch.equal(td[key], old[key])
    explored = 1 - wide.double() * (legal.sum() - 1) / legal.sum()
    spread = (explored * (1 - explored) / wide[..., 0].numel() / 300).sqrt().mean()
    assert abs((action == 1).double().mean() - explored.mean()) < 5 * max(spread, 0.01)
    assert same(before, memory(explore))


@each_strategy
@pytest.mark.parametrize("nested", [False, True], ids=["root", "nested"])
def test_only_the_random_exploration_type_explores(name, shape, nested):
    explore = exploring(FACTORIES[name](shape), nested=nested)
    for kind in ExplorationType:
        td = observed((*shape, 50), nested=nested)
        with set_exploration_type(kind):
            explore(td)
        acted = td["agents"] if nested else td
        explores = kind == ExplorationType.RANDOM
        assert bool((acted["action"] != 1).any()) == explores
        taken = explore.taken(td)
        assert bool(taken.all()) == bool(taken.any()) == explores


@each_strategy
def test_walking_time_is_stepping_through_it(name, shape):
    walked, stepped = FACTORIES[name](shape), FACTORIES[name](shape)
    data = transitions((*shape, 9))
    walked.update(data)
    for time in range(9):
        stepped.update(data[..., time])
    assert alike(memory(walked), memory(stepped))
    if name in LEARNING:
        assert not same(memory(walked), memory(FACTORIES[name](shape)))


# A ladder's rungs depend on how many there are.
@pytest.mark.parametrize("name", [name for name in FACTORIES if name != "apex"])
def test_a_batch_of_runs_is_each_run_alone(name):
    data = transitions((*RUNS, 9))
    together = FACTORIES[name](RUNS)
    together.update(data)
    for run in range(*RUNS):
        if isinstance(together, StackedEpsilon):
            alone, part = copy.deepcopy(stacked(RUNS).strategies[run]), data[run : run + 1]
        else:
            alone, part = FACTORIES[name](()), data[run]
        alone.update(part)
        assert torch.equal(together.eps[run], alone.eps.squeeze())


@each_strategy
def test_state_survives_saving_copying_and_pickling(name, shape):
    explore = exploring(FACTORIES[name](shape))
    data = transitions((*shape, 5))
    explore.update(data)
    loaded = exploring(FACTORIES[name](shape))
    loaded.load_state_dict(explore.state_dict())
    twins = [loaded, copy.deepcopy(explore), pickle.loads(pickle.dumps(explore))]
    later = transitions((*shape, 5))
    kept = memory(explore)
    for twin in twins:
        assert same(memory(twin), kept)
        twin.update(later)
    assert same(memory(explore), kept)
    explore.update(later)
    for twin in twins:
        assert same(memory(twin), memory(explore))
        torch.manual_seed(1)
        ours = explore(observed(shape))
        torch.manual_seed(1)
        assert (twin(observed(shape)) == ours).all()


@each_strategy
@pytest.mark.parametrize("cast", [lambda m: m.half(), lambda m: m.to(torch.bfloat16)])
def test_casting_keeps_the_precision_of_the_memory(name, shape, cast):
    explore = exploring(FACTORIES[name](shape))
    explore.update(transitions((*shape, 5)))
    before = memory(explore)
    assert same(memory(cast(explore)), before)


@each_strategy
def test_buffers_stay_where_they_are(name, shape):
    explore = exploring(FACTORIES[name](shape))
    where = {key: buffer.data_ptr() for key, buffer in explore.named_buffers()}
    for time in ((), (3,)):
        explore(observed((*shape, *time)))
        explore.update(transitions((*shape, *time)))
        explore.step(2)
    assert where == {key: buffer.data_ptr() for key, buffer in explore.named_buffers()}


@each_strategy
def test_updates_inside_the_module_are_those_of_the_strategy(name, shape):
    explore, strategy = exploring(FACTORIES[name](shape)), FACTORIES[name](shape)
    data = transitions((*shape, 6))
    explore.update(data)
    strategy.update(data)
    assert same(memory(explore.strategy), memory(strategy))
    assert torch.equal(explore.eps, strategy.eps)
    assert explore.eps.shape == shape


@pytest.mark.parametrize("name", FACTORIES)
def test_every_strategy_declares_what_it_reads(name):
    strategy, data = FACTORIES[name](RUNS), transitions((*RUNS, 4))
    twin = FACTORIES[name](RUNS)
    strategy.update(data)
    twin.update(data.select(*strategy.in_keys))
    assert same(memory(strategy), memory(twin))
    for key in strategy.in_keys:
        with pytest.raises(KeyError, match=str(key if isinstance(key, str) else key[-1])):
            strategy.update(data.exclude(key))
    assert same(memory(strategy), memory(twin))


def test_vdbe_with_a_whole_step_is_what_its_last_value_change_says():
    strategy = VDBEEpsilon(1, sigma=0.5, delta=1.0, batch_shape=RUNS)
    data = transitions(RUNS)
    strategy.update(data)
    expected = torch.tanh(data["value_change"].double().abs() / (2 * 0.5))
    torch.testing.assert_close(strategy.eps, expected)


@pytest.mark.parametrize("shape", [(), (4,), (4, 2)])
def test_vdbe_of_one_state_has_one_epsilon_per_run(shape):
    strategy = VDBEEpsilon(1, 1.0, 0.5, initial=0.3, batch_shape=shape)
    assert strategy.state_key is None
    assert strategy.epsilon(TensorDict({}, shape)).shape == shape
    assert torch.equal(strategy.epsilon(TensorDict({}, shape)), strategy.eps)


def test_a_stack_of_strategies_with_agents_walks_through_time():
    data = transitions((*RUNS, 6), agents=(AGENTS,))
    alone = BMCEpsilon(batch_shape=(*RUNS, AGENTS))
    parts = [BMCEpsilon(batch_shape=(runs, AGENTS)) for runs in (1, 3)]
    stack = StackedEpsilon(parts)
    for strategy in (alone, stack):
        strategy.update(data)
    assert torch.equal(stack.eps, alone.eps)
    assert not torch.equal(stack.eps, BMCEpsilon(batch_shape=(*RUNS, AGENTS)).eps)


def test_a_stack_does_not_take_time_for_runs():
    data = transitions(RUNS)
    data.names = ["time"]
    with pytest.raises(ValueError, match="does not start with the 4 runs of the stacked"):
        FACTORIES["stacked"](RUNS).update(data)
