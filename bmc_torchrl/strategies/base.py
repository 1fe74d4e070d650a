"""What every source of ε shares: two verbs, and state that lives in buffers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.utils import expand_as_right, expand_right
from torch import Tensor

from bmc_torchrl.precision import KeepsPrecision

__all__ = ["EpsilonStrategy", "gather_state", "per_run_buffer", "state_index", "time_major"]


class EpsilonStrategy(KeepsPrecision, ABC):
    """A source of ε, one value per run.

    :meth:`epsilon` says with which probability to explore now; :meth:`update` learns from a
    transition. Everything a strategy remembers is a buffer of shape ``[*batch_shape]`` (followed by
    ``[num_states]`` where ε depends on the state), written in place, so checkpoints, devices and
    shared memory need no further code. Buffers keep their precision under ``.half()`` and the like.

    A transition has the strategy's batch shape (one step) or more dimensions: those beyond
    `batch_shape` are walked in order, the last one (time) slowest. An update that raises has
    changed nothing.

    Several workers' streams ``[workers, time]`` are so one stream: step by step, and by worker
    within a step. With 8 streams of 1000 steps, another order of the workers changes ε-BMC's ε by
    0.01 %; one worker's whole stream after another's changes it by 1 % where all streams are
    alike, by 55 % where they differ, and by 96 % where returns grow with time.
    """

    in_keys: list[NestedKey]
    """What :meth:`update` reads."""

    state_key: NestedKey | None = None
    """Where :meth:`epsilon` finds the discrete state, if ε depends on it.

    A state out of range is an error, on a GPU an assertion of the device.
    """

    epsilon_key: NestedKey = "epsilon"
    """Where the ε an action was taken with is recorded."""

    needs_update: bool = True
    """Whether ε never changes unless :meth:`update` is called."""

    def __init__(self, batch_shape: Sequence[int] = ()) -> None:
        super().__init__()
        if any(size < 1 for size in batch_shape):
            raise ValueError(f"batch_shape must have positive sizes, got {tuple(batch_shape)}.")
        self.batch_shape = torch.Size(batch_shape)

    @property
    @abstractmethod
    def eps(self) -> Tensor:
        """ε per run, ``[*batch_shape]``, averaged over states where it depends on them."""

    @abstractmethod
    def epsilon(self, tensordict: TensorDictBase) -> Tensor:
        """ε with which to act on `tensordict`, ``[*batch_shape]`` or finer."""

    @abstractmethod
    def update(self, transition: TensorDictBase) -> None:
        """Learn from ``[*batch_shape]`` or ``[*batch_shape, time]`` transitions, in order."""

    def step(self, frames: int) -> None:
        """Anneal by `frames`; only strategies that anneal by frames do anything."""

    def _read(self, transition: TensorDictBase) -> tuple[Any, ...]:
        """All that can go wrong in :meth:`update`: what :meth:`_learn` needs, checked."""
        return (transition,)

    def _learn(self, *columns: Any) -> None:
        """The rest of :meth:`update`, which cannot fail."""
        self.update(*columns)

    def _entry(self, tensordict: TensorDictBase, key: NestedKey, buffer: Tensor) -> Tensor:
        """An entry that must be there, and on the device of the strategy's `buffer`."""
        value: Tensor | None = tensordict.get(key, None)
        if value is None:
            raise KeyError(
                f"{type(self).__name__} needs the key {key!r}, and the tensordict has "
                f"{sorted(map(str, tensordict.keys(True, True)))}. Returns are written by "
                "OneStepReturns: explore.update(returns(transition))."
            )
        if value.device != buffer.device:
            raise ValueError(
                f"{key!r} is on {value.device} but {type(self).__name__} is on {buffer.device}: "
                f"move the strategy with .to({str(value.device)!r})."
            )
        return value

    def _done(self, transition: TensorDictBase, buffer: Tensor) -> Tensor:
        """Where an episode ended, ``[*batch]``."""
        done = self._entry(transition, ("next", "done"), buffer)
        if done.dtype != torch.bool:
            raise TypeError(f"('next', 'done') must be bool, got {done.dtype}.")
        return done.squeeze(-1) if done.ndim > transition.batch_dims else done

    def _state(self, tensordict: TensorDictBase, num_states: int, buffer: Tensor) -> Tensor:
        """The discrete state, ``[*batch]``, or ``[*batch, *agents]`` at a nested key."""
        key, owner = self.state_key, tensordict
        assert key is not None
        value = self._entry(tensordict, key, buffer)
        if isinstance(key, tuple) and len(key) > 1:
            owner = tensordict.get(key[:-1])
        return state_index(value, owner.batch_dims, num_states)

    def _at_state(self, table: Tensor, tensordict: TensorDictBase) -> Tensor:
        """The entries of a table ``[*batch_shape, states]`` at the current states."""
        state = self._state(tensordict, table.shape[-1], table)
        shape = self.batch_shape[: state.ndim]
        if state.shape[: len(shape)] != shape:
            raise ValueError(
                f"The state at {self.state_key!r} has shape {tuple(state.shape)}, which does not "
                f"start with the strategy's batch_shape {tuple(self.batch_shape)}: build the "
                "strategy with the batch shape of the environment, or with batch_shape=() to "
                "share one ε per state."
            )
        if state.ndim < len(self.batch_shape):
            state = expand_right(state, self.batch_shape)
        return gather_state(table, state)

    def _state_left(self, transition: TensorDictBase, num_states: int, like: Tensor) -> Tensor:
        """The state of each transition in the shape of `like`; an error if one is out of range."""
        state: Tensor = expand_as_right(self._state(transition, num_states, like), like)
        torch._assert_async(
            ((state >= 0) & (state < num_states)).all(),
            f"{type(self).__name__}: {self.state_key!r} must be an index from 0 to "
            f"{num_states - 1}; raise num_states= if there are more states.",
        )
        return state

    def _mark_keys(self) -> tuple[NestedKey, ...]:
        """Where :meth:`_taken` looks."""
        return (("collector", "mask"), "mask", self.epsilon_key)

    def _taken(self, transition: TensorDictBase, like: Tensor) -> Tensor:
        """Where a transition is a real one, taken by this policy, in the shape of `like`.

        Padding is marked by ``split_trajectories``' mask, ``("collector", "mask")`` or ``"mask"``;
        frames that a collector took at random before learning carry a recorded ε of exactly zero.
        """
        taken = torch.ones_like(like, dtype=torch.bool)
        for key in self._mark_keys():
            mark = transition.get(key, None)
            # Another "mask" than that of steps, such as one of actions, has more dimensions.
            if mark is not None and (key != "mask" or mark.shape == transition.batch_size):
                mark = mark != 0
                if mark.ndim > like.ndim:
                    mark = mark.flatten(like.ndim).any(-1)
                taken = taken & expand_as_right(mark, like)
        return taken

    def _steps(self, transition: TensorDictBase, value: Tensor) -> Tensor:
        if value.shape == self.batch_shape and transition.batch_size == self.batch_shape:
            return value.unsqueeze(0)
        dims = transition.batch_dims
        timed = value.ndim > dims > 0 and transition.names[-1] == "time"
        return time_major(value, dims, self.batch_shape, timed)

    def extra_repr(self) -> str:
        """The batch shape, beside what the subclass adds."""
        return f"batch_shape={tuple(self.batch_shape)}"


