"""The published DQN as compiled loops: one run at a time, tests included."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from bmc_torchrl.envs.lanes import ScalarDomain
from bmc_torchrl.lockstep.numba import loops, network, products
from bmc_torchrl.lockstep.numba.domains import domain_start, domain_step, is_noisy
from bmc_torchrl.lockstep.numba.formulas import (
    Array,
    Bits,
    Scalar,
    compiled,
    epsilon_greedy,
    next_bits,
    row_argmax,
    uniform,
    uniform_pair,
)
from bmc_torchrl.lockstep.numba.loops import (
    compiled_for,
    mean_return,
    record_episode,
    seed_bits,
    start_draws,
    start_tests,
    step_test,
)
from bmc_torchrl.lockstep.numba.network import Network, Work, fit, forward, show
from bmc_torchrl.lockstep.numba.rules import begin_episode, current_epsilon, learn_transition
from bmc_torchrl.strategies import ScalarRule

__all__ = ["DQNLanes", "DQNRule", "DQNScratch", "dqn_loops_of"]

_SOURCES = (*loops.SOURCES, products.__file__, network.__file__, __file__)
_ZERO = np.float32(0)
GIVEN = 7
"""Given uniforms of a step before those of its minibatch."""


class DQNRule(NamedTuple):
    """How all lanes learn and are tested."""

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


class DQNLanes(NamedTuple):
    """Everything that the runs remember, ``[runs, ...]``; written in place.

    `weights`, `mean` and `square` are the networks' parameters and Adam's moments. `time` counts a
    run's steps. Replay is a ring of `capacity`: `seen_states` of s and s′ where a state is its
    index, else `seen_numbers`, four of each; and reward, action and termination. `reads_change`
    says whether a run's strategy reads what learning changed. The rest is as in
    :class:`~bmc_torchrl.lockstep.numba.loops.Lanes`.
    """

    weights: Array
    mean: Array
    square: Array
    time: Array
    seen_states: Array
    seen_numbers: Array
    seen_reward: Array
    seen_action: Array
    seen_terminated: Array
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


class DQNScratch(NamedTuple):
    """What one lane's step and tests need, for any lane.

    `rows`, `taken`, `reward` and `terminated` are those of a minibatch. From `physics` on see
    :class:`~bmc_torchrl.lockstep.numba.loops.Scratch`.
    """

    space: Work
    positions: Array
    rows: Array
    taken: Array
    reward: Array
    terminated: Array
    physics: Array
    states: Array
    slots: Array
    streams: Array
    returns: Array


def start_lanes(
    m: Any,
    rules: Any,
    net: Network,
    lanes: DQNLanes,
    first: int,
    last: int,
    offset: int,
    seed: int,
    drawn: bool,
    nothing: Array,
) -> None:
    """Seed lanes `first` to `last` − 1, draw their weights and start their first episodes.

    A lane's numbers depend on `seed` and on `offset` plus its index only. Weights are left as they
    are unless `drawn`, as ``QNetwork`` draws them.
    """
    for lane in range(first, last):
        bits = lanes.bits[lane]
        seed_bits(bits, seed, offset + lane)
        if drawn:
            draw_weights(net, lanes.weights[lane], bits)
        draws = start_draws(bits, nothing, 0, lane)
        lanes.state[lane] = domain_start(m, lanes.physics[lane], draws)
        begin_episode(rules, lanes.rule[lane], lanes.parameters[lane], lanes.memory[lane], 0)


@compiled
def draw_weights(net: Network, weights: Array, bits: Array) -> None:
    """Glorot's uniform kernels, and biases of 0."""
    for depth in range(len(net.widths) - 1):
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
    net: Network,
    lanes: DQNLanes,
    first: int,
    last: int,
    steps: int,
    given: Array,
    scratch: DQNScratch,
) -> None:
    """Up to `steps` training steps of each of the lanes `first` to `last` − 1, tests included.

    Args:
        m: the domain.
        rules: those of the strategies.
        rule: how to learn.
        net: the networks' shape.
        lanes: what is changed.
        first: first lane.
        last: the lane after the last one.
        steps: how many steps.
        given: uniforms ``[steps, runs, 7 + batch]`` to use instead of each lane's own: two for the
            action, one for the step, four for the reset, the rest for the minibatch; or empty.
        scratch: overwritten.
    """
    for lane in range(first, last):
        advance_lane(m, rules, rule, net, lanes, lane, steps, given, scratch)


