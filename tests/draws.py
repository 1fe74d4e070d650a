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
    """Log what ``torch.rand`` returns; a coin and a random action as two uniforms, ``[2, ...]``."""
    original, choose = torch.rand, torch.randint

    def rand(*args: Any, **kwargs: Any) -> Tensor:
        log.append(original(*args, **kwargs))
        return log[-1]

    def randint(high: int, size: Any, **kwargs: Any) -> Tensor:
        chosen = choose(high, size, **kwargs)
        log.append(torch.stack([log.pop(), (chosen + 0.5) / high]))
        return chosen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "rand", rand)
        patch.setattr(torch, "randint", randint)
        yield
