"""The plan of the house holds: imports go where docs/architecture.md's picture has an arrow.

Every import is read from the source, wherever in a file it stands.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import itertools
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "bmc_torchrl"
PICTURE = "docs/architecture.md"
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = SETTINGS["project"]
PYTHONPATH = SETTINGS["tool"]["pytest"]["ini_options"]["pythonpath"]

DOORS = {"bmc_torchrl": "exploration", "bmc_torchrl.__main__": "experiments"}
"""Modules outside rooms, and the room that each is the door of."""

STRICTER = {"bmc_torchrl.learners.values": "envs"}
"""Modules that may import only what another room may, and that room."""

ONLY_IN = {
    "PIL": ("envs", "training"),
    "cloudpickle": ("experiments",),
    "gymnasium": ("envs", "training", "experiments", "benchmarks"),
    "hydra": ("experiments", "benchmarks"),
    "llvmlite": ("strategies.machine_code", "lockstep.numba"),
    "lightning": ("training", "experiments", "benchmarks"),
    "matplotlib": ("analysis", "experiments"),
    "numba": (
        "strategies.compiled",
        "strategies.machine_code",
        "lockstep.numba",
        "benchmarks",
    ),
    "numpy": ("envs", "lockstep.numba", "training", "analysis", "experiments", "benchmarks"),
    "omegaconf": ("experiments", "benchmarks"),
    "pandas": ("analysis", "experiments", "benchmarks"),
    "pyarrow": ("analysis", "experiments"),
    "rich": ("training", "analysis", "experiments", "benchmarks"),
    "scipy": ("analysis", "experiments"),
    "triton": ("strategies.triton_walks",),
    "wandb": ("training", "experiments"),
}
"""Where the packages of the extra `experiments` may be imported: rooms, or parts of rooms."""


class Import(NamedTuple):
    """One imported module and where that is written."""

    name: str
    where: str


def imports(path: Path, module: str) -> Iterator[Import]:
    """All modules that the file of `module` imports, `from x import y` being x.y and x."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        names: Iterable[str] = ()
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level]
            source = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            names = [f"{source}.{alias.name}" for alias in node.names]
        for name in names:
            yield Import(name, f"{path}:{node.lineno}")


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
OURS = {module: list(imports(path, module)) for module, path in SOURCES.items()}


def room_of(name: str) -> str:
    """The room of a module, or of a name that a module has."""
    while name not in SOURCES:
        name = name.rpartition(".")[0]
    return DOORS.get(name) or name.split(".")[1]


ROOMS = {room_of(module) for module in SOURCES}


def drawn_plan() -> dict[str, set[str]]:
    """The arrows of the picture: from a room to those it may import."""
    (picture,) = re.findall(r"```mermaid\n(.*?)```", (ROOT / PICTURE).read_text(), re.DOTALL)
    plan: dict[str, set[str]] = {}
    for start, ends in re.findall(r"^\s*(\w+) --> (\w+(?: & \w+)*)$", picture, re.MULTILINE):
        plan.setdefault(start, set()).update(ends.split(" & "))
    return plan


PLAN = drawn_plan()


def reachable(room: str) -> set[str]:
    """The room, and all rooms that arrows lead to from it."""
    return {room}.union(*(reachable(next_room) for next_room in PLAN.get(room, ())))


def test_the_picture_shows_every_room_and_no_other() -> None:
    assert {*PLAN, *(room for ends in PLAN.values() for room in ends)} == ROOMS


def test_no_arrows_run_in_a_circle() -> None:
    graphlib.TopologicalSorter(PLAN).prepare()


def test_the_arrows_are_those_that_were_decided() -> None:
    chain = ("functional", "likelihoods", "strategies", "exploration", "learners", "training")
    for below, above in itertools.pairwise((*chain, "experiments")):
        assert below in reachable(above)
    assert "training" not in reachable("lockstep")
    for blind in ("envs", "analysis"):
        assert not reachable(blind) & {"strategies", "exploration", "learners", "training"}


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_imports_only_where_an_arrow_leads(room: str) -> None:
    wrong = [
        f"{found.where}: {module} imports {found.name}"
        for module in SOURCES
        if room_of(module) == room
        for found in OURS[module]
        if found.name.split(".")[0] == PACKAGE.name
        and room_of(found.name) not in reachable(STRICTER.get(module, room)) | {room}
    ]
    assert not wrong, f"{room} may import {sorted(reachable(room))} ({PICTURE}):\n" + "\n".join(
        wrong
    )


