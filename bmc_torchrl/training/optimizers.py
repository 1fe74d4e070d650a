"""What surrounds an optimiser's step within a chunk of updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning import Trainer
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["CountedOptimizer", "clip_each_run"]


class CountedOptimizer:
    """An optimiser whose steps Lightning counts, and nothing else: ``global_step`` goes on.

    Args:
        optimizer (Optimizer): The user's.
        trainer (Trainer): Whose manual optimisation it is.
    """

    def __init__(self, optimizer: Optimizer, trainer: Trainer) -> None:
        self.optimizer = optimizer
        self.progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress

    def step(self) -> None:
        """Take a step."""
        self.counted(self.optimizer.step)

    def counted(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """Call what takes a step, and count it."""
        self.progress.increment_ready()
        result = step(*arguments)
        self.progress.increment_completed()
        return result


def clip_each_run(gradients: Iterable[Tensor | None], largest: float, runs: int) -> None:
    """Scale the gradient of each run, the leading dimension, to a norm of at most `largest`."""
    rows = [gradient.reshape(runs, -1) for gradient in gradients if gradient is not None]
    norm = torch.stack([row.square().sum(-1) for row in rows]).sum(0).sqrt()
    scale = (largest / (norm + 1e-6)).clamp(max=1.0).unsqueeze(-1)
    for row in rows:
        row.mul_(scale)
