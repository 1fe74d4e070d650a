import copy
import pickle

import pytest
import torch
from probes import ProbeEnv
from scipy import stats
from tensordict import TensorDict
from torch import nn
from torch.nn import functional as F  # noqa: N812

from bmc_torchrl.learners.values import ActiveFeatures, QNetwork, QTable, RunLinear, q_actor


@pytest.mark.parametrize("batch", [(), (7,), (4, 3)])
def test_table_is_a_linear_layer_on_one_hot_states(batch):
    table = QTable(6, 3, initializer="normal")
    linear = nn.Linear(6, 3, bias=False)
    linear.weight.data = table.weight.data.T.clone()
    state, direction = torch.randint(6, batch), torch.randn(*batch, 3)
    values, expected = table(state), linear(F.one_hot(state, 6).float())
    torch.testing.assert_close(values, expected, rtol=0, atol=0)
    (values * direction).sum().backward()
    (expected * direction).sum().backward()
    torch.testing.assert_close(table.weight.grad, linear.weight.grad.T)


@pytest.mark.parametrize("runs", [(5,), (2, 3)])
@pytest.mark.parametrize("batch", [(), (4,), (2, 3)])
def test_each_run_reads_its_own_table(runs, batch):
    table = QTable(6, 3, runs=runs, initializer="normal")
    state = torch.randint(6, (*runs, *batch))
    values = table(state)
    direction = torch.randn_like(values)
    (values * direction).sum().backward()
    for run in torch.cartesian_prod(*(torch.arange(n) for n in runs)).view(-1, len(runs)).tolist():
        single = QTable(6, 3)
        single.weight.data = table.weight.data[tuple(run)].clone()
        alone = single(state[tuple(run)])
        assert torch.equal(values[tuple(run)], alone)
        (alone * direction[tuple(run)]).sum().backward()
        torch.testing.assert_close(table.weight.grad[tuple(run)], single.weight.grad)


def test_table_initialisers_have_the_stated_distributions():
    torch.manual_seed(0)
    normal = QTable(100, 10, runs=5, initializer="normal", scale=0.1).weight.detach().flatten()
    uniform = QTable(100, 10, runs=5, initializer="uniform", scale=0.1).weight.detach().flatten()
    assert stats.kstest(normal.numpy(), stats.norm(scale=0.1).cdf).pvalue > 1e-3
    assert stats.kstest(uniform.numpy(), stats.uniform(scale=0.1).cdf).pvalue > 1e-3
    assert QTable(3, 2).weight.abs().max() == 0
    assert (QTable(3, 2, initializer=lambda w: w.fill_(7.0)).weight == 7).all()
    pickle.loads(pickle.dumps(QTable(3, 2, initializer="normal")))


