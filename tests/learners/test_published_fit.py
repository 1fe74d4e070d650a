import functools

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from bmc_torchrl.functional import greedy_return
from bmc_torchrl.learners.published_fit import (
    adam_state,
    adam_update,
    fit_minibatch,
    fit_targets,
)
from bmc_torchrl.learners.values import QNetwork


class KerasFit:
    """``model.fit(x, y, epochs=…)`` of a ReLU perceptron in NumPy float64, one run at a time."""

    def __init__(self, weights, learning_rate, l2):
        self.weights = [w.double().numpy().copy() for w in weights]
        self.first = [np.zeros_like(w) for w in self.weights]
        self.second = [np.zeros_like(w) for w in self.weights]
        self.learning_rate, self.l2, self.iterations = learning_rate, l2, 0

    def predict(self, x):
        self.activations = [x]
        kernels, biases = self.weights[::2], self.weights[1::2]
        for depth, (kernel, bias) in enumerate(zip(kernels, biases, strict=True)):
            x = x @ kernel + bias
            if depth < len(kernels) - 1:
                x = np.maximum(x, 0)
            self.activations.append(x)
        return x

    def gradients(self, x, y):
        output = self.predict(x)
        delta, gradients = 2 * (output - y) / output.size, []
        for depth in reversed(range(len(self.weights) // 2)):
            kernel, source = self.weights[2 * depth], self.activations[depth]
            gradients = [source.T @ delta + 2 * self.l2 * kernel, delta.sum(0), *gradients]
            delta = (delta @ kernel.T) * (source > 0)
        return gradients

    def fit(self, x, y, epochs):
        for _ in range(epochs):
            gradients, self.iterations = self.gradients(x, y), self.iterations + 1
            corrections = np.sqrt(1 - 0.999**self.iterations) / (1 - 0.9**self.iterations)
            for weight, gradient, first, second in zip(
                self.weights, gradients, self.first, self.second, strict=True
            ):
                first[:] = 0.9 * first + 0.1 * gradient
                second[:] = 0.999 * second + 0.001 * gradient**2
                weight -= self.learning_rate * corrections * first / (np.sqrt(second) + 1e-7)


def detached(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def minibatch(runs, size, width, actions):
    features = torch.randn(runs, size, width, dtype=torch.float64)
    return features, torch.randint(actions, (runs, size)), torch.randn(runs, size).double()


@pytest.mark.parametrize(("epochs", "l2"), [(1, 0.0), (5, 0.0), (3, 1e-2)])
def test_the_fit_is_keras_fit_run_by_run(epochs, l2):
    module = QNetwork(4, 3, hidden=(6, 5), runs=3, dtype=torch.float64)
    parameters = detached(module)
    oracles = [
        KerasFit([p[run] for p in parameters.values()], learning_rate=0.01, l2=l2)
        for run in range(3)
    ]
    state = adam_state(parameters)
    network = functools.partial(torch.func.functional_call, module)
    for _ in range(4):
        features, action, target = minibatch(3, 8, 4, 3)
        loss = fit_minibatch(
            network, parameters, state, features, action, target,
            epochs=epochs, learning_rate=0.01, l2=l2,
        )  # fmt: skip
        for run, oracle in enumerate(oracles):
            y = oracle.predict(features[run].numpy())
            taken = (np.arange(8), action[run].numpy())
            error = (y[taken] - target[run].numpy()) ** 2
            assert loss[run].item() == pytest.approx(error.sum() / y.size, rel=1e-9)
            y = y.copy()
            y[taken] = target[run].numpy()
            oracle.fit(features[run].numpy(), y, epochs)
    for position, parameter in enumerate(parameters.values()):
        for run, oracle in enumerate(oracles):
            np.testing.assert_allclose(
                parameter[run].numpy(), oracle.weights[position], rtol=1e-8, atol=1e-10
            )


def test_outputs_not_taken_have_no_gradient_in_the_first_epoch_and_one_in_the_second():
    torch.manual_seed(0)
    module = QNetwork(4, 3, hidden=(6,), dtype=torch.float64)
    features, _, target = (x[0] for x in minibatch(1, 8, 4, 3))
    action = torch.zeros(8, dtype=torch.int64)
    fixed = fit_targets(module(features), action, target)
    parameters = dict(module.named_parameters())
    moments, column_gradients = adam_state(parameters), []
    for _ in range(2):
        loss = (module(features) - fixed).square().mean()
        gradients = dict(
            zip(parameters, torch.autograd.grad(loss, parameters.values()), strict=True)
        )
        column_gradients.append(gradients["layers.1.weight"][:, 1:].abs().max().item())
        for name, parameter in parameters.items():
            adam_update(parameter, gradients[name], moments[name], learning_rate=0.01)
    assert column_gradients[0] == 0
    assert column_gradients[1] > 1e-5


def test_keras_epsilon_differs_from_torchs_by_the_bias_correction():
    gradient, weight = torch.full((1,), 1e-6, dtype=torch.float64), torch.zeros(1).double()
    ours, theirs = weight.clone(), weight.clone().requires_grad_()
    adam_update(ours, gradient, adam_state({"w": weight})["w"], learning_rate=1.0)
    optimizer = torch.optim.Adam([theirs], lr=1.0, eps=1e-7 / (1 - 0.999) ** 0.5)
    theirs.grad = gradient
    optimizer.step()
    torch.testing.assert_close(ours, theirs.detach())
    # √v = √0.001·g ≈ 3.16e-8 is smaller than ε: a step of 0.24 where PyTorch's defaults give ≈ 1.
    assert ours.item() == pytest.approx(-(0.001**0.5) * 1e-6 / (0.001**0.5 * 1e-6 + 1e-7))


def test_one_runs_weights_and_data_leave_the_other_runs_bit_identical():
    module = QNetwork(16, 4, hidden=(25, 25), runs=5, active_features=3)
    network = functools.partial(torch.func.functional_call, module)
    features, action = torch.randint(16, (5, 24, 3)), torch.randint(4, (5, 24))
    target, results = torch.randn(5, 24), []
    for changed in (False, True):
        parameters = detached(module)
        if changed:
            target = target.index_fill(0, torch.tensor([2]), 9.0)
            for parameter in parameters.values():
                parameter[2] += 0.1
        state = adam_state(parameters)
        for _ in range(3):
            loss = fit_minibatch(
                network, parameters, state, features, action, target,
                epochs=5, learning_rate=0.001, l2=1e-6,
            )  # fmt: skip
        results.append([loss, *parameters.values()])
    for before, after in zip(*results, strict=True):
        assert torch.equal(before[[0, 1, 3, 4]], after[[0, 1, 3, 4]])
        assert not torch.equal(before[2], after[2])


def test_the_published_protocol_learns_a_chain_of_known_values():
    """States 0 → 1 → 2 → end, reward 1 at the end: values γ², γ, 1, whatever the action."""
    torch.manual_seed(0)
    gamma, runs = 0.5, 2
    module = QNetwork(3, 2, hidden=(25, 25), runs=runs)
    network = functools.partial(torch.func.functional_call, module)
    parameters = detached(module)
    state = adam_state(parameters)
    position = torch.tensor([0, 0, 1, 1, 2, 2]).expand(runs, 6)
    action = torch.tensor([0, 1] * 3).expand(runs, 6)
    done = position == 2
    features = F.one_hot(position, 3).float()
    following = F.one_hot((position + 1).clamp(max=2), 3).float()
    for _ in range(150):
        bootstrap = network(parameters, following)
        target = greedy_return(done.float(), bootstrap, gamma, terminated=done)
        fit_minibatch(
            network, parameters, state, features, action, target, epochs=3, learning_rate=0.01
        )
    expected = torch.tensor([0.25, 0.25, 0.5, 0.5, 1.0, 1.0]).view(3, 2).expand(runs, 3, 2)
    values = network(parameters, torch.eye(3).expand(runs, 3, 3))
    torch.testing.assert_close(values, expected, rtol=0, atol=0.01)


@pytest.mark.slow
def test_the_fit_compiles_without_graph_breaks():
    module = QNetwork(4, 3, hidden=(6,), runs=2)
    features, action, target = minibatch(2, 8, 4, 3)
    features, target = features.float(), target.float()

    def fit(parameters, state):
        network = functools.partial(torch.func.functional_call, module)
        options = {"epochs": 2, "learning_rate": 0.01, "l2": 1e-6}
        return fit_minibatch(network, parameters, state, features, action, target, **options)

    results = []
    for run in (fit, torch.compile(fit, fullgraph=True, backend="aot_eager")):
        parameters = detached(module)
        state = adam_state(parameters)
        run(parameters, state)
        run(parameters, state)
        results.append([*parameters.values(), *(m["square"] for m in state.values())])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled)
