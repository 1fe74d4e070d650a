"""Peers in processes of their own, and in environments of their own made when first needed."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bmc_torchrl.benchmarks.timing import EFFORT

ROOT = Path.cwd()
PEERS = Path(__file__).parent / "peers"
VARIABLES = {
    **{f"{kind}_NUM_THREADS": "1" for kind in ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "NUMBA")},
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    # A checkout is not compiled to bytecode at each import, as nothing is that pip installed.
    "PYTHONDONTWRITEBYTECODE": "",
}
"""Of every process: one thread, and imports as they are for a user."""


class UnavailableError(Exception):
    """A peer that cannot be installed or run here."""


def python_of(name: str | None) -> Path:
    """The interpreter of ``.peers/<name>``, installed on demand; the project's own for None."""
    if name is None:
        return Path(sys.executable)
    folder = ROOT / ".peers" / name
    mark, requirements = folder / "installed.txt", PEERS / f"requirements-{name}.txt"
    if not mark.exists() or mark.read_text() != requirements.read_text():
        _install(folder, requirements)
        mark.write_text(requirements.read_text())
    return folder / "bin" / "python"


def _install(folder: Path, requirements: Path) -> None:
    print(f"installing {requirements.name} in {folder.relative_to(ROOT)}, once", flush=True)
    wanted = requirements.read_text()
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    constrained = ["-c", str(ROOT / "constraints.txt")] if "torch" in wanted else []
    try:
        _checked([sys.executable, "-m", "venv", str(folder)])
        if constrained:
            # Alone and first: a package that pulls torch would pull CUDA with it.
            _checked([*pip, *constrained, "torch"])
        _checked([*pip, *constrained, "-r", str(requirements)])
    except subprocess.SubprocessError as error:
        raise UnavailableError(f"{requirements.name} could not be installed ({error})") from error


def _checked(command: list[str], **options: Any) -> str:
    done = subprocess.run(
        command, check=True, text=True, stdout=subprocess.PIPE, timeout=EFFORT.timeout, **options
    )
    return done.stdout


def ask(
    script: str,
    *arguments: object,
    environment: str | None = None,
    variables: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The JSON line that ``peers/<script>.py`` prints, run on this process's core."""
    command = [str(python_of(environment)), f"{script}.py", *map(str, arguments)]
    own = {**os.environ, **VARIABLES, **(variables or {})}
    try:
        printed = _checked(command, cwd=PEERS, env=own)
    except (subprocess.SubprocessError, OSError) as error:
        raise UnavailableError(f"{script} does not run here ({error})") from error
    result: dict[str, Any] = json.loads(printed.strip().splitlines()[-1])
    return result


def rate(script: str, *arguments: object, environment: str | None = None) -> float:
    """Steps per second that ``peers/<script>.py`` reports."""
    answer = ask(script, "--seconds", EFFORT.seconds, *arguments, environment=environment)
    return answer["steps"] / answer["seconds"]


def in_turns(works: Mapping[str, Callable[[], float]]) -> dict[str, float | UnavailableError]:
    """The median of what each work returns, all taken in turns; what failed is not asked again."""
    found: dict[str, list[float]] = {name: [] for name in works}
    failed: dict[str, UnavailableError] = {}
    for _ in range(EFFORT.repeats):
        for name, work in works.items():
            if name in failed:
                continue
            try:
                found[name].append(work())
            except UnavailableError as error:
                failed[name] = error
    return {
        name: failed[name] if name in failed else statistics.median(found[name]) for name in works
    }
