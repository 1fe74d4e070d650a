"""Strategies of the package as the plain arrays that the numba kernels take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bmc_torchrl.likelihoods import StudentTLikelihood
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

__all__ = ["NoKernelError", "StrategyArrays", "has_kernel", "read_strategy", "write_strategy"]

_ELSEWHERE = "use engine=torchrl."


class NoKernelError(ValueError):
    """A strategy that the loops do not have; the message names it."""


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


def has_kernel(strategy: EpsilonStrategy) -> bool:
    """Whether the loops can run `strategy`, or every part of a stack.

    >>> has_kernel(ConstantEpsilon(0.1))
    True
    """
    try:
        for part, _ in _parts(strategy):
            _family(part, None)
    except NoKernelError:
        return False
    return True


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


def _family(part: EpsilonStrategy, num_states: int | None) -> int:
    if isinstance(part, BMCEpsilon):
        student = isinstance(part.likelihood, StudentTLikelihood)
        if not student or part.offline or part.num_states is not None:
            raise NoKernelError(
                "The numba kernels have ε-BMC with the Student-t likelihood, one posterior per run "
                "and online updates only; for anything else " + _ELSEWHERE
            )
    if isinstance(part, VDBEEpsilon) and num_states not in (None, part.num_states):
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
        raise NoKernelError(f"The numba kernels do not have {type(part).__name__}: {_ELSEWHERE}")
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
