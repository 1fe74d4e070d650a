"""The three domains for one run, as scalar functions compiled by numba.

Grid-world is its transition table; cart-pole and supply-chain restate ``cart_pole_step``,
``cart_pole_bins`` and ``supply_chain_step`` operation by operation in the same precision, so that
only sine and cosine, of which each library has its own, differ in the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
from numba.extending import overload

from bmc_torchrl.lockstep.numba.formulas import OPTIONS, Array, F, Scalar, compiled

__all__ = [
    "GUIDE_SIZE",
    "CartPoleKernel",
    "GridKernel",
    "SupplyKernel",
    "domain_start",
    "domain_step",
    "is_noisy",
]

GUIDE_SIZE = 1024

Physics = tuple[Any, Any, Any, Any]

_JIT = {name: value for name, value in OPTIONS.items() if name != "nogil"}
implements = cast(Callable[[Any], Callable[[F], F]], lambda stub: overload(stub, jit_options=_JIT))


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
    bounds: tuple[Scalar, ...]
    widths: tuple[Scalar, ...]
    last_bins: tuple[Scalar, ...]
    bins: tuple[int, ...]


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


@compiled
def poisson_draw(u: Scalar, cdf: Array, guide: Array) -> Any:
    """``poisson_demand``: the number of `cdf` entries not above `u`."""
    k = np.int64(guide[np.int64(u * GUIDE_SIZE)])
    while cdf[k] <= u:
        k += 1
    return k


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
    sine, cosine = math.sin(angle), math.cos(angle)
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
def supply_step(m: SupplyKernel, state: int, action: int, demand: Scalar) -> tuple[Any, Scalar]:
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


def domain_step(m: Any, p: Physics, state: Scalar, action: Scalar, u: Scalar) -> Any:
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
