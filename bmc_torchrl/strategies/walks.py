"""Strategies' walks through many transitions: one operator each, with kernels for CPU and CUDA."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bmc_torchrl.strategies.compiled import cached_on_disk, compiled_rule, source_checksum
from bmc_torchrl.strategies.machine_code import (
    FLAGS,
    NUMBER,
    NUMBERS,
    WHOLE_NUMBERS,
    machine_loop,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "bmc_walk",
    "bmc_walk_in_place",
    "can_walk",
    "can_walk_in_place",
    "vdbe_walk",
    "wins_walk",
]


_MEMORY = [*[torch.float64] * 10, torch.int64]
"""What :func:`bmc_walk_in_place` writes to."""

_HAS_NUMBA = importlib.util.find_spec("numba") is not None
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def can_walk(column: Tensor) -> bool:
    """Whether to call an operator, for a column ``[steps, *batch_shape]``.

    Args:
        column (Tensor): what is walked.

    Returns:
        Whether there is a kernel for the device, and more than one step to use it for.
    """
    if len(column) < 2:
        return False
    if column.device.type == "cuda":
        return _HAS_TRITON
    if column.device.type != "cpu":
        return False
    return _HAS_NUMBA if torch.compiler.is_compiling() else _has_numba()


def can_walk_in_place(column: Tensor, memory: Sequence[Tensor]) -> bool:
    """Whether steps can be taken in the buffers' own memory.

    Args:
        column (Tensor): what is walked, ``[steps, *batch_shape]`` or one step.
        memory (sequence of Tensor): see :func:`bmc_walk_in_place`.

    Returns:
        Whether all is plain memory of the host, as the loop takes it to be, which nothing traces.
    """
    return (
        column.device.type == "cpu"
        and type(column) is Tensor
        and not torch.compiler.is_compiling()
        and not _transformed()
        and all(
            x.is_contiguous() and x.dtype == kind for x, kind in zip(memory, _MEMORY, strict=True)
        )
        and _has_numba()
    )


# Under vmap and grad a tensor has no memory. There is no public way to ask; without this one, the
# step is taken by the tensor functions.
_transformed: Callable[[], bool] = getattr(
    torch._C, "_are_functorch_transforms_active", lambda: True
)


@functools.cache
def _has_numba() -> bool:
    if not _HAS_NUMBA:
        warnings.warn(
            "Without numba, every transition of a batch costs ≈ 100 µs instead of ≈ 0.1 µs: "
            "pip install numba.",
            stacklevel=2,
        )
    return _HAS_NUMBA


@torch.library.custom_op("bmc_torchrl::bmc_walk", mutates_args=())
def bmc_walk(
    parameters: Tensor,
    memory: Tensor,
    held: Tensor,
    taken: Tensor,
    greedy: Tensor,
    uniform: Tensor,
    state: Tensor | None,
    done: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Every transition of many runs, one after the other, by ``BMCRule.learn``.

    Args:
        parameters (Tensor): those of the rule, ``[runs, 4]``.
        memory (Tensor): that of the rule, ``[runs, states, 8]``, one state if there are none.
        held (Tensor): α and β to act with, moved where episodes end, ``[runs, states, 2]``.
        taken (Tensor): where to learn, bool ``[steps, runs]``.
        greedy (Tensor): greedy returns, ``[steps, runs]``.
        uniform (Tensor): uniform returns, ``[steps, runs]``.
        state (Tensor, optional): states left, int64 ``[steps, runs]``.
        done (Tensor, optional): where episodes end, bool ``[steps, runs]``.

    Returns:
        The new `memory` and `held`, and the sum of the log evidence ratios, ``[runs]``.
    """
    memory, held = (x.clone(memory_format=torch.contiguous_format) for x in (memory, held))
    evidence = parameters.new_zeros(len(parameters))
    none = torch.empty(0, 0, dtype=torch.int64)
    rows = (parameters, memory, held, evidence, taken, greedy, uniform)
    more = (none if state is None else state, (none if done is None else done).bool())
    _bmc_loop()(*(x.detach().contiguous().numpy() for x in (*rows, *more)))
    return memory, held, evidence


@bmc_walk.register_kernel("cuda")
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    from bmc_torchrl.strategies.triton_walks import bmc_walk_on_gpu

    return bmc_walk_on_gpu(*arguments)


def walk_posteriors(
    parameters: Any,
    memory: Any,
    held: Any,
    evidence: Any,
    taken: Any,
    greedy: Any,
    uniform: Any,
    state: Any,
    done: Any,
) -> None:
    """The loop of :func:`bmc_walk`, in place."""
    steps, runs = taken.shape
    for run in range(runs):
        for step in range(steps):
            where = state[step, run] if state.size else 0
            row = memory[run, where]
            row[6] = 0.0
            if taken[step, run]:
                q, u = greedy[step, run], uniform[step, run]
                learn(parameters[run], row, row, where, q, u, 0.0)  # type: ignore[name-defined] # noqa: F821
            evidence[run] += row[6]
            if done.size and done[step, run]:
                for each in range(memory.shape[1]):
                    held[run, each, 0] = memory[run, each, 1]
                    held[run, each, 1] = memory[run, each, 2]


