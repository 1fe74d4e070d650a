"""Functions compiled whole on their first call, which is announced."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, TextIO

import torch

__all__ = ["CompiledOnce"]

_WHOLE: dict[str, Any] = {
    "fullgraph": True,
    "dynamic": False,
    "isolate_recompiles": True,
    "options": {"guard_filter_fn": torch.compiler.keep_tensor_guards_unsafe},
}

_log = logging.getLogger(__name__)


class CompiledOnce:
    """`function` under ``torch.compile``, with one static shape and no graph break.

    Each has its own cache, so that any number of engines can be built in one process.

    Args:
        function: of tensors.
        name: what is said of it.
        enabled: if not, `function` runs eagerly.
        told: where that goes; by default to the module's logger, at level INFO.

    >>> CompiledOnce(lambda x: x + 1, "example", enabled=False)(1)
    2
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        *,
        enabled: bool,
        told: TextIO | None = None,
    ) -> None:
        self.name, self.pending, self.told = name, enabled, told
        self.function = torch.compile(function, **_WHOLE) if enabled else function

    def __call__(self, *args: Any) -> Any:
        """Call the function; the first time, compile it and say so."""
        if not self.pending:
            return self.function(*args)
        self.pending = False
        self._say(f"compiling {self.name}; torch caches most of it for the next job")
        start = time.perf_counter()
        result = self.function(*args)
        self._say(f"compiled {self.name} in {time.perf_counter() - start:.1f} s")
        return result

    def _say(self, text: str) -> None:
        if self.told is None:
            _log.info(text)
        else:
            print(text, file=self.told, flush=True)
