"""Collected data of which exploration wins some."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict

KEYS = ("greedy_return", "uniform_return", "chosen_value", "promised_value", "acted_greedily")


def collected(shape: Sequence[int], random: torch.Generator, steps: int = 60) -> TensorDict:
    """Transitions ``[*shape, steps]``, some of them without a lead."""
    size = (*shape, steps)
    draw = lambda: torch.rand(size, generator=random, dtype=torch.float64)  # noqa: E731
    promised, greedily = 2 * draw(), draw() < 0.4
    chosen = torch.where(greedily | (draw() < 0.1), promised, promised - draw())
    greedy = 3 * draw()
    entries = dict(zip(KEYS, (greedy, greedy - draw(), chosen, promised, greedily), strict=True))
    return TensorDict(entries, size, names=[None] * len(shape) + ["time"])
