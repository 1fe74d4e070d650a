import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.data import MultiStep, OneHot
from torchrl.modules import (
    MLP,
    DistributionalQValueActor,
    EGreedyModule,
    QValueActor,
    QValueModule,
)

from bmc_torchrl import BMCEpsilon, OneStepReturns

VALUES = torch.tensor([[1.0, 5.0, 3.0], [-2.0, -6.0, -1.0]])
"""Q(s, ·) of two states: greatest 5 and −1, mean 3 and −3."""


class Table(nn.Module):
    def __init__(self, values=VALUES):
        super().__init__()
        self.register_buffer("values", values)

    def forward(self, state):
        return self.values[state]


def actor(space="categorical", **kwargs):
    return QValueActor(Table(), in_keys=["state"], action_space=space, **kwargs)


def transition(state, reward, terminated=None, **entries):
    """Transitions into `state`; everything ``[*batch]``."""
    state, reward = torch.as_tensor(state), torch.as_tensor(reward)
    terminated = torch.zeros_like(state) if terminated is None else torch.as_tensor(terminated)
    after = {"state": state, "reward": reward[..., None], **entries}
    after["terminated"] = terminated[..., None].bool()
    return TensorDict({"next": after}, state.shape)


@pytest.mark.parametrize("space", ["categorical", "one_hot"])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_returns_are_reward_plus_discounted_maximum_and_mean(space, gamma):
    td = OneStepReturns(actor(space), gamma)(transition([0, 1], [10.0, 20.0]))
    assert td["greedy_return"].tolist() == [10 + gamma * 5, 20 - gamma]
    assert td["uniform_return"].tolist() == [10 + gamma * 3, 20 - gamma * 3]


@pytest.mark.parametrize("batch", [(), (3,), (3, 4), (2, 3, 4)])
def test_returns_have_the_shape_of_the_batch_and_each_is_its_own(batch):
    state, reward = torch.randint(2, batch), torch.randn(batch)
    returns = OneStepReturns(actor(), 0.5)
    td = returns(transition(state, reward, torch.rand(batch) < 0.5))
    assert td["greedy_return"].shape == td["uniform_return"].shape == batch
    ended = td["next", "terminated"].squeeze(-1)
    greedy = torch.tensor([5.0, -1.0])[state]
    torch.testing.assert_close(td["greedy_return"], reward + 0.5 * greedy * ~ended)
    torch.testing.assert_close(td["uniform_return"], reward + 0.5 * (3.0 - 6 * state) * ~ended)


def test_terminated_stops_the_bootstrap_and_truncated_does_not():
    truncated = torch.tensor([[False], [False], [True]])
    td = transition([0, 0, 0], [1.0, 1.0, 1.0], [0, 1, 0], truncated=truncated)
    td["next", "done"] = td["next", "terminated"] | truncated
    OneStepReturns(actor(), 0.5)(td)
    assert td["greedy_return"].tolist() == [3.5, 1.0, 3.5]
    assert td["uniform_return"].tolist() == [2.5, 1.0, 2.5]


def test_without_a_terminated_key_every_state_is_bootstrapped_from():
    td = transition([0, 1], [1.0, 1.0], [1, 1]).exclude(("next", "terminated"))
    OneStepReturns(actor(), 0.5, terminated_key=None)(td)
    assert td["greedy_return"].tolist() == [3.5, 0.5]
    assert td["uniform_return"].tolist() == [2.5, -0.5]


@pytest.mark.parametrize("space", ["categorical", "one_hot"])
# QValueModule itself wants a bool mask.
@pytest.mark.parametrize(
    ("masks", "dtype"), [("actor", torch.bool), ("returns", torch.bool), ("returns", torch.int8)]
)
def test_only_legal_actions_count(masks, space, dtype):
    own, given = ("action_mask", None) if masks == "actor" else (None, "action_mask")
    returns = OneStepReturns(actor(space, action_mask_key=own), 1.0, action_mask_key=given)
    mask = torch.tensor([[True, False, True], [False, True, False]]).to(dtype)
    td = returns(transition([0, 1], [0.0, 0.0], action_mask=mask))
    assert td["greedy_return"].tolist() == [3.0, -6.0]
    assert td["uniform_return"].tolist() == [2.0, -6.0]


