"""Every mistake is an error that says what to do, and costs nothing that was learned."""

import copy
import math
import re

import pytest
import torch
from contracts import (
    ACTIONS,
    AGENTS,
    FACTORIES,
    LEARNING,
    RUNS,
    STATES,
    action_spec,
    exploring,
    memory,
    observed,
    same,
    transitions,
)
from tensordict import NonTensorData, TensorDict
from torchrl.data import Bounded, Categorical, Composite, MultiCategorical, OneHot, Unbounded
from torchrl.envs.utils import ExplorationType, set_exploration_type

from bmc_torchrl import (
    AdaptiveEGreedyModule,
    BMCEpsilon,
    ConstantEpsilon,
    GaussianLikelihood,
    GeometricEpsilon,
    LinearEpsilon,
    NormalGammaPrior,
    PowerEpsilon,
    StackedEpsilon,
    VDBEEpsilon,
)

# Construction: the argument, what was given, what is wanted.


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["alpha0", "beta0"])
def test_prior_weights_must_be_positive(name, bad):
    with pytest.raises(ValueError, match=rf"{name} must be positive and finite, got {bad}"):
        BMCEpsilon(**{name: bad})
    with pytest.raises(ValueError, match=f"{name} must be positive and finite"):
        BMCEpsilon(**{name: [0.5, bad]}, batch_shape=[2])


@pytest.mark.parametrize("bad", [-0.1, 1.1, math.nan])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("value", ConstantEpsilon),
        ("initial", lambda x: GeometricEpsilon(x, 0.9)),
        ("rate", lambda x: GeometricEpsilon(0.5, x)),
        ("initial", lambda x: PowerEpsilon(x, 0.5)),
        ("initial", lambda x: LinearEpsilon(x, 0.0)),
        ("final", lambda x: LinearEpsilon(1.0, x)),
        ("initial", lambda x: VDBEEpsilon(2, 1.0, 0.5, initial=x)),
    ],
)
def test_probabilities_must_be_probabilities(name, make, bad):
    with pytest.raises(ValueError, match=rf"{name} must be between 0 and 1, got {bad}"):
        make(bad)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BMCEpsilon(update="later"), "update must be 'online' or 'offline', got 'later'"),
        (lambda: BMCEpsilon(num_states=0), "num_states must be at least 1 or None, got 0"),
        (
            lambda: BMCEpsilon(likelihood=GaussianLikelihood(), prior=NormalGammaPrior()),
            "a likelihood or a prior, not both",
        ),
        (lambda: BMCEpsilon([1.0, 2.0]), r"alpha0 .* have the batch_shape \(\), got shape \(2,\)"),
        (lambda: BMCEpsilon(batch_shape=[0]), r"batch_shape must have positive sizes, got \(0,\)"),
        (lambda: BMCEpsilon().credible_interval(1.0), r"probability must be in \(0, 1\), got 1.0"),
        (lambda: VDBEEpsilon(0, 1.0, 0.5), "num_states must be at least 1, got 0"),
        (lambda: VDBEEpsilon(2, 0.0, 0.5), "sigma must be positive, got 0.0"),
        (lambda: VDBEEpsilon(2, 1.0, 0.0), r"delta must be in \(0, 1\], got 0.0"),
        (lambda: VDBEEpsilon(2, 1.0, 1.01), r"delta must be in \(0, 1\], got 1.01"),
        (lambda: VDBEEpsilon(2, 1.0, math.nan), r"delta must be in \(0, 1\], got nan"),
        (lambda: VDBEEpsilon(2, [1.0, 0.0], 0.5, batch_shape=[2]), "sigma must be positive"),
        (lambda: PowerEpsilon(0.5, -1.0), "power must be non-negative, got -1.0"),
        (lambda: PowerEpsilon(0.5, 1.0, first_index=2), "first_index must be 0 or 1, got 2"),
        (lambda: LinearEpsilon(0.1, 0.5), "final must not exceed initial, got 0.5 > 0.1"),
        (
            lambda: LinearEpsilon([0.5, 0.5], [0.1, 0.6], batch_shape=[2]),
            "final must not exceed initial, got",
        ),
        (lambda: LinearEpsilon(num_frames=0), "num_frames must be at least 1, got 0"),
        (lambda: LinearEpsilon(count_by="day"), "count_by must be 'update' or 'step', got 'day'"),
        (lambda: StackedEpsilon([]), r"got batch shapes \[\]: pass batch_shape=\[runs\]"),
        (
            lambda: StackedEpsilon([BMCEpsilon(), ConstantEpsilon(0.1, batch_shape=[2])]),
            r"got batch shapes \[\(\), \(2,\)\]: pass batch_shape=\[runs\]",
        ),
        (
            lambda: StackedEpsilon(
                [ConstantEpsilon(0.1, batch_shape=[2, 3]), ConstantEpsilon(0.1, batch_shape=[2])]
            ),
            r"equal further dimensions, got batch shapes \[\(2, 3\), \(2,\)\]",
        ),
    ],
)
def test_arguments_of_strategies_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("strategy", [0.1, BMCEpsilon, "bmc"])
def test_a_strategy_must_be_one(strategy):
    with pytest.raises(TypeError, match=r"strategy must be an EpsilonStrategy such as BMCEpsilon"):
        AdaptiveEGreedyModule(action_spec(False), strategy)


