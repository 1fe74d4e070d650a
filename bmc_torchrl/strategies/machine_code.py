"""Loops that numba compiled, kept on disk as machine code and run without numba."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import types
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bmc_torchrl.strategies.compiled import INNER, compiled_rule, source_checksum

__all__ = ["FLAGS", "NUMBER", "NUMBERS", "WHOLE_NUMBERS", "machine_loop"]

NUMBER, NUMBERS, WHOLE_NUMBERS, FLAGS = "int64", "float64*", "int64*", "uint8*"
"""What a loop may be given: a number, or the address of many."""

LIBM = {"exp", "expm1", "log", "log1p", "pow"}
"""What kept code may call: every process has it, whereas Intel's library comes with numba."""

_ENTRY = "loop"


def machine_loop(loop: Any, arguments: Sequence[str], **rule: Any) -> Callable[..., None]:
    """A loop, compiled once for a machine.

    numba takes a quarter of a second to be imported, and leaves eighty thousand objects to be
    looked through whenever garbage is collected. What it has compiled needs none of that: later
    processes link the machine code that they find on disk.

    Args:
        loop (callable): a plain function that neither returns nor raises anything.
        arguments (sequence of str): what it is given.
        **rule (callable): plain functions that it calls by these names.

    Returns:
        The compiled function, of numbers and addresses.
    """
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    name = f"{loop.__name__}-{_key(loop, arguments, rule)}.o"
    code = _read(name)
    if code is None:
        module = _compiled(loop, arguments, rule)
        code = _target_machine().emit_object(module)
        if _needs(module) <= LIBM:
            _keep(name, code)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    # numba's functions begin with places for a result and an exception.
    prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * len(arguments))
    entry = prototype(engine.get_function_address(_ENTRY))
    result, exception = ctypes.c_void_p(), ctypes.c_void_p()
    entry.needs = engine, result, exception  # type: ignore[attr-defined]
    return functools.partial(entry, ctypes.addressof(result), ctypes.addressof(exception))


def _compiled(loop: Any, arguments: Sequence[str], rule: dict[str, Any]) -> Any:
    """The module of the loop and all that it calls, in LLVM's language."""
    import llvmlite.binding as llvm
    import numba

    scope = {name: compiled_rule(function) for name, function in rule.items()}
    compiled = numba.njit(**INNER)(
        types.FunctionType(loop.__code__, {**loop.__globals__, **scope}, loop.__name__)
    )
    signature = tuple(
        numba.types.CPointer(getattr(numba.types, kind[:-1]))
        if kind.endswith("*")
        else getattr(numba.types, kind)
        for kind in arguments
    )
    compiled.compile(signature)
    module = llvm.parse_assembly(compiled.inspect_llvm(signature))
    (entry,) = (
        function
        for function in module.functions
        if not function.is_declaration and function.linkage == llvm.Linkage.external
    )
    entry.name = _ENTRY
    return module


def _needs(module: Any) -> set[str]:
    """What a module calls that is not in it."""
    names = (function.name for function in module.functions if function.is_declaration)
    return {name for name in names if not name.startswith("llvm.")}


def _target_machine() -> Any:
    """This processor, as numba describes it."""
    import llvmlite.binding as llvm

    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        reloc="static" if platform.machine() in ("x86_64", "AMD64") else "default",
        codemodel="jitdefault",
    )


def _key(loop: Any, arguments: Sequence[str], rule: dict[str, Any]) -> str:
    """All that machine code depends on, in 16 digits."""
    import llvmlite.binding as llvm

    parts = (
        source_checksum([loop, *rule.values()]),
        zlib.crc32(Path(__file__).read_bytes()),
        [function.__qualname__ for function in rule.values()],
        list(arguments),
        version("numba"),
        version("llvmlite"),
        llvm.get_host_cpu_name(),
        llvm.get_host_cpu_features().flatten(),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _folders() -> Iterator[Path]:
    """Where machine code may be: where numba keeps its own, else among the user's caches."""
    if "NUMBA_CACHE_DIR" in os.environ:
        yield Path(os.environ["NUMBA_CACHE_DIR"])
    else:
        yield Path(__file__).parent / "__pycache__"
        yield Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "bmc_torchrl"


def _read(name: str) -> bytes | None:
    """What was kept under a name, if it is whole."""
    for folder in _folders():
        with contextlib.suppress(OSError):
            content = (folder / name).read_bytes()
            if content[:4] == _checksum(content[4:]):
                return content[4:]
    return None


def _keep(name: str, code: bytes) -> None:
    """Write a file, whole or not at all, where that is allowed."""
    for folder in _folders():
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            part = folder / f"{name}.{uuid.uuid4().hex}"
            try:
                part.write_bytes(_checksum(code) + code)
                part.replace(folder / name)
            finally:
                part.unlink(missing_ok=True)
            return


def _checksum(code: bytes) -> bytes:
    return zlib.crc32(code).to_bytes(4, "little")
