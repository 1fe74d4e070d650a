"""AdaptiveEGreedyModule in place of EGreedyModule: specs, keys, policies, vmap, warnings."""

import copy
import pickle
import re
import warnings
from functools import partial

import pytest
import torch
from contracts import (
    ACTIONS,
    FACTORIES,
    LEARNING,
    RUNS,
    Plain,
    action_spec,
    exploring,
    observed,
    transitions,
)
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.func import functional_call, stack_module_state
from torchrl.data import Composite, OneHot
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import QValueActor

from bmc_torchrl import (
    AdaptiveEGreedyModule,
    BMCEpsilon,
    ConstantEpsilon,
    LinearEpsilon,
)


@pytest.mark.parametrize("nested", [False, True], ids=["root", "nested"])
@pytest.mark.parametrize("one_hot", [False, True], ids=["categorical", "one_hot"])
@pytest.mark.parametrize("form", ["leaf", "composite", "batched", "batched composite", "delayed"])
def test_every_form_of_the_spec_draws_the_same_actions(form, one_hot, nested):
    key = ("agents", "action") if nested else "action"
    batch = RUNS if "batched" in form else ()
    whole = action_spec(one_hot, nested, batch)
    leaf = whole[key] if nested else whole
    composite = whole if nested else Composite(action=leaf, shape=batch)
    spec = composite if "composite" in form else leaf
    kept = copy.deepcopy(spec)
    explore = AdaptiveEGreedyModule(
        None if form == "delayed" else spec, ConstantEpsilon(0.5), action_key=key
    )
    if form == "delayed":
        assert explore.spec is None
        with pytest.raises(RuntimeError, match=r"no action spec yet.*explore\.spec"):
            explore(observed(RUNS, one_hot=one_hot, nested=nested))
        explore.spec = spec
    td = observed(RUNS, one_hot=one_hot, nested=nested)
    torch.manual_seed(3)
    drawn = explore(td.clone())[key]
    torch.manual_seed(3)
    plain = exploring(ConstantEpsilon(0.5), one_hot=one_hot, nested=nested)
    assert torch.equal(drawn, plain(td)[key])
    assert explore.spec[key] == leaf
    assert spec == kept


def test_the_default_is_the_papers_prior():
    explore = AdaptiveEGreedyModule(action_spec(False))
    assert isinstance(explore.strategy, BMCEpsilon)
    assert float(explore.eps) == pytest.approx(1 / 2.01)


def test_a_trainers_partial_builds_it():
    greedy_module = partial(
        AdaptiveEGreedyModule, strategy=LinearEpsilon(1.0, 0.5, 10, count_by="step")
    )
    explore = greedy_module(spec=action_spec(False), action_key="chosen")
    explore.step(4)
    assert float(explore.eps) == pytest.approx(0.8)
    assert explore.in_keys == ["chosen"]
    assert explore.out_keys == ["chosen", "epsilon"]
    td = explore(TensorDict({"chosen": torch.zeros(3, dtype=torch.int64)}, [3]))
    torch.testing.assert_close(td["epsilon"], torch.full([3], 0.8))


@pytest.mark.parametrize("nested", [False, True], ids=["root", "nested"])
def test_keys_are_declared(nested):
    strategy = FACTORIES["vdbe"](())
    explore = exploring(strategy, masked=True, nested=nested, explore="softmax")
    root = ("agents",) if nested else ()
    names = [(*root, name) if root else name for name in ("action", "action_mask", "action_value")]
    assert explore.in_keys == [*names, "state"]
    assert explore.out_keys == [names[0], (*root, "epsilon") if root else "epsilon"]
    td = observed(RUNS, masked=True, nested=nested)
    explore(td.select(*explore.in_keys))


def test_the_record_may_go_elsewhere():
    explore = AdaptiveEGreedyModule(action_spec(False), epsilon_key=("log", "eps"))
    td = explore(observed(RUNS))
    torch.testing.assert_close(td["log", "eps"], torch.full(RUNS, 1 / 2.01))
    assert explore.taken(td).all()
    explore.update(transitions(RUNS).set(("log", "eps"), torch.zeros(RUNS)))
    assert float(explore.eps) == pytest.approx(1 / 2.01)


