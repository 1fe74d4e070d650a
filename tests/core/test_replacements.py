"""What replaces an action: how often, for how long, and that it goes with every strategy."""

import copy
import itertools
import pickle
import warnings

import pytest
import torch
from contracts import (
    ACTIONS,
    AGENTS,
    FACTORIES,
    MASK,
    REJECT,
    REPLACEMENTS,
    RUNS,
    exploring,
    memory,
    observed,
    recorded,
    same,
    transitions,
)
from scipy import stats
from tensordict import TensorDict
from torchrl.data import Categorical, MultiCategorical
from torchrl.envs import InitTracker, TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type

from bmc_torchrl import AdaptiveEGreedyModule, BMCEpsilon, ConstantEpsilon, RepeatedAction
from bmc_torchrl.actions import ActionLayout, Choice
from bmc_torchrl.envs import SubgoalGridEnv
from bmc_torchrl.functional import normalised_value, zeta_cdf

LAYOUT = ActionLayout((ACTIONS,), one_hot=False, multiple=False)


def index(td, nested=False, one_hot=False):
    action = td["agents", "action"] if nested else td["action"]
    return action.int().argmax(-1) if one_hot else action


def played(explore, steps, batch=(2000,), **layout):
    """Actions ``[steps, *batch]`` of a module that always sees the greedy action 1."""
    first = torch.ones(*batch, 1, dtype=torch.bool)
    return torch.stack(
        [
            index(explore(observed(batch, **layout).set("is_init", first & (step == 0))))
            for step in range(steps)
        ]
    )


def runs_of_one_action(column):
    return [(key, len(list(group))) for key, group in itertools.groupby(column)]


def test_the_truncated_zeta_law_is_scipys():
    for mu, longest in ((1.5, 40), (2.0, 1000)):
        n = torch.arange(1, longest + 1).numpy()
        expected = stats.zipfian.cdf(n, mu, longest)
        torch.testing.assert_close(
            zeta_cdf(mu, longest), torch.tensor(expected), rtol=1e-12, atol=0
        )
    wide = zeta_cdf(2.0, 10_000)[:100]
    torch.testing.assert_close(
        wide, torch.tensor(stats.zipf.cdf(range(1, 101), 2.0)), rtol=1e-4, atol=0
    )


def test_lengths_are_drawn_from_it():
    lengths = RepeatedAction(2.0, 1000).length(torch.rand(100_000))
    assert int(lengths.min()) == 1
    counts = lengths.clamp(max=20).bincount(minlength=21)[1:]
    law = stats.zipfian.pmf(range(1, 20), 2.0, 1000)
    expected = 100_000 * torch.tensor([*law, 1 - law.sum()])
    assert stats.chisquare(counts, expected).pvalue > REJECT
    edges = torch.tensor([0.0, 1 - 2**-24])
    assert RepeatedAction(2.0, 3).length(edges).tolist() == [1, 3]


def test_a_repetition_lasts_as_long_as_was_drawn_and_its_action_is_uniform():
    torch.manual_seed(0)
    longest = 4
    explore = exploring(ConstantEpsilon(0.02), explore=RepeatedAction(1.5, longest))
    actions = played(explore, 300)[:-longest]
    found = [run for column in actions.T.tolist() for run in runs_of_one_action(column)]
    found = [(action, length) for action, length in found if action != 1 and length <= longest]
    lengths = torch.tensor([length for _, length in found]).bincount(minlength=longest + 1)[1:]
    law = torch.tensor(stats.zipfian.pmf(range(1, longest + 1), 1.5, longest))
    # Two of the same action in a row are counted as one: rare at this ε, beside what is drawn.
    torch.testing.assert_close(lengths / lengths.sum(), law, rtol=0.1, atol=0.01, check_dtype=False)
    chosen = torch.tensor([action for action, _ in found]).bincount(minlength=ACTIONS)
    assert stats.chisquare(chosen[[0, 2, 3]]).pvalue > REJECT


def test_held_for_one_step_it_is_epsilon_greedy():
    torch.manual_seed(0)
    explore = exploring(ConstantEpsilon(0.6), explore=RepeatedAction(2.0, longest=1))
    counts = played(explore, 10, (10_000,)).flatten().bincount(minlength=ACTIONS)
    assert stats.chisquare(counts, [15_000, 55_000, 15_000, 15_000]).pvalue > REJECT


def choice(epsilon, **known):
    return Choice(torch.ones(2, dtype=torch.int64), torch.full([2], epsilon), **known)


def held(left=5):
    """Action 3 in both elements of a batch, for some more steps."""
    replacement = RepeatedAction()
    replacement.start([2])
    replacement.set_extra_state({"held": torch.tensor([3, 3]), "left": torch.tensor([left, left])})
    return replacement


HEADS, TAILS = torch.zeros(2), torch.ones(2)
FIRST_ACTION = torch.zeros(2, 2)


