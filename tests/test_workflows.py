"""The workflows on GitHub are well formed, call what exists, and hold no secrets."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from bmc_torchrl.experiments.command import COMMANDS

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FILES = sorted((ROOT / ".github/workflows").glob("*.yml"))
CLASSIFIED = [
    line.split(" :: ")[-1] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)
]


def jobs(file: Path) -> dict[str, dict[str, Any]]:
    return yaml.safe_load(file.read_text())["jobs"]


def steps(file: Path) -> list[dict[str, Any]]:
    return [step for job in jobs(file).values() for step in job["steps"]]


def scripts(file: Path) -> str:
    return "\n".join(step["run"] for step in steps(file) if "run" in step)


def test_there_are_tests_docs_a_package_and_a_look_at_the_newest() -> None:
    assert [file.stem for file in FILES] == ["docs", "newest", "package", "tests"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_step_uses_an_action_of_a_major_version_or_runs_a_script(file: Path) -> None:
    for step in steps(file):
        assert ("uses" in step) != ("run" in step), step
        assert re.fullmatch(r"[\w-]+/[\w-]+@(release/)?v\d+", step.get("uses", "a/b@v1")), step
    checked = subprocess.run(
        ["bash", "-n"], input=scripts(file), capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_a_workflow_calls_exists(file: Path) -> None:
    called = re.findall(r"\bbash ([\w./-]+)", scripts(file))
    assert [path for path in called if not (ROOT / path).is_file()] == []
    assert set(re.findall(r"\bbmc (\w+)", scripts(file))) <= COMMANDS.keys()
    extras = re.findall(r"\.\[([\w,]+)\]", scripts(file))
    named = {name for group in extras for name in group.split(",")}
    assert named <= PROJECT["optional-dependencies"].keys()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_workflow_ends_reads_and_knows_no_secret(file: Path) -> None:
    assert "secrets." not in file.read_text()
    assert yaml.safe_load(file.read_text())["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 90 for job in jobs(file).values())


def test_the_tests_run_on_every_python_of_the_classifiers() -> None:
    (job,) = jobs(ROOT / ".github/workflows/tests.yml").values()
    assert job["strategy"]["matrix"]["python"] == CLASSIFIED


def test_other_workflows_take_a_python_of_the_classifiers() -> None:
    given = [
        step["with"]["python-version"]
        for file in FILES
        for step in steps(file)
        if step.get("uses", "").startswith("actions/setup-python@")
    ]
    assert set(given) - {"${{ matrix.python }}"} <= set(CLASSIFIED)


def test_only_a_tag_is_published_and_without_a_token() -> None:
    built, released = jobs(ROOT / ".github/workflows/package.yml").values()
    assert "permissions" not in built
    assert released["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert released["permissions"] == {"id-token": "write"}
    assert released["needs"] == "build"
    *_, publish = released["steps"]
    assert publish.keys() == {"uses"}
