"""A small ReLU network of one run and how it learns, as compiled functions of flat arrays.

They restate ``lockstep/flat_network.py`` for one run, row by row of the minibatch: a layer is a
matrix ``[in + 1, out]`` whose last row is the bias, and its input ends with a 1. From
:func:`forward` on arrays are given as places (:func:`placed`). Tests hold them to
``learners/published_fit.py``; sums are taken in another order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bmc_torchrl.envs.base import BatchedEnv
from bmc_torchrl.envs.factored import active_features, one_hot_encoding
from bmc_torchrl.lockstep.numba.formulas import Array, Scalar, at, compiled, inlined, row_maximum
from bmc_torchrl.lockstep.numba.kernels import BETA1, BETA2, adam, multiply, transpose

__all__ = ["Network", "Work", "describe", "fit", "forward", "work"]

EMBED_BEYOND = 32
"""Multi-hot inputs wider than this are summed rows of the kernel; narrower ones are multiplied."""

MANY_ACTIONS = 32
"""From so many actions on, the first epoch's gradient is worth gathering instead of multiplying."""

_ZERO, _NONE = np.float32(0), np.float32(-np.inf)


class Network(NamedTuple):
    """What all runs' networks have in common.

    Attributes:
        widths: of the input, the hidden layers and the output; as all that follow, an int64 array:
            compiled code reads an entry of a tuple through a table of jumps.
        starts: where each layer begins among the parameters, and where the last one ends.
        outputs: where the input and each layer's output begin in a :class:`Work`, and where the
            last one ends.
        slopes: likewise of each layer's slopes.
        codes: the input of each state with a 1 at its end, ``[states, in + 1]``, or empty.
        active: positions of the ones in it, int64 ``[states, ones]``, or empty. Without codes and
            positions, the input is the numbers of the state.
        layers: how many.
        coded: whether there are codes.
        ones: how many positions there are for a state, 0 if none.
    """

    widths: Array
    starts: Array
    outputs: Array
    slopes: Array
    codes: Array
    active: Array
    layers: int
    coded: bool
    ones: int


class Work(NamedTuple):
    """Space for some rows at once, for any run's network; all but `states` are flat float32.

    Attributes:
        states: index of each row's state, ``[rows]``.
        outputs: of the input and of each layer, ``[rows, width + 1]``, each row ending with a 1.
        slopes: of the loss with respect to each layer's output, ``[batch, width + 1]``.
        fixed: targets of all outputs, ``[batch, actions + 1]``.
        gradient: of the loss with respect to the parameters.
        turned: a transposed layer.
        sums: a transposed layer's gradient.
    """

    states: Array
    outputs: Array
    slopes: Array
    fixed: Array
    gradient: Array
    turned: Array
    sums: Array


def describe(env: BatchedEnv, hidden: Sequence[int], rows: int, batch: int) -> Network:
    """The network of `hidden` layers on what the domain of `env` shows of a state.

    Args:
        env: the domain.
        hidden: widths.
        rows: how many are evaluated at once, at most.
        batch: how many of them learn.
    """
    domain = env.lanes()
    widths = (domain.num_features, *hidden, domain.num_actions)
    codes, active = torch.zeros(0, 0), torch.zeros(0, 0, dtype=torch.int64)
    states = torch.arange(domain.num_states)
    if domain.ones and widths[0] > EMBED_BEYOND:
        active = _with_last(active_features(states, domain.sizes), widths[0])
    elif domain.ones:
        codes = _with_last(one_hot_encoding(states, domain.sizes), 1)
    elif widths[0] != 4:
        raise ValueError(f"A state has four numbers, but the network reads {widths[0]}.")
    shown = [0 if active.numel() else widths[0] + 1, *(width + 1 for width in widths[1:])]
    return Network(
        widths=np.array(widths),
        starts=_starts((fan_in + 1) * fan_out for fan_in, fan_out in itertools.pairwise(widths)),
        outputs=_starts(rows * width for width in shown),
        slopes=_starts(batch * (width + 1) for width in widths[1:]),
        codes=codes.numpy(),
        active=active.numpy(),
        layers=len(widths) - 1,
        coded=codes.numel() > 0,
        ones=active.shape[1],
    )


def _with_last(rows: Tensor, value: float) -> Tensor:
    return torch.cat([rows, torch.full_like(rows[:, :1], value)], -1)


