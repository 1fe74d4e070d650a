import copy

import pytest
import torch
from probes import LOOP_HALF_GREEDY, LOOP_OPTIMAL, every_transition, exit_step, loop_step
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import OneHot
from torchrl.modules import QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate, ValueEstimators

from bmc_torchrl.learners.objectives import ExpectedSarsaLoss, tabular_update
from bmc_torchrl.learners.values import QNetwork, QTable, q_actor


def transitions(*batch: int, states: int = 6, actions: int = 3) -> TensorDict:
    ended = torch.rand(*batch, 1) < 0.3
    following = {
        "state": torch.randint(states, batch),
        "reward": torch.randn(*batch, 1),
        "done": ended | (torch.rand(*batch, 1) < 0.2),
        "terminated": ended,
    }
    state, action = torch.randint(states, batch), torch.randint(actions, batch)
    return TensorDict({"state": state, "action": action, "next": following}, batch)


def estimating(loss, gamma=0.9, **options):
    loss.make_value_estimator(gamma=gamma, **options)
    return loss


def scalar_loss(values, data, value_of_next, gamma=0.9, mask=True) -> list[float]:
    """Squared errors, one transition at a time in Python floats."""
    errors = []
    for item in data:
        state, action = item["state"].item(), item["action"].item()
        bootstrap = value_of_next(values[item["next", "state"].item()].tolist(), item)
        if mask and item["next", "terminated"].item():
            bootstrap = 0.0
        target = item["next", "reward"].item() + gamma * bootstrap
        errors.append((values[state, action].item() - target) ** 2)
    return errors


