"""Tabular expected SARSA as compiled loops: one run at a time, tests included."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bmc_torchrl.envs.lanes import Numbers, ScalarDomain
from bmc_torchrl.lockstep.numba import domains, formulas, rules
from bmc_torchrl.lockstep.numba.domains import domain_start, domain_step
from bmc_torchrl.lockstep.numba.formulas import (
    GOLDEN,
    MIX2,
    NO_BITS,
    Array,
    Bits,
    Scalar,
    at,
    compiled,
    epsilon_greedy,
    fill_normal,
    inlined,
    learning_rate,
    mixed,
    move_value,
    next_bits,
    row_argmax,
    row_mean,
    uniform,
    uniform_pair,
)
from bmc_torchrl.lockstep.numba.rules import (
    begin_episode,
    current_epsilon,
    learn_transition,
    look_at_values,
)
from bmc_torchrl.strategies import ScalarRule
from bmc_torchrl.strategies.compiled import cached_on_disk, source_checksum

__all__ = [
    "CURVES",
    "SOURCES",
    "Lanes",
    "Rule",
    "Scratch",
    "compiled_for",
    "greedy_episodes",
    "is_unseeded",
    "loops_of",
    "mean_return",
    "record_episode",
    "seed_bits",
    "start_draws",
    "start_episode",
    "start_tests",
    "step_test",
]

SOURCES = (formulas.__file__, domains.__file__, rules.__file__, __file__)
"""The files of what is compiled here."""

CURVES = ("steps", "returns", "epsilons", "train_returns", "losses", "train_steps")
"""What is known of each episode, by the first index of :attr:`Lanes.curves`."""
_STEPS, _RETURNS, _EPSILONS, _TRAIN_RETURNS, _LOSSES, _TRAIN_STEPS = range(len(CURVES))


class Rule(NamedTuple):
    """How all lanes begin, learn and are tested.

    A lane's numbers depend on `seed` and on `first_run` plus its index only. Its table is left as
    it is (`table` 0) or `scale` times standard normal (1) or uniform on [0, 1) (2). `noisy` says
    whether a step reads its uniform draw.
    """

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
    noisy: bool
    seed: int
    first_run: int
    table: int
    scale: float


class Lanes(NamedTuple):
    """Everything that the runs remember, ``[runs, ...]``; written in place.

    `sums` are those of ε, reward and squared TD error since an episode began, ``[runs, 3]``.
    `curves` is ``[len(CURVES), runs, episodes]``. From `rule` to `history_row` see
    :class:`~bmc_torchrl.lockstep.numba.arguments.StrategyArrays`.
    """

    table: Array
    greedy: Array
    row_sum: Array
    physics: Array
    state: Array
    action: Array
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


class Scratch(NamedTuple):
    """What the tests of one lane remember, ``[tests]`` (physics ``[tests, 4]``); for any lane."""

    physics: Array
    states: Array
    slots: Array
    streams: Array
    returns: Array


def advance_lanes(
    m: Any,
    rules: Any,
    rule: Rule,
    lanes: Lanes,
    first: int,
    last: int,
    steps: int,
    given: Array,
    scratch: Scratch,
) -> None:
    """Up to `steps` training steps of each of the lanes `first` to `last` − 1, tests included.

    A lane that has no random numbers yet is started.

    Args:
        m: the domain.
        rules: those of the strategies.
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
        if is_unseeded(at(lanes.bits, lane)):
            start_lane(m, rules, rule, lanes, lane, given)
        advance_lane(m, rules, rule, lanes, lane, steps, given, scratch)


@compiled
def start_lane(m: Any, rules: Any, rule: Rule, lanes: Lanes, lane: int, given: Array) -> None:
    """Seed a lane, draw its table and start its first episode."""
    bits, episode = at(lanes.bits, lane), lanes.episode[lane]
    seed_bits(bits, rule.seed, rule.first_run + lane)
    for state in range(lanes.table.shape[1]):
        row = lanes.table[lane, state]
        if rule.table == 1:
            fill_normal(row, bits, rule.scale)
        elif rule.table == 2:
            for j in range(row.size):
                row[j] = rule.scale * uniform(next_bits(bits))
        lanes.greedy[lane, state] = row_argmax(row, row.size)
        lanes.row_sum[lane, state] = 0.0
        for value in row:
            lanes.row_sum[lane, state] += value
    draws = start_draws(bits, given, 0, lane)
    physics, memory = at(lanes.physics, lane), lanes.memory[lane]
    lanes.state[lane] = start_episode(
        m, rules, lanes.rule[lane], lanes.parameters[lane], memory, physics, draws, episode
    )


@compiled
def is_unseeded(bits: Array) -> Any:
    """Whether a generator, whose state is never all 0, has not been seeded."""
    return (bits[0] | bits[1] | bits[2] | bits[3]) == NO_BITS


@compiled
def seed_bits(bits: Array, seed: int, run: int) -> None:
    """The generator of a run, by the seed of all and the run's index."""
    start = mixed(mixed(np.uint64(seed) + GOLDEN) ^ (np.uint64(run) * MIX2))
    for j in range(4):
        bits[j] = mixed(start + np.uint64(j + 1) * GOLDEN)


