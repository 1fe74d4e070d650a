"""A small ReLU network of one run and how it learns, as compiled functions of flat arrays.

They restate ``lockstep/flat_network.py`` for one run: a layer is a matrix ``[in + 1, out]`` whose
last row is the bias, and its input is ``[in + 1, samples]``, whose last row is ones. So vectors run
along the minibatch and are full, however narrow a layer is. From :func:`forward` on arrays are
given as places (:func:`placed`). Tests hold them to ``learners/published_fit.py``; sums are taken
in another order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from bmc_torchrl.envs.base import BatchedEnv
from bmc_torchrl.envs.factored import active_features
from bmc_torchrl.lockstep.numba.formulas import Array, Scalar, at, compiled, inlined
from bmc_torchrl.lockstep.numba.kernels import BETA1, BETA2, adam, multiply, transpose

__all__ = [
    "Network",
    "Work",
    "describe",
    "fit",
    "forward",
    "greedy_actions",
    "placed",
    "placed_work",
    "work",
]

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
        outputs: where the input and each layer's output begin in a :class:`Work` of one sample, and
            where the last one ends.
        slopes: likewise of each layer's slopes.
        active: positions of the ones in each state's input, int64 ``[states, ones]``, or empty if
            the input is the numbers of the state.
        layers: how many.
        ones: how many positions there are for a state, 0 if none.
        embedded: whether the first layer's rows are summed at the positions, the last of which is
            the bias; if not, the input is multiplied by them.
    """

    widths: Array
    starts: Array
    outputs: Array
    slopes: Array
    active: Array
    layers: int
    ones: int
    embedded: bool


class Work(NamedTuple):
    """Space for some samples at once, for any run's network; float32 and flat unless said.

    Attributes:
        states: index of each sample's state, int64.
        outputs: of the input and of each layer, ``[width + 1, samples]``, the last row ones.
        slopes: of the loss with respect to each layer's output, ``[width, samples]``.
        fixed: targets of all outputs, ``[actions, samples]``.
        best: the largest action value of each sample; where it is learned from, the slope of the
            action taken.
        chosen: the action with the largest value, int32.
        gradient: of the loss with respect to the parameters.
        penalty: what is added to the gradient for each unit of a parameter.
        turned: a layer's output, input or slopes, sample by sample.
        sums: the last layer's gradient, action by action.
        samples: how many there is space for.
    """

    states: Array
    outputs: Array
    slopes: Array
    fixed: Array
    best: Array
    chosen: Array
    gradient: Array
    penalty: Array
    turned: Array
    sums: Array
    samples: int


def describe(env: BatchedEnv, hidden: Sequence[int]) -> Network:
    """The network of `hidden` layers on what the domain of `env` shows of a state."""
    domain = env.lanes()
    widths = (domain.num_features, *hidden, domain.num_actions)
    active = torch.zeros(0, 0, dtype=torch.int64)
    embedded = bool(domain.ones) and widths[0] > EMBED_BEYOND
    if domain.ones:
        active = active_features(torch.arange(domain.num_states), domain.sizes)
    elif widths[0] != 4:
        raise ValueError(f"A state has four numbers, but the network reads {widths[0]}.")
    if embedded:
        active = torch.cat([active, torch.full_like(active[:, :1], widths[0])], -1)
    shown = [0 if embedded else widths[0] + 1, *(width + 1 for width in widths[1:])]
    return Network(
        widths=np.array(widths),
        starts=_starts((fan_in + 1) * fan_out for fan_in, fan_out in itertools.pairwise(widths)),
        outputs=_starts(shown),
        slopes=_starts(widths[1:]),
        active=active.contiguous().numpy(),
        layers=len(widths) - 1,
        ones=active.shape[1],
        embedded=embedded,
    )


def _starts(sizes: Iterable[int]) -> Array:
    return np.array([0, *itertools.accumulate(sizes)])


def work(network: Network, samples: int, *, learning: bool = False, l2: float = 0.0) -> Work:
    """Space for `samples`, and for learning from them if they are a minibatch."""
    widest, actions = int(network.widths.max()) + 1, int(network.widths[-1])
    *_, last, size = (int(start) * learning for start in network.starts)
    learned = samples * learning
    outputs = np.ones(network.outputs[-1] * samples, np.float32)
    if not network.embedded:
        outputs[: network.widths[0] * samples] = 0
    penalty = np.zeros(size, np.float32)
    for depth in range(network.layers * learning):
        kernel = int(network.widths[depth] * network.widths[depth + 1])
        penalty[network.starts[depth] :][:kernel] = 2 * l2
    return Work(
        states=np.zeros(samples, np.int64),
        outputs=outputs,
        slopes=np.zeros(network.slopes[-1] * learned, np.float32),
        fixed=np.zeros(actions * learned, np.float32),
        best=np.zeros(samples, np.float32),
        chosen=np.zeros(samples, np.int32),
        gradient=np.zeros(size, np.float32),
        penalty=penalty,
        turned=np.zeros(widest * samples, np.float32),
        sums=np.zeros(size - last, np.float32),
        samples=samples,
    )


