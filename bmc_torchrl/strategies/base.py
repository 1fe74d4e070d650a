"""What every source of ε shares: two verbs, and state that lives in buffers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.utils import expand_as_right, expand_right
from torch import Tensor

from bmc_torchrl.precision import KeepsPrecision, PerRun, per_run, require_run_shape, shown
from bmc_torchrl.strategies.scalar import NoScalarFormError, ScalarForm

__all__ = [
    "LEAST_EPSILON",
    "PADDING_KEYS",
    "EpsilonStrategy",
    "epsilon_used",
    "gather_state",
    "has_time",
    "per_run_buffer",
    "skipped_by_rule",
    "skipped_metrics",
    "state_index",
    "taken_with",
    "time_major",
]

PADDING_KEYS: tuple[NestedKey, ...] = (("collector", "mask"), "mask")
"""Where ``split_trajectories`` and the trainers mark what is a real step and what is padding."""

LEAST_EPSILON = torch.finfo(torch.float32).tiny
"""The least ε that is recorded: zero says that the policy did not take the action."""

Runs = Tensor | slice | Sequence[int] | Sequence[bool]
"""Some of the runs."""

SKIPPED = ("mask", "foreign", "nonfinite")
"""Why a frame is left out: a mask says that it is padding or of a run that has finished; this
policy did not take it; or what was to be learned from it is not finite. Each has one cause, the
first that applies."""

# The only check that neither makes the host wait for the device nor breaks a compiled graph. It is
# not public; without it, the host waits.
_assert_async: Callable[[Tensor, str], None] | None = getattr(torch, "_assert_async", None)


class EpsilonStrategy(KeepsPrecision, ABC):
    """A source of ε, one value per run.

    :meth:`epsilon` says with which probability to explore now; :meth:`update` learns from a
    transition. Everything a strategy remembers is a buffer of shape ``[*batch_shape]`` (followed by
    ``[num_states]`` where ε depends on the state), written in place, so checkpoints, devices and
    shared memory need no further code. Buffers keep their precision under ``.half()`` and the like.

    A subclass defines :attr:`eps`; :meth:`epsilon`, if ε depends on more than the run; and, if it
    learns, :attr:`in_keys`, :meth:`read` (all that can go wrong) and :meth:`learn` (all that
    changes), so that an update that raises has changed nothing. For the numba engine it defines
    :meth:`scalars` and, if it learns, :meth:`load_scalars`. To have frames counted that are left
    out, it calls :meth:`register_skipped` and defines :meth:`learned_from`. If what it learns is
    about a task, which may change, it defines :meth:`reset` and :meth:`forget`.

    A transition has the strategy's batch shape (one step) or more dimensions: those beyond
    `batch_shape` are walked in order, time slowest. Time is the dimension that TorchRL named
    ``"time"``, as collectors and rollouts do, and the last one if there are no names.

    Several workers' streams ``[workers, time]`` make one stream: step by step, and by worker
    within a step. With 8 streams of 1000 steps, another order of the workers changes ε-BMC's ε by
    0.01 %; one worker's whole stream after another's changes it by 1 % where all streams are
    alike, by 55 % where they differ, and by 96 % where returns grow with time.

    Args:
        batch_shape (sequence of int, optional): shape of the runs; ``()`` is one ε for all
            environments. Default: ``()``.

    Examples:
        >>> class Halving(EpsilonStrategy):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.register_buffer("value", torch.ones(()))
        ...
        ...     @property
        ...     def eps(self):
        ...         return self.value
        ...
        ...     def learn(self):
        ...         self.value /= 2
        >>> from tensordict import TensorDict
        >>> strategy = Halving()
        >>> strategy.update(TensorDict())
        >>> strategy
        Halving(eps=0.5, batch_shape=())
    """

    in_keys: list[NestedKey] = []  # noqa: RUF012
    """What :meth:`update` reads. Every strategy has a list of its own."""

    state_key: NestedKey | None = None
    """Where :meth:`epsilon` finds the discrete state, if ε depends on it.

    A state out of range is an error, on a GPU an assertion of the device.
    """

    def __init__(self, batch_shape: Sequence[int] = ()) -> None:
        super().__init__()
        if any(size < 1 for size in batch_shape):
            raise ValueError(f"batch_shape must have positive sizes, got {tuple(batch_shape)}.")
        self.batch_shape = torch.Size(batch_shape)
        self.in_keys = list(self.in_keys)

    @property
    @abstractmethod
    def eps(self) -> Tensor:
        """ε per run, ``[*batch_shape]``, averaged over states where it depends on them."""

    @property
    def needs_update(self) -> bool:
        """Whether ε never changes unless :meth:`update` is called."""
        return type(self).learn is not EpsilonStrategy.learn

    @property
    def waits(self) -> bool:
        """Whether ε moves only where an episode ends."""
        return False

    @property
    def learned(self) -> Tensor | None:
        """How many frames have taught it, ``[*batch_shape]``; None if that is not counted."""
        return None

    @property
    def skipped(self) -> dict[str, Tensor]:
        """How many frames were left out, by the causes in ``SKIPPED`` that it counts."""
        found = ((cause, getattr(self, f"skipped_{cause}", None)) for cause in SKIPPED)
        return {cause: count for cause, count in found if count is not None}

    def epsilon(self, tensordict: TensorDictBase) -> Tensor:
        """ε to act with, that of the run unless a subclass says more.

        Args:
            tensordict (TensorDictBase): what is acted on.

        Returns:
            ``[*batch_shape]`` or finer.
        """
        return self.eps

    def update(
        self,
        transition: TensorDictBase,
        taken: Tensor | None = None,
        *,
        mask_keys: Sequence[NestedKey] = PADDING_KEYS,
    ) -> None:
        """Learn from transitions, in order; if this raises, nothing has changed.

        Args:
            transition (TensorDictBase): ``[*batch_shape]``, or with more dimensions such as time.
            taken (Tensor, optional): where the policy took the action, of the transition's batch
                size, or with the agents' dimensions beyond. What it did not take, and what is
                padding, teaches nothing. Default: everywhere.
            mask_keys (sequence of NestedKey, optional): where bool entries of the transition's
                batch size say what is a real step and what is padding; ``()`` for nowhere.
                Default: where TorchRL's collectors and ``split_trajectories`` do.
        """
        if taken is not None:
            taken = _checked_mark(transition, taken)
        if transition.batch_dims > 1:
            transition, taken = _time_last(transition, taken)
        real = _real_steps(transition, mask_keys)
        self.learn(*self.read(transition, _both(taken, real)))
        if taken is not None or real is not None:
            self.count_skipped(transition, taken, real)

    def read(self, transition: TensorDictBase, taken: Tensor | None) -> tuple[Any, ...]:
        """The first half of :meth:`update`: read and check, and change nothing.

        Args:
            transition (TensorDictBase): the transitions, time their last dimension.
            taken (Tensor, optional): where to learn, or None for everywhere.

        Returns:
            What :meth:`learn` needs.
        """
        return ()

    def learn(self, *columns: Any) -> None:
        """The second half of :meth:`update`, which cannot fail.

        Args:
            *columns (Any): what :meth:`read` returned.
        """

    def learned_from(self, transition: TensorDictBase) -> Tensor | None:
        """The entry that has one value per frame (and agent) that may teach.

        Args:
            transition (TensorDictBase): ``[*batch]``.

        Returns:
            ``[*batch]`` or ``[*batch, *agents]``; None if frames that are left out are not counted.
        """
        return None

    def register_skipped(self, *causes: str) -> None:
        """Count the frames that are left out, by cause.

        Args:
            *causes (str): of ``SKIPPED``.
        """
        for cause in causes:
            count = torch.zeros(self.batch_shape, dtype=torch.int64)
            self.register_buffer(f"skipped_{cause}", count)

    def count_skipped(
        self,
        transition: TensorDictBase,
        taken: Tensor | None,
        real: Tensor | None,
        runs: slice | None = None,
    ) -> None:
        """Count what a mark or a mask leaves out.

        Args:
            transition (TensorDictBase): the transitions, time their last dimension.
            taken (Tensor, optional): where the policy took the action.
            real (Tensor, optional): where there is no padding.
            runs (slice, optional): which of the transition's runs are the strategy's.
                Default: all.
        """
        like = self.learned_from(transition)
        if like is None:
            return
        if real is not None:
            real = self.mark_like(real, like)
            self._skip("mask", transition, ~real, runs)
        if taken is not None:
            foreign = ~self.mark_like(taken, like)
            self._skip("foreign", transition, foreign if real is None else foreign & real, runs)

    def _skip(
        self, cause: str, transition: TensorDictBase, where: Tensor, runs: slice | None
    ) -> None:
        where, timed = where if runs is None else where[runs], has_time(transition)
        if where.shape != self.batch_shape or where.ndim != transition.batch_dims or timed:
            where = time_major(where, transition.batch_dims, self.batch_shape, timed).sum(0)
        getattr(self, f"skipped_{cause}").add_(where)

    def diagnostics(self) -> dict[str, Tensor]:
        """What is worth logging beside ε, by metric name.

        Returns:
            ``[*batch_shape]`` each; nothing, unless a subclass says more.
        """
        return {}

    def parts(self) -> Iterator[tuple[EpsilonStrategy, slice]]:
        """The strategies that this one is made of, each with its runs.

        Returns:
            Itself with all runs, unless a subclass says more.
        """
        yield self, slice(0, self.batch_shape[0] if self.batch_shape else 1)

    def scalars(self) -> ScalarForm:
        """The strategy as plain functions, with what it remembers now; for the numba engine.

        Returns:
            They hold for the class that defines this method, not for a subclass that redefines
            what it learns or how.
        """
        raise NoScalarFormError(f"{type(self).__name__} has no scalars() of its own.")

    def load_scalars(self, memory: Tensor, local: Tensor | None) -> None:
        """Take over what the functions of :meth:`scalars` have learned; nothing by default.

        Args:
            memory (Tensor): ``[runs, columns]``, perhaps more columns than :meth:`scalars` gave.
            local (Tensor, optional): ``[runs, states]``, if :meth:`scalars` gave it.
        """

    @staticmethod
    def scalar_diagnostics(memory: Tensor) -> dict[str, Tensor]:
        """What :meth:`diagnostics` would say, from the memory of :meth:`scalars`.

        Args:
            memory (Tensor): ``[*batch, columns]``.

        Returns:
            ``[*batch]`` each; nothing, unless a subclass says more.
        """
        return {}

    def step(self, frames: int) -> None:
        """Anneal by frames; only strategies that anneal by frames do anything.

        Args:
            frames (int): how many.
        """

    def reset(self, *, strength: PerRun | None = None, runs: Runs | None = None) -> None:
        """Unlearn everything, for a new task: back to what it was built with, in place.

        A schedule follows the clock, not a task: it has nothing to unlearn, and stays as it is.
        What counts frames that were left out goes on.

        Args:
            strength (float, sequence of float or Tensor, optional): α + β to begin with instead, at
                the prior's mean, a number or one per run; a strategy without a posterior ignores
                it. Default: the prior's.
            runs (Tensor, slice or sequence of int, optional): which runs, a mask of the batch shape
                or indices of its first dimension. Default: all.
        """

    def forget(self, rate: PerRun, *, runs: Runs | None = None) -> None:
        """Unlearn a share of what was learned; see :func:`~bmc_torchrl.functional.forgotten`.

        ε moves towards the prior's mean, by as much as the prior weighs in what is left. Were the
        mean kept, an ε near 0 would stay there at any strength: ε-BMC's never rises (Theorem 1).

        Args:
            rate (float, sequence of float or Tensor): which share, a number or one per run: 0 for
                nothing, 1 for everything, as :meth:`reset` does.
            runs (Tensor, slice or sequence of int, optional): as in :meth:`reset`.
        """

    def chosen_runs(self, runs: Runs | None, buffer: Tensor) -> Tensor:
        """The runs that somebody means, as a mask.

        Args:
            runs (Tensor, slice or sequence of int, optional): a mask of the batch shape, or indices
                of its first dimension; None for all.
            buffer (Tensor): a buffer of the strategy, which says where the mask should be.

        Returns:
            bool ``[*batch_shape]``.
        """
        if runs is None:
            return torch.ones(self.batch_shape, dtype=torch.bool, device=buffer.device)
        if not isinstance(runs, slice):
            runs = torch.as_tensor(runs, device=buffer.device)
            if runs.dtype == torch.bool and runs.shape == self.batch_shape:
                return runs
            if not self.batch_shape or runs.is_floating_point() or runs.dtype == torch.bool:
                raise ValueError(
                    f"runs must be a bool mask of the batch_shape {tuple(self.batch_shape)} or "
                    f"indices of its first dimension, got {runs.dtype} of shape "
                    f"{tuple(runs.shape)}: leave it out to mean all."
                )
        mask = torch.zeros(self.batch_shape, dtype=torch.bool, device=buffer.device)
        mask[runs] = True
        return mask

    def forgetting_rate(self, rate: PerRun, runs: Runs | None, buffer: Tensor) -> Tensor:
        """Which share each run is to forget.

        Args:
            rate (float, sequence of float or Tensor): that of :meth:`forget`.
            runs (Tensor, slice or sequence of int, optional): likewise.
            buffer (Tensor): a buffer of the strategy, which says where it should be.

        Returns:
            float64 ``[*batch_shape]``, 0 for the other runs.
        """
        bounds = "between 0 and 1"
        share = per_run_buffer(
            rate, self.batch_shape, "rate", lambda x: (x >= 0) & (x <= 1), bounds
        )
        return torch.where(self.chosen_runs(runs, buffer), share.to(buffer.device), 0.0)

    def positive(self, value: PerRun, name: str, buffer: Tensor | None = None) -> Tensor:
        """An argument that must be positive and finite, a number or one per run.

        Args:
            value (float, sequence of float or Tensor): what was given.
            name (str): of the argument.
            buffer (Tensor, optional): a buffer of the strategy, which says where it should be.

        Returns:
            float64 ``[]`` or ``[*batch_shape]``.
        """
        found = per_run_buffer(
            value, self.batch_shape, name, lambda x: x > 0, "positive and finite"
        )
        return found if buffer is None else found.to(buffer.device)

    def number(self, transition: TensorDictBase, key: NestedKey, buffer: Tensor) -> Tensor:
        """An entry of a transition that must be there and hold floating-point numbers.

        Args:
            transition (TensorDictBase): where to look.
            key (NestedKey): its name.
            buffer (Tensor): a buffer of the strategy, which says where it should be.

        Returns:
            It, as float64.
        """
        value = self.entry(transition, key, buffer)
        if not value.is_floating_point():
            raise TypeError(f"{key!r} must be floating point, got {value.dtype}.")
        if value.ndim < transition.batch_dims:
            raise ValueError(
                f"{key!r} has shape {tuple(value.shape)}, less than the transition's batch size "
                f"{tuple(transition.batch_size)}."
            )
        return value.double()

    def entry(self, tensordict: TensorDictBase, key: NestedKey, buffer: Tensor) -> Tensor:
        """An entry that must be there, and on the device of the strategy.

        Args:
            tensordict (TensorDictBase): where to look.
            key (NestedKey): what for.
            buffer (Tensor): a buffer of the strategy, which says where that is.

        Returns:
            The entry.
        """
        value: Tensor | None = tensordict.get(key, None)
        if value is None:
            remedy = (
                "It is a discrete state: pass state_key=, or leave out num_states= for one ε."
                if key == self.state_key
                else "Returns are written by OneStepReturns: explore.update(returns(transition)); "
                "with values=True it also writes the values of the state being left."
            )
            raise KeyError(
                f"{type(self).__name__} needs the key {key!r}, and the tensordict has "
                f"{sorted(map(str, tensordict.keys(True, True)))}. {remedy}"
            )
        if value.device != buffer.device:
            raise ValueError(
                f"{key!r} is on {value.device} but {type(self).__name__} is on {buffer.device}: "
                f"move the strategy with .to({str(value.device)!r})."
            )
        return value

    def mark_like(self, taken: Tensor | None, like: Tensor) -> Tensor:
        """The mark that :meth:`read` is given, in the shape of an entry.

        Args:
            taken (Tensor, optional): ``[*batch]`` or ``[*batch, *agents]``.
            like (Tensor): the entry, ``[*batch]`` or ``[*batch, *agents]``.

        Returns:
            bool, True where to learn. An entry for all agents counts if one of them acted.
        """
        if taken is None:
            return torch.ones_like(like, dtype=torch.bool)
        if taken.ndim > like.ndim:
            taken = taken.flatten(like.ndim).any(-1)
        spread: Tensor = expand_as_right(taken, like)
        return spread

    def steps(self, transition: TensorDictBase, value: Tensor) -> Tensor:
        """An entry of a transition, one step after the other.

        Args:
            transition (TensorDictBase): ``[*batch]``.
            value (Tensor): ``[*batch]`` or ``[*batch, *agents]``.

        Returns:
            ``[steps, *batch_shape]``; see :func:`time_major`.
        """
        timed = has_time(transition)
        if value.shape == self.batch_shape == transition.batch_size and not timed:
            return value.unsqueeze(0)
        return time_major(value, transition.batch_dims, self.batch_shape, timed)

    def _done(self, transition: TensorDictBase, buffer: Tensor) -> Tensor:
        """Where an episode ended, ``[*batch]``."""
        done = self.entry(transition, ("next", "done"), buffer)
        if done.dtype != torch.bool:
            raise TypeError(f"('next', 'done') must be bool, got {done.dtype}.")
        return done.squeeze(-1) if done.ndim > transition.batch_dims else done

    def _state(self, tensordict: TensorDictBase, num_states: int, buffer: Tensor) -> Tensor:
        """The discrete state, ``[*batch]``, or ``[*batch, *agents]`` at a nested key."""
        key, owner = self.state_key, tensordict
        assert key is not None
        value = self.entry(tensordict, key, buffer)
        if isinstance(key, tuple) and len(key) > 1:
            owner = tensordict.get(key[:-1])
        return state_index(value, owner.batch_dims, num_states, key)

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
        if torch.compiler.is_compiling():
            return gather_state(table, state)
        try:
            return gather_state(table, state)
        except RuntimeError as error:
            raise RuntimeError(self._out_of_range(table.shape[-1])) from error

    def _out_of_range(self, num_states: int) -> str:
        return (
            f"{type(self).__name__}: {self.state_key!r} must be an index from 0 to "
            f"{num_states - 1}; raise num_states= if there are more states, or pass state_key= if "
            "the state is elsewhere."
        )

    def _state_left(self, transition: TensorDictBase, num_states: int, like: Tensor) -> Tensor:
        """The state of each transition in the shape of `like`; an error if one is out of range."""
        state: Tensor = expand_as_right(self._state(transition, num_states, like), like)
        _require(((state >= 0) & (state < num_states)).all(), self._out_of_range(num_states))
        return state

    def extra_repr(self) -> str:
        """ε and the batch shape, beside what the subclass adds."""
        return f"eps={shown(self.eps)}, batch_shape={tuple(self.batch_shape)}"


def skipped_metrics(mask: Tensor, foreign: Tensor, nonfinite: Tensor) -> dict[str, Tensor]:
    """How many frames were left out, by the metric of each cause in ``SKIPPED``.

    Args:
        mask (Tensor): ``[*batch]``.
        foreign (Tensor): ``[*batch]``.
        nonfinite (Tensor): ``[*batch]``.

    Returns:
        ``[*batch]`` each.
    """
    counts = (mask, foreign, nonfinite)
    return {f"skipped/{cause}": count for cause, count in zip(SKIPPED, counts, strict=True)}


def skipped_by_rule(nonfinite: Tensor) -> dict[str, Tensor]:
    """:func:`skipped_metrics` of engines of rules, which mask nothing and meet no other policy.

    Args:
        nonfinite (Tensor): ``[*batch]``.

    Returns:
        ``[*batch]`` each.
    """
    return skipped_metrics(nonfinite * 0, nonfinite * 0, nonfinite)


def has_time(transition: TensorDictBase) -> bool:
    """Whether the last dimension is known to be time, and so cannot be that of a run.

    One step of time may be a run's: an unbatched environment's collector has no other dimension.

    Args:
        transition (TensorDictBase): ``[*batch]``.

    Returns:
        Whether it is named ``"time"`` and longer than one step.

    Examples:
        >>> from tensordict import TensorDict
        >>> has_time(TensorDict(batch_size=[3, 5], names=[None, "time"]))
        True
    """
    size: torch.Size = transition.batch_size
    return len(size) > 0 and size[-1] > 1 and transition.names[-1] == "time"


def time_major(
    value: Tensor, batch_dims: int, batch_shape: Sequence[int], timed: bool = False
) -> Tensor:
    """Arrange an entry of a tensordict as ``[steps, *batch_shape]``.

    Dimensions of the tensordict beyond `batch_shape` become steps, the last one (time) slowest.
    Dimensions of the entry beyond the tensordict's (agents) belong to `batch_shape` if it ends
    with them and does not fit the tensordict's own, and are pooled otherwise.

    Args:
        value (Tensor): ``[*batch, *agents]``.
        batch_dims (int): number of the tensordict's batch dimensions.
        batch_shape (sequence of int): shape of the strategy.
        timed (bool, optional): whether the tensordict's last dimension is known to be time, never a
            run. Default: False.

    Returns:
        ``[steps, *batch_shape]``.

    Examples:
        >>> time_major(torch.zeros(4, 10), 2, [4]).shape
        torch.Size([10, 4])
    """
    batch_shape = tuple(batch_shape)
    agents, run_dims = tuple(value.shape[batch_dims:]), batch_dims - timed
    fits = len(batch_shape) <= run_dims and value.shape[: len(batch_shape)] == batch_shape
    per_agent = not fits and batch_shape[-len(agents) :] == agents if agents else False
    runs = batch_shape[: len(batch_shape) - len(agents)] if per_agent else batch_shape
    if tuple(value.shape[: min(len(runs), run_dims)]) != runs:
        raise ValueError(
            f"A transition of batch size {tuple(value.shape[:batch_dims])}"
            f"{', the last dimension being time,' if timed else ''} does not start with the "
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


def state_index(
    value: Tensor, batch_dims: int, num_states: int, key: NestedKey = "state"
) -> Tensor:
    """A discrete state as an index.

    Args:
        value (Tensor): an index ``[*batch]`` or ``[*batch, 1]``, or a one-hot vector of bools or
            integers. Numbers with a fraction are neither.
        batch_dims (int): number of batch dimensions.
        num_states (int): how many states there are.
        key (NestedKey, optional): where it was found, for the error. Default: ``"state"``.

    Returns:
        int64 ``[*batch]``.

    Examples:
        >>> state_index(torch.tensor([[0, 0, 1], [1, 0, 0]]), 1, 3)
        tensor([2, 0])
    """
    wanted = (
        f"The state at {key!r} must be an integer index or a one-hot vector of num_states="
        f"{num_states} bools or integers, got {value.dtype} of shape {tuple(value.shape)}"
    )
    remedy = "pass state_key= if the discrete state is elsewhere, or another num_states=."
    vector = value.ndim == batch_dims + 1
    one_hot = vector and value.shape[-1] == num_states and num_states > 1
    if value.is_floating_point() or (value.dtype == torch.bool and not one_hot):
        raise TypeError(f"{wanted}: {remedy}")
    if one_hot:
        _require(
            (((value == 0) | (value == 1)).all(-1) & (value.sum(-1) == 1)).all(),
            f"{wanted} that has not a single 1: {remedy}",
        )
        value = value.to(torch.uint8).argmax(-1)
    return (value.squeeze(-1) if vector and not one_hot else value).long()


def gather_state(table: Tensor, state: Tensor) -> Tensor:
    """Entries of a table at some states.

    Args:
        table (Tensor): ``[*batch, states]``.
        state (Tensor): int64 ``[*batch, *more]``.

    Returns:
        ``[*batch, *more]``.

    Examples:
        >>> gather_state(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1, 0]))
        tensor([2., 3.])
    """
    extra = state.ndim - table.ndim + 1
    table = table.reshape(*table.shape[:-1], *([1] * extra), table.shape[-1])
    return table.expand(*state.shape, -1).gather(-1, state.unsqueeze(-1)).squeeze(-1)


def per_run_buffer(
    value: PerRun,
    batch_shape: Sequence[int],
    name: str,
    check: Callable[[Tensor], Any],
    requirement: str,
) -> Tensor:
    """A float64 parameter, a number or one per run, checked.

    Args:
        value (float, sequence of float or Tensor): what the user gave.
        batch_shape (sequence of int): shape of the runs.
        name (str): what the user calls it.
        check (callable): says where a tensor's values are allowed.
        requirement (str): `check` in words.

    Returns:
        float64, a number or ``[*batch_shape]``.

    Examples:
        >>> per_run_buffer([0.1, 0.2], [2], "rate", lambda x: x > 0, "positive")
        tensor([0.1000, 0.2000], dtype=torch.float64)
    """
    tensor = per_run(value, name, check, requirement)
    require_run_shape(tensor, batch_shape, name)
    return tensor


def taken_with(transition: TensorDictBase, epsilon_key: NestedKey) -> Tensor | None:
    """Where a policy took the action, which the ε that it recorded says.

    Args:
        transition (TensorDictBase): ``[*batch]``.
        epsilon_key (NestedKey): where ε is.

    Returns:
        bool ``[*batch]`` or ``[*batch, *agents]``, False where ε is zero: the frames that a
        collector draws at random, or in which the policy acts greedily. None if there is no ε.

    Examples:
        >>> from tensordict import TensorDict
        >>> taken_with(TensorDict({"epsilon": torch.tensor([0.0, 0.5])}, [2]), "epsilon")
        tensor([False,  True])
    """
    epsilon = transition.get(epsilon_key, None)
    if epsilon is None:
        return None
    if not (isinstance(epsilon, Tensor) and epsilon.is_floating_point()):
        kind = epsilon.dtype if isinstance(epsilon, Tensor) else type(epsilon).__name__
        raise TypeError(
            f"{epsilon_key!r} must be the ε that actions were taken with, a floating point tensor, "
            f"got {kind}: if it is an entry of yours that means something else, pass epsilon_key=."
        )
    return epsilon > 0


def epsilon_used(recorded: Tensor) -> Tensor:
    """The ε that was used, where another may be recorded; see :data:`LEAST_EPSILON`.

    Args:
        recorded (Tensor): ``[*batch]``.

    Returns:
        ``[*batch]``.

    Examples:
        >>> epsilon_used(torch.tensor([LEAST_EPSILON, 0.5]))
        tensor([0.0000, 0.5000])
    """
    return torch.where(recorded > LEAST_EPSILON, recorded, 0.0)


def _checked_mark(transition: TensorDictBase, taken: Tensor) -> Tensor:
    """`taken` as bool ``[*batch]`` or ``[*batch, *agents]``."""
    if taken.shape[: transition.batch_dims] != transition.batch_size:
        raise ValueError(
            f"taken has shape {tuple(taken.shape)}, which does not start with the transition's "
            f"batch size {tuple(transition.batch_size)}: mark every step."
        )
    if taken.dtype != torch.bool:
        raise TypeError(
            f"taken must be bool, True where the policy took the action, got {taken.dtype}."
        )
    return taken


def _time_last(
    transition: TensorDictBase, taken: Tensor | None
) -> tuple[TensorDictBase, Tensor | None]:
    """Both with the dimension named ``"time"`` behind the other batch dimensions."""
    last = transition.batch_dims - 1
    if "time" not in transition.names[:last]:
        return transition, taken
    time = transition.names.index("time")
    order = [dim for dim in range(last + 1) if dim != time]
    return transition.permute(*order, time), None if taken is None else taken.movedim(time, last)


def _real_steps(transition: TensorDictBase, mask_keys: Sequence[NestedKey]) -> Tensor | None:
    """Where masks say that there is no padding, bool ``[*batch]``; None if there is no mask."""
    found: Tensor | None = None
    for key in mask_keys:
        real = _mask_at(transition, key)
        if real is not None:
            found = real if found is None else found & real
    return found


def _mask_at(transition: TensorDictBase, key: NestedKey) -> Tensor | None:
    refused = "pass mask_keys= with the places of the masks of real steps, or () for none."
    try:
        real: Tensor | None = transition.get(key, None)
    except ValueError as error:
        raise TypeError(
            f"There cannot be a mask at {key!r}, {key[0]!r} is a tensor: {refused}"
        ) from error
    size, dims = transition.batch_size, transition.batch_dims
    if real is None:
        if key in PADDING_KEYS:
            return None
        raise KeyError(f"No mask at {key!r}: {refused}")
    # Another "mask" than that of steps, such as one of actions, has more dimensions.
    if key == "mask" and isinstance(real, Tensor) and real.shape[dims:].numel() > 1:
        return None
    if not isinstance(real, Tensor) or real.dtype != torch.bool or real.shape[:dims] != size:
        kind = real.dtype if isinstance(real, Tensor) else type(real).__name__
        raise TypeError(
            f"{key!r} is read as a mask of real steps, bool of shape {tuple(size)}, and is {kind} "
            f"of shape {tuple(real.shape)}. If it means something else, {refused}"
        )
    return real.flatten(dims).any(-1) if real.ndim > dims else real


def _both(taken: Tensor | None, real: Tensor | None) -> Tensor | None:
    if taken is None or real is None:
        return real if taken is None else taken
    both: Tensor = taken & expand_as_right(real, taken)
    return both


def _require(condition: Tensor, message: str) -> None:
    """Raise a RuntimeError unless `condition` holds; a GPU raises it when it gets there."""
    if _assert_async is not None:
        _assert_async(condition, message)
    elif not bool(condition):
        raise RuntimeError(message)
