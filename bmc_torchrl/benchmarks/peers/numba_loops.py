"""Bare numba loops: tabular expected SARSA with ε-BMC, one domain each, no other choice.

Each run is a loop over scalars; the greedy action (and, for a hundred actions, the sum) of a row
is kept beside the table. `tests` greedy episodes follow every training episode.
"""

from __future__ import annotations

import math

import numba
import numpy as np

GAMMA, LIMIT = 0.95, 200
CART_STATES, SUPPLY_STATES = 162, 51 * 51

compiled = numba.njit(fastmath=True, error_model="numpy", nogil=True)
POISSON = np.cumsum([math.exp(-2.5) * 2.5**k / math.factorial(k) for k in range(40)])
POISSON[-1] = 2.0


@compiled
def draw(bits):
    bits[0] += np.uint64(0x9E3779B97F4A7C15)
    z = bits[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.float64((z ^ (z >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53


@compiled
def bmc(alpha, beta, count, mean, m2, greedy, uniform):
    total = alpha + beta
    epsilon = alpha / total
    observed = greedy + epsilon * (uniform - greedy)
    count += 1
    deviation = observed - mean
    mean += deviation / count
    m2 += deviation * (observed - mean)
    b = 500 + count / 2 * (m2 / max(count - 1, 1.0) + mean * mean / (1 + count))
    squared = (greedy - uniform) ** 2
    tau = (beta - alpha) / total
    inner = math.log1p(tau * squared / (2 * b + epsilon * epsilon * squared))
    evidence = math.exp(-(500.5 + count / 2) * inner)
    scale = alpha * evidence + beta
    gain, p = evidence / scale, beta / scale
    c = beta + p + beta * gain
    kappa = c / (c + gain * p * (total + 2))
    return alpha * (1 + gain) * kappa, (beta + p) * kappa, count, mean, m2


@compiled
def cart_step(x, v, angle, spin, action):
    force = 10.0 if action == 1 else -10.0
    sine, cosine = math.sin(angle), math.cos(angle)
    push = (force + 0.05 * spin * spin * sine) / 1.1
    bend = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine * cosine / 1.1))
    pull = push - 0.05 * bend * cosine / 1.1
    return x + 0.02 * v, v + 0.02 * pull, angle + 0.02 * spin, spin + 0.02 * bend


@compiled
def digit(x, bound, last):
    return int(min(max(np.rint(last * (x + bound) / (2 * bound)), 0.0), last))


@compiled
def cart_cell(x, v, angle, spin):
    cell = digit(x, 4.8, 2.0) * 3 + digit(v, 0.5, 2.0)
    cell = cell * 6 + digit(angle, 0.41887902, 5.0)
    return cell * 3 + digit(spin, 0.87266463, 2.0)


@compiled
def cart_start(bits):
    return (
        0.1 * draw(bits) - 0.05,
        0.1 * draw(bits) - 0.05,
        0.1 * draw(bits) - 0.05,
        0.1 * draw(bits) - 0.05,
    )


@compiled
def cart_tests(best, tests, bits):
    total = 0
    for _ in range(tests):
        x, v, angle, spin = cart_start(bits)
        for _ in range(LIMIT):
            x, v, angle, spin = cart_step(x, v, angle, spin, best[cart_cell(x, v, angle, spin)])
            total += 1
            if abs(x) > 2.4 or abs(angle) > 0.20943951:
                break
    return total


@compiled
def cart_pole(tables, best, steps, tests, seed):
    """`steps` steps of each run; returns the number of test steps and of episodes."""
    tested, episodes = 0, 0
    bits = np.zeros(1, np.uint64)
    for run in range(tables.shape[0]):
        bits[0] = np.uint64(seed * 1_000_003 + run) * np.uint64(0x9E3779B97F4A7C15)
        table, top = tables[run], best[run]
        alpha, beta, count, mean, m2 = 10.0, 10.01, 0.0, 0.0, 0.0
        x, v, angle, spin = cart_start(bits)
        state, length, rate = cart_cell(x, v, angle, spin), 0, 0.5
        epsilon = alpha / (alpha + beta)
        action = int(draw(bits) * 2) if draw(bits) < epsilon else int(top[state])
        for _ in range(steps):
            x, v, angle, spin = cart_step(x, v, angle, spin, action)
            after = cart_cell(x, v, angle, spin)
            length += 1
            fell = abs(x) > 2.4 or abs(angle) > 0.20943951
            reward = 0.0 if fell else 1.0
            following = int(draw(bits) * 2) if draw(bits) < epsilon else int(top[after])
            left, right = table[after, 0], table[after, 1]
            greedy = reward + GAMMA * max(left, right)
            uniform = reward + GAMMA * 0.5 * (left + right)
            goal = greedy + epsilon * (uniform - greedy)
            table[state, action] += rate * (goal - table[state, action])
            top[state] = 1 if table[state, 1] > table[state, 0] else 0
            alpha, beta, count, mean, m2 = bmc(alpha, beta, count, mean, m2, greedy, uniform)
            epsilon = alpha / (alpha + beta)
            state, action = after, following
            if fell or length >= LIMIT:
                episodes += 1
                tested += cart_tests(top, tests, bits)
                rate = max(rate * 0.99, 0.01)
                x, v, angle, spin = cart_start(bits)
                state, length = cart_cell(x, v, angle, spin), 0
                action = int(draw(bits) * 2) if draw(bits) < epsilon else int(top[state])
    return tested, episodes


@compiled
def supply_step(state, action, u, cdf):
    factory, shelf = state // 51, state % 51
    demand = 0
    while cdf[demand] <= u:
        demand += 1
    sold = min(demand, shelf)
    shipped = min(action // 10, factory, 50 - shelf + sold)
    produced = min(action % 10, 50 - factory + shipped)
    reward = 0.5 * sold - 0.1 * produced - 0.02 * (factory + shelf) - 0.1 * ((shipped + 4) // 5)
    return (factory - shipped + produced) * 51 + shelf - sold + shipped, reward


@compiled
def supply_tests(best, tests, bits, cdf):
    score = 0.0
    for _ in range(tests):
        state, discount = 510, 1.0
        for _ in range(LIMIT):
            state, reward = supply_step(state, best[state], draw(bits), cdf)
            score += discount * reward
            discount *= GAMMA
    return score


@compiled
def supply_chain(tables, best, sums, steps, tests, seed, cdf):
    """`steps` steps of each run; returns the number of test steps and the tests' mean return."""
    tested, score = 0, 0.0
    bits = np.zeros(1, np.uint64)
    for run in range(tables.shape[0]):
        bits[0] = np.uint64(seed * 1_000_003 + run) * np.uint64(0x9E3779B97F4A7C15)
        table, top, total = tables[run], best[run], sums[run]
        alpha, beta, count, mean, m2 = 750.0, 750.01, 0.0, 0.0, 0.0
        state, length, epsilon = 510, 0, alpha / (alpha + beta)
        action = int(draw(bits) * 100) if draw(bits) < epsilon else int(top[state])
        for _ in range(steps):
            after, reward = supply_step(state, action, draw(bits), cdf)
            length += 1
            following = int(draw(bits) * 100) if draw(bits) < epsilon else int(top[after])
            greedy = reward + GAMMA * table[after, top[after]]
            uniform = reward + GAMMA * total[after] / 100
            goal = greedy + epsilon * (uniform - greedy)
            row = table[state]
            old = row[action]
            row[action] = old + 0.6 * (goal - old)
            total[state] += row[action] - old
            if action == top[state]:
                if row[action] < old:
                    largest = row[0]
                    for a in range(1, 100):
                        largest = max(largest, row[a])
                    a = 0
                    while row[a] != largest:
                        a += 1
                    top[state] = a
            elif row[action] > row[top[state]]:
                top[state] = action
            alpha, beta, count, mean, m2 = bmc(alpha, beta, count, mean, m2, greedy, uniform)
            epsilon = alpha / (alpha + beta)
            state, action = after, following
            if length >= LIMIT:
                score += supply_tests(top, tests, bits, cdf)
                tested += tests * LIMIT
                state, length = 510, 0
                action = int(draw(bits) * 100) if draw(bits) < epsilon else int(top[state])
    return tested, score * LIMIT / max(tested, 1)