@inlined
def placed(net: Network) -> Network:
    """With places instead of arrays, which are eight times as much to hand to a function."""
    return Network(
        at(net.widths, 0),
        at(net.starts, 0),
        at(net.outputs, 0),
        at(net.slopes, 0),
        at(net.active, 0),
        net.layers,
        net.ones,
        net.embedded,
    )


@inlined
def placed_work(space: Work) -> Work:
    """See :func:`placed`."""
    return Work(
        at(space.states, 0),
        at(space.outputs, 0),
        at(space.slopes, 0),
        at(space.fixed, 0),
        at(space.best, 0),
        at(space.chosen, 0),
        at(space.gradient, 0),
        at(space.penalty, 0),
        at(space.turned, 0),
        at(space.sums, 0),
        space.samples,
    )


@compiled
def forward(network: Network, parameters: Array, space: Work, count: Scalar) -> None:
    """The layers' outputs for the first `count` samples; the last are the action values."""
    last, ones, samples = network.layers - 1, network.ones, space.samples
    for depth in range(last + 1):
        size, fan_out = network.widths[depth] + 1, network.widths[depth + 1]
        layer = at(parameters, network.starts[depth])
        inputs = at(space.outputs, network.outputs[depth] * samples)
        output = at(space.outputs, network.outputs[depth + 1] * samples)
        floor = _ZERO if depth < last else _NONE
        if depth == 0 and network.embedded:
            turned = space.turned
            for sample in range(count):
                positions = at(network.active, space.states[sample] * ones)
                sum_rows(positions, ones, layer, at(turned, sample * fan_out), fan_out)
            for j in range(count * fan_out):
                turned[j] = floor if turned[j] < floor else turned[j]
            transpose(turned, output, count, fan_out, samples)
        elif samples == 1:
            multiply(1, size, fan_out, inputs, size, 1, layer, fan_out, output, fan_out, floor)
        else:
            multiply(
                fan_out, size, count, layer, 1, fan_out, inputs, samples, output, samples, floor
            )


@compiled
def sum_rows(positions: Array, ones: int, layer: Array, total: Array, width: int) -> None:
    """The rows of a layer at `positions`, summed."""
    for number in range(ones):
        row = at(layer, positions[number] * width)
        for j in range(width):
            total[j] = row[j] if number == 0 else total[j] + row[j]


@compiled
def greedy_actions(network: Network, space: Work, count: Scalar) -> None:
    """The first `count` samples' largest action values, and the first actions that have them."""
    samples, best, chosen = space.samples, space.best, space.chosen
    values = at(space.outputs, network.outputs[network.layers] * samples)
    for j in range(count):
        best[j], chosen[j] = values[j], 0
    for action in range(1, network.widths[network.layers]):
        row = at(values, action * samples)
        for j in range(count):
            better = row[j] > best[j]
            best[j] = row[j] if better else best[j]
            chosen[j] = np.int32(action) if better else chosen[j]


