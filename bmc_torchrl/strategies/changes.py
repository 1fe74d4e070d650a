"""When a task seems to have changed: episodes return less than they used to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from bmc_torchrl.functional import PageHinkley, page_hinkley_update
from bmc_torchrl.precision import KeepsPrecision
from bmc_torchrl.strategies.base import has_time, time_major

__all__ = ["ChangeDetector"]


class ChangeDetector(KeepsPrecision):
    r"""Page–Hinkley's test for a fall of the episodes' returns, one per run.

    It fires where the sum of :func:`~bmc_torchrl.functional.page_hinkley_update` is more than
    `threshold` below its peak, and starts anew there. What to do then is yours: ``explore.strategy
    .reset(runs=fired)`` or ``.forget(0.5, runs=fired)``; in Lightning
    :class:`~bmc_torchrl.training.ForgetOnChange` does it. Everything is measured in standard
    deviations of the returns so far, so that no unit of reward matters. Returns that are not finite
    are passed over. To look for rises, give it the negative returns.

    Args:
        threshold (float, optional): by how many standard deviations the sum must fall. With the
            tolerance of ½, independent normal returns give a false alarm about every 1000 episodes
            at 5, every 18,000 at 8, and hardly ever at 10. Default: 10.
        tolerance (float, optional): by how many the mean may fall unnoticed. Default: 0.5.
        least_episodes (int, optional): how many to see before it may fire. Default: 30.
        batch_shape (sequence of int, optional): shape of the runs, the strategy's; ``()`` pools all
            environments. Default: ``()``.

    Examples:
        >>> detector = ChangeDetector()
        >>> returns = 8 * [10.0, 11.0, 12.0, 11.0] + 4 * [2.0]
        >>> [bool(detector.observe(torch.tensor(x))) for x in returns][-4:]
        [False, False, True, False]
    """

    def __init__(
        self,
        threshold: float = 10.0,
        tolerance: float = 0.5,
        least_episodes: int = 30,
        *,
        batch_shape: Sequence[int] = (),
    ) -> None:
        super().__init__()
        if not 0 < threshold < float("inf"):
            raise ValueError(f"threshold must be positive and finite, got {threshold}.")
        if not 0 <= tolerance < float("inf"):
            raise ValueError(f"tolerance must be finite and not negative, got {tolerance}.")
        if least_episodes < 2:
            raise ValueError(
                f"least_episodes must be at least 2, got {least_episodes}: one has no deviation."
            )
        self.threshold, self.tolerance = threshold, tolerance
        self.least_episodes, self.batch_shape = least_episodes, torch.Size(batch_shape)
        for name in PageHinkley._fields:
            self.register_buffer(name, torch.zeros(self.batch_shape, dtype=torch.float64))
        self.changes: Tensor
        self.register_buffer("changes", torch.zeros(self.batch_shape, dtype=torch.int64))

    def _state(self) -> PageHinkley:
        return PageHinkley(*(getattr(self, name) for name in PageHinkley._fields))

    @torch.no_grad()
    def observe(self, returns: Tensor, ended: Tensor | None = None) -> Tensor:
        """Account for one episode of each run.

        Args:
            returns (Tensor): of the episodes that ended, ``[*batch_shape]``.
            ended (Tensor, optional): bool ``[*batch_shape]``, False where none did.
                Default: everywhere.

        Returns:
            bool ``[*batch_shape]``, True where it fires.
        """
        taken = returns.isfinite()
        if ended is not None:
            taken = taken & ended
        before = self._state()
        after = page_hinkley_update(before, returns.double(), self.tolerance, taken)
        enough = after.num >= self.least_episodes
        fired = taken & enough & (after.fall > self.threshold)
        for buffer, value in zip(before, after, strict=True):
            buffer.copy_(torch.where(fired, 0.0, value))
        self.changes.add_(fired)
        return fired

    def update(
        self,
        transition: TensorDictBase,
        *,
        return_key: NestedKey = ("next", "episode_reward"),
        done_key: NestedKey = ("next", "done"),
    ) -> Tensor:
        """Account for the episodes that end in collected data, in order.

        Args:
            transition (TensorDictBase): ``[*batch_shape]``, or with more dimensions such as time.
            return_key (NestedKey, optional): where the rewards since the episode began are summed,
                as ``RewardSum`` does. Default: ``("next", "episode_reward")``.
            done_key (NestedKey, optional): where episodes end. Default: ``("next", "done")``.

        Returns:
            bool ``[*batch_shape]``, True where it fired.
        """
        found = [transition.get(key, None) for key in (return_key, done_key)]
        if found[0] is None or found[1] is None:
            raise KeyError(
                f"ChangeDetector needs {return_key!r} and {done_key!r}: append RewardSum() to the "
                "environment, or pass return_key= and done_key=."
            )
        dims, timed = transition.batch_dims, has_time(transition)
        returns, done = (
            time_major(x.squeeze(-1) if x.ndim > dims else x, dims, self.batch_shape, timed)
            for x in found
        )
        fired = torch.zeros_like(self.changes, dtype=torch.bool)
        for now, ended in zip(returns.unbind(0), done.unbind(0), strict=True):
            fired |= self.observe(now, ended)
        return fired

    def extra_repr(self) -> str:
        """The settings."""
        least = f"least_episodes={self.least_episodes}"
        return f"threshold={self.threshold:g}, tolerance={self.tolerance:g}, {least}"
