"""A small ReLU network of one run and how it learns, as compiled functions of flat arrays.

They restate ``lockstep/flat_network.py`` for one run, row by row of the minibatch: a layer is a
matrix ``[in + 1, out]`` whose last row is the bias, and its input ends with a 1. Tests hold them to
``learners/published_fit.py``; sums are taken in another order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bmc_torchrl.envs.base import BatchedEnv
from bmc_torchrl.envs.factored import active_features, one_hot_encoding
from bmc_torchrl.lockstep.numba.formulas import Array, Scalar, compiled, row_maximum
from bmc_torchrl.lockstep.numba.products import multiply, transpose

__all__ = ["Inputs", "Network", "Work", "fit", "forward", "network_inputs", "show", "work"]

EMBED_BEYOND = 32
"""Multi-hot inputs wider than this are summed rows of the kernel; narrower ones are multiplied."""

BETA1, BETA2 = 0.9, 0.999
_KEPT1, _NEW1 = np.float32(BETA1), np.float32(1 - BETA1)
_KEPT2, _NEW2 = np.float32(BETA2), np.float32(1 - BETA2)
_ADAM_EPSILON = np.float32(1e-7)
_ZERO, _NONE = np.float32(0), np.float32(-np.inf)


class Network(NamedTuple):
    """What all runs' networks have in common.

    Attributes:
        widths: of the input, the hidden layers and the output.
        starts: where each layer begins among the parameters, and where the last one ends.
        codes: the input of each state with a 1 at its end, ``[states · (in + 1)]``, or empty.
        active: positions of the ones in it, int32 ``[states · ones]``, or empty. Without codes and
            positions, the input is the four numbers of the state.
        ones: how many positions a state has.
    """

    widths: tuple[int, ...]
    starts: tuple[int, ...]
    codes: Array
    active: Array
    ones: int


class Work(NamedTuple):
    """Space for some rows at once, for any run's network; all but `states` are float32.

    Attributes:
        states: index of each row's state, ``[rows]``.
        inputs: ``[rows, in + 1]``, empty where positions are used.
        layers: each layer's output; that of the hidden ones ends with a 1.
        slopes: of the loss with respect to each layer's output, ``[batch, out]``.
        fixed: targets of all outputs, ``[batch, actions]``.
        gradient: of the loss with respect to the parameters.
        turned: a transposed layer.
    """

    states: Array
    inputs: Array
    layers: tuple[Array, ...]
    slopes: tuple[Array, ...]
    fixed: Array
    gradient: Array
    turned: Array


def describe(env: BatchedEnv, hidden: Sequence[int]) -> Network:
    """The network of `hidden` layers on what the domain of `env` shows of a state."""
    domain = env.lanes()
    widths = (domain.num_features, *hidden, domain.num_actions)
    sizes = [(fan_in + 1) * fan_out for fan_in, fan_out in itertools.pairwise(widths)]
    codes, active, ones = np.zeros(0, np.float32), np.zeros(0, np.int32), 0
    states = torch.arange(domain.num_states)
    if domain.ones and widths[0] > EMBED_BEYOND:
        positions = active_features(states, domain.sizes)
        active = _with_last(positions, widths[0]).to(torch.int32).numpy()
        ones = domain.ones + 1
    elif domain.ones:
        codes = _with_last(one_hot_encoding(states, domain.sizes), 1).numpy()
    elif widths[0] != 4:
        raise ValueError(f"A state has four numbers, but the network reads {widths[0]}.")
    starts = tuple(itertools.accumulate(sizes, initial=0))
    return Network(widths, starts, codes.reshape(-1), active.reshape(-1), ones)


def _with_last(rows: Tensor, value: float) -> Tensor:
    return torch.cat([rows, torch.full_like(rows[:, :1], value)], -1)


def work(network: Network, rows: int, batch: int) -> Work:
    """Space for `rows` at once, of which `batch` learn."""
    *hidden, actions = network.widths[1:]
    single: Any = np.float32
    return Work(
        states=np.zeros(rows, np.int64),
        inputs=np.ones(0 if network.ones else rows * (network.widths[0] + 1), single),
        layers=(*(np.ones(rows * (w + 1), single) for w in hidden), np.ones(rows * actions, single)),
        slopes=tuple(np.zeros(batch * width, single) for width in network.widths[1:]),
        fixed=np.zeros(batch * actions, single),
        gradient=np.zeros(network.starts[-1], single),
        turned=np.zeros(max(a * b for a, b in itertools.pairwise(network.widths)), single),
    )


@compiled
def show(network: Network, space: Work, row: int, p: Any, state: int) -> None:
    """Let a row's input be that of a state."""
    space.states[row] = state
    if network.ones > 0:
        return
    width = network.widths[0] + 1
    if network.codes.size > 0:
        for j in range(width):
            space.inputs[row * width + j] = network.codes[state * width + j]
    else:
        for j in range(4):
            space.inputs[row * width + j] = np.float32(p[j])


