"""Functions compiled whole on their first call, and who waits for a compiler is told so."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import torch

__all__ = ["CompiledOnce", "announced"]

PATIENCE = 1.0
"""Seconds that go by without a word: what is read from a disk takes less."""

_WHOLE: dict[str, Any] = {"fullgraph": True, "dynamic": False, "isolate_recompiles": True}
_GUARDED: dict[str, Any] = {"guard_filter_fn": torch.compiler.keep_tensor_guards_unsafe}
_UNGUARDED: dict[str, Any] = {
    "guard_filter_fn": torch.compiler.skip_all_guards_unsafe,
    "size_asserts": False,
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
        guarded: whether each call checks that its tensors are still of the kind that it was
            compiled for; if not, the caller sees to it.

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
        guarded: bool = True,
    ) -> None:
        self.name, self.pending, self.told = name, enabled, told
        options = _GUARDED if guarded else _UNGUARDED
        self.function = torch.compile(function, **_WHOLE, options=options) if enabled else function

    def __call__(self, *args: Any) -> Any:
        """Call the function; the first time, compile it and say so."""
        if not self.pending:
            return self.function(*args)
        self.pending = False
        _say(f"compiling {self.name}; torch caches most of it for the next job", self.told)
        start = time.perf_counter()
        result = self.function(*args)
        _say(f"compiled {self.name} in {time.perf_counter() - start:.1f} s", self.told)
        return result


@contextlib.contextmanager
def announced(name: str) -> Iterator[None]:
    """Say on stderr that `name` is being compiled, and for how long it was, unless that is short.

    Garbage is not collected meanwhile: compilers make much that lives on, and looking through it
    takes a tenth of the time.

    >>> with announced("example"):
    ...     pass
    """
    start = time.perf_counter()
    text = f"compiling {name} (kept on disk for the next time)"
    waiting = threading.Timer(PATIENCE, _say, [text, sys.stderr])
    waiting.daemon = True
    waiting.start()
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        waiting.cancel()
        if collecting:
            gc.enable()
    if (taken := time.perf_counter() - start) > PATIENCE:
        _say(f"compiled {name} in {taken:.1f} s", sys.stderr)


def _say(text: str, told: TextIO | None) -> None:
    if told is None:
        _log.info(text)
    else:
        print(text, file=told, flush=True)
