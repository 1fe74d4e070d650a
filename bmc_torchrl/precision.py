"""The numbers of a run: checked, kept in float64 whatever the model is cast to, and shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

__all__ = ["KeepsPrecision", "PerRun", "per_run", "require_run_shape", "shown"]

PerRun = float | Sequence[float] | Tensor
"""A number, or one for each run."""


class KeepsPrecision(nn.Module):
    """A module that moves between devices, but whose buffers ``.half()`` and the like leave alone.

    Which buffers those are is said by :meth:`keeps`: all of them, unless a subclass knows better.

    Examples:
        >>> module = KeepsPrecision()
        >>> module.register_buffer("count", torch.zeros((), dtype=torch.float64))
        >>> module.half().count.dtype
        torch.float64
    """

    def keeps(self, name: str, buffer: Tensor) -> bool:
        """Whether a buffer's precision is kept.

        Args:
            name (str): the buffer's name.
            buffer (Tensor): the buffer.

        Returns:
            True: every buffer's is.
        """
        return True

    # What ``.to()``, ``.half()`` and ``.cuda()`` do to a module has no public hook: all of them
    # call this method. If that changed, the numbers would be cast with the model around them.
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, moved in list(self.named_buffers(recurse=False)):
            buffer = before[name]
            if moved.dtype != buffer.dtype and self.keeps(name, buffer):
                setattr(self, name, buffer.to(moved.device))
        return self


def per_run(value: PerRun, name: str, check: Callable[[Tensor], Any], requirement: str) -> Tensor:
    """A parameter in float64, a number or one per run.

    Args:
        value (float, sequence of float or Tensor): what the user gave.
        name (str): what the user calls it.
        check (callable): says where a tensor's values are allowed; they must be finite anyway.
        requirement (str): `check` in words.

    Returns:
        A copy of `value` in float64.

    Examples:
        >>> per_run(0.5, "rate", lambda x: x <= 1, "at most 1")
        tensor(0.5000, dtype=torch.float64)
    """
    tensor = torch.as_tensor(value, dtype=torch.float64).detach().clone()
    if not bool(torch.as_tensor(check(tensor)).all() & tensor.isfinite().all()):
        raise ValueError(f"{name} must be {requirement}, got {value}.")
    return tensor


def require_run_shape(value: Tensor, batch_shape: Sequence[int], name: str) -> None:
    """Raise unless `value` is a number or one per run.

    Args:
        value (Tensor): the values.
        batch_shape (sequence of int): shape of the runs.
        name (str): what the user calls the value.

    Examples:
        >>> require_run_shape(torch.zeros(3), [3], "rate")
    """
    if value.ndim and value.shape != torch.Size(batch_shape):
        raise ValueError(
            f"{name} must be a number or have the batch_shape {tuple(batch_shape)}, got shape "
            f"{tuple(value.shape)}."
        )


def shown(value: Tensor) -> str:
    """A few words for a ``repr``: the number, or the range of many.

    On an accelerator this waits for the device, as every ``repr`` of a tensor does. A tensor
    without numbers, as compilers use, is shown by its shape.

    Args:
        value (Tensor): one number or many.

    Returns:
        At most two numbers.

    Examples:
        >>> shown(torch.tensor(0.25)), shown(torch.tensor([0.25, 0.5, 0.75]))
        ('0.25', '0.25 … 0.75 (3 values)')
    """
    sizes = " × ".join(map(str, value.shape))
    try:
        low, high = (float(bound) for bound in value.detach().aminmax())
    except RuntimeError:
        return f"({sizes} values)"
    if value.numel() == 1:
        return f"{low:.4g}"
    span = f"{low:.4g}" if low == high else f"{low:.4g} … {high:.4g}"
    return f"{span} ({sizes} values)"