@compiled
def forward(network: Network, parameters: Array, space: Work, rows: int) -> None:
    """The layers' outputs for the first `rows` rows; the last are the action values."""
    widths, last = network.widths, len(network.widths) - 2
    for depth in range(last + 1):
        fan_in, fan_out = widths[depth], widths[depth + 1]
        layer = parameters[network.starts[depth] : network.starts[depth + 1]]
        output = space.layers[depth]
        row_width = fan_out + 1 if depth < last else fan_out
        floor = _ZERO if depth < last else _NONE
        if depth == 0 and network.ones > 0:
            _sum_rows(network, layer, space.states, output, row_width, fan_out, rows, floor)
            continue
        below = space.inputs if depth == 0 else space.layers[depth - 1]
        size = fan_in + 1
        multiply(
            rows, size, fan_out, below.ctypes, size, 1, layer.ctypes, output.ctypes, row_width, floor
        )


@compiled
def _sum_rows(
    network: Network,
    layer: Array,
    states: Array,
    output: Array,
    row_width: int,
    fan_out: int,
    rows: int,
    floor: Scalar,
) -> None:
    for row in range(rows):
        total = output[row * row_width : row * row_width + fan_out]
        positions = states[row] * network.ones
        for one in range(network.ones):
            start = network.active[positions + one] * fan_out
            kernel = layer[start : start + fan_out]
            for j in range(fan_out):
                total[j] = kernel[j] if one == 0 else total[j] + kernel[j]
        for j in range(fan_out):
            total[j] = floor if total[j] < floor else total[j]


@compiled
def backward(network: Network, parameters: Array, space: Work, rows: int, taken: Array) -> None:
    """The gradient, from the slopes of the action values.

    Args:
        network: all runs'.
        parameters: the run's.
        space: as :func:`forward` left it, with the last slopes; the others are overwritten.
        rows: how many.
        taken: actions ``[rows]`` where the slopes of all others are 0, or empty.
    """
    for depth in range(len(network.widths) - 2, -1, -1):
        fan_in, fan_out = network.widths[depth], network.widths[depth + 1]
        start, stop = network.starts[depth], network.starts[depth + 1]
        gradient, slope = space.gradient[start:stop], space.slopes[depth]
        below = space.inputs if depth == 0 else space.layers[depth - 1]
        size = fan_in + 1
        if depth > 0:
            transpose(parameters[start : stop - fan_out], space.turned, fan_in, fan_out)
        if depth > 0 and depth == len(network.widths) - 2 and taken.size > 0:
            _back_from_taken(space, depth, fan_in, fan_out, rows, taken, gradient)
            continue
        if depth == 0 and network.ones > 0:
            _scatter_rows(network, space.states, slope, gradient, fan_out, rows)
            continue
        multiply(
            size, rows, fan_out, below.ctypes, 1, size, slope.ctypes, gradient.ctypes, fan_out, _NONE
        )
        if depth > 0:
            lower = space.slopes[depth - 1]
            multiply(
                rows, fan_out, fan_in, slope.ctypes, fan_out, 1, space.turned.ctypes,
                lower.ctypes, fan_in, _NONE,
            )  # fmt: skip
            for row in range(rows):
                for j in range(fan_in):
                    if not below[row * size + j] > 0:
                        lower[row * fan_in + j] = 0