@functools.cache
def _bmc_loop() -> Callable[..., None]:
    from bmc_torchrl.strategies.bmc import BMCRule

    return _compiled_walk(walk_posteriors, BMCRule.learn)


def bmc_walk_in_place(
    memory: Sequence[Tensor],
    taken: Tensor,
    greedy: Tensor,
    uniform: Tensor,
    state: Tensor | None,
) -> None:
    """What :func:`bmc_walk` computes, written to the buffers themselves.

    An operator's call costs a hundred times what a step does.

    Args:
        memory (sequence of Tensor): the rule's parameters ``[runs]``, then its memory but ε: the
            posterior, ``[runs]`` or ``[runs, states]``, the evidence so far and how often it was
            skipped, ``[runs]``; all contiguous.
        taken (Tensor): where to learn, bool ``[steps, runs]`` or ``[runs]``; so are the others.
        greedy (Tensor): greedy returns.
        uniform (Tensor): uniform returns.
        state (Tensor, optional): states left, int64.
    """
    room = torch.empty(4 + 8, dtype=torch.float64)
    columns = [x.contiguous() for x in (taken, greedy, uniform)]
    left = None if state is None else state.contiguous()
    _bmc_loop_in_place()(
        room.data_ptr(),
        room[4:].data_ptr(),
        *(x.data_ptr() for x in (*memory, *columns)),
        0 if left is None else left.data_ptr(),
        taken.numel(),
        memory[0].numel(),
        0 if left is None else memory[4].shape[-1],
    )


def walk_posteriors_in_place(
    prior: Any,
    memory: Any,
    mu0: Any,
    tau0: Any,
    a0: Any,
    b0: Any,
    alpha: Any,
    beta: Any,
    count: Any,
    mean: Any,
    m2: Any,
    evidence: Any,
    skipped: Any,
    taken: Any,
    greedy: Any,
    uniform: Any,
    state: Any,
    steps: int,
    runs: int,
    states: int,
) -> None:
    """The loop of :func:`bmc_walk_in_place`, with room for the rule's parameters and memory."""
    for step in range(steps):
        if not taken[step]:
            continue
        run = step % runs
        at = run * states + state[step] if states else run
        prior[0], prior[1], prior[2], prior[3] = mu0[run], tau0[run], a0[run], b0[run]
        memory[1], memory[2], memory[3] = alpha[at], beta[at], count[at]
        memory[4], memory[5], memory[6], memory[7] = mean[at], m2[at], evidence[run], 0.0
        learn(prior, memory, memory, 0, greedy[step], uniform[step], 0.0)  # type: ignore[name-defined] # noqa: F821
        alpha[at], beta[at], count[at] = memory[1], memory[2], memory[3]
        mean[at], m2[at], evidence[run] = memory[4], memory[5], memory[6]
        skipped[run] += int(memory[7])


@functools.cache
def _bmc_loop_in_place() -> Callable[..., None]:
    from bmc_torchrl.strategies.bmc import BMCRule

    buffers = [*[NUMBERS] * 10, WHOLE_NUMBERS]
    columns = [FLAGS, NUMBERS, NUMBERS, WHOLE_NUMBERS]
    arguments = [NUMBERS, NUMBERS, *buffers, *columns, NUMBER, NUMBER, NUMBER]
    return machine_loop(walk_posteriors_in_place, arguments, learn=BMCRule.learn)


@torch.library.custom_op("bmc_torchrl::vdbe_walk", mutates_args=())
def vdbe_walk(
    parameters: Tensor, epsilons: Tensor, change: Tensor, taken: Tensor, state: Tensor
) -> Tensor:
    """Every value change of many runs, one after the other, by ``VDBERule.learn``.

    Args:
        parameters (Tensor): those of the rule, ``[runs, 2]``.
        epsilons (Tensor): ε of each state, ``[runs, states]``.
        change (Tensor): ``[steps, runs]``.
        taken (Tensor): where to learn if the change is finite, bool ``[steps, runs]``.
        state (Tensor): states left, int64 ``[steps, runs]``.

    Returns:
        The new `epsilons`.
    """
    taken = taken & change.isfinite()
    epsilons = epsilons.clone(memory_format=torch.contiguous_format)
    columns = (parameters, epsilons, change, taken, state)
    _vdbe_loop()(*(x.detach().contiguous().numpy() for x in columns))
    return epsilons


@vdbe_walk.register_kernel("cuda")
def _(*arguments: Any) -> Tensor:
    from bmc_torchrl.strategies.triton_walks import vdbe_walk_on_gpu

    return vdbe_walk_on_gpu(*arguments)


def walk_states(parameters: Any, epsilons: Any, change: Any, taken: Any, state: Any) -> None:
    """The loop of :func:`vdbe_walk`, in place."""
    steps, runs = taken.shape
    for run in range(runs):
        own, local = parameters[run], epsilons[run]
        for step in range(steps):
            if taken[step, run]:
                learn(own, own, local, state[step, run], 0.0, 0.0, change[step, run])  # type: ignore[name-defined] # noqa: F821


