"""Tabular expected SARSA as scalar loops compiled by numba: one lane is one run, start to end.

Every function here restates a tensor function of the package (named in its docstring) for a single
run, and ``tests/test_kernels.py`` holds the two equal. Tables, rewards, returns and the physics are
float32 and ε and the posterior float64, as there. Two things differ in the last bits: sine and
cosine (each library has its own), and the mean over more than `SHORT_ROW` actions, which is kept as
a float64 row sum because reading the row is what a step would otherwise spend its time on.

All compiled code is in this file: numba's cache on disk notices a change of the file that a cached
function is in, and of no other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numba
import numpy as np
from numba.extending import overload

__all__ = [
    "BMC",
    "CONSTANT",
    "GEOMETRIC",
    "POWER",
    "VDBE",
    "CartPoleKernel",
    "GridKernel",
    "Lanes",
    "Rule",
    "SupplyKernel",
    "advance_lanes",
    "start_lanes",
]

CONSTANT, GEOMETRIC, POWER, VDBE, BMC = range(5)
SHORT_ROW = 8
GUIDE_SIZE = 1024

F = TypeVar("F", bound=Callable[..., Any])
Array = np.ndarray[Any, Any]
Bits = Any
Scalar = Any
Physics = tuple[Any, Any, Any, Any]

compiled = cast(
    Callable[[F], F], numba.njit(cache=True, nogil=True, error_model="numpy", _nrt=False)
)
# A maximum may be taken in any order; nothing else here may.
compiled_unordered = cast(
    Callable[[F], F],
    numba.njit(cache=True, nogil=True, error_model="numpy", _nrt=False, fastmath={"nnan", "nsz"}),
)
implements = cast(
    Callable[[Any], Callable[[F], F]],
    lambda stub: overload(stub, jit_options={"error_model": "numpy", "_nrt": False}),
)


class GridKernel(NamedTuple):
    """The grid-world as tables ``[states, 4]``: those of ``subgoal_grid_table``."""

    next_state: Array
    reward: Array
    terminated: Array
    start: int


class CartPoleKernel(NamedTuple):
    """Constants of ``CartPole`` in the precision of the physics."""

    gravity: Scalar
    mass: Scalar
    pole_mass: Scalar
    half_length: Scalar
    moment: Scalar
    four_thirds: Scalar
    force: Scalar
    tau: Scalar
    position_limit: Scalar
    angle_limit: Scalar
    initial_bound: Scalar
    step_reward: Scalar
    fall_change: Scalar
    bounds: Physics
    widths: Physics
    last_bins: Physics
    bins: tuple[int, int, int, int]


class SupplyKernel(NamedTuple):
    """A ``SupplyNetwork`` with one warehouse; stocks by state, orders by action."""

    factory: Array
    shelf: Array
    ship: Array
    produce: Array
    truck_cost: Array
    factory_capacity: int
    shelf_capacity: int
    factory_cost: Scalar
    shelf_cost: Scalar
    price: Scalar
    produce_cost: Scalar
    cdf: Array
    guide: Array
    start: int


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
    """What the tests of one lane at a time need to remember, ``[tests]`` (physics: ``[tests, 4]``)."""

    physics: Array
    states: Array
    slots: Array
    streams: Array
    returns: Array


_GOLDEN, _MIX1, _MIX2 = (
    np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_U11, _U16, _U17, _U23, _U27, _U30, _U31, _U40, _U45, _U64 = (
    np.uint64(x) for x in (11, 16, 17, 23, 27, 30, 31, 40, 45, 64)
)
_MASK24 = np.uint64(0xFFFFFF)


@compiled
def mixed(z: Bits) -> Bits:
    """The output function of splitmix64 (Steele, Lea & Flood 2014)."""
    z = (z ^ (z >> _U30)) * _MIX1
    z = (z ^ (z >> _U27)) * _MIX2
    return z ^ (z >> _U31)


@compiled
def next_bits(s: Array) -> Bits:
    """One step of xoshiro256++ (Blackman & Vigna 2019) on its state ``[4]`` uint64."""
    s0, s1, s2, s3 = s[0], s[1], s[2], s[3]
    total = s0 + s3
    result = ((total << _U23) | (total >> (_U64 - _U23))) + s0
    shifted = s1 << _U17
    s2 ^= s0
    s3 ^= s1
    s1 ^= s2
    s0 ^= s3
    s2 ^= shifted
    s[0], s[1], s[2], s[3] = s0, s1, s2, (s3 << _U45) | (s3 >> (_U64 - _U45))
    return result


@compiled
def uniform(bits: Bits) -> Scalar:
    """A float64 on [0, 1) from 53 of 64 bits."""
    return np.int64(bits >> _U11) * 2.0**-53


@compiled
def uniform_pair(bits: Bits) -> tuple[Scalar, Scalar]:
    """Two float32 on [0, 1), of 24 bits each, like torch's."""
    unit = np.float32(2.0**-24)
    first, second = np.int32(bits >> _U40), np.int32((bits >> _U16) & _MASK24)
    return np.float32(first) * unit, np.float32(second) * unit


