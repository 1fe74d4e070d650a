"""``bmc doctor`` says what is here, what is missing for what, and whether the core works."""

from __future__ import annotations

import sys
from importlib.metadata import version

import pytest
from packaging.requirements import Requirement

from bmc_torchrl.experiments import doctor


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The exit status of the doctor, and its lines."""

    def call() -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", ["bmc doctor"])
        return doctor.main(), capsys.readouterr().out.splitlines()

    return call


def test_every_package_of_an_extra_has_one_line_with_its_version(lines) -> None:
    status, said = lines()
    assert status == 0
    names = {requirement.name for extra in doctor.PURPOSES for requirement in doctor.needed(extra)}
    found = [line.split()[1] for line in said if line.startswith("ok ")]
    for line in said:
        if line.startswith("missing "):
            found += line.split(": ")[1].split("; ")[0].split(", ")
    assert sorted(found) == sorted(names)
    assert {"torch", "lightning", "ray"} <= names
    assert "pytest" not in names
    assert f"ok       lightning {version('lightning')}" in said


def test_a_core_that_cannot_be_imported_is_said_and_ends_with_1(lines, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torchrl.data", None)
    status, said = lines()
    assert status == 1
    assert said[-1].startswith("FAILS    the core: ModuleNotFoundError: ")
    assert said[1].startswith("ok ")


@pytest.mark.parametrize(
    ("found", "line"),
    [
        ("2.15.1", "ok       torch 2.15.1"),
        ("2.13.0+cpu", "ok       torch 2.13.0+cpu"),
        ("2.16.0", "outside  torch 2.16.0: <2.16,>=2.13 was tried"),
    ],
)
def test_a_version_is_held_against_the_bounds(found: str, line: str) -> None:
    assert doctor.version_line(Requirement("torch>=2.13,<2.16"), found) == line