@compiled
def _back_from_taken(
    space: Work, depth: int, fan_in: int, fan_out: int, rows: int, taken: Array, gradient: Array
) -> None:
    """The last layer, whose slopes have one entry per row that is not 0."""
    below, lower = space.layers[depth - 1], space.slopes[depth - 1]
    gradient[:] = 0
    for row in range(rows):
        action = taken[row]
        slope = space.slopes[depth][row * fan_out + action]
        kernel = space.turned[action * fan_in : (action + 1) * fan_in]
        inputs = below[row * (fan_in + 1) : (row + 1) * (fan_in + 1)]
        into = lower[row * fan_in : (row + 1) * fan_in]
        for j in range(fan_in):
            into[j] = slope * kernel[j] if inputs[j] > 0 else _ZERO
        for j in range(fan_in + 1):
            gradient[j * fan_out + action] += slope * inputs[j]


@compiled
def _scatter_rows(
    network: Network, states: Array, slope: Array, gradient: Array, fan_out: int, rows: int
) -> None:
    gradient[:] = 0
    for row in range(rows):
        own = slope[row * fan_out : (row + 1) * fan_out]
        for one in range(network.ones):
            start = network.active[states[row] * network.ones + one] * fan_out
            into = gradient[start : start + fan_out]
            for j in range(fan_out):
                into[j] += own[j]


@compiled
def adam_rate(learning_rate: float, step: int) -> Scalar:
    """η times the bias correction, as ``flat_network.adam_rates``."""
    return np.float32(learning_rate * math.sqrt(1 - BETA2**step) / (1 - BETA1**step))


@compiled
def adam(parameters: Array, mean: Array, square: Array, gradient: Array, rate: Scalar) -> None:
    """``flat_network.adam``."""
    for j in range(parameters.size):
        slope = gradient[j]
        mean[j] += _NEW1 * (slope - mean[j])
        square[j] = _KEPT2 * square[j] + _NEW2 * slope * slope
        parameters[j] -= rate * mean[j] / (np.sqrt(square[j]) + _ADAM_EPSILON)


@compiled
def add_penalty(network: Network, parameters: Array, gradient: Array, l2: float) -> None:
    """The gradient of `l2` times the sum of the squared kernels; biases have none."""
    factor = np.float32(2 * l2)
    for depth in range(len(network.widths) - 1):
        stop = network.starts[depth + 1] - network.widths[depth + 1]
        for j in range(network.starts[depth], stop):
            gradient[j] += factor * parameters[j]


@compiled
def fit(
    network: Network,
    parameters: Array,
    mean: Array,
    square: Array,
    space: Work,
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
    batch, actions = taken.size, network.widths[-1]
    value, slope, fixed = space.layers[-1], space.slopes[-1], space.fixed
    scale = np.float32(2 / (actions * batch))
    loss = 0.0
    for j in range(batch * actions):
        fixed[j], slope[j] = value[j], _ZERO
    for row in range(batch):
        start, following = row * actions, (batch + row) * actions
        best = row_maximum(value[following : following + actions])
        target = reward[row] + gamma * (_ZERO if terminated[row] else best)
        chosen = start + taken[row]
        error = value[chosen] - target
        fixed[chosen], slope[chosen] = target, scale * error
        loss += np.float64(error) * np.float64(error)
    for epoch in range(epochs):
        if epoch > 0:
            forward(network, parameters, space, batch)
            for j in range(batch * actions):
                slope[j] = scale * (value[j] - fixed[j])
        backward(network, parameters, space, batch, taken if epoch == 0 else taken[:0])
        if l2 > 0:
            add_penalty(network, parameters, space.gradient, l2)
        rate = adam_rate(learning_rate, first_step + epoch)
        adam(parameters, mean, square, space.gradient, rate)
    return loss / (batch * actions)