@compiled
def poisson_draw(u: Scalar, cdf: Array, guide: Array) -> Any:
    """``poisson_demand``: the number of `cdf` entries not above `u`."""
    k = np.int64(guide[np.int64(u * GUIDE_SIZE)])
    while cdf[k] <= u:
        k += 1
    return k


@compiled
def sine_cosine(x: Scalar) -> tuple[Scalar, Scalar]:
    """Sine and cosine in the precision of `x`."""
    return math.sin(x), math.cos(x)


@compiled
def cart_digit(x: Scalar, bound: Scalar, width: Scalar, last: Scalar) -> Any:
    """The bin of one entry of the physics, as in ``cart_pole_bins``."""
    scaled = np.rint(last * ((x + bound) / width))
    return np.int64(min(max(scaled, last - last), last))


@compiled
def cart_cell(m: CartPoleKernel, p: Physics) -> Any:
    """``cart_pole_bins``."""
    index = cart_digit(p[0], m.bounds[0], m.widths[0], m.last_bins[0])
    index = index * m.bins[1] + cart_digit(p[1], m.bounds[1], m.widths[1], m.last_bins[1])
    index = index * m.bins[2] + cart_digit(p[2], m.bounds[2], m.widths[2], m.last_bins[2])
    return index * m.bins[3] + cart_digit(p[3], m.bounds[3], m.widths[3], m.last_bins[3])


@compiled
def cart_step(m: CartPoleKernel, p: Physics, action: int) -> tuple[Physics, Scalar, bool]:
    """``cart_pole_step``."""
    position, velocity, angle, spin = p
    sine, cosine = sine_cosine(angle)
    force = m.force if action == 1 else -m.force
    push = (force + m.moment * (spin * spin) * sine) / m.mass
    inertia = m.half_length * (m.four_thirds - m.pole_mass * (cosine * cosine) / m.mass)
    spin_rate = (m.gravity * sine - cosine * push) / inertia
    acceleration = push - m.moment * spin_rate * cosine / m.mass
    position = position + m.tau * velocity
    velocity = velocity + m.tau * acceleration
    angle = angle + m.tau * spin
    spin = spin + m.tau * spin_rate
    fell = abs(position) > m.position_limit or abs(angle) > m.angle_limit
    reward = m.step_reward + m.fall_change if fell else m.step_reward
    return (position, velocity, angle, spin), reward, fell


@compiled
def supply_step(m: SupplyKernel, state: int, action: int, demand: int) -> tuple[Any, Scalar]:
    """``supply_chain_step`` of one warehouse, on state indices."""
    factory, shelf = np.int64(m.factory[state]), np.int64(m.shelf[state])
    sold = min(demand, shelf)
    left = shelf - sold
    shipped = min(min(np.int64(m.ship[action]), factory), m.shelf_capacity - left)
    kept = factory - shipped
    produced = min(np.int64(m.produce[action]), m.factory_capacity - kept)
    reward = -m.factory_cost * np.float32(factory) + m.price * np.float32(sold)
    reward = reward - m.shelf_cost * np.float32(shelf) - m.truck_cost[shipped]
    reward = reward - m.produce_cost * np.float32(produced)
    return (kept + produced) * (m.shelf_capacity + 1) + left + shipped, reward