def time_major(
    value: Tensor, batch_dims: int, batch_shape: Sequence[int], timed: bool = False
) -> Tensor:
    """Arrange an entry of a tensordict as ``[steps, *batch_shape]``.

    Dimensions of the tensordict beyond `batch_shape` become steps, the last one (time) slowest.
    Dimensions of the entry beyond the tensordict's (agents) belong to `batch_shape` if it ends
    with them and does not fit the tensordict's own, and are pooled otherwise.

    Args:
        value: ``[*batch, *agents]``.
        batch_dims: number of the tensordict's batch dimensions.
        batch_shape: shape of the strategy.
        timed: whether the tensordict's last dimension is known to be time, never a run.

    >>> time_major(torch.zeros(4, 10), 2, [4]).shape
    torch.Size([10, 4])
    """
    batch_shape = tuple(batch_shape)
    agents = tuple(value.shape[batch_dims:])
    fits = len(batch_shape) <= batch_dims - timed and value.shape[: len(batch_shape)] == batch_shape
    per_agent = not fits and batch_shape[-len(agents) :] == agents if agents else False
    runs = batch_shape[: len(batch_shape) - len(agents)] if per_agent else batch_shape
    if tuple(value.shape[: min(len(runs), batch_dims)]) != runs:
        raise ValueError(
            f"A transition of batch size {tuple(value.shape[:batch_dims])} does not start with the "
            f"strategy's batch_shape {batch_shape}: build the strategy with the batch shape of the "
            "environment, or with batch_shape=() to pool all environments."
        )
    extra = list(range(len(runs), batch_dims))
    order = extra[-1:] + extra[:-1]
    trailing = list(range(batch_dims, value.ndim))
    if per_agent:
        order += list(range(len(runs))) + trailing
    else:
        order += trailing + list(range(len(runs)))
    return value.permute(order).reshape(-1, *batch_shape)


def state_index(value: Tensor, batch_dims: int, num_states: int) -> Tensor:
    """A discrete state as an index, from an index ``[*batch]``, ``[*batch, 1]`` or a one-hot."""
    if value.ndim == batch_dims + 1:
        one_hot = value.shape[-1] == num_states and num_states > 1
        value = value.to(torch.uint8).argmax(-1) if one_hot else value.squeeze(-1)
    if value.is_floating_point() or value.dtype == torch.bool:
        raise TypeError(
            f"A discrete state must be an integer index or a one-hot vector of {num_states}, got "
            f"{value.dtype} of shape {tuple(value.shape)}."
        )
    return value.long()


def gather_state(table: Tensor, state: Tensor) -> Tensor:
    """Entries ``[*batch, *more]`` of a table ``[*batch, states]`` at ``[*batch, *more]`` states."""
    extra = state.ndim - table.ndim + 1
    table = table.reshape(*table.shape[:-1], *([1] * extra), table.shape[-1])
    return table.expand(*state.shape, -1).gather(-1, state.unsqueeze(-1)).squeeze(-1)


def per_run_buffer(
    value: float | Sequence[float] | Tensor,
    batch_shape: Sequence[int],
    name: str,
    check: Callable[[Tensor], Any],
    requirement: str,
) -> Tensor:
    """A float64 parameter, scalar or one per run, checked by `check`."""
    tensor = torch.as_tensor(value, dtype=torch.float64).detach().clone()
    if tensor.ndim and tensor.shape != torch.Size(batch_shape):
        raise ValueError(
            f"{name} must be a number or have the batch_shape {tuple(batch_shape)}, got shape "
            f"{tuple(tensor.shape)}."
        )
    if not bool(torch.as_tensor(check(tensor)).all() & tensor.isfinite().all()):
        raise ValueError(f"{name} must be {requirement}, got {value}.")
    return tensor