def _starts(sizes: Iterable[int]) -> Array:
    return np.array([0, *itertools.accumulate(sizes)])


def work(network: Network, rows: int, batch: int) -> Work:
    """Space for a network that was described for so many rows."""
    largest = max((fan_in + 1) * fan_out for fan_in, fan_out in itertools.pairwise(network.widths))
    return Work(
        states=np.zeros(rows, np.int64),
        outputs=np.ones(network.outputs[-1], np.float32),
        slopes=np.zeros(network.slopes[-1], np.float32),
        fixed=np.zeros(batch * (network.widths[-1] + 1), np.float32),
        gradient=np.zeros(network.starts[-1], np.float32),
        turned=np.zeros(largest, np.float32),
        sums=np.zeros(largest, np.float32),
    )


@inlined
def placed(net: Network, space: Work) -> tuple[Network, Work]:
    """Both with places instead of arrays, which are eight times as much to hand to a function."""
    network = Network(
        at(net.widths, 0),
        at(net.starts, 0),
        at(net.outputs, 0),
        at(net.slopes, 0),
        at(net.codes, 0),
        at(net.active, 0),
        net.layers,
        net.coded,
        net.ones,
    )
    work = Work(
        at(space.states, 0),
        at(space.outputs, 0),
        at(space.slopes, 0),
        at(space.fixed, 0),
        at(space.gradient, 0),
        at(space.turned, 0),
        at(space.sums, 0),
    )
    return network, work


@compiled
def forward(network: Network, parameters: Array, space: Work, rows: Scalar) -> None:
    """The layers' outputs for the first `rows` rows; the last are the action values."""
    last, ones = network.layers - 1, network.ones
    for depth in range(last + 1):
        size, fan_out = network.widths[depth] + 1, network.widths[depth + 1]
        layer = at(parameters, network.starts[depth])
        output = at(space.outputs, network.outputs[depth + 1])
        floor = _ZERO if depth < last else _NONE
        if depth == 0 and ones > 0:
            for row in range(rows):
                positions = at(network.active, space.states[row] * ones)
                sum_rows(positions, ones, layer, at(output, row * (fan_out + 1)), fan_out)
            for j in range(rows * (fan_out + 1)):
                output[j] = floor if output[j] < floor else output[j]
        else:
            inputs = at(space.outputs, network.outputs[depth])
            multiply(
                rows, size, fan_out, inputs, size, 1, layer, fan_out, output, fan_out + 1, floor
            )


@compiled
def sum_rows(positions: Array, ones: int, layer: Array, total: Array, width: int) -> None:
    """The rows of a layer at `positions`, summed."""
    for number in range(ones):
        row = at(layer, positions[number] * width)
        for j in range(width):
            total[j] = row[j] if number == 0 else total[j] + row[j]


@inlined
def backward(
    network: Network, parameters: Array, space: Work, rows: int, taken: Array, sparse: bool
) -> None:
    """The gradient, from the slopes of the action values.

    Args:
        network: all runs'.
        parameters: the run's.
        space: as :func:`forward` left it, with the last slopes; the others are overwritten.
        rows: how many.
        taken: actions ``[rows]``.
        sparse: whether the slopes of all other actions are 0.
    """
    last, ones = network.layers - 1, network.ones
    for depth in range(last, -1, -1):
        fan_in, fan_out = network.widths[depth], network.widths[depth + 1]
        start, size = network.starts[depth], fan_in + 1
        gradient = at(space.gradient, start)
        slope = at(space.slopes, network.slopes[depth])
        inputs = at(space.outputs, network.outputs[depth])
        lower = at(space.slopes, network.slopes[depth - 1]) if depth > 0 else slope
        turned, sums = space.turned, space.sums
        if depth > 0:
            transpose(at(parameters, start), turned, fan_in, fan_out)
        if sparse and depth > 0 and depth == last and fan_out >= MANY_ACTIONS:
            from_taken(rows, taken, slope, turned, inputs, lower, gradient, sums, fan_in, fan_out)
        elif depth == 0 and ones > 0:
            clear(gradient, size * fan_out)
            for row in range(rows):
                positions = at(network.active, space.states[row] * ones)
                scatter_rows(positions, ones, at(slope, row * (fan_out + 1)), gradient, fan_out)
        else:
            multiply(
                size, rows, fan_out, inputs, 1, size, slope, fan_out + 1, gradient, fan_out, _NONE
            )
            if depth > 0:
                multiply(
                    rows, fan_out, fan_in, slope, fan_out + 1, 1, turned, fan_in, lower, size, _NONE
                )
        if depth > 0:
            for j in range(rows * size):
                lower[j] = lower[j] if inputs[j] > 0 else _ZERO