def domain_step(m: Any, p: Physics, state: int, action: int, u: Scalar) -> Any:
    """Physics, state, reward and termination after one step; by the type of `m`."""
    raise NotImplementedError


def domain_start(m: Any, p: Array, u: Physics) -> Any:
    """State of a new episode, its physics written to `p` ``[4]``; by the type of `m`."""
    raise NotImplementedError


def is_noisy(m: Any) -> bool:
    """Whether a step reads its uniform draw; by the type of `m`."""
    raise NotImplementedError


def _kernel(m: Any) -> type:
    return cast(type, m.instance_class)


@implements(domain_step)
def _domain_step(m: Any, p: Any, state: Any, action: Any, u: Any) -> Any:
    def grid(m: Any, p: Any, state: Any, action: Any, u: Any) -> Any:
        reward = m.reward[state, action]
        return p, np.int64(m.next_state[state, action]), reward, m.terminated[state, action]

    def cart(m: Any, p: Any, state: Any, action: Any, u: Any) -> Any:
        after, reward, fell = cart_step(m, p, action)
        return after, cart_cell(m, after), reward, fell

    def supply(m: Any, p: Any, state: Any, action: Any, u: Any) -> Any:
        after, reward = supply_step(m, state, action, poisson_draw(u, m.cdf, m.guide))
        return p, after, reward, False

    return {GridKernel: grid, CartPoleKernel: cart, SupplyKernel: supply}[_kernel(m)]


@implements(domain_start)
def _domain_start(m: Any, p: Any, u: Any) -> Any:
    def fixed(m: Any, p: Any, u: Any) -> Any:
        return m.start

    def cart(m: Any, p: Any, u: Any) -> Any:
        for j in range(4):
            p[j] = (2.0 * u[j] - 1.0) * m.initial_bound
        return cart_cell(m, (p[0], p[1], p[2], p[3]))

    return cart if _kernel(m) is CartPoleKernel else fixed


@implements(is_noisy)
def _is_noisy(m: Any) -> Any:
    def noisy(m: Any) -> Any:
        return True

    def quiet(m: Any) -> Any:
        return False

    return noisy if _kernel(m) is SupplyKernel else quiet


@compiled
def epsilon_greedy(greedy: int, epsilon: Scalar, coin: Scalar, which: Scalar, actions: int) -> Any:
    """``epsilon_greedy_action``, all in float32."""
    return np.int64(which * np.float32(actions)) if coin < epsilon else np.int64(greedy)


@compiled
def learning_rate(rule: Rule, episode: int) -> Scalar:
    """η of an episode, ``max(initial · decay^k, floor)``."""
    return np.float32(max(rule.rate_initial * rule.rate_decay**episode, rule.rate_floor))


@compiled
def scheduled_epsilon(family: int, parameters: Array, episode: int) -> Scalar:
    """``geometric_decay``, ``power_decay`` or the constant, after `episode` finished episodes."""
    k = episode + parameters[4]
    if family == GEOMETRIC:
        return parameters[0] * parameters[1] ** k
    if family == POWER:
        return parameters[0] * max(k + parameters[2], 1.0) ** -parameters[1]
    return parameters[0]


@compiled
def vdbe_update(epsilon: Scalar, change: Scalar, sigma: Scalar, delta: Scalar) -> Scalar:
    """``vdbe_epsilon``; a change that is not finite teaches nothing, as in ``VDBEEpsilon``."""
    if not math.isfinite(change):
        return epsilon
    return delta * math.tanh(abs(change) / (2 * sigma)) + (1 - delta) * epsilon


