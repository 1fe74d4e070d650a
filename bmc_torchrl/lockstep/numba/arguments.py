"""Domains and strategies of the package as the plain arrays that the numba kernels take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bmc_torchrl.envs import (
    CartPole,
    SubgoalGrid,
    SupplyNetwork,
    poisson_cdf,
    subgoal_grid_table,
    supply_chain_action,
    unravel_index,
)
from bmc_torchrl.likelihoods import StudentTLikelihood
from bmc_torchrl.lockstep.numba.domains import (
    GUIDE_SIZE,
    CartPoleKernel,
    GridKernel,
    SupplyKernel,
)
from bmc_torchrl.lockstep.numba.formulas import BMC, CONSTANT, GEOMETRIC, POWER, VDBE
from bmc_torchrl.lockstep.numba.loops import Lanes
from bmc_torchrl.strategies import (
    BMCEpsilon,
    ConstantEpsilon,
    EpsilonStrategy,
    GeometricEpsilon,
    PowerEpsilon,
    StackedEpsilon,
    VDBEEpsilon,
)

__all__ = ["DomainKernel", "StrategyArrays", "domain_kernel", "read_strategy", "write_strategy"]

_NAMES = {"grid_world": SubgoalGrid, "cart_pole": CartPole, "supply_chain": SupplyNetwork}
_ELSEWHERE = "use the torch engine for it."


class DomainKernel(NamedTuple):
    """A domain as the kernels take it, and the size of its table."""

    kernel: GridKernel | CartPoleKernel | SupplyKernel
    num_states: int
    num_actions: int


class StrategyArrays(NamedTuple):
    """The ε of many runs as plain arrays: 22 strategies of 100 runs are one set of 2200 rows.

    Attributes:
        family: ``CONSTANT``, ``GEOMETRIC``, ``POWER``, ``VDBE`` or ``BMC``, int64 ``[runs]``.
        parameters: float64 ``[runs, 5]``: the value; initial, rate; initial, power, first index;
            σ, δ; or μ₀, τ₀, a₀, b₀. The fifth is the number of episodes counted already.
        posterior: float64 ``[runs, 5]``: α, β, count, mean and squared deviations of the returns.
        epsilons: VDBE's ε, float64 ``[rows, states]``, at least one row.
        epsilons_row: which row of `epsilons` belongs to a run, int64 ``[runs]``.
    """

    family: Any
    parameters: Any
    posterior: Any
    epsilons: Any
    epsilons_row: Any


def domain_kernel(
    domain: str | SubgoalGrid | CartPole | SupplyNetwork, physics_dtype: torch.dtype
) -> DomainKernel:
    """The kernel of a domain, given by name or by its parameters.

    >>> domain_kernel("grid_world", torch.float32).num_states
    150
    """
    if isinstance(domain, str):
        if domain not in _NAMES:
            raise ValueError(f"domain must be one of {sorted(_NAMES)}, got {domain!r}.")
        domain = _NAMES[domain]()
    if isinstance(domain, SubgoalGrid):
        return _grid(domain)
    if isinstance(domain, CartPole):
        return _cart_pole(domain, physics_dtype)
    if isinstance(domain, SupplyNetwork):
        return _supply_chain(domain)
    raise TypeError(f"domain must be a name or a domain's parameters, got {domain!r}.")


def _grid(grid: SubgoalGrid) -> DomainKernel:
    next_state, reward, terminated = (x.numpy() for x in subgoal_grid_table(grid))
    kernel = GridKernel(next_state.astype(np.int32), reward, terminated, grid.start_state)
    return DomainKernel(kernel, grid.num_states, 4)


def _cart_pole(model: CartPole, dtype: torch.dtype) -> DomainKernel:
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"physics_dtype must be torch.float32 or torch.float64, got {dtype}.")
    real: Any = np.float32 if dtype == torch.float32 else np.float64
    kernel = CartPoleKernel(
        gravity=real(model.gravity),
        mass=real(model.pole_mass + model.cart_mass),
        pole_mass=real(model.pole_mass),
        half_length=real(model.half_length),
        moment=real(model.pole_mass * model.half_length),
        four_thirds=real(4.0 / 3.0),
        force=real(model.force),
        tau=real(model.tau),
        position_limit=real(model.position_limit),
        angle_limit=real(model.angle_limit),
        initial_bound=real(model.initial_bound),
        step_reward=np.float32(model.step_reward),
        fall_change=np.float32(model.fall_reward - model.step_reward),
        bounds=tuple(real(bound) for bound in model.bounds),
        widths=tuple(real(2 * bound) for bound in model.bounds),
        last_bins=tuple(real(count - 1) for count in model.bins),
        bins=tuple(model.bins),
    )
    return DomainKernel(kernel, int(np.prod(model.bins)), 2)


def _supply_chain(network: SupplyNetwork) -> DomainKernel:
    if max(network.num_actions, *network.capacity) > np.iinfo(np.int16).max:
        raise ValueError(
            f"The numba kernels count stocks and actions to {np.iinfo(np.int16).max}, the network "
            f"has capacity {network.capacity} and {network.num_actions} actions: " + _ELSEWHERE
        )
    if network.warehouses != 1:
        raise ValueError(
            f"The numba kernels have one warehouse, the network has {network.warehouses}: "
            + _ELSEWHERE
        )
    factory, shelf = unravel_index(torch.arange(network.num_states), network.sizes)
    ship, produce = supply_chain_action(torch.arange(network.num_actions), network)
    cdf = poisson_cdf(network.demand_rate[0])
    grid = torch.arange(GUIDE_SIZE, dtype=torch.float64) / GUIDE_SIZE
    trucks = (torch.arange(network.ship_max[0] + 1) + network.zeta[0] - 1) // network.zeta[0]
    kernel = SupplyKernel(
        factory=_short(factory),
        shelf=_short(shelf),
        ship=_short(ship),
        produce=_short(produce),
        truck_cost=(network.kappa_tr[0] * trucks.float()).numpy(),
        factory_capacity=network.capacity[0],
        shelf_capacity=network.capacity[1],
        factory_cost=np.float32(network.kappa_st[0]),
        shelf_cost=np.float32(network.kappa_st[1]),
        price=np.float32(network.price),
        produce_cost=np.float32(network.kappa_pr),
        cdf=cdf.numpy(),
        guide=_short(torch.searchsorted(cdf, grid, right=True)),
        start=network.initial_stocks[0] * network.sizes[1] + network.initial_stocks[1],
    )
    return DomainKernel(kernel, network.num_states, network.num_actions)


def _short(values: Tensor) -> Any:
    return values.numpy().astype(np.int16)


def _parts(strategy: EpsilonStrategy) -> Iterator[tuple[EpsilonStrategy, slice]]:
    """The strategies of a (nested) stack with the runs they have."""
    if not isinstance(strategy, StackedEpsilon):
        yield strategy, slice(0, strategy.batch_shape.numel())
        return
    start = 0
    for part, size in zip(strategy.strategies, strategy.sizes, strict=True):
        for inner, runs in _parts(part):  # type: ignore[arg-type]
            yield inner, slice(start + runs.start, start + runs.stop)
        start += size


def read_strategy(strategy: EpsilonStrategy, runs: int, num_states: int) -> StrategyArrays:
    """A copy of what a strategy's buffers hold.

    >>> read_strategy(ConstantEpsilon(0.1, batch_shape=[2]), 2, 5).parameters[:, 0]
    array([0.1, 0.1])
    """
    if tuple(strategy.batch_shape) != (runs,):
        raise ValueError(
            f"strategy has batch_shape {tuple(strategy.batch_shape)}, but there are runs={runs}: "
            f"build it with batch_shape=[{runs}]."
        )
    arrays = StrategyArrays(
        family=np.zeros(runs, np.int64),
        parameters=np.zeros((runs, 5)),
        posterior=np.ones((runs, 5)),
        epsilons=np.zeros((1, num_states)),
        epsilons_row=np.zeros(runs, np.int64),
    )
    rows: list[Any] = []
    for part, lanes in _parts(strategy):
        arrays.family[lanes] = _family(part, num_states)
        for column, value in enumerate(_parameters(part)):
            arrays.parameters[lanes, column] = _numpy(value)
        if isinstance(part, GeometricEpsilon | PowerEpsilon):
            arrays.parameters[lanes, 4] = _numpy(part.episodes)
        if isinstance(part, BMCEpsilon):
            arrays.posterior[lanes] = np.stack([_numpy(x) for x in part._posterior()], -1)
        if isinstance(part, VDBEEpsilon):
            first = sum(len(row) for row in rows)
            rows.append(_numpy(part.epsilons))
            arrays.epsilons_row[lanes] = np.arange(first, first + len(rows[-1]))
    return arrays._replace(epsilons=np.concatenate(rows)) if rows else arrays


def write_strategy(strategy: EpsilonStrategy, lanes: Lanes) -> None:
    """Copy what the lanes learned into a strategy's buffers."""
    for part, runs in _parts(strategy):
        if isinstance(part, GeometricEpsilon | PowerEpsilon):
            counted = lanes.parameters[runs, 4].astype(np.int64) + lanes.episode[runs]
            part.episodes.copy_(torch.from_numpy(counted))
        if isinstance(part, BMCEpsilon):
            for column, buffer in enumerate(part._posterior()):
                buffer.copy_(torch.from_numpy(lanes.posterior[runs, column].copy()))
        if isinstance(part, VDBEEpsilon):
            part.epsilons.copy_(torch.from_numpy(lanes.epsilons[lanes.epsilons_row[runs]]))


