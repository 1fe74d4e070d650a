"""The published DQN as compiled loops: one run at a time, tests included."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from bmc_torchrl.envs.lanes import ScalarDomain
from bmc_torchrl.lockstep.numba import kernels, loops, network
from bmc_torchrl.lockstep.numba.domains import domain_step
from bmc_torchrl.lockstep.numba.formulas import (
    Array,
    Bits,
    Scalar,
    at,
    epsilon_greedy,
    inlined,
    next_bits,
    row_argmax,
    uniform,
    uniform_pair,
)
from bmc_torchrl.lockstep.numba.kernels import distinct_indices
from bmc_torchrl.lockstep.numba.loops import (
    Scratch,
    compiled_for,
    is_unseeded,
    mean_return,
    record_episode,
    seed_bits,
    start_draws,
    start_episode,
    start_tests,
    step_test,
)
from bmc_torchrl.lockstep.numba.network import (
    Network,
    Work,
    fit,
    forward,
    greedy_actions,
    placed,
    placed_work,
)
from bmc_torchrl.lockstep.numba.rules import (
    current_epsilon,
    learn_transition,
    look_at_values,
)
from bmc_torchrl.strategies import ScalarRule

__all__ = ["DQNLanes", "DQNRule", "DQNScratch", "Minibatch", "dqn_loops_of"]

_SOURCES = (*loops.SOURCES, kernels.__file__, network.__file__, __file__)
GIVEN = 7
"""Given uniforms of a step before those of its minibatch."""

SHORT_RECORD, LONG_RECORD = 5, 11
"""Numbers that hold a transition whose states are indices, and one whose states are numbers."""


class DQNRule(NamedTuple):
    """How all lanes begin, learn and are tested.

    A lane's numbers depend on `seed` and on `first_run` plus its index only. Its weights are drawn
    as ``QNetwork`` draws them, or left as they are unless `drawn`. `noisy` says whether a step
    reads its uniform draw.
    """

    episodes: int
    tests: int
    max_steps: int
    gamma: float
    mask_terminated: bool
    enough_perfect: int
    learning_rate: float
    batch: int
    capacity: int
    epochs: int
    l2: float
    noisy: bool
    seed: int
    first_run: int
    drawn: bool


class DQNLanes(NamedTuple):
    """Everything that the runs remember, ``[runs, ...]``; written in place.

    `networks` are the parameters and Adam's two moments, ``[runs, 3, size]``. `replay` is a ring,
    ``[runs, capacity, …]``, of s and s′ (each an index, or four numbers), reward, action and
    termination as float32, of which a run has seen `time`. `reads_change` says whether its strategy
    reads what learning changed. The rest is as in
    :class:`~bmc_torchrl.lockstep.numba.loops.Lanes`.
    """

    networks: Array
    replay: Array
    time: Array
    reads_change: Array
    physics: Array
    state: Array
    step_count: Array
    episode: Array
    sums: Array
    perfect: Array
    bits: Array
    rule: Array
    parameters: Array
    memory: Array
    local: Array
    local_row: Array
    history: Array
    history_row: Array
    curves: Array


class Minibatch(NamedTuple):
    """Transitions drawn from a lane's replay: `rows` is twice ``[batch]``, the rest ``[batch]``."""

    rows: Array
    taken: Array
    reward: Array
    terminated: Array


class DQNScratch(NamedTuple):
    """What one lane's step and tests need, for any lane.

    The network sees a minibatch's s in `before` and its s′ in `after`, one state in `alone`, and
    all tests in `tested`.
    """

    before: Work
    after: Work
    alone: Work
    tested: Work
    minibatch: Minibatch
    tests: Scratch


@inlined
def draw_weights(net: Network, weights: Array, bits: Array) -> None:
    """Glorot's uniform kernels, and biases of 0."""
    for depth in range(net.layers):
        fan_in, fan_out = net.widths[depth], net.widths[depth + 1]
        limit, start = math.sqrt(6 / (fan_in + fan_out)), net.starts[depth]
        for j in range(fan_in * fan_out):
            weights[start + j] = limit * (2 * uniform(next_bits(bits)) - 1)
        for j in range(fan_out):
            weights[start + fan_in * fan_out + j] = 0


