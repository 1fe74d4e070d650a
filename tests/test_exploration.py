import copy
import warnings
from functools import partial

import pytest
import torch
from contracts import (
    ACTIONS,
    AGENTS,
    FACTORIES,
    MASK,
    RUNS,
    action_spec,
    exploring,
    memory,
    observed,
    same,
    transitions,
)
from scipy import stats
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.func import functional_call, stack_module_state
from torch.nn import functional as F  # noqa: N812
from torchrl.data import Binary, Categorical, Composite, MultiCategorical, MultiOneHot, OneHot
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import EGreedyModule, QValueActor

from bmc_torchrl import (
    AdaptiveEGreedyModule,
    BMCEpsilon,
    ConstantEpsilon,
    LinearEpsilon,
    OneStepReturns,
)

DRAWS = 100_000
REJECT = 1e-3
"""Below which probability a fixed seed's draws are called different."""


def codes(action, spec):
    """Each action as one number, agents and variables together."""
    if isinstance(spec, MultiOneHot):
        action = torch.stack([part.int().argmax(-1) for part in action.split([2, 3], -1)], -1)
    elif isinstance(spec, OneHot):
        action = action.int().argmax(-1)
    action = action.reshape(DRAWS, -1).long()
    return (action * 5 ** torch.arange(action.shape[-1])).sum(-1)


def histograms(first, second):
    bins = int(max(first.max(), second.max())) + 1
    table = torch.stack([x.bincount(minlength=bins) for x in (first, second)])
    return table[:, table.sum(0) > 0].numpy()


# The distribution of actions.

SPECS = {
    "categorical": (Categorical(4), torch.tensor(1)),
    "one_hot": (OneHot(4), F.one_hot(torch.tensor(1), 4).bool()),
    "multi_categorical": (MultiCategorical([2, 3]), torch.tensor([1, 1])),
    "multi_one_hot": (MultiOneHot([2, 3]), torch.tensor([0, 1, 0, 1, 0]).bool()),
    "binary": (Binary(3), torch.tensor([1, 0, 1], dtype=torch.int8)),
}
MASKS = {
    "categorical": torch.tensor(MASK),
    "one_hot": torch.tensor(MASK),
    "multi_categorical": torch.tensor([True, True, False, True, True]),
    "multi_one_hot": torch.tensor([True, True, False, True, True]),
}


@pytest.mark.parametrize(
    ("kind", "masked"),
    # TorchRL's own draws from a MultiCategorical are what is slow.
    [
        pytest.param(kind, masked, marks=[pytest.mark.slow] * (kind == "multi_categorical"))
        for masked, kinds in ((False, SPECS), (True, MASKS))
        for kind in kinds
    ],
)
def test_actions_are_distributed_as_egreedys(kind, masked):
    spec, greedy = SPECS[kind]
    td = TensorDict({"action": greedy.expand(DRAWS, *greedy.shape).clone()}, [DRAWS])
    if masked:
        td["action_mask"] = MASKS[kind].expand(DRAWS, -1).clone()
    key = "action_mask" if masked else None
    ours = AdaptiveEGreedyModule(spec, ConstantEpsilon(0.6), action_mask_key=key)
    theirs = EGreedyModule(copy.deepcopy(spec), 0.6, 0.6, action_mask_key=key)
    mine, their = ours(td.clone())["action"], theirs(td.clone())["action"]
    assert mine.dtype == greedy.dtype
    assert mine.shape == their.shape
    table = histograms(codes(mine, spec), codes(their, spec))
    assert table.shape[1] > 2
    assert stats.chi2_contingency(table).pvalue > REJECT


@pytest.mark.parametrize("one_hot", [False, True], ids=["categorical", "one_hot"])
def test_nested_actions_are_drawn_per_agent_as_egreedys(one_hot):
    td = observed((DRAWS,), one_hot=one_hot, nested=True)
    spec = action_spec(one_hot, nested=True)
    key = ("agents", "action")
    ours = AdaptiveEGreedyModule(spec, ConstantEpsilon(0.6), action_key=key)
    wide = action_spec(one_hot, nested=True, batch=(DRAWS,))
    theirs = EGreedyModule(wide, 0.6, 0.6, action_key=key)
    leaf = spec[key]
    table = histograms(*(codes(module(td.clone())[key], leaf) for module in (ours, theirs)))
    assert table.shape[1] == ACTIONS**AGENTS
    assert stats.chi2_contingency(table).pvalue > REJECT


@pytest.mark.parametrize("epsilon", [0.0, 0.25, 1.0])
def test_the_probability_of_an_action_is_that_of_the_paper(epsilon):
    td = exploring(ConstantEpsilon(epsilon))(observed((DRAWS,)))
    counts = td["action"].bincount(minlength=ACTIONS).numpy()
    expected = [DRAWS * (epsilon / 4 + (1 - epsilon) * (action == 1)) for action in range(4)]
    if epsilon == 0:
        assert counts.tolist() == expected
    else:
        assert stats.chisquare(counts, expected).pvalue > REJECT


