"""The published DQN protocol: several epochs of Keras' Adam on one minibatch with fixed targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

__all__ = ["adam_state", "adam_update", "fit_minibatch", "fit_targets"]


def fit_targets(action_value: Tensor, action: Tensor, target: Tensor) -> Tensor:
    """The matrix Keras' ``fit`` is given: the predictions, but `target` for the actions taken.

    Args:
        action_value: predictions ``[*batch, actions]``.
        action: int64 ``[*batch]``.
        target: ``[*batch]``.

    Examples:
        >>> fit_targets(torch.tensor([[1.0, 2.0]]), torch.tensor([1]), torch.tensor([5.0]))
        tensor([[1., 5.]])
    """
    return action_value.detach().scatter(-1, action.unsqueeze(-1), target.unsqueeze(-1))


@torch.no_grad()
def adam_update(
    parameter: Tensor,
    gradient: Tensor,
    moments: dict[str, Tensor],
    *,
    learning_rate: float | Tensor,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-7,
) -> None:
    r"""Keras' Adam on one tensor, in place on `parameter` and `moments`.

    :math:`w \leftarrow w - \eta \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t}
    \frac{m}{\sqrt v + \epsilon}`. PyTorch's Adam adds ε to the *corrected* :math:`\sqrt{\hat v}`:
    at the first step its ε = 1e-7 acts as 3e-9 would here.

    Args:
        parameter: any shape.
        gradient: as `parameter`.
        moments: ``step``, the number of steps taken, a float64 scalar; ``mean`` and ``square``, the
            running means m and v of the gradient and its square, as `parameter`.
        learning_rate: η.
        beta1: decay of m.
        beta2: decay of v.
        epsilon: ε.
    """
    step, mean, square = moments["step"], moments["mean"], moments["square"]
    step += 1
    mean.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    rate = learning_rate * (1 - beta2**step).sqrt() / (1 - beta1**step)
    parameter.sub_(rate * mean / (square.sqrt() + epsilon))


def adam_state(parameters: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Adam's state before the first step: step, mean and square of each parameter."""
    return {
        name: {
            "step": torch.zeros((), dtype=torch.float64, device=parameter.device),
            "mean": torch.zeros_like(parameter, requires_grad=False),
            "square": torch.zeros_like(parameter, requires_grad=False),
        }
        for name, parameter in parameters.items()
    }


def fit_minibatch(
    network: Callable[[dict[str, Tensor], Tensor], Tensor],
    parameters: dict[str, Tensor],
    state: Mapping[str, dict[str, Tensor]],
    features: Tensor,
    action: Tensor,
    target: Tensor,
    *,
    epochs: int,
    learning_rate: float | Tensor,
    l2: float = 0.0,
) -> Tensor:
    r"""Train on one minibatch per run as the published DQN does, like Keras' ``fit``.

    The targets of *all* outputs are fixed before the first epoch, the non-taken ones at their own
    predictions. In the first epoch these have no gradient; from the second on they do, pulling
    the network back to what it predicted before. A run's loss is the mean over batch and outputs
    of the squared difference, plus `l2` times the sum of its squared kernels (names ending in
    ``weight``). Runs share nothing: the losses are summed, and Adam is elementwise.

    Args:
        network: ``(parameters, features) -> [*runs, batch, actions]``; for a module,
            ``functools.partial(torch.func.functional_call, module)``.
        parameters: by name, changed in place; detached.
        state: from :func:`adam_state`, changed in place.
        features: ``[*runs, batch, …]``.
        action: int64 ``[*runs, batch]``.
        target: ``[*runs, batch]``.
        epochs: number of Adam steps.
        learning_rate: Adam's η.
        l2: Keras' ``L2(l2)`` kernel penalty.

    Returns:
        The mean squared difference ``[*runs]`` before the first step.

    Examples:
        >>> import functools
        >>> from bmc_torchrl.learners.values import QNetwork
        >>> module = QNetwork(3, 2, hidden=(4,), runs=5)
        >>> parameters = {name: p.detach() for name, p in module.named_parameters()}
        >>> network = functools.partial(torch.func.functional_call, module)
        >>> batch = torch.randn(5, 8, 3), torch.zeros(5, 8, dtype=torch.int64), torch.ones(5, 8)
        >>> fit_minibatch(
        ...     network, parameters, adam_state(parameters), *batch, epochs=3, learning_rate=0.001
        ... ).shape
        torch.Size([5])
    """
    with torch.no_grad():
        fixed = fit_targets(network(parameters, features), action, target)

    def objective(weights: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        loss = (network(weights, features) - fixed).square().mean((-2, -1))
        kernels = (w for name, w in weights.items() if name.endswith("weight"))
        penalty = sum((w.square().sum() for w in kernels), loss.new_zeros(())) if l2 else 0.0
        return loss.sum() + l2 * penalty, loss

    losses: list[Tensor] = []
    for _ in range(epochs):
        gradients, loss = torch.func.grad(objective, has_aux=True)(parameters)
        losses.append(loss)
        for name, parameter in parameters.items():
            adam_update(parameter, gradients[name], state[name], learning_rate=learning_rate)
    return losses[0]