@compiled
def clear(array: Array, size: int) -> None:
    """The first entries become 0, faster than by an assignment to a slice."""
    for j in range(size):
        array[j] = _ZERO


@compiled
def from_taken(
    rows: int,
    taken: Array,
    slope: Array,
    turned: Array,
    inputs: Array,
    lower: Array,
    gradient: Array,
    sums: Array,
    fan_in: int,
    fan_out: int,
) -> None:
    """Gradient and lower slopes of a layer whose slopes have one entry per row that is not 0."""
    size = fan_in + 1
    clear(sums, size * fan_out)
    for row in range(rows):
        action = taken[row]
        own = slope[row * (fan_out + 1) + action]
        kernel, seen = at(turned, action * fan_in), at(inputs, row * size)
        into, total = at(lower, row * size), at(sums, action * size)
        for j in range(fan_in):
            into[j] = own * kernel[j]
        for j in range(size):
            total[j] += own * seen[j]
    transpose(sums, gradient, fan_out, size)


@compiled
def scatter_rows(positions: Array, ones: int, slope: Array, gradient: Array, width: int) -> None:
    """Add a row's slopes to the rows of the gradient at `positions`."""
    for number in range(ones):
        into = at(gradient, positions[number] * width)
        for j in range(width):
            into[j] += slope[j]


@inlined
def fit(
    network: Network,
    parameters: Array,
    mean: Array,
    square: Array,
    space: Work,
    batch: int,
    taken: Array,
    reward: Array,
    terminated: Array,
    gamma: Scalar,
    learning_rate: float,
    l2: float,
    epochs: int,
    first_step: int,
) -> Scalar:
    """``flat_network.fit`` of one run: several epochs on one minibatch with fixed targets.

    Args:
        network: all runs'.
        parameters: the run's; they and the moments are changed.
        mean: Adam's first moments.
        square: Adam's second moments.
        space: :func:`forward` has been called on the minibatch's s, followed by its s′.
        batch: how many transitions.
        taken: actions, int64 ``[batch]``.
        reward: float32 ``[batch]``.
        terminated: whether s′ ended its episode, bool ``[batch]``.
        gamma: discount factor, float32.
        learning_rate: Adam's η.
        l2: kernel penalty.
        epochs: Adam steps.
        first_step: number of the first of them in all, from 1.

    Returns:
        The mean squared difference before the first step.
    """
    actions, last = network.widths[network.layers], network.layers - 1
    value, width = at(space.outputs, network.outputs[last + 1]), actions + 1
    slope, fixed = at(space.slopes, network.slopes[last]), space.fixed
    scale, penalty = np.float32(2 / (actions * batch)), np.float32(2 * l2)
    loss, decayed1, decayed2 = 0.0, BETA1**first_step, BETA2**first_step
    for j in range(batch * width):
        fixed[j] = value[j]
    for row in range(batch):
        best = row_maximum(at(value, (batch + row) * width), actions)
        target = reward[row] + gamma * (_ZERO if terminated[row] else best)
        chosen = row * width + taken[row]
        error = value[chosen] - target
        fixed[chosen] = target
        loss += np.float64(error) * np.float64(error)
    for epoch in range(epochs):
        if epoch > 0:
            forward(network, parameters, space, batch)
        for j in range(batch * width):
            slope[j] = scale * (value[j] - fixed[j])
        backward(network, parameters, space, batch, taken, epoch == 0)
        if penalty > 0:
            for depth in range(network.layers):
                kernel = at(parameters, network.starts[depth])
                slopes = at(space.gradient, network.starts[depth])
                for j in range(network.widths[depth] * network.widths[depth + 1]):
                    slopes[j] += penalty * kernel[j]
        rate = learning_rate * math.sqrt(1 - decayed2) / (1 - decayed1)
        decayed1, decayed2 = decayed1 * BETA1, decayed2 * BETA2
        size = network.starts[network.layers]
        adam(size, parameters, mean, square, space.gradient, np.float32(rate))
    return loss / (batch * actions)