def advance_lanes(
    m: Any,
    rules: Any,
    rule: DQNRule,
    shape: Network,
    lanes: DQNLanes,
    first: int,
    last: int,
    steps: int,
    given: Array,
    scratch: DQNScratch,
) -> None:
    """Up to `steps` training steps of each of the lanes `first` to `last` − 1, tests included.

    A lane that has no random numbers yet is started. The order is that of docs/protocol.md §2.

    Args:
        m: the domain.
        rules: those of the strategies.
        rule: how to learn.
        shape: the networks'.
        lanes: what is changed.
        first: first lane.
        last: the lane after the last one.
        steps: how many steps.
        given: uniforms ``[steps, runs, 7 + batch]`` to use instead of each lane's own: two for the
            action, one for the step, four for the reset, the rest for the minibatch; or empty.
        scratch: overwritten.
    """
    net, alone = placed(shape), placed_work(scratch.alone)
    left, reached = placed_work(scratch.before), placed_work(scratch.after)
    minibatch, values = scratch.minibatch, at(alone.outputs, net.outputs[net.layers])
    actions, gamma, drawn = net.widths[net.layers], np.float32(rule.gamma), given.shape[0] == 0
    size, width = net.starts[net.layers], lanes.replay.shape[2]
    # As literals they would be further types, for which everything is compiled again.
    none: Scalar = np.int64(0)
    one: Scalar = np.int64(1)
    for lane in range(first, last):
        weights, replay, bits = (
            at(lanes.networks, lane),
            at(lanes.replay, lane),
            at(lanes.bits, lane),
        )
        which_rule, parameters = lanes.rule[lane], lanes.parameters[lane]
        memory, local = lanes.memory[lane], lanes.local[lanes.local_row[lane]]
        physics, sums, time = at(lanes.physics, lane), at(lanes.sums, lane), lanes.time[lane]
        episode, count = lanes.episode[lane], lanes.step_count[lane]
        if is_unseeded(bits):
            seed_bits(bits, rule.seed, rule.first_run + lane)
            if rule.drawn:
                draw_weights(net, weights, bits)
            draws = start_draws(bits, given, none, lane)
            lanes.state[lane] = start_episode(
                m, rules, which_rule, parameters, memory, physics, draws, episode
            )
        state = lanes.state[lane]
        p = (physics[0], physics[1], physics[2], physics[3])
        for step in range(steps):
            if episode >= rule.episodes:
                break
            if drawn:
                coin, which = uniform_pair(next_bits(bits))
            else:
                coin, which = np.float32(given[step, lane, 0]), np.float32(given[step, lane, 1])
            show(net, alone, none, p, state)
            forward(net, weights, alone, one)
            here = np.float32(current_epsilon(rules, which_rule, memory, local, state))
            greedy = row_argmax(values, actions)
            action = epsilon_greedy(greedy, here, coin, which, actions)
            chosen, promised, draw = values[action], values[greedy], 0.0
            if rule.noisy:
                draw = uniform(next_bits(bits)) if drawn else given[step, lane, 2]
            q, after, reward, terminated = domain_step(m, p, state, action, draw)
            record = at(replay, time % rule.capacity * width)
            remember(record, width, p, state, q, after, action, reward, terminated)
            time += 1
            count += 1
            filled = time if time < rule.capacity else rule.capacity
            if filled >= rule.batch:
                for j in range(rule.batch):
                    u = uniform(next_bits(bits)) if drawn else given[step, lane, GIVEN + j]
                    minibatch.rows[j] = np.int32(u * (filled - j))
                sample(net, left, reached, replay, width, minibatch)
                forward(net, weights, left, rule.batch)
                forward(net, weights, reached, rule.batch)
            show(net, alone, none, q, after)
            forward(net, weights, alone, one)
            best, mean = maximum_and_mean(values, actions)
            if terminated and rule.mask_terminated:
                best = mean = np.float32(0)
            change = np.float32(0)
            if filled >= rule.batch:
                sums[2] += fit(
                    net,
                    weights,
                    at(weights, size),
                    at(weights, 2 * size),
                    left,
                    reached,
                    minibatch.taken,
                    minibatch.reward,
                    minibatch.terminated,
                    gamma,
                    rule.learning_rate,
                    rule.epochs,
                    (time - rule.batch) * rule.epochs + 1,
                )
                if lanes.reads_change[lane]:
                    show(net, alone, none, p, state)
                    forward(net, weights, alone, one)
                    change = values[action] - chosen
            sums[0] += here
            sums[1] += reward
            look_at_values(
                rules,
                which_rule,
                memory,
                np.float64(chosen),
                np.float64(promised),
                action == greedy,
            )
            learn_transition(
                rules,
                which_rule,
                parameters,
                memory,
                local,
                state,
                np.float64(reward + gamma * best),
                np.float64(reward + gamma * mean),
                np.float64(change),
            )
            p, state = q, after
            if terminated or count >= rule.max_steps:
                found, stream = (np.nan, np.nan, False), next_bits(bits)
                if rule.tests > 0:
                    tested = placed_work(scratch.tested)
                    found = greedy_episodes(
                        m, rule, net, weights, stream, tested, scratch.tests, episode
                    )
                episode = record_episode(rule, lanes, lane, count, found)
                count = 0
                draws = start_draws(bits, given, step, lane)
                state = start_episode(
                    m, rules, which_rule, parameters, memory, physics, draws, episode
                )
                p = (physics[0], physics[1], physics[2], physics[3])
        physics[0], physics[1], physics[2], physics[3] = p
        lanes.step_count[lane], lanes.state[lane], lanes.time[lane] = count, state, time


