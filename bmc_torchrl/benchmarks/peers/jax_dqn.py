"""The paper's cart-pole DQN in JAX, purejaxrl-style, of our own writing: vmap runs, scan steps.

docs/protocol.md §4: replay of 2000, batch 32 without replacement, 3 epochs of Keras' Adam on fixed
targets, no target network, ε-BMC (here in float32), step limit 200. Training steps only, no tests.
"""

from __future__ import annotations

import functools

import common
import jax
import jax.numpy as jnp
from jax import lax

CAPACITY, BATCH, EPOCHS, GAMMA, RATE, L2, LIMIT = 2000, 32, 3, 0.95, 5e-4, 1e-6, 200
WIDTHS = (4, 12, 12, 2)
CHUNK = 50


def initial(key):
    keys = jax.random.split(key, len(WIDTHS))
    params = []
    for k, fan_in, fan_out in zip(keys, WIDTHS[:-1], WIDTHS[1:], strict=False):
        bound = (6 / (fan_in + fan_out)) ** 0.5
        kernel = jax.random.uniform(k, (fan_out, fan_in), minval=-bound, maxval=bound)
        params.append((kernel, jnp.zeros((fan_out, 1))))
    zeros = jax.tree.map(jnp.zeros_like, params)
    physics = jax.random.uniform(keys[-1], (4,), minval=-0.05, maxval=0.05)
    posterior = jnp.array([5.0, 5.01, 0.0, 0.0, 0.0])
    return params, zeros, zeros, physics, jnp.int32(0), jnp.zeros((CAPACITY, 11)), posterior


def q_values(params, x):
    for kernel, bias in params[:-1]:
        x = jax.nn.relu(kernel @ x + bias)
    return params[-1][0] @ x + params[-1][1]


def physics_step(s, action):
    x, v, angle, spin = s
    force = jnp.where(action == 1, 10.0, -10.0)
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    push = (force + 0.05 * spin**2 * sine) / 1.1
    bend = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
    pull = push - 0.05 * bend * cosine / 1.1
    after = jnp.stack([x + 0.02 * v, v + 0.02 * pull, angle + 0.02 * spin, spin + 0.02 * bend])
    fell = (jnp.abs(after[0]) > 2.4) | (jnp.abs(after[2]) > 0.20943951)
    return after, jnp.where(fell, 0.0, 1.0), fell


def distinct(u, filled):
    """Positions among those left, turned into indices by undoing the removals, last first."""
    position = (u * (filled - jnp.arange(BATCH))).astype(jnp.int32)
    index = position
    for draw in reversed(range(BATCH - 1)):
        later = jnp.arange(BATCH) > draw
        index = index + (later & (index >= position[draw]))
    return index


def bmc(posterior, greedy, uniform):
    alpha, beta, count, mean, m2 = posterior
    total = alpha + beta
    observed = greedy + alpha / total * (uniform - greedy)
    count = count + 1
    deviation = observed - mean
    mean = mean + deviation / count
    m2 = m2 + deviation * (observed - mean)
    a = 500 + count / 2
    b = 500 + count / 2 * (m2 / jnp.maximum(count - 1, 1) + mean**2 / (1 + count))
    epsilon, tau, squared = alpha / total, (beta - alpha) / total, (greedy - uniform) ** 2
    ratio = (a + 0.5) * jnp.log1p(tau * squared / (2 * b + epsilon**2 * squared))
    evidence = jnp.exp(-ratio)
    scale = alpha * evidence + beta
    gain, p = evidence / scale, beta / scale
    c = beta + p + beta * gain
    kappa = c / (c + gain * p * (total + 2))
    return jnp.stack([alpha * (1 + gain) * kappa, (beta + p) * kappa, count, mean, m2])


def loss(params, x, fixed):
    penalty = sum(jnp.sum(kernel**2) for kernel, _ in params)
    return jnp.mean((q_values(params, x) - fixed) ** 2) + L2 * penalty