def test_the_recorded_epsilon_is_exact_but_for_zero_and_a_copy():
    rates = torch.tensor([0.0, 1e-40, 0.5, 1.0], dtype=torch.float64)
    explore = exploring(ConstantEpsilon(rates, batch_shape=RUNS))
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            recorded = explore(observed(RUNS))["epsilon"]
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.equal(recorded, rates.to(dtype).clamp_min(2.0**-126))
        explore.strategy.value.fill_(0.25)
        assert torch.equal(recorded, rates.to(dtype).clamp_min(2.0**-126))
        explore.strategy.value.copy_(rates)


def test_building_a_module_changes_nothing_about_its_strategy():
    strategy = FACTORIES["stacked"](RUNS)
    before = [dict(vars(part)) for part in strategy.modules()]
    AdaptiveEGreedyModule(action_spec(False), strategy, epsilon_key="eps")
    assert [dict(vars(part)) for part in strategy.modules()] == before


def test_one_property_is_a_strategy():
    explore = exploring(Plain(RUNS))
    assert explore.state_dict() == {}
    explore.load_state_dict({})
    for mode in (explore.train(), explore.eval(), pickle.loads(pickle.dumps(explore))):
        explored = mode(observed((*RUNS, 5000)))["action"] != 1
        torch.testing.assert_close(
            explored.float().mean(-1), torch.full(RUNS, 0.3 * 0.75), rtol=0, atol=0.03
        )
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            td = mode(observed(RUNS))
        assert (td["action"] == 1).all()
        assert not td["epsilon"].any()
        mode.update(transitions((*RUNS, 5)))
        mode.step(5)
    assert explore.eps.tolist() == [0.3] * 4


def test_the_module_takes_egreedys_place_in_a_policy():
    q_actor = QValueActor(nn.Linear(3, ACTIONS), in_keys=["observation"], action_space="one_hot")
    explore = AdaptiveEGreedyModule(OneHot(ACTIONS), ConstantEpsilon(1.0))
    policy = TensorDictSequential(q_actor, explore)
    td = policy(TensorDict({"observation": torch.randn(1000, 3)}, [1000]))
    assert (td["action"].sum(-1) == 1).all()
    assert (td["action"].argmax(-1) != td["action_value"].argmax(-1)).any()
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        td = policy(td)
    assert torch.equal(td["action"].argmax(-1), td["action_value"].argmax(-1))


def test_vmap_over_functional_call_runs_many_modules_at_once():
    rates = [0.0, 0.5, 1.0]
    modules = [exploring(ConstantEpsilon(rate)) for rate in rates]
    _, buffers = stack_module_state(modules)

    def act(buffers, action):
        td = functional_call(modules[0], buffers, (TensorDict({"action": action}, [2000]),))
        return td["action"], td["epsilon"]

    greedy = torch.ones(3, 2000, dtype=torch.int64)
    action, epsilon = torch.vmap(act, randomness="different")(buffers, greedy)
    torch.testing.assert_close(epsilon[:, 0], torch.tensor(rates))
    explored = (action != 1).float().mean(-1)
    torch.testing.assert_close(explored, torch.tensor(rates) * 0.75, rtol=0, atol=0.04)


def test_vmap_reaches_the_posterior():
    modules = [exploring(BMCEpsilon(alpha, 10.0)) for alpha in (1.0, 2.0, 3.0)]
    _, buffers = stack_module_state(modules)
    td = observed((5,))
    epsilon = torch.vmap(
        lambda b: functional_call(modules[0], b, (td.clone(),))["epsilon"], randomness="different"
    )(buffers)
    expected = torch.tensor([1 / 11, 2 / 12, 3 / 13])
    torch.testing.assert_close(epsilon, expected[:, None].expand(3, 5))


def test_vmap_reaches_a_tensordict_that_has_been_acted_on():
    explore = exploring(ConstantEpsilon(0.25))
    td = torch.stack([observed((5,)) for _ in range(3)])
    td = td.set("epsilon", torch.full((3, 5), 0.5))
    acted = torch.vmap(explore, randomness="different")(td)
    assert (acted["epsilon"] == 0.25).all()


def test_on_a_device_what_was_acted_on_is_acted_on_again():
    explore = exploring(BMCEpsilon()).to("meta")
    td = observed(RUNS).set("epsilon", torch.full(RUNS, 0.5)).to("meta")
    assert explore(td)["epsilon"].shape == RUNS


@pytest.mark.parametrize("use", [lambda m: m.step(10), lambda m: m(observed(RUNS))])
def test_long_use_without_updates_warns_once(use):
    explore = AdaptiveEGreedyModule(action_spec(False))
    explore.PATIENCE = 5
    expected = r"used 5 times and ε is still 0\.498.*update\(returns"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            use(explore)
        with pytest.warns(UserWarning, match=expected):
            use(explore)
        use(explore)