@inlined
def backward(network: Network, parameters: Array, space: Work, taken: Array, sparse: bool) -> None:
    """The gradient, from the slopes of the action values.

    Args:
        network: all runs'.
        parameters: the run's.
        space: as :func:`forward` left it, with the last slopes; the others are overwritten.
        taken: each sample's action.
        sparse: whether the slopes of all other actions are 0.
    """
    last, ones, batch = network.layers - 1, network.ones, space.samples
    for depth in range(last, -1, -1):
        fan_in, fan_out = network.widths[depth], network.widths[depth + 1]
        start, size = network.starts[depth], fan_in + 1
        layer, gradient = at(parameters, start), at(space.gradient, start)
        slope = at(space.slopes, network.slopes[depth] * batch)
        inputs = at(space.outputs, network.outputs[depth] * batch)
        lower = at(space.slopes, network.slopes[depth - 1] * batch) if depth > 0 else slope
        turned = space.turned
        if sparse and depth > 0 and depth == last and fan_out >= MANY_ACTIONS:
            from_taken(space, taken, slope, layer, inputs, lower, gradient, fan_in, fan_out)
        else:
            transpose(slope, turned, fan_out, batch, fan_out)
            if depth == 0 and network.embedded:
                clear(gradient, size * fan_out)
                for sample in range(batch):
                    positions = at(network.active, space.states[sample] * ones)
                    scatter_rows(positions, ones, at(turned, sample * fan_out), gradient, fan_out)
            else:
                multiply(
                    size, batch, fan_out, inputs, batch, 1, turned, fan_out,
                    gradient, fan_out, _NONE,
                )  # fmt: skip
                if depth > 0:
                    multiply(
                        fan_in, fan_out, batch, layer, fan_out, 1, slope, batch, lower, batch, _NONE
                    )
        if depth > 0:
            for j in range(fan_in * batch):
                lower[j] = lower[j] if inputs[j] > 0 else _ZERO


@compiled
def clear(array: Array, size: int) -> None:
    """The first entries become 0, faster than by an assignment to a slice."""
    for j in range(size):
        array[j] = _ZERO


@compiled
def from_taken(
    space: Work,
    taken: Array,
    slope: Array,
    layer: Array,
    inputs: Array,
    lower: Array,
    gradient: Array,
    fan_in: int,
    fan_out: int,
) -> None:
    """Gradient and lower slopes of a layer with one slope per sample that is not 0."""
    size, batch, own = fan_in + 1, space.samples, space.best
    clear(space.sums, size * fan_out)
    transpose(inputs, space.turned, size, batch, size)
    for sample in range(batch):
        action = taken[sample]
        own[sample] = slope[action * batch + sample]
        seen, total = at(space.turned, sample * size), at(space.sums, action * size)
        for j in range(size):
            total[j] += own[sample] * seen[j]
    transpose(space.sums, gradient, fan_out, size, fan_out)
    for unit in range(fan_in):
        kernel, into = at(layer, unit * fan_out), at(lower, unit * batch)
        for sample in range(batch):
            into[sample] = own[sample] * kernel[taken[sample]]


@compiled
def scatter_rows(positions: Array, ones: int, slope: Array, gradient: Array, width: int) -> None:
    """Add a sample's slopes to the rows of the gradient at `positions`."""
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
    after: Work,
    taken: Array,
    reward: Array,
    terminated: Array,
    gamma: Scalar,
    learning_rate: float,
    epochs: int,
    first_step: int,
) -> Scalar:
    """``flat_network.fit`` of one run: several epochs on one minibatch with fixed targets.

    Args:
        network: all runs'.
        parameters: the run's; they and the moments are changed.
        mean: Adam's first moments.
        square: Adam's second moments.
        space: :func:`forward` has been called on the minibatch's s.
        after: likewise on its s′.
        taken: actions, int64.
        reward: float32.
        terminated: whether s′ ended its episode, bool.
        gamma: discount factor, float32.
        learning_rate: Adam's η.
        epochs: Adam steps.
        first_step: number of the first of them in all, from 1.

    Returns:
        The mean squared difference before the first step.
    """
    actions, last, batch = network.widths[network.layers], network.layers - 1, space.samples
    value = at(space.outputs, network.outputs[last + 1] * batch)
    slope, fixed, best = at(space.slopes, network.slopes[last] * batch), space.fixed, after.best
    scale = np.float32(2 / (actions * batch))
    loss, decayed1, decayed2 = 0.0, BETA1**first_step, BETA2**first_step
    for j in range(actions * batch):
        fixed[j] = value[j]
    greedy_actions(network, after, batch)
    for sample in range(batch):
        target = reward[sample] + gamma * (_ZERO if terminated[sample] else best[sample])
        chosen = taken[sample] * batch + sample
        error = value[chosen] - target
        fixed[chosen] = target
        loss += np.float64(error) * np.float64(error)
    for epoch in range(epochs):
        if epoch > 0:
            forward(network, parameters, space, batch)
        for j in range(actions * batch):
            slope[j] = scale * (value[j] - fixed[j])
        backward(network, parameters, space, taken, epoch == 0)
        rate = learning_rate * math.sqrt(1 - decayed2) / (1 - decayed1)
        decayed1, decayed2 = decayed1 * BETA1, decayed2 * BETA2
        size = network.starts[network.layers]
        adam(size, parameters, mean, square, space.gradient, space.penalty, np.float32(rate))
    return loss / (batch * actions)