@compiled
def bmc_update(posterior: Array, greedy: Scalar, uniform: Scalar, prior: Array) -> Scalar:
    """``bmc_step`` with the Student-t likelihood, in place; returns ε.

    Args:
        posterior: α, β and the number, mean and squared deviations of the returns, ``[5]``.
        greedy: the greedy return.
        uniform: the uniform return.
        prior: μ₀, τ₀, a₀ and b₀, ``[4]`` or longer.
    """
    alpha, beta = posterior[0], posterior[1]
    total = alpha + beta
    if not (math.isfinite(greedy) and math.isfinite(uniform)):
        return alpha / total
    observed = greedy + alpha / total * (uniform - greedy)
    count = posterior[2] + 1
    deviation = observed - posterior[3]
    mean = posterior[3] + deviation / count
    m2 = posterior[4] + deviation * (observed - mean)
    shift = prior[1] / (prior[1] + count) * (mean - prior[0]) ** 2
    a = prior[2] + count / 2
    b = prior[3] + count / 2 * (m2 / max(count - 1, 1.0) + shift)
    alpha, beta = moment_match(alpha, beta, log_evidence_ratio(greedy - uniform, alpha, beta, a, b))
    posterior[0], posterior[1], posterior[2], posterior[3], posterior[4] = (
        alpha, beta, count, mean, m2,
    )
    return alpha / (alpha + beta)


@compiled
def log_evidence_ratio(
    gap: Scalar, alpha: Scalar, beta: Scalar, a: Scalar, b: Scalar
) -> Scalar:
    """``student_t_log_evidence_ratio``."""
    total = alpha + beta
    smaller, tau = min(alpha, beta) / total, (beta - alpha) / total
    squared = gap * gap
    ratio = math.log1p(abs(tau) * squared / (2 * b + smaller * smaller * squared))
    return -(a + 0.5) * math.copysign(ratio, tau)


@compiled
def moment_match(alpha: Scalar, beta: Scalar, ratio: Scalar) -> tuple[Scalar, Scalar]:
    """``beta_moment_match``."""
    lead = math.expm1(-abs(ratio))
    # Below e^-1 the sum 1 + expm1 would lose what exp keeps.
    weaker = 1 + lead if lead > -0.6 else math.exp(-abs(ratio))
    uniform = alpha * (weaker if ratio < 0 else 1.0)
    greedy = beta * (1.0 if ratio < 0 else weaker)
    evidence = uniform + greedy
    p, q = uniform / evidence, greedy / evidence
    d = alpha * beta * math.copysign(lead, -ratio) / evidence
    change = d / ((alpha + p) * (beta + q) + p * q * (alpha + beta + 1))
    return alpha - p * (alpha + 1) * change, beta + q * (beta + 1) * change


@compiled_unordered
def row_maximum(row: Array) -> Scalar:
    """The largest of a row."""
    best = row[0]
    for value in row[1:]:
        best = max(best, value)
    return best


@compiled
def row_argmax(row: Array) -> Any:
    """The first index of the largest."""
    best, index = row_maximum(row), 0
    while row[index] != best:
        index += 1
    return index


@compiled
def row_mean(row: Array, row_sum: Scalar) -> Scalar:
    """The mean of a row in float32; `row_sum` is read where the row is long."""
    if row.size > SHORT_ROW:
        return np.float32(row_sum / row.size)
    total = row[0]
    for value in row[1:]:
        total += value
    return total / np.float32(row.size)