def test_a_state_without_legal_actions_teaches_nothing_unless_it_is_terminal():
    returns = OneStepReturns(actor(action_mask_key="action_mask"), 1.0)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    td = returns(transition([0, 0], [2.0, 2.0], [0, 1], action_mask=mask))
    assert not td["greedy_return"][0].isfinite()
    assert td["greedy_return"][1] == td["uniform_return"][1] == 2
    strategy = BMCEpsilon(batch_shape=[2])
    strategy.update(td)
    assert strategy.skipped["nonfinite"].tolist() == [1, 0]
    assert strategy.return_count.tolist() == [0, 1]


@pytest.mark.parametrize("space", ["categorical", "one_hot"])
def test_the_atoms_of_c51_are_reduced_over_their_support(space):
    support = torch.tensor([-1.0, 0.0, 2.0, 4.0])
    logits = torch.randn(2, 4, 3)
    c51 = DistributionalQValueActor(
        Table(logits), in_keys=["state"], action_space=space, support=support, make_log_softmax=True
    )
    td = OneStepReturns(c51, 0.5)(transition([0, 1], [1.0, 1.0]))
    value = (logits.softmax(-2) * support[:, None]).sum(-2)
    torch.testing.assert_close(td["greedy_return"], 1 + 0.5 * value.amax(-1))
    torch.testing.assert_close(td["uniform_return"], 1 + 0.5 * value.mean(-1))


def test_several_action_variables_add_their_values():
    values = torch.tensor([[1.0, 3.0, 0.0, 6.0, 3.0]])
    network = TensorDictModule(Table(values), in_keys=["state"], out_keys=["action_value"])
    choose = QValueModule("mult_one_hot", var_nums=[2, 3])
    returns = OneStepReturns(TensorDictSequential(network, choose), 0.5)
    td = returns(transition([0], [1.0]))
    assert td["greedy_return"].tolist() == [1 + 0.5 * (3 + 6)]
    assert td["uniform_return"].tolist() == [1 + 0.5 * (2 + 3)]
    masked = OneStepReturns(
        TensorDictSequential(network, choose), 0.5, action_mask_key="action_mask"
    )
    mask = torch.tensor([[True, False, True, False, True]])
    td = masked(transition([0], [1.0], action_mask=mask))
    assert td["greedy_return"].tolist() == [1 + 0.5 * (1 + 3)]
    assert td["uniform_return"].tolist() == [1 + 0.5 * (1 + 1.5)]


def test_multi_step_data_are_discounted_by_their_own_number_of_steps():
    time = 5
    td = transition(torch.tensor([[0, 1, 1, 0, 1]]), torch.ones(1, time))
    td["state"] = torch.tensor([[1, 0, 1, 1, 0]])
    td["next", "done"] = torch.tensor([[False] * 4 + [True]])[..., None]
    td["next", "terminated"].zero_()
    td["collector"] = TensorDict({"mask": torch.ones(1, time, dtype=torch.bool)}, [1, time])
    multi = MultiStep(gamma=0.5, n_steps=3)(td.clone())
    assert multi["steps_to_next_obs"].flatten().tolist() == [3, 3, 3, 2, 1]
    OneStepReturns(actor(), 0.5)(multi)
    rewards = [1.75, 1.75, 1.75, 1.5, 1.0]
    last = [1, 0, 1, 1, 1]
    discounts = [0.125, 0.125, 0.125, 0.25, 0.5]
    for key, value in (("greedy_return", (5, -1)), ("uniform_return", (3, -3))):
        by_hand = [r + g * value[s] for r, g, s in zip(rewards, discounts, last, strict=True)]
        assert multi[key].flatten().tolist() == pytest.approx(by_hand)


