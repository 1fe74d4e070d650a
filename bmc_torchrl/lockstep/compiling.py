"""Functions compiled whole on their first call, which is announced."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

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
        name: what the module's logger says, at level INFO.
        enabled: if not, `function` runs eagerly.

    >>> CompiledOnce(lambda x: x + 1, "example", enabled=False)(1)
    2
    """

    def __init__(self, function: Callable[..., Any], name: str, *, enabled: bool) -> None:
        self.name, self.pending = name, enabled
        self.function = torch.compile(function, **_WHOLE) if enabled else function

    def __call__(self, *args: Any) -> Any:
        """Call the function; the first time, compile it and say so."""
        if not self.pending:
            return self.function(*args)
        self.pending = False
        _log.info("compiling %s, once", self.name)
        start = time.perf_counter()
        result = self.function(*args)
        _log.info("compiled %s in %.1f s", self.name, time.perf_counter() - start)
        return result