@compiled
def move_value(
    table: Array, greedy: Array, row_sum: Array, state: int, action: int, target: Scalar, rate: Any
) -> Scalar:
    """``tabular_update`` of one run, which also keeps each row's greedy action and sum."""
    row = table[state]
    before = row[action]
    after = before + rate * (target - before)
    row[action] = after
    row_sum[state] += np.float64(after) - np.float64(before)
    best = np.int64(greedy[state])
    if action == best:
        if after < before:
            greedy[state] = row_argmax(row)
    elif after > row[best] or (after == row[best] and action < best):
        greedy[state] = action
    return after - before


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
        streams[j] = mixed(stream + np.uint64(j + 1) * _GOLDEN)
        if drawn:
            u0, u1 = uniform_pair(mixed(streams[j] + _GOLDEN))
            u2, u3 = uniform_pair(mixed(streams[j] + _GOLDEN + _GOLDEN))
            u = (np.float64(u0), np.float64(u1), np.float64(u2), np.float64(u3))
        else:
            u = (given[j, 0], given[j, 1], given[j, 2], given[j, 3])
        streams[j] += _GOLDEN + _GOLDEN
        states[j] = domain_start(m, physics[j], u)
    active, total_steps, ended_early, discount = tests, 0, False, 1.0
    for step in range(rule.max_steps):
        total_steps += active
        i = 0
        while i < active:
            j = slots[i]
            draw = 0.0
            if is_noisy(m):
                streams[j] += _GOLDEN
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
def advance_lane(
    m: Any, rule: Rule, lanes: Lanes, lane: int, steps: int, given: Array, scratch: Scratch
) -> None:
    """Up to `steps` training steps of one lane, in the order of ENGINE: see `advance_lanes`."""
    table, greedy, row_sum = lanes.table[lane], lanes.greedy[lane], lanes.row_sum[lane]
    physics, bits, posterior = lanes.physics[lane], lanes.bits[lane], lanes.posterior[lane]
    family, parameters = lanes.family[lane], lanes.parameters[lane]
    local = lanes.epsilons[lanes.epsilons_row[lane]]
    nothing = given[:0, :0, 0]
    actions, gamma, drawn = table.shape[1], np.float32(rule.gamma), given.shape[0] == 0
    episode, count = lanes.episode[lane], lanes.step_count[lane]
    state, action = lanes.state[lane], lanes.action[lane]
    p = (physics[0], physics[1], physics[2], physics[3])
    rate = learning_rate(rule, episode)
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
            rate = learning_rate(rule, episode)
            if family < VDBE:
                epsilon = scheduled_epsilon(family, parameters, episode)
            state = domain_start(m, physics, start_draws(bits, given, step, lane))
            p = (physics[0], physics[1], physics[2], physics[3])
    physics[0], physics[1], physics[2], physics[3] = p
    lanes.step_count[lane], lanes.state[lane], lanes.action[lane] = count, state, action


@compiled
def start_draws(bits: Array, given: Array, step: int, lane: int) -> Physics:
    """Four uniforms for the start of an episode."""
    if given.shape[0] > 0:
        row = given[step, lane]
        return row[3], row[4], row[5], row[6]
    u0, u1 = uniform_pair(next_bits(bits))
    u2, u3 = uniform_pair(next_bits(bits))
    return np.float64(u0), np.float64(u1), np.float64(u2), np.float64(u3)


@compiled
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


@compiled
def start_lanes(
    m: Any, lanes: Lanes, first: int, last: int, seed: int, kind: int, scale: float, nothing: Array
) -> None:
    """Seed lanes `first` to `last` − 1, draw their tables and start their first episodes.

    A lane's numbers depend on `seed` and its index only. Tables are left as they are (`kind` 0) or
    `scale` times standard normal (1) or uniform on [0, 1) (2).
    """
    for lane in range(first, last):
        start = mixed(mixed(np.uint64(seed) + _GOLDEN) ^ (np.uint64(lane) * _MIX2))
        for j in range(4):
            lanes.bits[lane, j] = mixed(start + np.uint64(j + 1) * _GOLDEN)
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
def fill_normal(values: Array, bits: Array, scale: float) -> None:
    """`scale` times standard normal numbers, by Marsaglia's polar method."""
    j = 0
    while j < values.size:
        x, y = 2 * uniform(next_bits(bits)) - 1, 2 * uniform(next_bits(bits)) - 1
        squared = x * x + y * y
        if 0 < squared < 1:
            factor = scale * math.sqrt(-2 * math.log(squared) / squared)
            values[j] = x * factor
            if j + 1 < values.size:
                values[j + 1] = y * factor
            j += 2
