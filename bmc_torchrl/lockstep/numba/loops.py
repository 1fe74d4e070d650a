"""Tabular expected SARSA as compiled loops: one run at a time, tests included."""

from __future__ import annotations

import functools
import marshal
import types
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np

from bmc_torchrl.envs.lanes import Numbers, ScalarDomain
from bmc_torchrl.lockstep.numba import domains, formulas
from bmc_torchrl.lockstep.numba.domains import (
    domain_start,
    domain_step,
    is_noisy,
)
from bmc_torchrl.lockstep.numba.formulas import (
    BMC,
    GOLDEN,
    MIX2,
    OPTIONS,
    VDBE,
    Array,
    Bits,
    Scalar,
    bmc_update,
    compiled,
    epsilon_greedy,
    fill_normal,
    learning_rate,
    mixed,
    move_value,
    next_bits,
    row_argmax,
    row_mean,
    scheduled_epsilon,
    uniform,
    uniform_pair,
    vdbe_update,
)

__all__ = ["Lanes", "Rule", "Scratch", "greedy_episodes", "loops_of"]

_SOURCES = (formulas.__file__, domains.__file__, __file__)
_CHECKSUM = zlib.crc32(b"".join(Path(source).read_bytes() for source in _SOURCES))


class Rule(NamedTuple):
    """How all lanes learn and are tested."""

    episodes: int
    tests: int
    max_steps: int
    gamma: float
    rate_initial: float
    rate_decay: float
    rate_floor: float
    mask_terminated: bool
    before: bool
    enough_perfect: int


class Lanes(NamedTuple):
    """Everything that the runs remember, ``[runs, ...]``; written in place."""

    table: Array
    greedy: Array
    row_sum: Array
    physics: Array
    state: Array
    action: Array
    step_count: Array
    episode: Array
    epsilon_sum: Array
    perfect: Array
    bits: Array
    family: Array
    parameters: Array
    posterior: Array
    epsilons: Array
    epsilons_row: Array
    steps: Array
    returns: Array
    logged: Array


class Scratch(NamedTuple):
    """What the tests of one lane remember, ``[tests]`` (physics ``[tests, 4]``); for any lane."""

    physics: Array
    states: Array
    slots: Array
    streams: Array
    returns: Array


def advance_lanes(
    m: Any,
    rule: Rule,
    lanes: Lanes,
    first: int,
    last: int,
    steps: int,
    given: Array,
    scratch: Scratch,
) -> None:
    """Up to `steps` training steps of each of the lanes `first` to `last` − 1, tests included.

    Args:
        m: the domain.
        rule: how to learn.
        lanes: what is changed.
        first: first lane.
        last: the lane after the last one.
        steps: how many steps.
        given: uniforms ``[steps, runs, 9]`` to use instead of each lane's own: two for the action,
            one for the step, four for the reset, two for the next action; or empty.
        scratch: overwritten.
    """
    for lane in range(first, last):
        advance_lane(m, rule, lanes, lane, steps, given, scratch)


def start_lanes(
    m: Any,
    lanes: Lanes,
    first: int,
    last: int,
    offset: int,
    seed: int,
    kind: int,
    scale: float,
    nothing: Array,
) -> None:
    """Seed lanes `first` to `last` − 1, draw their tables and start their first episodes.

    A lane's numbers depend on `seed` and on `offset` plus its index only. Tables are left as they
    are (`kind` 0) or `scale` times standard normal (1) or uniform on [0, 1) (2).
    """
    for lane in range(first, last):
        start = mixed(mixed(np.uint64(seed) + GOLDEN) ^ (np.uint64(offset + lane) * MIX2))
        for j in range(4):
            lanes.bits[lane, j] = mixed(start + np.uint64(j + 1) * GOLDEN)
        bits = lanes.bits[lane]
        for state in range(lanes.table.shape[1]):
            row = lanes.table[lane, state]
            if kind == 1:
                fill_normal(row, bits, scale)
            elif kind == 2:
                for j in range(row.size):
                    row[j] = scale * uniform(next_bits(bits))
            lanes.greedy[lane, state] = row_argmax(row)
            lanes.row_sum[lane, state] = 0.0
            for value in row:
                lanes.row_sum[lane, state] += value
        draws = start_draws(bits, nothing, 0, lane)
        lanes.state[lane] = domain_start(m, lanes.physics[lane], draws)