def _family(part: EpsilonStrategy, num_states: int) -> int:
    if isinstance(part, BMCEpsilon):
        student = isinstance(part.likelihood, StudentTLikelihood)
        if not student or part.offline or part.num_states is not None:
            raise ValueError(
                "The numba kernels have ε-BMC with the Student-t likelihood, one posterior per run "
                "and online updates only; for anything else " + _ELSEWHERE
            )
    if isinstance(part, VDBEEpsilon) and part.num_states != num_states:
        raise ValueError(
            f"VDBEEpsilon has num_states={part.num_states}, but the domain has {num_states}: "
            f"build it with num_states={num_states}."
        )
    families: dict[type, int] = {
        ConstantEpsilon: CONSTANT,
        GeometricEpsilon: GEOMETRIC,
        PowerEpsilon: POWER,
        VDBEEpsilon: VDBE,
        BMCEpsilon: BMC,
    }
    if type(part) not in families:
        raise TypeError(f"The numba kernels do not have {type(part).__name__}: {_ELSEWHERE}")
    return families[type(part)]


def _parameters(part: EpsilonStrategy) -> tuple[float | Tensor, ...]:
    if isinstance(part, ConstantEpsilon):
        return (part.value,)
    if isinstance(part, GeometricEpsilon):
        return part.initial, part.rate
    if isinstance(part, PowerEpsilon):
        return part.initial, part.power, part.first_index
    if isinstance(part, VDBEEpsilon):
        return part.sigma, part.delta
    assert isinstance(part, BMCEpsilon)
    assert isinstance(part.likelihood, StudentTLikelihood)
    prior = part.likelihood
    return prior.mu0, prior.tau0, prior.a0, prior.b0


def _numpy(value: float | Tensor) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else value
