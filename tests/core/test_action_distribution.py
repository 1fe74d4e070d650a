"""How often each action is drawn, against EGreedyModule and the paper; masks."""

import copy

import pytest
import torch
from contracts import ACTIONS, AGENTS, MASK, REJECT, action_spec, exploring, observed
from scipy import stats
from tensordict import TensorDict
from torch.nn import functional as F  # noqa: N812
from torchrl.data import Binary, Categorical, MultiCategorical, MultiOneHot, OneHot
from torchrl.modules import EGreedyModule

from bmc_torchrl import AdaptiveEGreedyModule, ConstantEpsilon

DRAWS = 100_000


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


SPECS = {
    "categorical": (Categorical(4), torch.tensor(1)),
    "categorical_in_a_column": (Categorical(4, shape=[1]), torch.tensor([1])),
    "two_categorical_with_one_coin": (Categorical(4, shape=[2]), torch.tensor([1, 1])),
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
def test_softmax_exploration_follows_the_action_values_in_their_range(temperature, one_hot, masked):
    layout = {"one_hot": one_hot, "masked": masked}
    explore = exploring(ConstantEpsilon(0.7), explore="softmax", temperature=temperature, **layout)
    td = observed((DRAWS,), **layout)
    value = torch.tensor([0.3, -0.4, 2.0, 1.0])
    td["action_value"] = value.expand(DRAWS, -1).clone()
    counts = codes(explore(td)["action"], action_spec(one_hot)).bincount(minlength=ACTIONS)
    allowed = torch.tensor(MASK) if masked else torch.ones(ACTIONS, dtype=torch.bool)
    low, high = value[allowed].min(), value[allowed].max()
    logits = (2 * (value - low) / (high - low) - 1) / temperature
    logits = logits.masked_fill(~allowed, -torch.inf)
    expected = 0.7 * logits.double().softmax(-1) + 0.3 * F.one_hot(torch.tensor(1), 4)
    legal = expected > 0
    assert counts[~legal].sum() == 0
    assert stats.chisquare(counts[legal], DRAWS * expected[legal]).pvalue > REJECT


@pytest.mark.parametrize("how", ["uniform", "softmax", "zeta"])
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


@pytest.mark.parametrize("kind", MASKS)
def test_masks_do_not_change_the_spec(kind):
    spec, greedy = SPECS[kind]
    assert spec.mask is None
    explore = AdaptiveEGreedyModule(spec, ConstantEpsilon(1.0), action_mask_key="action_mask")
    mask = MASKS[kind].expand(8, -1)
    explore(TensorDict({"action": greedy.expand(8, *greedy.shape), "action_mask": mask}, [8]))
    assert spec.mask is None
    assert explore.spec["action"].mask is None