@pytest.mark.parametrize("spec", [Bounded(-1, 1, shape=(2,)), Unbounded(shape=(2,))])
@pytest.mark.parametrize("composite", [False, True])
def test_only_discrete_actions_can_be_explored(spec, composite):
    wrapped = Composite(action=spec) if composite else spec
    with pytest.raises(TypeError, match=f"needs a discrete action spec.*{type(spec).__name__}"):
        AdaptiveEGreedyModule(wrapped)


def test_choices_that_differ_within_a_batch_are_refused():
    uneven = torch.stack([Categorical(2), Categorical(3)])
    with pytest.raises((TypeError, ValueError), match=r"discrete action spec|same choices"):
        AdaptiveEGreedyModule(uneven)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        (
            {"explore": "boltzmann"},
            ValueError,
            "'uniform', 'softmax', 'zeta' or a Replacement .*, got 'boltzmann'",
        ),
        ({"temperature": 0.0}, ValueError, "temperature must be positive and finite, got 0.0"),
        ({"temperature": math.nan}, ValueError, "temperature must be positive and finite, got nan"),
        ({"action_key": "chosen"}, KeyError, "no entry 'chosen', only.*pass action_key="),
    ],
)
def test_arguments_of_the_module_are_checked(kwargs, error, message):
    with pytest.raises(error, match=message):
        AdaptiveEGreedyModule(Composite(action=Categorical(4)), **kwargs)


def test_softmax_needs_a_single_action_variable():
    with pytest.raises(ValueError, match="one action variable"):
        AdaptiveEGreedyModule(MultiCategorical([2, 3]), explore="softmax")


# Acting.


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda td: td.exclude("action"), KeyError, "No action at 'action'.*after the Q-actor"),
        (
            lambda td: td.exclude("action_mask"),
            KeyError,
            "No action mask at 'action_mask'",
        ),
        (
            lambda td: td.set("action_mask", torch.ones(*RUNS, 3, dtype=torch.bool)),
            ValueError,
            r"'action_mask' has shape \(4, 3\): it must have one entry per choice, \(4, 4\)",
        ),
        (
            lambda td: td.set("action_value", torch.ones(*RUNS, 3)),
            ValueError,
            r"action values at 'action_value' of shape \(4, 4\), found \(4, 3\): pass",
        ),
        (
            lambda td: td.exclude("action_value"),
            KeyError,
            "at 'action_value', found nothing: pass action_value_key=",
        ),
        (
            lambda td: td.set("action", td["action"].to("meta")),
            RuntimeError,
            r"action is on meta and the exploration module on cpu: move.*\.to\('meta'\)",
        ),
        (
            lambda td: td.apply(lambda x: x[:3], batch_size=[3]),
            ValueError,
            r"shape \(4,\), but the action has batch size \(3,\).*batch_shape=\[3\], or \(\)",
        ),
    ],
)
def test_acting_explains_what_is_missing(spoil, error, message):
    explore = exploring(BMCEpsilon(batch_shape=RUNS), masked=True, explore="softmax")
    td = spoil(observed(RUNS, masked=True))
    kept = td.get("action", None)
    with pytest.raises(error, match=message):
        explore(td)
    assert td.get("action", None) is kept
    assert td.get("epsilon", None) is None


