"""Replay indices of many lanes and steps at once."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["sampled_rows"]


def sampled_rows(uniform: Tensor, population: Tensor) -> Tensor:
    """What ``learners.replay.distinct_indices`` gives, in a layout that suits large batches.

    Args:
        uniform: float64 ``[steps, lanes, count]``.
        population: int64 ``[steps]``; rows are clamped to it where it is below `count`.

    Returns:
        int64 ``[steps, lanes, count]``.

    >>> uniform = torch.tensor([[[0.0, 0.0, 0.99]]], dtype=torch.float64)
    >>> sampled_rows(uniform, torch.tensor([4]))
    tensor([[[0, 1, 3]]])
    """
    steps, lanes, count = uniform.shape
    draws = uniform.permute(2, 0, 1).contiguous()
    left = population.view(1, -1, 1) - torch.arange(count, device=uniform.device).view(-1, 1, 1)
    position = draws.mul_(left).to(torch.int32).view(count, -1)
    index, space = position.clone(), torch.empty_like(position)
    position -= 1
    for draw in reversed(range(count - 1)):
        later, passed = index[draw + 1 :], space[draw + 1 :]
        # The sign bit of position − 1 − later: −1 where the index has passed a removed one.
        torch.sub(position[draw], later, out=passed)
        later -= passed.bitwise_right_shift_(31)
    rows = index.view(count, steps, lanes).permute(1, 2, 0).long()
    return torch.minimum(rows.clamp_(min=0), (population - 1).view(-1, 1, 1))