@compiled
def advance_lane(
    m: Any, rule: Rule, lanes: Lanes, lane: int, steps: int, given: Array, scratch: Scratch
) -> None:
    """Up to `steps` training steps of one lane, in the order of docs/protocol.md §2."""
    table, greedy, row_sum = lanes.table[lane], lanes.greedy[lane], lanes.row_sum[lane]
    physics, bits, posterior = lanes.physics[lane], lanes.bits[lane], lanes.posterior[lane]
    family, parameters = lanes.family[lane], lanes.parameters[lane]
    local = lanes.epsilons[lanes.epsilons_row[lane]]
    nothing = given[:0, :0, 0]
    actions, gamma, drawn = table.shape[1], np.float32(rule.gamma), given.shape[0] == 0
    episode, count = lanes.episode[lane], lanes.step_count[lane]
    state, action = lanes.state[lane], lanes.action[lane]
    p = (physics[0], physics[1], physics[2], physics[3])
    rate = learning_rate(rule.rate_initial, rule.rate_decay, rule.rate_floor, episode)
    epsilon = scheduled_epsilon(family, parameters, episode)
    if family == BMC:
        epsilon = posterior[0] / (posterior[0] + posterior[1])
    for step in range(steps):
        if episode >= rule.episodes:
            break
        if count == 0 or not rule.before:
            if drawn:
                coin, which = uniform_pair(next_bits(bits))
            else:
                coin, which = np.float32(given[step, lane, 0]), np.float32(given[step, lane, 1])
            here = np.float32(local[state] if family == VDBE else epsilon)
            action = epsilon_greedy(greedy[state], here, coin, which, actions)
        draw = 0.0
        if is_noisy(m):
            draw = uniform(next_bits(bits)) if drawn else given[step, lane, 2]
        p, after, reward, terminated = domain_step(m, p, state, action, draw)
        count += 1
        there = np.float32(local[after] if family == VDBE else epsilon)
        following = action
        if rule.before:
            if drawn:
                coin, which = uniform_pair(next_bits(bits))
            else:
                coin, which = np.float32(given[step, lane, 7]), np.float32(given[step, lane, 8])
            following = epsilon_greedy(greedy[after], there, coin, which, actions)
        best = table[after, greedy[after]]
        mean = row_mean(table[after], row_sum[after])
        if terminated and rule.mask_terminated:
            best = mean = np.float32(0)
        greedy_return, uniform_return = reward + gamma * best, reward + gamma * mean
        target = greedy_return + there * (uniform_return - greedy_return)
        change = move_value(table, greedy, row_sum, state, action, target, rate)
        lanes.epsilon_sum[lane] += there
        if family == BMC:
            epsilon = bmc_update(
                posterior, np.float64(greedy_return), np.float64(uniform_return), parameters
            )
        elif family == VDBE:
            local[state] = vdbe_update(
                local[state], np.float64(change), parameters[0], parameters[1]
            )
        state, action = after, following
        if terminated or count >= rule.max_steps:
            episode = finish_episode(m, rule, lanes, lane, count, scratch, nothing)
            count = 0
            rate = learning_rate(rule.rate_initial, rule.rate_decay, rule.rate_floor, episode)
            if family < VDBE:
                epsilon = scheduled_epsilon(family, parameters, episode)
            state = domain_start(m, physics, start_draws(bits, given, step, lane))
            p = (physics[0], physics[1], physics[2], physics[3])
    physics[0], physics[1], physics[2], physics[3] = p
    lanes.step_count[lane], lanes.state[lane], lanes.action[lane] = count, state, action


@compiled
def finish_episode(
    m: Any, rule: Rule, lanes: Lanes, lane: int, steps: int, scratch: Scratch, nothing: Array
) -> Any:
    """Record an episode of `steps` steps with its tests; the number of episodes now done."""
    k = lanes.episode[lane]
    stream = next_bits(lanes.bits[lane])
    lanes.logged[lane, k] = lanes.epsilon_sum[lane] / steps
    if rule.tests > 0:
        length, score, perfect = greedy_episodes(
            m, rule, lanes.greedy[lane], stream, scratch, nothing
        )
        lanes.steps[lane, k], lanes.returns[lane, k] = length, score
        lanes.perfect[lane] = lanes.perfect[lane] + 1 if perfect else 0
    lanes.epsilon_sum[lane] = 0.0
    k += 1
    if rule.enough_perfect > 0 and lanes.perfect[lane] >= rule.enough_perfect:
        lanes.steps[lane, k:] = lanes.steps[lane, k - 1]
        lanes.returns[lane, k:] = lanes.returns[lane, k - 1]
        lanes.logged[lane, k:] = lanes.logged[lane, k - 1]
        k = rule.episodes
    lanes.episode[lane] = k
    return k