@compiled
def advance_lane(
    m: Any,
    rules: Any,
    rule: DQNRule,
    net: Network,
    lanes: DQNLanes,
    lane: int,
    steps: int,
    given: Array,
    scratch: DQNScratch,
) -> None:
    """Up to `steps` training steps of one lane, in the order of docs/protocol.md §2."""
    weights, physics, bits, sums = (
        lanes.weights[lane],
        lanes.physics[lane],
        lanes.bits[lane],
        lanes.sums[lane],
    )
    which_rule, parameters = lanes.rule[lane], lanes.parameters[lane]
    memory, local = lanes.memory[lane], lanes.local[lanes.local_row[lane]]
    space, values = scratch.space, scratch.space.layers[-1]
    actions, gamma, drawn = net.widths[-1], np.float32(rule.gamma), given.shape[0] == 0
    nothing = given[:0, :0, 0]
    episode, count, state = lanes.episode[lane], lanes.step_count[lane], lanes.state[lane]
    p = (physics[0], physics[1], physics[2], physics[3])
    for step in range(steps):
        if episode >= rule.episodes:
            break
        if drawn:
            coin, which = uniform_pair(next_bits(bits))
        else:
            coin, which = np.float32(given[step, lane, 0]), np.float32(given[step, lane, 1])
        show(net, space, 0, p, state)
        forward(net, weights, space, 1)
        here = np.float32(current_epsilon(rules, which_rule, memory, local, state))
        action = epsilon_greedy(row_argmax(values[:actions]), here, coin, which, actions)
        chosen = values[action]
        draw = 0.0
        if is_noisy(m):
            draw = uniform(next_bits(bits)) if drawn else given[step, lane, 2]
        q, after, reward, terminated = domain_step(m, p, state, action, draw)
        count += 1
        remember(lanes, lane, rule.capacity, p, state, q, after, action, reward, terminated)
        filled = min(lanes.time[lane], rule.capacity)
        learning = filled >= rule.batch
        rows = 0
        if learning:
            sample(net, lanes, lane, filled, step, given, scratch)
            rows = 2 * rule.batch
        show(net, space, rows, q, after)
        forward(net, weights, space, rows + 1)
        best, mean = maximum_and_mean(values[rows * actions : (rows + 1) * actions])
        if terminated and rule.mask_terminated:
            best = mean = np.float32(0)
        loss, change = 0.0, np.float32(0)
        if learning:
            loss = fit(
                net,
                weights,
                lanes.mean[lane],
                lanes.square[lane],
                space,
                scratch.taken,
                scratch.reward,
                scratch.terminated,
                gamma,
                rule.learning_rate,
                rule.l2,
                rule.epochs,
                (lanes.time[lane] - rule.batch) * rule.epochs + 1,
            )
            if lanes.reads_change[lane]:
                show(net, space, 0, p, state)
                forward(net, weights, space, 1)
                change = values[action] - chosen
        sums[0] += here
        sums[1] += reward
        sums[2] += loss
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
            episode = finish_episode(m, rule, net, lanes, lane, count, scratch, nothing)
            count = 0
            begin_episode(rules, which_rule, parameters, memory, episode)
            state = domain_start(m, physics, start_draws(bits, given, step, lane))
            p = (physics[0], physics[1], physics[2], physics[3])
    physics[0], physics[1], physics[2], physics[3] = p
    lanes.step_count[lane], lanes.state[lane] = count, state


@compiled
def remember(
    lanes: DQNLanes,
    lane: int,
    capacity: int,
    p: Any,
    state: int,
    q: Any,
    after: int,
    action: int,
    reward: Scalar,
    terminated: Any,
) -> None:
    """Put a transition into the lane's replay, over the oldest where it is full."""
    row = lanes.time[lane] % capacity
    if lanes.seen_states.shape[1] > 0:
        lanes.seen_states[lane, row, 0], lanes.seen_states[lane, row, 1] = state, after
    else:
        for j in range(4):
            lanes.seen_numbers[lane, row, j] = p[j]
            lanes.seen_numbers[lane, row, 4 + j] = q[j]
    lanes.seen_reward[lane, row], lanes.seen_action[lane, row] = reward, action
    lanes.seen_terminated[lane, row] = terminated
    lanes.time[lane] += 1