def test_each_run_explores_at_its_own_rate():
    rates = torch.tensor([0.0, 0.1, 0.5, 1.0])
    explore = exploring(ConstantEpsilon(rates, batch_shape=[4]))
    explored = (explore(observed((4, DRAWS // 4)))["action"] != 1).float().mean(-1)
    torch.testing.assert_close(explored, rates * 0.75, rtol=0, atol=0.015)


@pytest.mark.parametrize("masked", [False, True], ids=["free", "masked"])
@pytest.mark.parametrize("one_hot", [False, True], ids=["categorical", "one_hot"])
@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_softmax_exploration_follows_the_action_values(temperature, one_hot, masked):
    layout = {"one_hot": one_hot, "masked": masked}
    explore = exploring(ConstantEpsilon(0.7), explore="softmax", temperature=temperature, **layout)
    td = observed((DRAWS,), **layout)
    value = torch.tensor([0.3, -0.4, 2.0, 1.0])
    td["action_value"] = value.expand(DRAWS, -1).clone()
    counts = codes(explore(td)["action"], action_spec(one_hot)).bincount(minlength=ACTIONS)
    logits = value / temperature
    if masked:
        logits = logits.masked_fill(~torch.tensor(MASK), -torch.inf)
    expected = 0.7 * logits.double().softmax(-1) + 0.3 * F.one_hot(torch.tensor(1), 4)
    legal = expected > 0
    assert counts[~legal].sum() == 0
    assert stats.chisquare(counts[legal], DRAWS * expected[legal]).pvalue > REJECT


@pytest.mark.parametrize("how", ["uniform", "softmax"])
@pytest.mark.parametrize("one_hot", [False, True], ids=["categorical", "one_hot"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int8])
def test_illegal_actions_are_never_drawn_and_an_empty_mask_keeps_the_action(how, one_hot, dtype):
    td = observed((5000,), one_hot=one_hot, masked=True)
    mask = torch.rand(5000, ACTIONS) < 0.4
    empty = ~mask.any(-1)
    assert empty.any()
    td["action_mask"] = mask.to(dtype)
    explore = exploring(ConstantEpsilon(1.0), explore=how, one_hot=one_hot, masked=True)
    action = explore(td)["action"]
    index = action.int().argmax(-1) if one_hot else action
    assert mask.gather(-1, index[:, None])[~empty].all()
    assert (index[empty] == 1).all()


@pytest.mark.parametrize(("empty", "explores"), [((0, 0, 1, 1, 1), False), ((0, 1, 0, 1, 1), True)])
def test_every_variable_of_a_masked_multi_action_needs_a_choice(empty, explores):
    spec = MultiCategorical([2, 3])
    explore = AdaptiveEGreedyModule(spec, ConstantEpsilon(1.0), action_mask_key="action_mask")
    mask = torch.tensor(empty).bool().expand(1000, -1)
    action = torch.tensor([1, 0]).expand(1000, 2)
    drawn = explore(TensorDict({"action": action.clone(), "action_mask": mask}, [1000]))["action"]
    assert torch.equal(drawn, action) != explores
    if explores:
        assert (drawn[:, 0] == 1).all()
        assert set(drawn[:, 1].tolist()) == {1, 2}


# Specs and construction.


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


@pytest.mark.parametrize("kind", MASKS)
def test_masks_do_not_change_the_spec(kind):
    spec, greedy = SPECS[kind]
    assert spec.mask is None
    explore = AdaptiveEGreedyModule(spec, ConstantEpsilon(1.0), action_mask_key="action_mask")
    mask = MASKS[kind].expand(8, -1)
    explore(TensorDict({"action": greedy.expand(8, *greedy.shape), "action_mask": mask}, [8]))
    assert spec.mask is None
    assert explore.spec["action"].mask is None


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


def test_the_recorded_epsilon_may_go_elsewhere_and_still_marks_random_frames():
    explore = AdaptiveEGreedyModule(action_spec(False), epsilon_key=("log", "eps"))
    td = explore(observed(RUNS))
    torch.testing.assert_close(td["log", "eps"], torch.full(RUNS, 1 / 2.01))
    data = transitions(RUNS).set(("log", "eps"), torch.zeros(RUNS))
    explore.update(data)
    assert float(explore.eps) == pytest.approx(1 / 2.01)


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


# Warnings.


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


def test_evaluation_does_not_count_towards_the_warning():
    explore = AdaptiveEGreedyModule(action_spec(False))
    explore.PATIENCE = 3
    with warnings.catch_warnings(), set_exploration_type(ExplorationType.DETERMINISTIC):
        warnings.simplefilter("error")
        for _ in range(5):
            explore(observed(RUNS))


# Compiled.


@pytest.fixture
def _fresh_compiler():
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "stacked")) for n in FACTORIES]
)
def test_every_strategy_acts_and_learns_in_one_graph(name):
    eager, compiled = exploring(FACTORIES[name](RUNS)), exploring(FACTORIES[name](RUNS))

    def act_and_learn(explore, td, data):
        td = explore(td)
        explore.update(data)
        return td["action"], td["epsilon"]

    graph = torch.compile(act_and_learn, fullgraph=True, backend="eager")
    for _ in range(2):
        td, data = observed(RUNS), transitions(RUNS)
        torch.manual_seed(1)
        expected = act_and_learn(eager, td.clone(), data.clone())
        torch.manual_seed(1)
        for ours, theirs in zip(graph(compiled, td, data), expected, strict=True):
            assert torch.equal(ours, theirs)
    assert same(memory(compiled), memory(eager))


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_actions_have_the_same_distribution():
    layout = {"one_hot": True, "masked": True, "nested": True}
    act = torch.compile(exploring(ConstantEpsilon(0.6), **layout), fullgraph=True)
    acted = act(observed((20_000,), **layout))["agents"]
    counts = acted["action"].sum((0, 1)).tolist()
    assert counts.pop(MASK.index(False)) == 0
    assert stats.chisquare(counts, [8000, 24000, 8000]).pvalue > REJECT
    torch.testing.assert_close(acted["epsilon"], torch.full((20_000, AGENTS), 0.6))


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("time", [(), (50,)])
def test_returns_and_update_compile_together(time):
    q_actor = QValueActor(
        nn.Linear(3, ACTIONS), in_keys=["observation"], action_space="categorical"
    )
    returns = OneStepReturns(q_actor, gamma=0.9)
    eager, compiled = (exploring(BMCEpsilon(batch_shape=RUNS)) for _ in range(2))
    where = {key: buffer.data_ptr() for key, buffer in compiled.named_buffers()}
    learn = torch.compile(
        lambda data: compiled.update(returns(data)), fullgraph=True, backend="aot_eager"
    )
    for _ in range(2):
        data = transitions((*RUNS, *time)).exclude("greedy_return", "uniform_return")
        data["next", "observation"] = 3 * torch.randn(*RUNS, *time, 3)
        data["next", "terminated"].zero_()
        eager.update(returns(data.clone()))
        learn(data.clone())
    assert (eager.eps < 1 / 2.01).all()
    for key, buffer in compiled.named_buffers():
        torch.testing.assert_close(buffer, eager.get_buffer(key), rtol=1e-12, atol=1e-12)
        assert buffer.data_ptr() == where[key]


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
def test_a_compiled_walk_through_time_is_one_scan_and_exact():
    eager, compiled = BMCEpsilon(batch_shape=RUNS), BMCEpsilon(batch_shape=RUNS)
    graphs = []

    def inductor(graph, inputs):
        graphs.append(graph)
        return torch._inductor.compile(graph, inputs)

    learn = torch.compile(compiled.update, fullgraph=True, backend=inductor)
    for _ in range(2):
        data = transitions((*RUNS, 50))
        data["greedy_return"][0, 3] = torch.nan
        eager.update(data)
        learn(data)
    (graph,) = graphs
    calls = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert calls.count("scan") == 1
    assert len(calls) < 50
    for key, buffer in compiled.named_buffers():
        torch.testing.assert_close(buffer, eager.get_buffer(key), rtol=1e-12, atol=1e-12)