@inlined
def show(net: Network, space: Work, sample: Scalar, p: Any, state: Scalar) -> None:
    """Let a sample's input be that of a state."""
    inputs, samples, ones = at(space.outputs, sample), space.samples, net.ones
    if ones == 0:
        # In a loop, an entry of a tuple would be read through a table of jumps.
        inputs[0], inputs[samples] = np.float32(p[0]), np.float32(p[1])
        inputs[2 * samples], inputs[3 * samples] = np.float32(p[2]), np.float32(p[3])
    elif not net.embedded:
        shown, active = at(net.active, space.states[sample] * ones), at(net.active, state * ones)
        for number in range(ones):
            inputs[shown[number] * samples] = 0
        for number in range(ones):
            inputs[active[number] * samples] = 1
    space.states[sample] = state


@inlined
def remember(
    record: Array,
    width: int,
    p: Any,
    state: int,
    q: Any,
    after: int,
    action: int,
    reward: Scalar,
    terminated: Any,
) -> None:
    """Write a transition to its place in replay."""
    if width == SHORT_RECORD:
        record[0], record[1] = state, after
    else:
        record[0], record[1], record[2], record[3] = p
        record[4], record[5], record[6], record[7] = q
    record[width - 3], record[width - 2], record[width - 1] = reward, action, terminated


@inlined
def sample(
    net: Network, left: Work, reached: Work, replay: Array, width: int, minibatch: Minibatch
) -> None:
    """Show the network a minibatch of what a lane remembers: the states left, and those reached."""
    batch = minibatch.taken.size
    rows = at(minibatch.rows, batch)
    distinct_indices(at(minibatch.rows, 0), rows, batch)
    for j in range(batch):
        record = at(replay, rows[j] * width)
        minibatch.reward[j], minibatch.taken[j] = record[width - 3], np.int64(record[width - 2])
        minibatch.terminated[j] = record[width - 1] > 0
    # A loop of its own: the one above waits for memory, and waits for many records at once.
    for j in range(batch):
        record = at(replay, rows[j] * width)
        p, q, state, after = record, record, np.int64(0), np.int64(0)
        if width == SHORT_RECORD:
            state, after = np.int64(record[0]), np.int64(record[1])
        else:
            q = at(record, 4)
        show(net, left, j, (p[0], p[1], p[2], p[3]), state)
        show(net, reached, j, (q[0], q[1], q[2], q[3]), after)


@inlined
def maximum_and_mean(row: Array, size: int) -> tuple[Scalar, Scalar]:
    """Of a row of action values; the mean from a sum in float64."""
    best, total = row[0], 0.0
    for j in range(size):
        best = row[j] if row[j] > best else best
        total += row[j]
    return best, np.float32(total / size)


@inlined
def greedy_episodes(
    m: Any,
    rule: DQNRule,
    net: Network,
    weights: Array,
    stream: Bits,
    space: Work,
    tests: Scratch,
    episode: Scalar,
) -> tuple[Scalar, Scalar, bool]:
    """Mean steps and discounted return of `tests` greedy episodes, and whether all were perfect.

    As ``loops.greedy_episodes``; the network sees all tests under way at once.
    """
    physics, slots = tests.physics, tests.slots
    nothing = physics[:0]
    start_tests(m, rule.tests, stream, tests, nothing, episode)
    active, total_steps, ended_early, discount = rule.tests, 0, False, 1.0
    for step in range(rule.max_steps):
        total_steps += active
        for i in range(active):
            j = slots[i]
            p = (physics[j, 0], physics[j, 1], physics[j, 2], physics[j, 3])
            show(net, space, i, p, tests.states[j])
        forward(net, weights, space, active)
        greedy_actions(net, space, active)
        left = 0
        for i in range(active):
            j, action = slots[i], np.int64(space.chosen[i])
            if step_test(m, tests, j, action, discount, rule.noisy, step, nothing):
                ended_early |= step + 1 < rule.max_steps
            else:
                slots[left] = j
                left += 1
        active = left
        if active == 0:
            break
        discount *= rule.gamma
    return total_steps / rule.tests, mean_return(tests.returns, rule.tests), not ended_early


@functools.cache
def dqn_loops_of(
    kind: type[ScalarDomain], rules: tuple[type[ScalarRule], ...]
) -> Callable[..., None]:
    """`advance_lanes` compiled for a class of domains and rules of strategies."""
    kernels.compile_kernels()
    return compiled_for(kind, rules, advance_lanes, _SOURCES)