@compiled
def sample(
    net: Network,
    lanes: DQNLanes,
    lane: int,
    filled: int,
    step: int,
    given: Array,
    scratch: DQNScratch,
) -> None:
    """Show the network a minibatch of what the lane remembers: its s, then its s′."""
    batch, bits, numbers = scratch.taken.size, lanes.bits[lane], lanes.seen_numbers[lane]
    for j in range(batch):
        if given.shape[0] == 0:
            draw = uniform(next_bits(bits))
        else:
            draw = given[step, lane, GIVEN + j]
        scratch.positions[j] = np.int32(draw * (filled - j))
    distinct_indices(scratch.positions, scratch.rows)
    for j in range(batch):
        row = scratch.rows[j]
        scratch.taken[j] = lanes.seen_action[lane, row]
        scratch.reward[j] = lanes.seen_reward[lane, row]
        scratch.terminated[j] = lanes.seen_terminated[lane, row]
        for side in range(2):
            state, p = 0, (_ZERO, _ZERO, _ZERO, _ZERO)
            if lanes.seen_states.shape[1] > 0:
                state = np.int64(lanes.seen_states[lane, row, side])
            else:
                at = 4 * side
                p = (
                    numbers[row, at],
                    numbers[row, at + 1],
                    numbers[row, at + 2],
                    numbers[row, at + 3],
                )
            show(net, scratch.space, side * batch + j, p, state)


@compiled
def distinct_indices(positions: Array, rows: Array) -> None:
    """``learners.replay.distinct_indices``, from positions among what is left."""
    count = positions.size
    for j in range(count):
        rows[j] = positions[j]
    for draw in range(count - 2, -1, -1):
        removed = positions[draw]
        for later in range(draw + 1, count):
            rows[later] += rows[later] >= removed


@compiled
def maximum_and_mean(row: Array) -> tuple[Scalar, Scalar]:
    """Of a row of action values; the mean from a sum in float64."""
    best, total = row[0], 0.0
    for value in row:
        best = max(best, value)
        total += value
    return best, np.float32(total / row.size)


@compiled
def finish_episode(
    m: Any,
    rule: DQNRule,
    net: Network,
    lanes: DQNLanes,
    lane: int,
    steps: int,
    scratch: DQNScratch,
    nothing: Array,
) -> Any:
    """Test a lane and record its episode of `steps` steps; the number of episodes now done."""
    stream = next_bits(lanes.bits[lane])
    found = np.nan, np.nan, False
    if rule.tests > 0:
        found = greedy_episodes(m, rule, net, lanes.weights[lane], stream, scratch, nothing)
    return record_episode(rule, lanes, lane, steps, found)


@compiled
def greedy_episodes(
    m: Any,
    rule: DQNRule,
    net: Network,
    weights: Array,
    stream: Bits,
    scratch: DQNScratch,
    given: Array,
) -> tuple[Scalar, Scalar, bool]:
    """Mean steps and discounted return of `tests` greedy episodes, and whether all were perfect.

    As ``loops.greedy_episodes``; the network sees all tests under way at once.
    """
    tests, actions, values = rule.tests, net.widths[-1], scratch.space.layers[-1]
    physics, slots = scratch.physics, scratch.slots
    start_tests(m, tests, stream, scratch, given)
    active, total_steps, ended_early, discount = tests, 0, False, 1.0
    for step in range(rule.max_steps):
        total_steps += active
        for i in range(active):
            j = slots[i]
            p = (physics[j, 0], physics[j, 1], physics[j, 2], physics[j, 3])
            show(net, scratch.space, i, p, scratch.states[j])
        forward(net, weights, scratch.space, active)
        left = 0
        for i in range(active):
            j = slots[i]
            action = row_argmax(values[i * actions : (i + 1) * actions])
            if step_test(m, scratch, j, action, discount, step, given):
                ended_early |= step + 1 < rule.max_steps
            else:
                slots[left] = j
                left += 1
        active = left
        if active == 0:
            break
        discount *= rule.gamma
    return total_steps / tests, mean_return(scratch, tests), not ended_early


@functools.cache
def dqn_loops_of(
    kind: type[ScalarDomain], rules: tuple[type[ScalarRule], ...]
) -> tuple[Callable[..., None], Callable[..., None]]:
    """`start_lanes` and `advance_lanes` compiled for a class of domains and rules of strategies."""
    products.compile_products()
    start, advance = compiled_for(kind, rules, (start_lanes, advance_lanes), _SOURCES)
    return start, advance