def third_party(found: Iterable[Import], local: Iterable[str] = ()) -> list[Import]:
    """Those that come with neither Python nor this repository, by the name of their package."""
    ours = {*sys.stdlib_module_names, PACKAGE.name, *local}
    tops = [Import(name.split(".")[0], where) for name, where in found]
    return [top for top in tops if top.name not in ours]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def named(requirements: Iterable[str]) -> set[str]:
    """The distributions that requirements name."""
    lines = (line.split("#")[0].strip() for line in requirements)
    return {normal(re.split(r"[^\w.-]", line)[0]) for line in lines if line}


CORE = named(PROJECT["dependencies"])
EXTRAS = {name: named(lines) for name, lines in PROJECT["optional-dependencies"].items()}
distributions = functools.cache(packages_distributions)


def undeclared(found: Iterable[Import], declared: set[str]) -> list[str]:
    return [
        f"{where}: {name}"
        for name, where in found
        if not {normal(name), *map(normal, distributions().get(name, ()))} & declared
    ]


PEERS = "bmc_torchrl.benchmarks.peers"
"""Scripts that run in environments of their own."""


OPTIONAL = {
    "bmc_torchrl.strategies.compiled": {"numba"},
    "bmc_torchrl.strategies.triton_walks": {"triton"},
}
"""What is imported if it is there, and done without if it is not."""


def declared_for(module: str) -> set[str]:
    """What is installed where the module is used."""
    if room_of(module) in reachable("exploration") | {"interop"}:
        return CORE | OPTIONAL.get(module, set())
    if module.startswith(PEERS):
        files = (PACKAGE / "benchmarks/peers").glob("requirements-*.txt")
        lines = [line for path in files for line in path.read_text().splitlines()]
        return CORE | EXTRAS["experiments"] | named(lines)
    return CORE | EXTRAS["experiments"]


def siblings(module: str) -> set[str]:
    """What a script imports from its own folder, by stem."""
    return {path.stem for path in SOURCES[module].parent.glob("*.py")} if PEERS in module else set()


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_what_a_room_imports_is_declared(room: str) -> None:
    missing = [
        line
        for module in SOURCES
        if room_of(module) == room
        for line in undeclared(third_party(OURS[module], siblings(module)), declared_for(module))
    ]
    assert not missing, "pyproject.toml does not declare, for this room:\n" + "\n".join(missing)


@pytest.mark.parametrize("package", sorted(ONLY_IN))
def test_a_package_of_the_extra_is_imported_only_where_it_belongs(package: str) -> None:
    prefixes = tuple(f"bmc_torchrl.{part}" for part in ONLY_IN[package])
    wrong = [
        found.where
        for module in SOURCES
        for found in third_party(OURS[module])
        if found.name == package and not f"{module}.".startswith(tuple(f"{p}." for p in prefixes))
    ]
    assert not wrong, f"{package} belongs in {ONLY_IN[package]} only:\n" + "\n".join(wrong)


def test_every_package_has_a_place() -> None:
    used = {
        found.name
        for module in SOURCES
        if not module.startswith(PEERS)
        for found in third_party(OURS[module])
    }
    assert used <= CORE | set(ONLY_IN)


@pytest.mark.parametrize("folder", ["tests", "scripts"])
def test_what_tests_and_scripts_import_is_declared(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    local = {path.stem for place in PYTHONPATH for path in (ROOT / place).glob("*.py")}
    found = [line for path in files for line in third_party(imports(path, path.stem), local)]
    assert not undeclared(found, CORE.union(*EXTRAS.values()))


def test_versions_are_pinned_for_all_that_is_declared() -> None:
    pins = named((ROOT / "constraints.txt").read_text().splitlines())
    assert CORE.union(*EXTRAS.values()) <= pins


def test_imports_are_found_wherever_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "somewhere.py"
    path.write_text(
        "import a.b as c\n"
        "from d.e import f, g\n"
        "def later():\n    from h import i\n"
        "if TYPE_CHECKING:\n    import j\n"
        "from . import k\nfrom ..l import m\n"
    )
    found = {name for name, _ in imports(path, "x.y.z")}
    assert found == {"a.b", "d.e.f", "d.e.g", "h.i", "j", "x.y.k", "x.l.m"}