def adam(params, mean, square, gradient, step):
    mean = jax.tree.map(lambda m, g: m + 0.1 * (g - m), mean, gradient)
    square = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, square, gradient)
    rate = RATE * jnp.sqrt(1 - 0.999**step) / (1 - 0.9**step)
    moved = jax.tree.map(lambda w, m, v: w - rate * m / (jnp.sqrt(v) + 1e-7), params, mean, square)
    return moved, mean, square


def learn(params, mean, square, rows, time):
    before, after, reward, action, done = jnp.split(rows.T, [4, 8, 9, 10], axis=0)
    target = reward + GAMMA * (1 - done) * q_values(params, after).max(0, keepdims=True)
    taken = action.astype(jnp.int32) == jnp.arange(WIDTHS[-1])[:, None]
    fixed = jnp.where(taken, target, q_values(params, before))
    first = (time + 1 - BATCH) * EPOCHS + 1
    for epoch in range(EPOCHS):
        gradient = jax.grad(loss)(params, before, fixed)
        params, mean, square = adam(params, mean, square, gradient, first + epoch)
    return params, mean, square


def run_step(state, time, key):
    params, mean, square, physics, count, replay, posterior = state
    u = jax.random.uniform(key, (6 + BATCH,))
    greedy = q_values(params, physics[:, None])[:, 0].argmax()
    epsilon = posterior[0] / (posterior[0] + posterior[1])
    action = jnp.where(u[0] < epsilon, (u[1] * 2).astype(jnp.int32), greedy)
    after, reward, fell = physics_step(physics, action)
    done = fell | (count + 1 >= LIMIT)
    extra = jnp.stack([reward, action.astype(jnp.float32), done.astype(jnp.float32)])
    row = jnp.concatenate([physics, after, extra])
    replay = lax.dynamic_update_index_in_dim(replay, row, time % CAPACITY, 0)
    value = q_values(params, after[:, None])[:, 0]
    posterior = bmc(posterior, reward + GAMMA * value.max(), reward + GAMMA * value.mean())
    rows = replay[distinct(u[6:], jnp.minimum(time + 1, CAPACITY))]
    learned = learn(params, mean, square, rows, jnp.maximum(time, BATCH - 1))
    old = (params, mean, square)
    new = jax.tree.map(lambda n, o: jnp.where(time + 1 >= BATCH, n, o), learned, old)
    physics = jnp.where(done, u[2:6] * 0.1 - 0.05, after)
    return *new, physics, jnp.where(done, 0, count + 1), replay, posterior


@functools.partial(jax.jit, donate_argnums=0, static_argnums=3)
def advance(states, time, key, runs):
    def step(carry, key):
        states, time = carry
        keys = jax.random.split(key, runs)
        return (jax.vmap(run_step, (0, None, 0))(states, time, keys), time + 1), None

    (states, time), _ = lax.scan(step, (states, time), jax.random.split(key, CHUNK))
    return states, time


class Runs:
    """All runs, advanced CHUNK steps at a time."""

    def __init__(self, runs: int, seed: int) -> None:
        self.key = jax.random.key(seed)
        self.states = jax.vmap(initial)(jax.random.split(self.key, runs))
        self.runs, self.time = runs, jnp.int32(0)

    def advance(self, run_steps: int) -> None:
        """Take about `run_steps` steps of all runs together."""
        for _ in range(max(run_steps // (self.runs * CHUNK), 1)):
            self.key, key = jax.random.split(self.key)
            self.states, self.time = advance(self.states, self.time, key, self.runs)
        jax.block_until_ready(self.states)


if __name__ == "__main__":
    parsed = common.arguments(runs=int)
    runs = parsed.runs or 1000
    parsed.warm_up = 2 * runs * CHUNK
    common.measure(Runs(runs, parsed.seed).advance, parsed, chunk=runs * CHUNK)