@pytest.mark.parametrize(
    ("spec", "action"),
    [
        (OneHot(ACTIONS), torch.zeros(*RUNS, dtype=torch.int64)),
        (OneHot(ACTIONS), torch.zeros(*RUNS, 7, dtype=torch.bool)),
        (MultiCategorical([2, 3]), torch.zeros(*RUNS, 3, dtype=torch.int64)),
    ],
)
def test_an_action_that_does_not_fit_the_spec_is_refused(spec, action):
    explore = AdaptiveEGreedyModule(spec, ConstantEpsilon(1.0))
    shape = re.escape(str(tuple(action.shape)))
    if action.ndim == 1:
        action = action[..., :3]
        shape = r"\(3,\)"
    with pytest.raises(ValueError, match=f"has shape {shape}, which is not an action of"):
        explore(TensorDict({"action": action}, action.shape[:1]))


NAMED = "pass state_key= .* or another num_states="
RANGE = "'state' must be an index from 0 to 2; raise num_states= .* or pass state_key="


@pytest.mark.parametrize("name", ["vdbe", "bmc-state"])
@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        (None, KeyError, "needs the key 'state'.*pass state_key=, or leave out num_states="),
        (torch.zeros(*RUNS), TypeError, f"got torch.float32.*{NAMED}"),
        (torch.zeros(*RUNS, 1), TypeError, f"got torch.float32.*{NAMED}"),
        (torch.eye(STATES)[[0, 1, 2, 0]], TypeError, f"got torch.float32.*{NAMED}"),
        (torch.zeros(*RUNS, dtype=torch.bool), TypeError, f"got torch.bool.*{NAMED}"),
        (torch.tensor([[0, 1, 2]] * 4), RuntimeError, f"has not a single 1.*{NAMED}"),
        (torch.tensor([[0, 1, 1]] * 4), RuntimeError, f"has not a single 1.*{NAMED}"),
        (torch.zeros(*RUNS, 3, dtype=torch.bool), RuntimeError, f"has not a single 1.*{NAMED}"),
        (torch.zeros(3, dtype=torch.int64), ValueError, r"shape \(3,\).*batch_shape \(4,\)"),
        (torch.full(RUNS, STATES), RuntimeError, RANGE),
        (torch.full(RUNS, -1), RuntimeError, RANGE),
    ],
)
def test_a_bad_state_is_refused_when_acting(name, state, error, message):
    explore = exploring(FACTORIES[name](RUNS))
    td = observed(RUNS).exclude("state")
    if state is not None:
        td = observed(state.shape[:1]).set("state", state)
    with pytest.raises(error, match=message):
        explore(td)


def test_an_action_value_that_is_not_a_number_does_not_break_uniform_exploration():
    td = observed((1000,))
    td["action_value"][:] = torch.nan
    action = exploring(ConstantEpsilon(1.0))(td)["action"]
    assert set(action.tolist()) == set(range(ACTIONS))


# Learning: the memory is as it was before the error.


def refuse(strategy, data, error, message):
    strategy.update(transitions((*strategy.batch_shape, 3)))
    explore = exploring(strategy)
    before = memory(explore)
    with pytest.raises(error, match=message):
        explore.update(data)
    assert same(memory(explore), before)


@pytest.mark.parametrize("time", [(), (5,)])
@pytest.mark.parametrize("name", LEARNING)
def test_entries_on_another_device_are_refused(name, time):
    data = transitions((*RUNS, *time))
    for key in FACTORIES[name](RUNS).in_keys:
        moved = data.clone().set(key, data[key].to("meta"))
        refuse(
            FACTORIES[name](RUNS), moved, ValueError, r"is on meta but \w+ is on cpu.*\.to\('meta"
        )


@pytest.mark.parametrize("batch", [(3,), (3, 5), ()])
@pytest.mark.parametrize("name", LEARNING)
def test_a_batch_of_other_runs_is_refused(name, batch):
    message = r"batch size \(.*\) does not start with the .*(batch_shape|runs)"
    refuse(FACTORIES[name](RUNS), transitions(batch), ValueError, message)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("name", ["geometric", "power", "linear", "bmc-offline", "stacked"])
