"""What the library draws, recorded, so that a reference can be given the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor


@contextmanager
def recorded_draws(log: list[Tensor]) -> Iterator[None]:
    """Log what ``torch.rand`` returns."""
    original = torch.rand

    def rand(*args: Any, **kwargs: Any) -> Tensor:
        log.append(original(*args, **kwargs))
        return log[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "rand", rand)
        yield
