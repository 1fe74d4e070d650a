"""What the library draws, recorded, so that a reference can be given the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor


@contextmanager
def recorded_draws(log: list[Tensor]) -> Iterator[None]:
    """Log uniform draws; a coin and a random action as two uniforms, ``[2, ...]``."""
    choose = torch.randint

    def logged(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def rand(*args: Any, **kwargs: Any) -> Tensor:
            log.append(original(*args, **kwargs))
            return log[-1]

        return rand

    def randint(high: int, size: Any, **kwargs: Any) -> Tensor:
        chosen = choose(high, size, **kwargs)
        log.append(torch.stack([log.pop(), (chosen + 0.5) / high]))
        return chosen

    with pytest.MonkeyPatch.context() as patch:
        for name in ("rand", "rand_like"):
            patch.setattr(torch, name, logged(getattr(torch, name)))
        patch.setattr(torch, "randint", randint)
        yield