def test_done_must_be_bool(name, dtype):
    data = transitions(RUNS)
    data["next", "done"] = data["next", "done"].to(dtype)
    message = rf"'done'\) must be bool, got {dtype}"
    refuse(FACTORIES[name](RUNS), data, TypeError, message)


@pytest.mark.parametrize("name", ["bmc", "bmc-state", "bmc-offline", "stacked"])
@pytest.mark.parametrize("key", ["greedy_return", "uniform_return"])
def test_returns_must_be_floating_point(name, key):
    data = transitions(RUNS)
    data[key] = data[key].long()
    refuse(
        FACTORIES[name](RUNS), data, TypeError, f"'{key}' must be floating point, got torch.int64"
    )


@pytest.mark.parametrize("name", ["bmc", "bmc-state", "bmc-offline", "stacked"])
def test_both_returns_must_have_one_shape(name):
    data = transitions(RUNS)
    data["uniform_return"] = data["uniform_return"][:, None].expand(*RUNS, AGENTS)
    refuse(FACTORIES[name](RUNS), data, ValueError, r"'greedy_return' has shape .* must be equal")


@pytest.mark.parametrize("name", ["vdbe", "bmc-state", "stacked"])
@pytest.mark.parametrize("bad", [STATES, -1])
@pytest.mark.parametrize("time", [(), (5,)])
def test_a_state_out_of_range_is_refused_before_anything_is_learned(name, bad, time):
    data = transitions((*RUNS, *time))
    last = data["state"][:, -1] if time else data["state"]
    last[-3:] = bad
    refuse(FACTORIES[name](RUNS), data, RuntimeError, RANGE)


@pytest.mark.parametrize("name", ["vdbe", "bmc-state", "stacked"])
def test_a_state_must_be_discrete(name):
    for state in (torch.zeros(RUNS), torch.eye(STATES)[[0, 1, 2, 0]]):
        data = transitions(RUNS).set("state", state)
        refuse(FACTORIES[name](RUNS), data, TypeError, f"got torch.float32.*{NAMED}")


def test_one_members_mistake_leaves_the_whole_stack_as_it_was():
    stack = StackedEpsilon(
        [
            BMCEpsilon(batch_shape=[2]),
            GeometricEpsilon(batch_shape=[1]),
            StackedEpsilon([VDBEEpsilon(STATES, 1.0, 0.5, batch_shape=[1])]),
        ]
    )
    refuse(stack, transitions(RUNS).exclude("value_change"), KeyError, "VDBEEpsilon needs the key")


def test_offline_posteriors_are_not_pooled():
    message = r"one posterior per environment.*\(2, 3, 5\).*\(2,\)"
    strategy = BMCEpsilon(update="offline", batch_shape=[2])
    refuse(strategy, transitions((2, 3, 5)), ValueError, message)


def test_a_missing_return_points_to_one_step_returns():
    data = transitions(RUNS).exclude("greedy_return")
    message = r"BMCEpsilon needs the key \W+greedy_return.*explore\.update\(returns\(transition\)\)"
    refuse(BMCEpsilon(batch_shape=RUNS), data, KeyError, message)


def test_one_state_is_an_index_and_never_one_hot():
    data = transitions(RUNS).set("state", torch.full((*RUNS, 1), 5))
    with pytest.raises(RuntimeError, match="must be an index from 0 to 0; raise num_states="):
        BMCEpsilon(num_states=1, batch_shape=RUNS).update(data)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8])
def test_two_states_may_be_one_hot(dtype):
    one_hot = BMCEpsilon(num_states=2, batch_shape=RUNS)
    index, data, where = copy.deepcopy(one_hot), transitions(RUNS), torch.tensor([0, 1, 1, 0])
    one_hot.update(data.clone().set("state", torch.eye(2, dtype=torch.int64)[where].to(dtype)))
    index.update(data.clone().set("state", where))
    assert same(memory(one_hot), memory(index))
    assert not torch.equal(index.alpha, torch.ones(4, 2))


# Entries of the user's that have a name of ours.