def test_what_is_held_goes_on_whatever_the_coin_says():
    replacement = held(left=2)
    taken = [
        replacement(LAYOUT, choice(0.5), coin, FIRST_ACTION).tolist() for coin in (HEADS, TAILS)
    ]
    assert taken == [[3, 3], [3, 3]]
    assert replacement(LAYOUT, choice(0.5), TAILS, FIRST_ACTION).tolist() == [1, 1]
    assert replacement(LAYOUT, choice(0.5), HEADS, FIRST_ACTION).tolist() == [0, 0]


def test_a_new_episode_ends_it_where_it_begins():
    replacement, first = held(), torch.tensor([True, False])
    assert replacement(LAYOUT, choice(0.0, first=first), HEADS, FIRST_ACTION).tolist() == [1, 3]
    assert replacement.get_extra_state()["left"].tolist() == [0, 4]
    replacement.end(torch.tensor([False, True]))
    assert replacement.get_extra_state()["left"].tolist() == [0, 0]


def test_a_mask_without_the_action_ends_it_for_good():
    replacement = held()
    mask = torch.tensor([[True, True, True, False], [True, True, True, True]])
    assert replacement(LAYOUT, choice(0.0, mask=mask), HEADS, FIRST_ACTION).tolist() == [1, 3]
    assert replacement(LAYOUT, choice(0.0), HEADS, FIRST_ACTION).tolist() == [1, 3]


def test_several_variables_are_held_together():
    torch.manual_seed(0)
    explore = AdaptiveEGreedyModule(
        MultiCategorical([2, 3]), ConstantEpsilon(1.0), explore=RepeatedAction(1.01, 10**6)
    )
    data = TensorDict({"action": torch.zeros(500, 2, dtype=torch.int64)}, [500])
    data["is_init"] = torch.zeros(500, 1, dtype=torch.bool)
    first, second = (explore(data.clone())["action"] for _ in range(2))
    codes = first[:, 0] * 3 + first[:, 1]
    assert stats.chisquare(codes.bincount(minlength=6)).pvalue > REJECT
    assert (first == second).all(-1).float().mean() > 0.8


@pytest.mark.parametrize("shape", [(), (3,)])
def test_every_action_has_a_number(shape):
    for layout in (
        ActionLayout((4,), False, False),
        ActionLayout((4,), True, False),
        ActionLayout((2, 3), False, True),
        ActionLayout((2, 3), True, True),
    ):
        rows = torch.rand(*shape, len(layout.sizes))
        draws = rows if layout.multiple else rows.squeeze(-1)
        action = layout.from_uniform(draws, None, torch.zeros((), dtype=torch.int64))
        again = layout.numbered(layout.number(action), action)
        assert torch.equal(again, action)
        assert ((layout.number(action) >= 0) & (layout.number(action) < layout.num_actions)).all()


def test_values_are_scaled_within_the_legal_actions():
    value = torch.tensor([3.0, -1.0, 100.0, 1.0])
    scaled = normalised_value(value, torch.tensor(MASK))
    assert scaled[torch.tensor(MASK)].tolist() == [1, -1, 0]
    torch.testing.assert_close(normalised_value(1e6 * value + 7, torch.tensor(MASK)), scaled)


# Strategy, replacement and who acts go together freely.

LAYOUTS = {
    "index": {},
    "one-hot, masked": {"one_hot": True, "masked": True},
    "agents, masked": {"nested": True, "masked": True},
}


@pytest.mark.parametrize("how", REPLACEMENTS)
@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_strategy_acts_through_every_replacement(layout, name, how):
    kinds, strategy = LAYOUTS[layout], FACTORIES[name](RUNS)
    explore = exploring(strategy, explore=REPLACEMENTS[how](), **kinds)
    legal = torch.tensor([allowed or not kinds.get("masked") for allowed in MASK])
    batch = (*RUNS, 50)
    before, expected = memory(strategy), explore.eps.float()
    torch.manual_seed(0)
    for _ in range(3):
        td = explore(observed(batch, **kinds))
        acted = td["agents"] if kinds.get("nested") else td
        assert explore.taken(td).all()
        wide = expected.reshape(4, *[1] * (acted["epsilon"].ndim - 1))
        torch.testing.assert_close(acted["epsilon"], wide.expand(acted["epsilon"].shape))
        assert legal[index(td, kinds.get("nested"), kinds.get("one_hot"))].all()
    assert (index(td, kinds.get("nested"), kinds.get("one_hot")) != 1).any()
    assert same(before, memory(strategy))
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        greedy = explore(observed(batch, **kinds))
    assert (index(greedy, kinds.get("nested"), kinds.get("one_hot")) == 1).all()
    assert not explore.taken(greedy).any()