def test_an_update_anywhere_spares_the_warning():
    explore = AdaptiveEGreedyModule(action_spec(False))
    explore.PATIENCE = 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        explore(observed(RUNS))
        explore.strategy.alpha.mul_(0.9)
        for _ in range(5):
            explore(observed(RUNS))


@pytest.mark.parametrize("strategy", [ConstantEpsilon(0.1), LinearEpsilon(count_by="step")])
def test_strategies_that_need_no_update_do_not_warn(strategy):
    explore = AdaptiveEGreedyModule(action_spec(False), strategy)
    explore.PATIENCE = 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            explore(observed(RUNS))
            explore.step(1)


def test_proper_use_does_not_warn():
    explore = AdaptiveEGreedyModule(action_spec(False))
    explore.PATIENCE = 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            explore(observed(RUNS))
            explore.update(transitions(RUNS))
            explore.step(1)


def used(strategy, *transitions, times=3, **options):
    """The warning of a module that was used and updated, or None."""
    explore = exploring(strategy, **options)
    explore.PATIENCE = times
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for data in transitions:
            explore.update(data)
        for _ in range(times):
            explore(observed(RUNS))
    return str(caught[0].message) if caught else None


@pytest.mark.parametrize("name", LEARNING)
@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (lambda td: td.set("epsilon", torch.zeros(RUNS)), "4 not taken by this policy"),
        (lambda td: td.set("mask", torch.zeros(RUNS).bool()), "4 masked as padding"),
    ],
)
def test_the_warning_names_why_frames_were_left_out(name, spoil, cause):
    said = used(FACTORIES[name](RUNS), spoil(transitions(RUNS)))
    assert "used 3 times and ε is still" in said
    assert cause in said
    assert "it learned from 0" in said
    assert "call" not in said


@pytest.mark.parametrize("name", ["bmc", "bmc-state", "vdbe"])
def test_the_warning_names_returns_that_are_not_finite(name):
    data = transitions(RUNS)
    data["greedy_return"][:] = data["value_change"][:] = torch.nan
    assert "4 without a finite return" in used(FACTORIES[name](RUNS), data)


def test_the_warning_names_every_cause_with_its_number():
    data = transitions(RUNS)
    data["mask"] = torch.tensor([False, True, True, True])
    data["epsilon"] = torch.tensor([0.0, 0.0, 0.0, 0.5])
    data["greedy_return"][3] = torch.inf
    said = used(BMCEpsilon(batch_shape=RUNS), data)
    assert re.search("1 masked.*; 2 not taken.*; 1 without a finite return", said)


def test_the_warning_names_action_values_that_do_not_differ():
    data = transitions(RUNS)
    data["uniform_return"] = data["greedy_return"].clone()
    said = used(BMCEpsilon(batch_shape=RUNS), data)
    assert "learned from 4 frames" in said
    assert "are all action values equal?" in said


@pytest.mark.parametrize("name", ["geometric", "power", "bmc-offline"])
def test_a_schedule_that_waits_for_the_end_of_an_episode_is_not_warned_of(name):
    data = transitions((*RUNS, 5))
    data["next", "done"][:] = False
    assert used(FACTORIES[name](RUNS), data) is None
    assert "call `explore.update" in used(FACTORIES[name](RUNS))


def test_a_users_own_strategy_that_was_updated_is_not_warned_of():
    class Waiting(Plain):
        def learn(self):
            pass

    assert used(Waiting(RUNS), transitions(RUNS)) is None
    assert "call `explore.update" in used(Waiting(RUNS))


def test_evaluation_does_not_count_towards_the_warning():
    explore = AdaptiveEGreedyModule(action_spec(False))
    explore.PATIENCE = 3
    with warnings.catch_warnings(), set_exploration_type(ExplorationType.DETERMINISTIC):
        warnings.simplefilter("error")
        for _ in range(5):
            explore(observed(RUNS))


def test_a_module_after_a_q_table_acts_on_time_too():
    explore = exploring(BMCEpsilon([1.0, 2.0, 3.0, 4.0], [10.0] * 4, batch_shape=[4]))
    greedy = TensorDictModule(torch.zeros_like, in_keys=["state"], out_keys=["action"])
    td = TensorDictSequential(greedy, explore)(observed((4, 7)))
    assert td["epsilon"].shape == (4, 7)
    torch.testing.assert_close(td["epsilon"][:, 3], explore.eps.float())