@compiled
def greedy_episodes(
    m: Any, rule: Rule, policy: Array, stream: Bits, scratch: Scratch, given: Array
) -> tuple[Scalar, Scalar, bool]:
    """Mean steps and discounted return of `tests` greedy episodes, and whether all were perfect.

    They advance side by side, so that the processor works on several at a time.

    Args:
        m: the domain.
        rule: has the number of tests and steps.
        policy: greedy action by state, ``[states]``.
        stream: where their random numbers start.
        scratch: overwritten.
        given: uniforms ``[tests, 4 + max_steps]`` to use instead (four for the start), or empty.
    """
    tests, drawn = rule.tests, given.shape[0] == 0
    physics, states, slots, streams, returns = scratch
    for j in range(tests):
        slots[j], returns[j] = j, 0.0
        streams[j] = mixed(stream + np.uint64(j + 1) * GOLDEN)
        if drawn:
            u0, u1 = uniform_pair(mixed(streams[j] + GOLDEN))
            u2, u3 = uniform_pair(mixed(streams[j] + GOLDEN + GOLDEN))
            u = (np.float64(u0), np.float64(u1), np.float64(u2), np.float64(u3))
        else:
            u = (given[j, 0], given[j, 1], given[j, 2], given[j, 3])
        streams[j] += GOLDEN + GOLDEN
        states[j] = domain_start(m, physics[j], u)
    active, total_steps, ended_early, discount = tests, 0, False, 1.0
    for step in range(rule.max_steps):
        total_steps += active
        i = 0
        while i < active:
            j = slots[i]
            draw = 0.0
            if is_noisy(m):
                streams[j] += GOLDEN
                draw = uniform(mixed(streams[j])) if drawn else given[j, 4 + step]
            p = (physics[j, 0], physics[j, 1], physics[j, 2], physics[j, 3])
            p, states[j], reward, terminated = domain_step(
                m, p, states[j], np.int64(policy[states[j]]), draw
            )
            physics[j, 0], physics[j, 1], physics[j, 2], physics[j, 3] = p
            returns[j] += discount * reward
            if terminated:
                active -= 1
                slots[i] = slots[active]
                ended_early |= step + 1 < rule.max_steps
            else:
                i += 1
        if active == 0:
            break
        discount *= rule.gamma
    score = 0.0
    for j in range(tests):
        score += returns[j]
    return total_steps / tests, score / tests, not ended_early


@compiled
def start_draws(bits: Array, given: Array, step: int, lane: int) -> Numbers:
    """Four uniforms for the start of an episode."""
    if given.shape[0] > 0:
        row = given[step, lane]
        return row[3], row[4], row[5], row[6]
    u0, u1 = uniform_pair(next_bits(bits))
    u2, u3 = uniform_pair(next_bits(bits))
    return np.float64(u0), np.float64(u1), np.float64(u2), np.float64(u3)


@functools.cache
def loops_of(kind: type[ScalarDomain]) -> tuple[Callable[..., None], Callable[..., None]]:
    """`start_lanes` and `advance_lanes` compiled for the domains of a class, and cached on disk.

    numba's cache notices a change of the file that a cached function is in, and of no other; and
    it cannot be read where a class in it is gone. So what is compiled for each class has a name of
    its own, with a checksum of all that was compiled.
    """
    checksum = _CHECKSUM
    for function in (kind.start, kind.step, kind.cell, kind.noisy):
        code = function.__code__
        file = Path(code.co_filename)
        source = file.read_bytes() if file.is_file() else marshal.dumps(code)
        checksum = zlib.crc32(source, checksum)
    made = []
    for loop in (start_lanes, advance_lanes):
        named = types.FunctionType(loop.__code__, loop.__globals__)
        named.__qualname__ = f"{loop.__name__}.{kind.__module__}.{kind.__qualname__}.{checksum:08x}"
        made.append(numba.njit(cache=True, **OPTIONS)(named))
    return made[0], made[1]