@pytest.mark.parametrize("how", REPLACEMENTS)
def test_what_epsilon_learns_does_not_depend_on_what_replaces_the_action(how):
    plain, other = (
        exploring(BMCEpsilon(batch_shape=RUNS), explore=kind) for kind in ("uniform", how)
    )
    data = transitions((*RUNS, 20))
    taken = torch.rand(data.shape) < 0.7
    data["epsilon"] = recorded(taken)
    for explore in (plain, other):
        explore(observed(RUNS))
        explore.update(data)
    assert same(memory(plain.strategy), memory(other.strategy))
    assert int(other.strategy.skipped["foreign"].sum()) == int((~taken).sum())


@pytest.fixture
def _fresh_compiler():
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(("how", "batch"), [("softmax", RUNS), ("zeta", ()), ("zeta", RUNS)])
def test_every_replacement_is_one_graph(how, batch):
    kinds = {"masked": True, "one_hot": True}
    eager, compiled = (exploring(ConstantEpsilon(0.5), explore=how, **kinds) for _ in range(2))
    act = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    for step in range(6):
        td = observed(batch, **kinds).set("is_init", torch.full((*batch, 1), step == 4))
        torch.manual_seed(step)
        expected = eager(td.clone())["action"]
        torch.manual_seed(step)
        assert torch.equal(act(td)["action"], expected)
    if how == "zeta":
        state = eager.explore.get_extra_state()
        for key, value in compiled.explore.get_extra_state().items():
            assert torch.equal(value, state[key])


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), "state_dict"],
    ids=["deepcopy", "pickle", "state_dict"],
)
def test_what_is_held_survives_copies_and_is_not_shared_with_them(copied):
    explore = exploring(ConstantEpsilon(0.9), explore="zeta")
    played(explore, 3, RUNS)
    if copied == "state_dict":
        other = exploring(ConstantEpsilon(0.9), explore="zeta")
        other.load_state_dict(explore.state_dict())
    else:
        other = copied(explore)
    state = explore.explore.get_extra_state()
    for key, value in other.explore.get_extra_state().items():
        assert torch.equal(value, state[key])
        assert value.data_ptr() != state[key].data_ptr()
    torch.manual_seed(1)
    expected = explore(observed(RUNS))["action"]
    torch.manual_seed(1)
    assert torch.equal(other(observed(RUNS))["action"], expected)


def test_in_an_environment_no_repetition_outlives_its_episode():
    torch.manual_seed(0)
    env = TransformedEnv(SubgoalGridEnv(max_steps=7, batch_size=[200]), InitTracker())
    replacement = RepeatedAction(1.01, 10**6)
    explore = AdaptiveEGreedyModule(env.action_spec, ConstantEpsilon(0.3), explore=replacement)

    def policy(td):
        return explore(td.set("action", torch.zeros_like(env.action_spec.zero())))

    data = env.rollout(21, policy, break_when_any_done=False)
    nonzero = (data["action"] != 0).double()
    starts = data["is_init"].squeeze(-1)
    assert starts.any(0).sum() == 3
    assert nonzero[starts].mean() == pytest.approx(0.3 * 3 / 4, abs=0.05)
    assert nonzero[:, 6].mean() > 0.5


def test_what_is_missing_is_said():
    explore = exploring(ConstantEpsilon(0.5), explore="zeta")
    with pytest.raises(KeyError, match=r"nothing at 'is_init': use TransformedEnv"):
        explore(observed(RUNS).exclude("is_init"))
    explore(observed(RUNS))
    with pytest.raises(ValueError, match=r"of size \(4,\), and is given one of \(7,\)"):
        explore(observed((7,)))
    for options in ({"mu": 1.0}, {"mu": float("nan")}, {"longest": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
            RepeatedAction(**options)


@pytest.mark.parametrize("masked", [False, True])
def test_zeta_refuses_more_than_one_action_per_element(masked):
    key = "action_mask" if masked else None
    explore = AdaptiveEGreedyModule(
        Categorical(4, shape=[2]), ConstantEpsilon(0.5), explore="zeta", action_mask_key=key
    )
    td = observed(RUNS, masked=masked).set("is_init", torch.zeros(*RUNS, 1, dtype=torch.bool))
    td["action"] = torch.ones(*RUNS, 2, dtype=torch.int64)
    if masked:
        td["action_mask"] = torch.ones(*RUNS, 2, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"one action per .* shape \(4, 2\) .* size is \(4,\)"):
        explore(td)


def test_agents_hold_actions_each_by_itself():
    torch.manual_seed(0)
    explore = exploring(ConstantEpsilon(0.5), nested=True, explore=RepeatedAction(1.01, 10**6))
    for _ in range(4):
        td = explore(observed((500,), nested=True))
    assert explore.explore.get_extra_state()["left"].shape == (500, AGENTS)
    actions = td["agents", "action"]
    assert (actions[:, 0] == actions[:, 1]).float().mean() < 0.6