def epsilon_greedy_value(epsilon: float):
    return lambda q, item: (1 - epsilon) * max(q) + epsilon * sum(q) / len(q)


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_expected_sarsa_is_the_equation_worked_one_transition_at_a_time(epsilon, mask):
    table, data = QTable(6, 3, initializer="normal", scale=1.0), transitions(50)
    loss = ExpectedSarsaLoss(
        q_actor(table, 3), epsilon=epsilon, mask_terminated=mask, reduction="none"
    )
    value = epsilon_greedy_value(epsilon)
    expected = torch.tensor(scalar_loss(table.weight, data, value, mask=mask))
    torch.testing.assert_close(estimating(loss)(data)["loss"], expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(data["td_error"].squeeze(-1), expected, rtol=1e-5, atol=1e-6)
    assert data["next", "terminated"].any()


def paired_losses(network, *, actions=3, spec=None, **options):
    """`DQNLoss` and expected SARSA with ε = 0 over copies of one network."""
    losses = []
    for build in (DQNLoss, lambda actor, **kw: ExpectedSarsaLoss(actor, epsilon=0.0, **kw)):
        actor = q_actor(copy.deepcopy(network), actions)
        if spec is not None:
            actor = QValueActor(copy.deepcopy(network), in_keys=["state"], spec=spec)
        losses.append(build(actor, **options))
    return losses


@pytest.mark.parametrize("estimator", [ValueEstimators.TD0, ValueEstimators.TDLambda])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("loss_function", ["l2", "smooth_l1"])
def test_without_exploration_expected_sarsa_is_dqn_to_the_bit(estimator, reduction, loss_function):
    network, data = QTable(6, 3, runs=4, initializer="normal", scale=1.0), transitions(4, 30)
    options = {"delay_value": False, "reduction": reduction, "loss_function": loss_function}
    results = []
    for loss in paired_losses(network, **options):
        loss.make_value_estimator(estimator, gamma=0.9)
        copied = data.clone()
        value = loss(copied)["loss"]
        value.sum().backward()
        (weight,) = (p.grad for p in loss.parameters())
        results.append((value, copied["td_error"], weight))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_without_exploration_delayed_one_hot_expected_sarsa_is_dqn_to_the_bit():
    dqn, sarsa = (
        estimating(loss)
        for loss in paired_losses(
            QTable(6, 3, initializer="normal"), spec=OneHot(3), delay_value=True
        )
    )
    data = transitions(30)
    data["action"] = nn.functional.one_hot(data["action"], 3)
    for loss in (dqn, sarsa):
        updater = SoftUpdate(loss, eps=0.5)
        optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss(data)["loss"].backward()
            optimizer.step()
            updater.step()
    assert torch.equal(dqn(data)["loss"], sarsa(data)["loss"])
    target = sarsa.target_value_network_params["module", "0", "module", "weight"]
    assert not torch.equal(target, next(sarsa.parameters()))


def test_epsilon_comes_from_the_next_state_then_the_action_then_the_loss():
    table, data = QTable(6, 3, initializer="normal", scale=1.0), transitions(20)
    loss = estimating(ExpectedSarsaLoss(q_actor(table, 3), epsilon=0.5, reduction="none"))

    def expect(epsilon):
        value = torch.tensor(scalar_loss(table.weight, data, epsilon_greedy_value(epsilon)))
        torch.testing.assert_close(loss(data)["loss"], value, rtol=1e-5, atol=1e-6)

    expect(0.5)
    loss.epsilon = 0.25
    expect(0.25)
    data["epsilon"] = torch.full((20,), 0.1)
    expect(0.1)
    data["next", "epsilon"] = torch.full((20, 1), 0.9, dtype=torch.float64)
    expect(0.9)
    loss.set_keys(epsilon="absent")
    expect(0.25)


def test_a_missing_epsilon_is_explained():
    loss = estimating(ExpectedSarsaLoss(q_actor(QTable(6, 3), 3)))
    with pytest.raises(KeyError, match="pass epsilon="):
        loss(transitions(5))


def test_one_epsilon_per_run_serves_the_whole_minibatch():
    table, data = QTable(6, 3, runs=4, initializer="normal", scale=1.0), transitions(4, 10)
    epsilon = torch.tensor([0.0, 0.2, 0.7, 1.0])
    loss = ExpectedSarsaLoss(q_actor(table, 3), epsilon=epsilon, reduction="none")
    values = estimating(loss)(data)["loss"]
    for run in range(4):
        value = epsilon_greedy_value(epsilon[run].item())
        expected = torch.tensor(scalar_loss(table.weight[run], data[run], value))
        torch.testing.assert_close(values[run], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("key", ["action_mask", "legal"])
def test_maximum_and_mean_are_over_legal_next_actions(key):
    table, data = QTable(6, 3, initializer="normal", scale=1.0), transitions(40)
    mask = torch.rand(40, 3) < 0.5
    mask[:, 1] |= ~mask.any(-1)
    data[key], data["next", key] = torch.ones(40, 3, dtype=torch.bool), mask
    ended = data["next", "terminated"].squeeze(-1)
    data["next", key] = mask & ~ended.unsqueeze(-1)
    actor = q_actor(table, 3, action_mask_key=key)
    loss = estimating(ExpectedSarsaLoss(actor, epsilon=0.3, reduction="none"))

    def legal_value(q, item):
        legal = [v for v, ok in zip(q, item["next", key].tolist(), strict=True) if ok]
        return 0.7 * max(legal) + 0.3 * sum(legal) / len(legal) if legal else 0.0

    expected = torch.tensor(scalar_loss(table.weight, data, legal_value))
    torch.testing.assert_close(loss(data)["loss"], expected, rtol=1e-5, atol=1e-6)


def test_losses_take_keyword_tensors_and_renamed_keys():
    table = QTable(6, 3, initializer="normal")
    loss = estimating(ExpectedSarsaLoss(q_actor(table, 3)))
    data = transitions(12)
    data["epsilon"] = torch.full((12,), 0.4)
    flat = data.exclude(("next", "action")).flatten_keys("_").to_dict()
    assert torch.equal(loss(**flat), loss(data)["loss"])
    renamed = data.clone()
    renamed["move"] = renamed.pop("action")
    renamed["next", "gain"] = renamed["next"].pop("reward")
    expected = loss(data)["loss"]
    loss.set_keys(action="move", reward="gain")
    assert torch.equal(loss(renamed)["loss"], expected)


def test_prioritised_weights_weigh_the_mean():
    loss = estimating(
        ExpectedSarsaLoss(q_actor(QTable(6, 3, initializer="normal"), 3), epsilon=0.1)
    )
    data = transitions(12)
    data["priority_weight"] = torch.rand(12)
    weight = data["priority_weight"]
    value = loss(data)["loss"]
    error = data["td_error"].squeeze(-1)
    torch.testing.assert_close(value, (weight * error).sum() / weight.sum())


def test_losses_accept_a_users_network():
    network = TensorDictModule(nn.Linear(4, 3), in_keys=["pixels"], out_keys=["action_value"])
    loss = estimating(ExpectedSarsaLoss(QValueActor(network, spec=OneHot(3)), epsilon=0.1))
    data = transitions(8)
    data["action"] = nn.functional.one_hot(data["action"], 3)
    data["pixels"], data["next", "pixels"] = torch.randn(2, 8, 4)
    loss(data)["loss"].backward()
    assert all(p.grad is not None for p in loss.parameters())


@pytest.mark.parametrize("double", [False, True])
def test_torchrls_dqn_trains_a_network_per_run_independently(double):
    torch.manual_seed(0)
    network = QNetwork(6, 3, hidden=(8,), runs=4, active_features=1)
    other = copy.deepcopy(network)
    for parameter in other.parameters():
        parameter.data[2].normal_()
    data = transitions(4, 16)
    for key in ("state", ("next", "state")):
        data[key] = data[key].unsqueeze(-1)
    results = []
    for each in (network, other):
        actor = q_actor(each, 3)
        loss = estimating(DQNLoss(actor, delay_value=True, double_dqn=double, reduction="none"))
        updater = SoftUpdate(loss, eps=0.9)
        optimizer = torch.optim.Adam(loss.parameters(), lr=0.01)
        for _ in range(5):
            optimizer.zero_grad()
            value = loss(data.clone())["loss"]
            assert value.shape == (4, 16)
            value.mean(-1).sum().backward()
            optimizer.step()
            updater.step()
        results.append([value, *(p.detach() for p in each.parameters())])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours[[0, 1, 3]], theirs[[0, 1, 3]])
        assert not torch.equal(ours[2], theirs[2])


@pytest.mark.parametrize("runs", [(), (5,), (2, 3)])
def test_tabular_update_is_the_scalar_update(runs):
    table = torch.randn(*runs, 6, 3)
    before = table.clone()
    state, action = torch.randint(6, runs), torch.randint(3, runs)
    target, rate = torch.randn(runs), torch.rand(runs)
    change = tabular_update(table, state, action, target, rate)
    for index in torch.ones(runs).nonzero().tolist():
        run = tuple(index)
        entry = (*run, state[run].item(), action[run].item())
        old = before[entry].item()
        new = old + rate[run].item() * (target[run].item() - old)
        assert table[entry].item() == pytest.approx(new, abs=1e-6)
        assert change[run].item() == pytest.approx(new - old, abs=1e-6)
        before[entry] = table[entry]
    assert torch.equal(before, table)


def test_sgd_on_the_loss_is_the_tabular_update():
    table = QTable(6, 3, runs=50, initializer="normal", scale=1.0)
    expected = table.weight.detach().clone()
    data = transitions(50)
    epsilon, eta, gamma = torch.rand(50), 0.7, 0.9
    loss = ExpectedSarsaLoss(q_actor(table, 3), epsilon=epsilon, reduction="sum")
    optimizer = torch.optim.SGD(estimating(loss, gamma).parameters(), lr=eta / 2)
    loss(data)["loss"].backward()
    optimizer.step()
    following = expected[torch.arange(50), data["next", "state"]]
    bootstrap = (1 - epsilon) * following.amax(-1) + epsilon * following.mean(-1)
    bootstrap = bootstrap * ~data["next", "terminated"].squeeze(-1)
    target = data["next", "reward"].squeeze(-1) + gamma * bootstrap
    tabular_update(expected, data["state"], data["action"], target, eta)
    torch.testing.assert_close(table.weight.detach(), expected, rtol=1e-6, atol=3e-7)


def fixed_point(loss, data, steps=120, lr=0.5):
    optimizer = torch.optim.SGD(loss.parameters(), lr=lr / 2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(data)["loss"].sum().backward()
        optimizer.step()
    return next(loss.parameters()).detach()


def test_learners_find_the_loops_values():
    data = every_transition(loop_step, runs=[3])
    build = {
        "dqn": lambda actor: DQNLoss(actor, delay_value=False, reduction="none"),
        "greedy": lambda actor: ExpectedSarsaLoss(actor, epsilon=0.0, reduction="none"),
        "half": lambda actor: ExpectedSarsaLoss(actor, epsilon=0.5, reduction="none"),
    }
    values = {"dqn": LOOP_OPTIMAL, "greedy": LOOP_OPTIMAL, "half": LOOP_HALF_GREEDY}
    for name, make in build.items():
        table = QTable(2, 2, runs=3, initializer="uniform")
        found = fixed_point(estimating(make(q_actor(table, 2)), gamma=0.5), data)
        torch.testing.assert_close(found, values[name].expand(3, 2, 2), rtol=0, atol=1e-4)


@pytest.mark.parametrize("mask", [True, False])
def test_masking_decides_whether_the_terminal_state_has_a_value(mask):
    data = every_transition(exit_step)[:2]
    table = QTable(2, 2)
    table.weight.data[1] = torch.tensor([4.0, 8.0])
    loss = ExpectedSarsaLoss(q_actor(table, 2), epsilon=0.5, mask_terminated=mask, reduction="none")
    found = fixed_point(estimating(loss, gamma=0.5), data)
    after = 0.0 if mask else 0.5 * (0.5 * 8 + 0.5 * 6)
    expected = torch.tensor([[after, 1 + after], [4.0, 8.0]])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_one_runs_table_does_not_reach_the_others():
    data = transitions(4, 10)
    table = QTable(6, 3, runs=4, initializer="normal")
    other = copy.deepcopy(table)
    other.weight.data[1].normal_()
    found = [
        fixed_point(
            estimating(ExpectedSarsaLoss(q_actor(t, 3), epsilon=0.2, reduction="none")), data, 5
        )
        for t in (table, other)
    ]
    assert torch.equal(found[0][[0, 2, 3]], found[1][[0, 2, 3]])
    assert not torch.equal(found[0][1], found[1][1])


@pytest.mark.slow
def test_tabular_update_compiles_without_graph_breaks():
    compiled = torch.compile(tabular_update, fullgraph=True, backend="aot_eager")
    table, index = torch.randn(5, 6, 3), torch.randint(3, (5,))
    expected = table.clone()
    target = torch.randn(5)
    compiled(table, index, index, target, torch.full((5,), 0.5))
    tabular_update(expected, index, index, target, 0.5)
    assert torch.equal(table, expected)
