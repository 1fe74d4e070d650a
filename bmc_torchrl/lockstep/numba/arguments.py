"""Strategies as the plain arrays that the numba kernels take."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bmc_torchrl.lockstep.numba.loops import Lanes
from bmc_torchrl.strategies import (
    SCALAR_RULES,
    EpsilonStrategy,
    NoScalarFormError,
    ScalarForm,
    ScalarRule,
)

__all__ = ["StrategyArrays", "has_kernel", "read_strategy", "write_strategy"]

_LEARNING = ("eps", "epsilon", "update", "read", "learn")


class StrategyArrays(NamedTuple):
    """The ε of many runs as plain arrays: 22 strategies of 100 runs are one set of 2200 rows.

    Attributes:
        rule: which of the rules a run has, int64 ``[runs]``.
        parameters: what the rules read, float64 ``[runs, columns]``.
        memory: what they change, float64 ``[runs, columns]``.
        local: what they remember of states, float64 ``[rows, states]``, at least one row.
        local_row: which row of `local` belongs to a run, int64 ``[runs]``.
        history: memory at the end of each episode, float64 ``[rows, episodes, columns]``.
        history_row: which row of `history` belongs to a run, int64 ``[runs]``, −1 for none.
    """

    rule: Any
    parameters: Any
    memory: Any
    local: Any
    local_row: Any
    history: Any
    history_row: Any


def scalar_form(strategy: EpsilonStrategy) -> ScalarForm:
    """What a strategy's :meth:`~EpsilonStrategy.scalars` gives, if it is that of its class.

    A class that learns otherwise than the one it inherits ``scalars`` from has none.
    """
    form = strategy.scalars()
    for kind in type(strategy).__mro__:
        if "scalars" in vars(kind):
            return form
        if not vars(kind).keys().isdisjoint(_LEARNING):
            raise NoScalarFormError(
                f"{kind.__name__} says how ε is found or learned, but not in scalars()."
            )
    raise AssertionError("EpsilonStrategy has scalars().")


def has_kernel(strategy: EpsilonStrategy) -> bool:
    """Whether the loops can run `strategy`, or every part of a stack.

    >>> from bmc_torchrl.strategies import ConstantEpsilon
    >>> has_kernel(ConstantEpsilon(0.1))
    True
    """
    try:
        for part, _ in strategy.parts():
            scalar_form(part)
    except NoScalarFormError:
        return False
    return True


def read_strategy(
    strategy: EpsilonStrategy, runs: int, num_states: int, episodes: int
) -> tuple[tuple[ScalarRule, ...], StrategyArrays]:
    """The rules that an engine of `strategy` needs, and a copy of what its buffers hold.

    >>> from bmc_torchrl.strategies import ConstantEpsilon
    >>> _, arrays = read_strategy(ConstantEpsilon(0.1, batch_shape=[2]), 2, 5, 3)
    >>> arrays.memory[:, 0]
    array([0.1, 0.1])
    """
    if tuple(strategy.batch_shape) != (runs,):
        raise ValueError(
            f"strategy has batch_shape {tuple(strategy.batch_shape)}, but there are runs={runs}: "
            f"build it with batch_shape=[{runs}]."
        )
    parts = [(part, lanes, scalar_form(part)) for part, lanes in strategy.parts()]
    rules = list(dict.fromkeys([*SCALAR_RULES, *(form.rule for _, _, form in parts)]))
    arrays = StrategyArrays(
        rule=np.zeros(runs, np.int64),
        parameters=np.zeros((runs, max(1, *(len(form.parameters) for _, _, form in parts)))),
        memory=np.zeros((runs, max(1, *(len(form.memory) for _, _, form in parts)))),
        local=np.zeros((1, num_states)),
        local_row=np.zeros(runs, np.int64),
        history=np.zeros((0, 0, 0)),
        history_row=np.full(runs, -1, np.int64),
    )
    local: list[Any] = []
    recorded = 0
    for part, lanes, form in parts:
        arrays.rule[lanes] = rules.index(form.rule)
        for array, columns in (
            (arrays.parameters, form.parameters),
            (arrays.memory, form.memory),
        ):
            for column, value in enumerate(columns):
                array[lanes, column] = _numpy(value)
        if form.local is not None:
            _require_states(part, form.local, num_states)
            first = sum(map(len, local))
            local.append(_numpy(form.local))
            arrays.local_row[lanes] = np.arange(first, first + len(local[-1]))
        if part.scalar_diagnostics(torch.from_numpy(arrays.memory)[lanes]):
            size = lanes.stop - lanes.start
            arrays.history_row[lanes] = np.arange(recorded, recorded + size)
            recorded += size
    history = np.full((recorded, episodes, arrays.memory.shape[1]), np.nan)
    arrays = arrays._replace(history=history)
    if local:
        arrays = arrays._replace(local=np.concatenate(local))
    return tuple(rule() for rule in rules), arrays


def write_strategy(strategy: EpsilonStrategy, lanes: Lanes) -> None:
    """Copy what the lanes learned into a strategy's buffers."""
    for part, runs in strategy.parts():
        local = torch.from_numpy(lanes.local[lanes.local_row[runs]])
        part.load_scalars(torch.from_numpy(lanes.memory[runs].copy()), local)


def _require_states(part: EpsilonStrategy, local: Tensor, num_states: int) -> None:
    if local.shape[-1] != num_states:
        raise ValueError(
            f"{type(part).__name__} has num_states={local.shape[-1]}, but the domain has "
            f"{num_states}: build it with num_states={num_states}."
        )


def _numpy(value: float | Tensor) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else value
