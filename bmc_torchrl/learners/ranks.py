"""The ranks of a distributed run; without one, there is a single rank 0."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

__all__ = ["average_gradients", "from_all_ranks", "of_this_rank", "rank", "world_size"]

T = TypeVar("T")


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def rank() -> int:
    """Which of the ranks this is."""
    return torch.distributed.get_rank() if _distributed() else 0


def world_size() -> int:
    """How many ranks there are."""
    return torch.distributed.get_world_size() if _distributed() else 1


def from_all_ranks(value: T) -> list[T]:
    """Every rank's `value`, in order of rank; every rank must ask.

    >>> from_all_ranks("mine")
    ['mine']
    """
    if not _distributed():
        return [value]
    gathered: list[T] = [value] * world_size()
    torch.distributed.all_gather_object(gathered, value)
    return gathered


def of_this_rank(values: list[T]) -> T:
    """What this rank gave to :func:`from_all_ranks` when it was saved."""
    if len(values) != world_size():
        raise RuntimeError(
            f"The checkpoint is of {len(values)} ranks and this run has {world_size()}: resume "
            f"with trainer.lightning.devices={len(values)}."
        )
    return values[rank()]


def average_gradients(module: nn.Module) -> None:
    """Average the gradients over the ranks of a distributed run, if there is one."""
    if not _distributed():
        return
    for parameter in module.parameters():
        if parameter.grad is not None:
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= world_size()
