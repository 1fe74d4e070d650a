"""Independent small networks as one flat tensor: forward, hand-written backward and Keras' Adam.

Activations are *feature-major*, ``[lanes, features, batch]``: the batch is the contiguous dimension
of every product, which is what makes products with two or four outputs fast.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bmc_torchrl.learners.values import QNetwork, RunLinear

__all__ = [
    "FlatNetwork",
    "Minibatch",
    "adam",
    "adam_rates",
    "fit",
    "fixed_targets",
    "network_widths",
]

MANY_ACTIONS = 32
"""From so many actions on, the first epoch's gradient is worth gathering instead of multiplying."""

BETA1, BETA2, ADAM_EPSILON = 0.9, 0.999, 1e-7


@dataclass(frozen=True)
class FlatNetwork:
    """Where the layers of a ReLU network lie in a flat parameter tensor ``[lanes, size]``.

    Attributes:
        widths: of the input, the hidden layers and the output.
        embedded: the input is given as positions of its ones; the first kernel is kept as
            ``[in, out]`` then, and its rows are summed. All other kernels are ``[out, in]``.

    >>> FlatNetwork((4, 12, 12, 2)).size
    242
    """

    widths: tuple[int, ...]
    embedded: bool = False

    @property
    def size(self) -> int:
        """Number of parameters of one network."""
        return sum((fan_in + 1) * fan_out for fan_in, fan_out in self._layers)

    @property
    def _layers(self) -> list[tuple[int, int]]:
        return list(itertools.pairwise(self.widths))

    def _kernel_shape(self, depth: int) -> tuple[int, int]:
        fan_in, fan_out = self._layers[depth]
        return (fan_in, fan_out) if self.embedded and depth == 0 else (fan_out, fan_in)

    def layers(self, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Kernel and bias ``[lanes, out, 1]`` of each layer, views of `flat`."""
        views, start = [], 0
        for depth, (fan_in, fan_out) in enumerate(self._layers):
            end = start + fan_in * fan_out
            kernel = flat[:, start:end].view(-1, *self._kernel_shape(depth))
            views.append((kernel, flat[:, end : end + fan_out].unsqueeze(-1)))
            start = end + fan_out
        return views

    def pack(self, network: QNetwork) -> Tensor:
        """The parameters of `network`, whose runs are the lanes, as a flat tensor."""
        parts = []
        for depth, layer in enumerate(_layers_of(network)):
            weight, bias = layer.weight.detach(), layer.bias.detach()
            weight = weight.reshape(-1, *weight.shape[-2:])
            kernel = weight if self.embedded and depth == 0 else weight.mT
            parts += [kernel.flatten(1), bias.reshape(len(weight), -1)]
        return torch.cat(parts, 1).contiguous()

    @torch.no_grad()
    def unpack(self, flat: Tensor, network: QNetwork) -> None:
        """Write `flat` into the parameters of `network`."""
        for depth, (kernel, bias) in enumerate(self.layers(flat)):
            layer = _layers_of(network)[depth]
            weight = kernel if self.embedded and depth == 0 else kernel.mT
            layer.weight.copy_(weight.reshape(layer.weight.shape))
            layer.bias.copy_(bias.reshape(layer.bias.shape))

    def forward(self, flat: Tensor, inputs: Tensor) -> list[Tensor]:
        """The activations of every layer, the last being Q, each ``[lanes, width, batch]``.

        Args:
            flat: ``[lanes, size]``.
            inputs: ``[lanes, in, batch]``, or with `embedded` int64 ``[lanes, ones, batch]``.
        """
        layers = self.layers(flat)
        activations = []
        hidden = inputs
        for depth, (kernel, bias) in enumerate(layers):
            if self.embedded and depth == 0:
                output = _summed_rows(kernel, hidden) + bias
            else:
                output = torch.bmm(kernel, hidden) + bias
            hidden = output.relu() if depth < len(layers) - 1 else output
            activations.append(hidden)
        return activations

    def gradient(
        self,
        flat: Tensor,
        dense_inputs: Tensor,
        activations: Sequence[Tensor],
        output_gradient: Tensor,
        *,
        action: Tensor | None = None,
        l2: float = 0.0,
    ) -> Tensor:
        """Gradient ``[lanes, size]`` of a loss, plus that of `l2` times the squared kernels.

        Args:
            flat: ``[lanes, size]``.
            dense_inputs: ``[lanes, in, batch]``, also with `embedded`.
            activations: from :meth:`forward`.
            output_gradient: of the loss with respect to Q, ``[lanes, out, batch]``.
            action: ``[lanes, batch]``, where `output_gradient` is zero for all other actions.
            l2: weight of the penalty.
        """
        layers = self.layers(flat)
        parts: list[Tensor] = []
        gradient = output_gradient
        for depth in reversed(range(len(layers))):
            kernel = layers[depth][0]
            below = dense_inputs if depth == 0 else activations[depth - 1]
            if self.embedded and depth == 0:
                slope = torch.bmm(below, gradient.mT)
            else:
                slope = torch.bmm(gradient, below.mT)
            if l2:
                slope = slope + 2 * l2 * kernel
            parts += [gradient.sum(-1), slope.flatten(1)]
            if depth > 0:
                if action is not None and depth == len(layers) - 1:
                    gradient = _taken_rows(kernel, action, gradient.sum(1))
                else:
                    gradient = torch.bmm(kernel.mT, gradient)
                gradient = torch.where(below > 0, gradient, 0.0)
        return torch.cat(parts[::-1], 1)


def network_widths(network: QNetwork) -> tuple[int, ...]:
    """Widths of the input, the hidden layers and the output."""
    return (network.in_features, *(layer.out_features for layer in _layers_of(network)))


def _layers_of(network: QNetwork) -> list[RunLinear]:
    return [layer for layer in network.layers if isinstance(layer, RunLinear)]


def _summed_rows(kernel: Tensor, positions: Tensor) -> Tensor:
    """Sum of the rows of ``[lanes, in, out]`` at ``[lanes, ones, batch]``: ``[…, out, batch]``."""
    lane = torch.arange(len(kernel), device=kernel.device).unsqueeze(-1)
    rows = [kernel[lane, position] for position in positions.unbind(1)]
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total.mT


def _taken_rows(kernel: Tensor, action: Tensor, scale: Tensor) -> Tensor:
    """Rows of ``[lanes, out, in]`` at ``[lanes, batch]`` times `scale`: ``[lanes, in, batch]``."""
    lane = torch.arange(len(kernel), device=kernel.device).unsqueeze(-1)
    return (kernel[lane, action] * scale.unsqueeze(-1)).mT


def adam(
    flat: Tensor, mean: Tensor, square: Tensor, gradient: Tensor, rate: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Keras' Adam, as ``published_fit.adam_update``; `rate` has the bias correction."""
    mean = mean + (1 - BETA1) * (gradient - mean)
    square = BETA2 * square + (1 - BETA2) * gradient * gradient
    return flat - rate * mean / (square.sqrt() + ADAM_EPSILON), mean, square


def adam_rates(learning_rate: float, first_step: int, count: int) -> list[float]:
    """η times the bias correction of `count` Adam steps, the first being number `first_step`."""
    steps = range(first_step, first_step + count)
    return [learning_rate * math.sqrt(1 - BETA2**step) / (1 - BETA1**step) for step in steps]


@dataclass(frozen=True)
class Minibatch:
    """What one fit reads; ``[lanes, batch]`` unless said otherwise.

    Attributes:
        inputs: of s then s′, ``[lanes, in | ones, 2 · batch]``.
        dense_inputs: of s, ``[lanes, in, batch]``.
        action: int64.
        reward: of the transitions.
        done: bool.
    """

    inputs: Tensor
    dense_inputs: Tensor
    action: Tensor
    reward: Tensor
    done: Tensor


def fixed_targets(value: Tensor, taken: Tensor, target: Tensor) -> Tensor:
    """Feature-major ``published_fit.fit_targets``, `taken` a mask like `value`."""
    return torch.where(taken, target.unsqueeze(1), value)


def fit(
    network: FlatNetwork,
    parameters: tuple[Tensor, Tensor, Tensor],
    batch: Minibatch,
    rates: Tensor,
    *,
    gamma: float,
    l2: float,
    extra: Tensor,
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
    """The published DQN's training on one minibatch per lane (docs/protocol.md §4).

    The targets of all outputs are fixed before the first epoch. In that epoch only the actions
    taken have a gradient, and its forward pass is the one that made the targets.

    Args:
        network: the layout.
        parameters: flat parameters and Adam's two moments, each ``[lanes, size]``.
        batch: the minibatch.
        rates: from :func:`adam_rates`, ``[epochs, lanes, 1]``; zero for a lane that does not
            learn, whose moments are then of no use.
        gamma: discount factor.
        l2: kernel penalty.
        extra: further inputs ``[lanes, in | ones, n]`` to evaluate before training.

    Returns:
        The parameters and moments after it; Q of `extra` before it, ``[lanes, actions, n]``; and
        the mean squared difference before it, ``[lanes]``.
    """
    flat, mean, square = parameters
    count = batch.action.shape[-1]
    before = network.forward(flat, torch.cat([batch.inputs, extra], -1))
    value, following, extra_value = torch.split(before[-1], [count, count, extra.shape[-1]], -1)
    actions = torch.arange(value.shape[1], device=value.device)
    taken = batch.action.unsqueeze(1) == actions.view(1, -1, 1)
    bootstrap = torch.where(batch.done, 0.0, following.amax(1))
    fixed = fixed_targets(value, taken, batch.reward + gamma * bootstrap)
    scale = 2 / (value.shape[1] * count)
    activations = [layer[..., :count] for layer in before]
    for epoch in range(rates.shape[0]):
        if epoch:
            activations = network.forward(flat, batch.inputs[..., :count])
        error = scale * (activations[-1] - fixed)
        sparse = batch.action if epoch == 0 and len(actions) >= MANY_ACTIONS else None
        gradient = network.gradient(
            flat, batch.dense_inputs, activations, error, action=sparse, l2=l2
        )
        flat, mean, square = adam(flat, mean, square, gradient, rates[epoch])
    return (flat, mean, square), extra_value, (value - fixed).square().mean((1, 2))
