"""Try other versions: python scripts/compatibility.py [--python PYTHON] [torch==2.15.0 …].

Makes an empty environment, installs the wheel of this repository and what it needs into it, runs
tests on what was installed, prints a row of docs/compatibility.md, and deletes the environment.
Without arguments: the versions of constraints.txt; those that are named may lie outside the bounds.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SHOWN = ("torch", "torchrl", "tensordict", "lightning", "gymnasium", "numba", "numpy")
TESTS = ("tests/core", "tests/strategies", "tests/envs", "tests/interop", "tests/training")


def name_of(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0].lower()


def requirements(given: list[str], lowest: bool) -> list[str]:
    """What the library declares, the lowest of it if asked for; `given` comes in its place."""
    extras = PROJECT["optional-dependencies"]
    used = [*PROJECT["dependencies"], *extras["experiments"]]
    if lowest:
        used = [re.sub(r">=([\w.]+).*", r"==\1", line) for line in used]
    lines = (*used, *extras["examples"], *extras["dev"])
    named = {name_of(line) for line in given}
    return given + [line for line in lines if name_of(line) not in named]


def constraints(chosen: list[str]) -> str:
    """The pins, but of what has an exact version already."""
    named = {name_of(line) for line in chosen if "==" in line}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return "\n".join(line for line in lines if name_of(line) not in named)


def run(*command: object, folder: Path = ROOT, endings: tuple[int, ...] = (0,)) -> str:
    """What a command prints; the trial ends where one ends otherwise than expected."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        print(done.stdout)
    if done.returncode not in endings:
        raise SystemExit(f"ended with {done.returncode}: {' '.join(map(str, command))}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="*", help="such as torch==2.15.0")
    parser.add_argument("--python", default=sys.executable, help="the interpreter to try")
    parser.add_argument("--lowest", action="store_true", help="the lower bounds, not the pins")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="tests or folders of them")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="compatibility-") as temporary:
        folder = Path(temporary)
        run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder)
        run(arguments.python, "-m", "venv", folder / "venv")
        python = folder / "venv/bin/python"
        pins = folder / "constraints.txt"
        wanted = requirements(arguments.versions, arguments.lowest)
        pins.write_text(constraints(wanted))
        began = time.monotonic()
        run(python, "-m", "pip", "install", "-q", "--no-compile", "-c", pins, *wanted)
        (wheel,) = folder.glob("*.whl")
        run(python, "-m", "pip", "install", "-q", "--no-deps", wheel)
        minutes = (time.monotonic() - began) / 60
        print(f"installed in {minutes:.1f} min", file=sys.stderr)
        pytest = (python.with_name("pytest"), "-p", "no:cacheprovider", "-q", "-rf")
        ran = run(*pytest, "-m", "not slow", *arguments.tests, endings=(0, 1))
        *_, verdict = ran.strip().splitlines()
        ask = f"from importlib.metadata import version as v; print(*map(v, {SHOWN}), sep=' | ')"
        versions = run(python, "-c", ask, folder=folder).strip()
        (said,) = run(python, "--version").split()[1:]
    print(f"| {said} | {versions} | {verdict.strip('= ')} |")


if __name__ == "__main__":
    main()