@compiled
def advance_lane(
    m: Any,
    rules: Any,
    rule: Rule,
    lanes: Lanes,
    lane: int,
    steps: int,
    given: Array,
    scratch: Scratch,
) -> None:
    """Up to `steps` training steps of one lane, in the order of docs/protocol.md §2."""
    table, greedy, row_sum = lanes.table[lane], lanes.greedy[lane], lanes.row_sum[lane]
    physics, bits, sums = at(lanes.physics, lane), at(lanes.bits, lane), at(lanes.sums, lane)
    which_rule, parameters = lanes.rule[lane], lanes.parameters[lane]
    memory, local = lanes.memory[lane], lanes.local[lanes.local_row[lane]]
    nothing = given[:0, :0, 0]
    actions, gamma, drawn = table.shape[1], np.float32(rule.gamma), given.shape[0] == 0
    episode, count = lanes.episode[lane], lanes.step_count[lane]
    state, action = lanes.state[lane], lanes.action[lane]
    p = (physics[0], physics[1], physics[2], physics[3])
    rate = learning_rate(rule.rate_initial, rule.rate_decay, rule.rate_floor, episode)
    for step in range(steps):
        if episode >= rule.episodes:
            break
        if count == 0 or not rule.before:
            if drawn:
                coin, which = uniform_pair(next_bits(bits))
            else:
                coin, which = np.float32(given[step, lane, 0]), np.float32(given[step, lane, 1])
            here = np.float32(current_epsilon(rules, which_rule, memory, local, state))
            action = epsilon_greedy(greedy[state], here, coin, which, actions)
        draw = 0.0
        if rule.noisy:
            draw = uniform(next_bits(bits)) if drawn else given[step, lane, 2]
        p, after, reward, terminated = domain_step(m, p, state, action, draw)
        count += 1
        there = np.float32(current_epsilon(rules, which_rule, memory, local, after))
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
        error = np.float64(target - table[state, action])
        look_at_values(
            rules,
            which_rule,
            memory,
            np.float64(table[state, action]),
            np.float64(table[state, greedy[state]]),
            action == greedy[state],
        )
        change = move_value(table, greedy, row_sum, state, action, target, rate)
        sums[0] += there
        sums[1] += reward
        sums[2] += error * error
        learn_transition(
            rules,
            which_rule,
            parameters,
            memory,
            local,
            state,
            np.float64(greedy_return),
            np.float64(uniform_return),
            np.float64(change),
        )
        state, action = after, following
        if terminated or count >= rule.max_steps:
            episode = finish_episode(m, rule, lanes, lane, count, scratch, nothing)
            count = 0
            rate = learning_rate(rule.rate_initial, rule.rate_decay, rule.rate_floor, episode)
            draws = start_draws(bits, given, step, lane)
            state = start_episode(m, rules, which_rule, parameters, memory, physics, draws, episode)
            p = (physics[0], physics[1], physics[2], physics[3])
    physics[0], physics[1], physics[2], physics[3] = p
    lanes.step_count[lane], lanes.state[lane], lanes.action[lane] = count, state, action


@compiled
def start_episode(
    m: Any,
    rules: Any,
    which_rule: int,
    parameters: Array,
    memory: Array,
    physics: Array,
    draws: Numbers,
    episode: Scalar,
) -> Scalar:
    """Start a lane's episode; its first state."""
    begin_episode(rules, which_rule, parameters, memory, episode)
    return domain_start(m, physics, draws, episode)


@compiled
def finish_episode(
    m: Any, rule: Rule, lanes: Lanes, lane: int, steps: int, scratch: Scratch, nothing: Array
) -> Any:
    """Test a lane and record its episode of `steps` steps; the number of episodes now done."""
    stream = next_bits(at(lanes.bits, lane))
    found = np.nan, np.nan, False
    if rule.tests > 0:
        policy, episode = lanes.greedy[lane], lanes.episode[lane]
        found = greedy_episodes(m, rule, policy, stream, scratch, nothing, episode)
    return record_episode(rule, lanes, lane, steps, found)


@inlined
def record_episode(rule: Any, lanes: Any, lane: int, steps: int, found: Any) -> Any:
    """Record an episode of `steps` steps and what its tests `found`; the episodes now done."""
    k, curves, sums = lanes.episode[lane], lanes.curves, at(lanes.sums, lane)
    history, row = lanes.history, lanes.history_row[lane]
    tested_steps, tested_return, perfect = found
    lanes.perfect[lane] = lanes.perfect[lane] + 1 if perfect else 0
    done = k + 1
    if rule.enough_perfect > 0 and lanes.perfect[lane] >= rule.enough_perfect:
        done = rule.episodes
    for j in range(k, done):
        curves[_STEPS, lane, j], curves[_RETURNS, lane, j] = tested_steps, tested_return
        curves[_EPSILONS, lane, j], curves[_TRAIN_RETURNS, lane, j] = sums[0] / steps, sums[1]
        curves[_LOSSES, lane, j], curves[_TRAIN_STEPS, lane, j] = sums[2] / steps, steps
        if row >= 0:
            for column in range(history.shape[2]):
                history[row, j, column] = lanes.memory[lane, column]
    sums[0] = sums[1] = sums[2] = 0.0
    lanes.episode[lane] = done
    return done