@pytest.mark.parametrize("shared", [True, False], ids=["shared reward", "own reward"])
def test_agents_have_returns_of_their_own(shared):
    q = QValueActor(Table(), in_keys=["agent_state"], action_space="categorical")
    state = torch.tensor([[0, 1], [1, 1]])
    reward = (
        torch.tensor([[10.0], [20.0]]) if shared else torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])
    )
    after = {"agent_state": state, "reward": reward}
    after["terminated"] = torch.tensor([[False], [True]])
    td = OneStepReturns(q, 0.5)(TensorDict({"next": after}, [2]))
    own = torch.tensor([[10.0, 10.0], [20.0, 20.0]]) if shared else reward.squeeze(-1)
    expected = own + 0.5 * torch.tensor([[5.0, -1.0], [0.0, 0.0]])
    assert torch.equal(td["greedy_return"], expected)


def test_exploration_in_the_actor_does_not_matter_and_nothing_else_is_written():
    policy = TensorDictSequential(actor("one_hot"), EGreedyModule(OneHot(3), 1.0, 1.0))
    td = transition([0, 1], [10.0, 20.0])
    kept = td.clone()
    OneStepReturns(policy, 0.5)(td)
    assert td["greedy_return"].tolist() == [12.5, 19.5]
    assert (td.exclude("greedy_return", "uniform_return") == kept).all()


def test_returns_carry_no_gradient_and_keep_the_networks_precision():
    network = MLP(in_features=2, out_features=3, num_cells=[]).double()
    q = QValueActor(network, in_keys=["observation"], action_space="categorical")
    td = transition(
        [0, 1], torch.tensor([1.0, 2.0]).double(), observation=torch.randn(2, 2).double()
    )
    OneStepReturns(q, 0.5)(td)
    assert not td["greedy_return"].requires_grad
    assert td["greedy_return"].dtype == torch.float64
    expected = td["next", "reward"].squeeze(-1) + 0.5 * network(td["next", "observation"]).amax(-1)
    torch.testing.assert_close(td["greedy_return"], expected.detach(), rtol=0, atol=0)


def test_keys_may_be_named_and_are_declared():
    returns = OneStepReturns(
        TensorDictModule(Table(), in_keys=["state"], out_keys=["q"]),
        0.5,
        reward_key=("stats", "gain"),
        terminated_key="over",
        action_value_key="q",
        greedy_return_key="g",
        uniform_return_key=("deep", "u"),
    )
    assert set(returns.in_keys) == {("next", "stats", "gain"), ("next", "over"), ("next", "state")}
    assert returns.out_keys == ["g", ("deep", "u")]
    after = {"state": torch.tensor([0]), "over": torch.tensor([False])}
    after["stats"] = {"gain": torch.tensor([1.0])}
    td = returns(TensorDict({"next": after}, [1]).select(*returns.in_keys))
    assert td["g"].tolist() == [3.5]
    assert td["deep", "u"].tolist() == [2.5]


@pytest.mark.parametrize("key", ["state", "reward", "terminated"])
def test_a_missing_entry_is_named(key):
    td = transition([0], [1.0]).exclude(("next", key))
    with pytest.raises(KeyError, match=rf"OneStepReturns needs \[\W+next\W+{key}\W+in the"):
        OneStepReturns(actor(), 0.5)(td)
    assert "greedy_return" not in td


@pytest.mark.parametrize("gamma", [-0.1, 1.5, float("nan")])
def test_a_discount_outside_zero_to_one_is_refused(gamma):
    with pytest.raises(ValueError, match="gamma must be between 0 and 1"):
        OneStepReturns(actor(), gamma)


def test_a_module_without_action_values_is_refused():
    policy = TensorDictModule(Table(), in_keys=["state"], out_keys=["logits"])
    with pytest.raises(ValueError, match=r"writes \['logits'\].*action_value_key="):
        OneStepReturns(policy, 0.5)
