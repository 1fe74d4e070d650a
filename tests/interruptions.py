"""Jobs that crash where a test wants them to."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import built, train
from lightning.pytorch.callbacks import Callback


class InterruptedJobError(Exception):
    """Stands for a crash."""


class InterruptAfter(Callback):
    """Crashes a job after so many chunks."""

    def __init__(self, chunks: int) -> None:
        self.left = chunks

    def on_train_batch_end(self, trainer, pl_module, *_) -> None:
        self.left -= 1
        if self.left == 0:
            raise InterruptedJobError


def interrupted(output: Path, chunks: int, *overrides: str) -> None:
    """Run a job until it has saved a checkpoint after `chunks` chunks, then crash it."""
    cfg, *job = built(*overrides, f"output={output}")
    callbacks = train.callbacks

    def with_interrupt(*args):
        return [*callbacks(*args), InterruptAfter(chunks)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "callbacks", with_interrupt)
        with pytest.raises(InterruptedJobError):
            train.fit(cfg, *job)