@compiled
def greedy_episodes(
    m: Any,
    rule: Rule,
    policy: Array,
    stream: Bits,
    scratch: Scratch,
    given: Array,
    episode: Scalar,
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
        episode: the training episode that they follow.
    """
    tests = rule.tests
    start_tests(m, tests, stream, scratch, given, episode)
    active, total_steps, ended_early, discount = tests, 0, False, 1.0
    for step in range(rule.max_steps):
        total_steps += active
        i = 0
        while i < active:
            j = scratch.slots[i]
            action = np.int64(policy[scratch.states[j]])
            if step_test(m, scratch, j, action, discount, rule.noisy, step, given):
                active -= 1
                scratch.slots[i] = scratch.slots[active]
                ended_early |= step + 1 < rule.max_steps
            else:
                i += 1
        if active == 0:
            break
        discount *= rule.gamma
    return total_steps / tests, mean_return(scratch.returns, tests), not ended_early


@inlined
def start_tests(
    m: Any, tests: int, stream: Bits, scratch: Scratch, given: Array, episode: Scalar
) -> None:
    """Begin `tests` episodes; see :func:`greedy_episodes`."""
    streams = scratch.streams
    for j in range(tests):
        scratch.slots[j], scratch.returns[j] = j, 0.0
        streams[j] = mixed(stream + np.uint64(j + 1) * GOLDEN)
        if given.shape[0] == 0:
            u0, u1 = uniform_pair(mixed(streams[j] + GOLDEN))
            u2, u3 = uniform_pair(mixed(streams[j] + GOLDEN + GOLDEN))
            u = (np.float64(u0), np.float64(u1), np.float64(u2), np.float64(u3))
        else:
            u = (given[j, 0], given[j, 1], given[j, 2], given[j, 3])
        streams[j] += GOLDEN + GOLDEN
        scratch.states[j] = domain_start(m, at(scratch.physics, j), u, episode)


@inlined
def step_test(
    m: Any,
    scratch: Scratch,
    j: int,
    action: Scalar,
    discount: float,
    noisy: bool,
    step: int,
    given: Array,
) -> Any:
    """One step of test `j`; whether it ended."""
    physics, states, streams = scratch.physics, scratch.states, scratch.streams
    draw = 0.0
    if noisy:
        streams[j] += GOLDEN
        draw = uniform(mixed(streams[j])) if given.shape[0] == 0 else given[j, 4 + step]
    p = (physics[j, 0], physics[j, 1], physics[j, 2], physics[j, 3])
    p, states[j], reward, terminated = domain_step(m, p, states[j], action, draw)
    physics[j, 0], physics[j, 1], physics[j, 2], physics[j, 3] = p
    scratch.returns[j] += discount * reward
    return terminated


@inlined
def mean_return(returns: Array, tests: int) -> Scalar:
    """Of the tests, in their order."""
    score = 0.0
    for j in range(tests):
        score += returns[j]
    return score / tests


@compiled
def start_draws(bits: Array, given: Array, step: int, lane: int) -> Numbers:
    """Four uniforms for the start of an episode."""
    if given.shape[0] > 0:
        return (
            given[step, lane, 3],
            given[step, lane, 4],
            given[step, lane, 5],
            given[step, lane, 6],
        )
    u0, u1 = uniform_pair(next_bits(bits))
    u2, u3 = uniform_pair(next_bits(bits))
    return np.float64(u0), np.float64(u1), np.float64(u2), np.float64(u3)


@functools.cache
def loops_of(kind: type[ScalarDomain], rules: tuple[type[ScalarRule], ...]) -> Callable[..., None]:
    """`advance_lanes` compiled for a class of domains and rules of strategies."""
    return compiled_for(kind, rules, advance_lanes, SOURCES)


def compiled_for(
    kind: type[ScalarDomain],
    rules: tuple[type[ScalarRule], ...],
    loop: Callable[..., None],
    sources: Sequence[str],
) -> Callable[..., None]:
    """A loop compiled for a class of domains and rules of strategies.

    It is cached on disk, by the classes' names and a checksum of all that is compiled.

    Args:
        kind: class of the domain.
        rules: classes of the strategies' rules.
        loop: a plain function.
        sources: the files that it and the compiled functions that it calls are in.
    """
    functions: list[Any] = [kind.start, kind.step, kind.cell]
    checksum = zlib.crc32(b"".join(Path(source).read_bytes() for source in sources))
    for rule in rules:
        functions += [rule.begin, rule.epsilon, rule.look, rule.learn]
        checksum = zlib.crc32(f"{rule.__module__}.{rule.__qualname__}".encode(), checksum)
    checksum ^= source_checksum(functions)
    name = f"{kind.__module__}.{kind.__qualname__}"
    compiled_loop: Callable[..., None] = cached_on_disk(loop, name, checksum)
    return compiled_loop
