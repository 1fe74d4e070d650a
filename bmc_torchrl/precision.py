"""Modules whose buffers keep their precision whatever the model around them is cast to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from torch import Tensor, nn

__all__ = ["KeepsPrecision"]


class KeepsPrecision(nn.Module):
    """A module that moves between devices, but whose buffers ``.half()`` and the like leave alone.

    >>> import torch
    >>> module = KeepsPrecision()
    >>> module.register_buffer("count", torch.zeros((), dtype=torch.float64))
    >>> module.half().count.dtype
    torch.float64
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            moved = self._buffers[name]
            if moved is not None and buffer is not None and moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self