THEIRS = [
    torch.zeros(*RUNS, 1),
    torch.zeros(*RUNS, 5),
    torch.zeros(RUNS, dtype=torch.int64),
    torch.full(RUNS, 1.5),
    torch.full(RUNS, -0.5),
    TensorDict({"x": torch.zeros(RUNS)}, RUNS),
]


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("theirs", THEIRS, ids=range(len(THEIRS)))
def test_an_epsilon_of_the_users_is_not_written_over(theirs, greedy):
    explore = exploring(BMCEpsilon(batch_shape=RUNS))
    td = observed(RUNS).set("epsilon", theirs.clone())
    mode = ExplorationType.DETERMINISTIC if greedy else ExplorationType.RANDOM
    with set_exploration_type(mode):
        with pytest.raises(ValueError, match=r"entry 'epsilon' that is not ε.*pass epsilon_key="):
            explore(td)
        assert (td["epsilon"] == theirs).all()
        other = exploring(BMCEpsilon(batch_shape=RUNS), epsilon_key="rate")
        assert (other(td)["epsilon"] == theirs).all()
        assert (td["rate"] == (0 if greedy else explore.eps.float())).all()


def test_what_a_module_wrote_it_may_write_again():
    explore, other = exploring(BMCEpsilon(batch_shape=RUNS)), exploring(ConstantEpsilon(1.0))
    td = other(explore(explore(observed(RUNS))))
    assert (td["epsilon"] == 1).all()


@pytest.mark.parametrize("name", LEARNING)
def test_a_mark_that_is_not_bool_is_none(name):
    strategy, taken = FACTORIES[name](RUNS), torch.zeros(RUNS)
    before = memory(strategy)
    with pytest.raises(TypeError, match=r"taken must be bool, .* got torch\.float32"):
        strategy.update(transitions(RUNS), taken)
    assert same(memory(strategy), before)


@pytest.mark.parametrize("theirs", [torch.zeros(RUNS, dtype=torch.int64), NonTensorData("low")])
@pytest.mark.parametrize("name", LEARNING)
def test_what_is_no_number_is_not_the_epsilon_of_an_action(name, theirs):
    explore = exploring(FACTORIES[name](RUNS))
    data, before = transitions(RUNS).set("epsilon", theirs), memory(explore)
    with pytest.raises(TypeError, match=r"'epsilon' must be the ε .*pass epsilon_key="):
        explore.update(data)
    assert same(memory(explore), before)
    exploring(FACTORIES[name](RUNS), epsilon_key="rate").update(data)


@pytest.mark.parametrize("name", LEARNING)
@pytest.mark.parametrize(
    ("key", "theirs", "message"),
    [
        ("mask", torch.zeros(RUNS), "'mask' is read as a mask.* and is torch.float32"),
        ("mask", torch.zeros(*RUNS, 1), r"torch.float32 of shape \(4, 1\). If it means something"),
        ("mask", TensorDict({}, RUNS), "'mask' is read as a mask of real.* is TensorDict"),
        ("collector", torch.zeros(RUNS), "cannot be a mask at .*'collector' is a tensor"),
        (("collector", "mask"), torch.ones(RUNS), "'collector', 'mask'.* is torch.float32"),
    ],
)
def test_a_mask_that_means_something_else_is_an_error_that_says_mask_keys(
    name, key, theirs, message
):
    data = transitions(RUNS).set(key, theirs)
    refuse(
        FACTORIES[name](RUNS), data, TypeError, f"{message}.*pass mask_keys=.*or \\(\\) for none"
    )
    free, plain = exploring(FACTORIES[name](RUNS), mask_keys=()), FACTORIES[name](RUNS)
    free.update(data)
    plain.update(data.exclude("mask", "collector"))
    kept = {k: v for k, v in memory(free.strategy).items() if "skipped" not in k}
    assert same(kept, {k: v for k, v in memory(plain).items() if "skipped" not in k})


def test_masks_are_where_mask_keys_says():
    data = transitions(RUNS).set("real", torch.tensor([True, False, True, False]))
    explore = exploring(BMCEpsilon(batch_shape=RUNS), mask_keys=["real"])
    explore.update(data)
    assert explore.strategy.learned.tolist() == [1, 0, 1, 0]
    with pytest.raises(KeyError, match="No mask at 'real': pass mask_keys="):
        explore.update(data.exclude("real"))