@functools.cache
def _vdbe_loop() -> Callable[..., None]:
    from bmc_torchrl.strategies.vdbe import VDBERule

    return _compiled_walk(walk_states, VDBERule.learn)


@torch.library.custom_op("bmc_torchrl::wins_walk", mutates_args=(), device_types="cpu")
def wins_walk(
    parameters: Tensor,
    memory: Tensor,
    taken: Tensor,
    greedy: Tensor,
    uniform: Tensor,
    chosen: Tensor,
    promised: Tensor,
    greedily: Tensor,
) -> Tensor:
    """Every transition of many runs, one after the other, by ``WinsRule``; on a CPU.

    Args:
        parameters (Tensor): those of the rule, ``[runs, 1]``.
        memory (Tensor): that of the rule, ``[runs, 9]``.
        taken (Tensor): where to learn, bool ``[steps, runs]``.
        greedy (Tensor): greedy returns, ``[steps, runs]``.
        uniform (Tensor): uniform returns, ``[steps, runs]``.
        chosen (Tensor): values of the actions taken, ``[steps, runs]``.
        promised (Tensor): values of the greedy actions, ``[steps, runs]``.
        greedily (Tensor): where they are the same, bool ``[steps, runs]``.

    Returns:
        The new `memory`.
    """
    memory = memory.clone(memory_format=torch.contiguous_format)
    columns = (parameters, memory, taken, greedy, uniform, chosen, promised, greedily)
    _wins_loop()(*(x.detach().contiguous().numpy() for x in columns))
    return memory


def walk_wins(
    parameters: Any,
    memory: Any,
    taken: Any,
    greedy: Any,
    uniform: Any,
    chosen: Any,
    promised: Any,
    greedily: Any,
) -> None:
    """The loop of :func:`wins_walk`, in place."""
    steps, runs = taken.shape
    for run in range(runs):
        own, row = parameters[run], memory[run]
        for at in range(steps):
            if taken[at, run]:
                look(row, chosen[at, run], promised[at, run], greedily[at, run])  # type: ignore[name-defined] # noqa: F821
                learn(own, row, row, 0, greedy[at, run], uniform[at, run], 0.0)  # type: ignore[name-defined] # noqa: F821


@functools.cache
def _wins_loop() -> Callable[..., None]:
    from bmc_torchrl.strategies.wins import WinsRule

    return _compiled_walk(walk_wins, WinsRule.learn, look=WinsRule.look)


def _compiled_walk(loop: Any, learn: Any, **more: Any) -> Callable[..., None]:
    functions = {"learn": learn} | more
    checksum = source_checksum([loop, *functions.values()])
    rule = {name: compiled_rule(function) for name, function in functions.items()}
    made: Callable[..., None] = cached_on_disk(loop, learn.__module__, checksum, **rule)
    return made


@bmc_walk.register_fake
def _(parameters: Tensor, memory: Tensor, held: Tensor, *columns: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(memory), torch.empty_like(held), torch.empty_like(parameters[:, 0])


@vdbe_walk.register_fake
def _(parameters: Tensor, epsilons: Tensor, *columns: Any) -> Tensor:
    return torch.empty_like(epsilons)


@wins_walk.register_fake
def _(parameters: Tensor, memory: Tensor, *columns: Any) -> Tensor:
    return torch.empty_like(memory)


@bmc_walk.register_vmap
def _(info: Any, in_dims: Any, *arguments: Any) -> Any:
    merged = _as_more_runs(info.batch_size, in_dims, arguments, run_dims=(0, 0, 0, 1, 1, 1, 1, 1))
    return tuple(x.unflatten(0, (info.batch_size, -1)) for x in bmc_walk(*merged)), (0, 0, 0)


@vdbe_walk.register_vmap
def _(info: Any, in_dims: Any, *arguments: Any) -> Any:
    merged = _as_more_runs(info.batch_size, in_dims, arguments, run_dims=(0, 0, 1, 1, 1))
    return vdbe_walk(*merged).unflatten(0, (info.batch_size, -1)), 0


@wins_walk.register_vmap
def _(info: Any, in_dims: Any, *arguments: Any) -> Any:
    merged = _as_more_runs(info.batch_size, in_dims, arguments, run_dims=(0, 0, 1, 1, 1, 1, 1, 1))
    return wins_walk(*merged).unflatten(0, (info.batch_size, -1)), 0


def _as_more_runs(size: int, in_dims: Any, arguments: Any, run_dims: Any) -> list[Tensor | None]:
    """What vmap maps over, as more runs."""
    merged: list[Tensor | None] = []
    for argument, mapped, runs in zip(arguments, in_dims, run_dims, strict=True):
        if argument is None:
            merged.append(None)
            continue
        if mapped is None:
            argument = argument.unsqueeze(runs)
            argument = argument.expand(*argument.shape[:runs], size, *argument.shape[runs + 1 :])
        else:
            argument = argument.movedim(mapped, runs)
        merged.append(argument.flatten(runs, runs + 1))
    return merged
