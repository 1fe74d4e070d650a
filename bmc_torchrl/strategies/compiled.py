"""Scalar rules compiled by numba, which is imported when the first of them is needed."""

from __future__ import annotations

import functools
import marshal
import types
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["INNER", "OPTIONS", "cached_on_disk", "compiled_rule", "source_checksum"]

# Without _nrt=False numba counts references to every array it looks at, with atomic operations that
# make a step three times as slow and the threads wait for each other. Nothing is allocated here.
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "_nrt": False}
INNER = OPTIONS | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
"""For what only compiled functions call; that Python can call it is a fifth of compiling it."""


@functools.cache
def compiled_rule(function: Any) -> Any:
    """A function of a rule, compiled with the plain functions that it calls.

    Args:
        function (callable): the function.

    Returns:
        The compiled function, for compiled ones to call.
    """
    import numba

    scope = dict(function.__globals__)
    for name in function.__code__.co_names:
        if isinstance(scope.get(name), types.FunctionType):
            scope[name] = compiled_rule(scope[name])
    function = types.FunctionType(function.__code__, scope, function.__name__)
    return numba.njit(**INNER)(function)


def source_checksum(functions: Iterable[Any]) -> int:
    """A number that changes with this file and the functions' files, or code where there is none.

    Args:
        functions (iterable of callable): the functions.

    Returns:
        A number of 32 bits.
    """
    checksum = zlib.crc32(Path(__file__).read_bytes())
    for code in dict.fromkeys(function.__code__ for function in functions):
        file = Path(code.co_filename)
        source = file.read_bytes() if file.is_file() else marshal.dumps(code)
        checksum = zlib.crc32(source, checksum)
    return checksum


def cached_on_disk(loop: Any, name: str, checksum: int, **scope: Any) -> Any:
    """A loop compiled and kept on disk.

    numba's cache notices a change of the file that a cached function is in, and of no other; and
    it cannot be read where a class in it is gone. So what is compiled has a name of its own.

    Args:
        loop (callable): a plain function.
        name (str): what it is compiled for.
        checksum (int): that of all that is compiled with it.
        **scope (callable): compiled functions that it calls by these names.

    Returns:
        The compiled function.
    """
    import numba

    named = types.FunctionType(loop.__code__, {**loop.__globals__, **scope})
    named.__qualname__ = f"{loop.__name__}.{name}.{checksum:08x}"
    return numba.njit(cache=True, no_cfunc_wrapper=True, **OPTIONS)(named)