def test_a_module_after_a_q_table_acts_on_time_too():
    explore = exploring(BMCEpsilon([1.0, 2.0, 3.0, 4.0], [10.0] * 4, batch_shape=[4]))
    greedy = TensorDictModule(torch.zeros_like, in_keys=["state"], out_keys=["action"])
    td = TensorDictSequential(greedy, explore)(observed((4, 7)))
    assert td["epsilon"].shape == (4, 7)
    torch.testing.assert_close(td["epsilon"][:, 3], explore.eps.float())


def test_agents_keep_their_own_epsilon_when_environments_are_pooled():
    strategy = BMCEpsilon(alpha0=[1e-9, 1.0, 1e9], beta0=[1e9, 1.01, 1.1e9], batch_shape=[3])
    key = ("agents", "action")
    explore = AdaptiveEGreedyModule(Categorical(5, shape=[3]), strategy, action_key=key)
    action = torch.full((400, 3), 4)
    td = explore(TensorDict({"agents": TensorDict({"action": action}, [400, 3])}, [400]))
    torch.testing.assert_close(
        td["agents", "epsilon"], strategy.eps.float().clamp(min=1e-38).expand(400, 3)
    )
    changed = (td[key] != 4).float().mean(0)
    expected = 0.8 * torch.tensor([0.0, 1 / 2.01, 1 / 2.1])
    torch.testing.assert_close(changed, expected, atol=0.08, rtol=0)
    returns = {"greedy_return": torch.ones(400, 3), "uniform_return": torch.zeros(400, 3)}
    strategy.update(TensorDict(returns, [400]))
    assert strategy.return_count.tolist() == [400.0] * 3