def test_unknown_initialiser_and_missing_run_dimension_are_explained():
    with pytest.raises(ValueError, match=r"initializer='ones' is unknown.*normal"):
        QTable(3, 2, initializer="ones")
    with pytest.raises(ValueError, match=r"runs=\(4,\)"):
        QTable(3, 2, runs=4)(torch.zeros(7, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"runs=\(4,\)"):
        QNetwork(3, 2, runs=4)(torch.zeros(7, 3))
    with pytest.raises(ValueError, match=r"active_features=3"):
        QNetwork(16, 4, active_features=3)(torch.zeros(5, 2, dtype=torch.int64))


def reference_network(network: QNetwork, run: tuple[int, ...]) -> nn.Sequential:
    modules: list[nn.Module] = []
    for layer in network.layers:
        linear = nn.Linear(layer.in_features, layer.out_features)
        linear.weight.data = layer.weight.data[run].T.clone()
        linear.bias.data = layer.bias.data[run].clone()
        modules += [linear, nn.ReLU()]
    return nn.Sequential(*modules[:-1])


def randomised(network: QNetwork) -> QNetwork:
    for parameter in network.parameters():
        nn.init.normal_(parameter)
    return network


@pytest.mark.parametrize("runs", [(), (3,), (2, 2)])
@pytest.mark.parametrize("batch", [(), (5,), (4, 2)])
def test_network_is_one_perceptron_per_run(runs, batch):
    network = randomised(QNetwork(6, 3, hidden=(8, 7), runs=runs))
    features = torch.randn(*runs, *batch, 6)
    values = network(features)
    values.square().sum().backward()
    for run in torch.ones(runs).nonzero().tolist():
        index = tuple(run)
        single = reference_network(network, index)
        alone = single(features[index])
        torch.testing.assert_close(values[index], alone, rtol=1e-4, atol=1e-4)
        alone.square().sum().backward()
        for layer, linear in zip(network.layers, single[::2], strict=True):
            scale = linear.weight.grad.abs().max().item()
            grad = layer.weight.grad[index].T
            torch.testing.assert_close(grad, linear.weight.grad, rtol=1e-3, atol=1e-5 * scale)
            grad = layer.bias.grad[index]
            torch.testing.assert_close(grad, linear.bias.grad, rtol=1e-3, atol=1e-5 * scale)


def test_changing_one_run_leaves_the_others_bit_identical():
    network = QNetwork(6, 3, runs=5, dueling=True)
    changed = copy.deepcopy(network)
    for parameter in changed.parameters():
        parameter.data[2].normal_()
    features = torch.randn(5, 9, 6)
    others = [0, 1, 3, 4]
    results = []
    for each in (network, changed):
        values = each(features)
        values.square().mean(-1).sum().backward()
        results.append([values[others], *(p.grad[others] for p in each.parameters())])
        assert not torch.equal(network(features)[2], changed(features)[2])
    for before, after in zip(*results, strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("runs", [(), (3,)])
@pytest.mark.parametrize("hidden", [(), (8, 7)])
def test_active_features_equal_the_dense_multi_hot_input(runs, hidden):
    sizes = (5, 5, 6)
    network = QNetwork(16, 4, hidden, runs=runs, active_features=3, dueling=True)
    state = torch.randint(150, (*runs, 9))
    indices = ActiveFeatures(sizes)(state)
    coordinates = torch.unravel_index(state, sizes)
    dense = torch.cat(
        [F.one_hot(x, n) for x, n in zip(coordinates, sizes, strict=True)], -1
    ).float()
    torch.testing.assert_close(network(indices), network(dense))
    parameters = list(network.parameters())
    sparse_grads = torch.autograd.grad(network(indices).square().sum(), parameters)
    dense_grads = torch.autograd.grad(network(dense).square().sum(), parameters)
    torch.testing.assert_close(sparse_grads, dense_grads)


def test_dueling_head_adds_the_state_value_to_centred_advantages():
    network = randomised(QNetwork(6, 3, hidden=(8,), dueling=True))
    features = torch.randn(11, 6)
    first, advantage, value = network.layers[0], network.layers[1], network.state_value
    hidden = F.linear(features, first.weight.T, first.bias).relu()
    centred = F.linear(hidden, advantage.weight.T, advantage.bias)
    centred = centred - centred.mean(-1, keepdim=True)
    expected = F.linear(hidden, value.weight.T, value.bias) + centred
    torch.testing.assert_close(network(features), expected, rtol=1e-4, atol=1e-4)


def test_layers_start_glorot_uniform_with_zero_bias():
    torch.manual_seed(0)
    for fan_in, fan_out in [(16, 25), (25, 25), (25, 4), (1, 1)]:
        layer = RunLinear(fan_in, fan_out, runs=100)
        limit = (6 / (fan_in + fan_out)) ** 0.5
        law = stats.uniform(-limit, 2 * limit)
        assert stats.kstest(layer.weight.detach().flatten().numpy(), law.cdf).pvalue > 1e-3
        assert layer.bias.abs().max() == 0
    weight = QNetwork(16, 4, runs=100).layers[1].weight
    assert weight.flatten(1).unique(dim=0).shape[0] == 100


def test_integer_observations_without_active_features_are_dense():
    network = QNetwork(4, 2)
    one_hot = F.one_hot(torch.tensor([1, 3]), 4)
    assert torch.equal(network(one_hot), network(one_hot.float()))


def test_actor_takes_the_first_of_tied_actions_and_respects_masks():
    actor = q_actor(QTable(2, 3, runs=4), 3, action_mask_key="action_mask")
    mask = torch.tensor([[1, 1, 1], [0, 1, 1], [0, 0, 1], [1, 0, 0]], dtype=torch.bool)
    state = torch.zeros(4, dtype=torch.int64)
    data = actor(TensorDict({"state": state, "action_mask": mask}, [4]))
    assert data["action"].tolist() == [0, 1, 2, 0]


def test_actor_rolls_out_a_batch_of_runs():
    table = QTable(2, 2, runs=3)
    table.weight.data[1, 0, 1] = 1.0
    data = ProbeEnv(batch_size=[3]).rollout(2, q_actor(table, 2), break_when_any_done=False)
    assert data["state"].tolist() == [[0, 0], [0, 1], [0, 0]]


@pytest.mark.slow
def test_values_compile_without_graph_breaks():
    table = QTable(6, 3, runs=5, initializer="normal")
    network = QNetwork(16, 4, runs=5, active_features=3, dueling=True)
    state, features = torch.randint(6, (5, 7)), torch.randint(16, (5, 7, 3))
    compiled = torch.compile(table, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(state), table(state))
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(features), network(features))
