"""The patches of docs/upstream, on a scratch copy of the installed TorchRL."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torchrl

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/upstream.md"
PATCHES = sorted((ROOT / "docs/upstream").glob("*.patch"))
ADAPTIVE = PATCHES[-1]
DOCTESTS = [
    "torchrl/modules/tensordict_module/adaptive_egreedy.py",
    "torchrl/trainers/algorithms/configs/modules.py"
    "::torchrl.trainers.algorithms.configs.modules.EGreedyModuleConfig",
]
OURS = [ROOT / "tests/core/test_egreedy_facts.py", ROOT / "tests/interop/patched_torchrl.py"]


def scratch_torchrl(folder: Path, *parts: str) -> None:
    """The installed TorchRL with these folders' parts of every patch; a wheel has no pages."""
    shutil.copytree(Path(torchrl.__file__).parent, folder / "torchrl")
    (folder / "pytest.ini").write_text("[pytest]\n")
    only = [f"--include={part}/*" for part in parts]
    # Not as a part of the repository that the folder may happen to be in.
    outside = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    for patch in PATCHES:
        subprocess.run(["git", "apply", *only, patch], cwd=folder, env=outside, check=True)


def outcomes(folder: Path, *tests: str | Path) -> dict[str, set[str]]:
    """What became of each ``Class::test`` where the TorchRL in `folder` is the one imported."""
    path = [folder, ROOT, ROOT / "tests", ROOT / "scripts/examples"]
    options = ["-q", "-c", "pytest.ini", "-p", "no:cacheprovider", "--junitxml=report.xml"]
    options += ["--tb=short", "--doctest-modules", "--continue-on-collection-errors"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *map(str, tests)],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        check=False,
        capture_output=True,
        text=True,
    )
    print(done.stdout, done.stderr)
    found: dict[str, set[str]] = {}
    for case in ElementTree.parse(folder / "report.xml").iter("testcase"):
        where, name = case.attrib["classname"], case.attrib["name"].partition("[")[0]
        key = f"{where.rpartition('.')[2]}::{name}"
        found.setdefault(key, set()).update({child.tag for child in case} or {"passed"})
    return found


def added_by(patch: Path) -> set[str]:
    """Every ``Class::test`` that a patch adds."""
    added, group = set(), ""
    for kind, name in re.findall(r"^\+ *(class Test|def test)(\w+)", patch.read_text(), re.M):
        if kind == "class Test":
            group = f"Test{name}"
        else:
            added.add(f"{group}::test{name}")
    return added


@pytest.mark.slow
def test_with_the_patches_their_tests_pass_and_so_do_ours(tmp_path):
    scratch_torchrl(tmp_path, "torchrl", "test")
    found = outcomes(tmp_path, "test", *DOCTESTS, *OURS)
    assert {key: result for key, result in found.items() if result != {"passed"}} == {}
    assert set().union(*map(added_by, PATCHES)) <= found.keys()
    for path in OURS:
        named = re.findall(r"^def (test_\w+)", path.read_text(), re.M)
        assert {f"::{name}" for name in named} <= found.keys()


@pytest.mark.slow
def test_without_the_patches_a_test_of_each_fails(tmp_path):
    scratch_torchrl(tmp_path, "test")
    found = outcomes(tmp_path, "test")
    failing = {key for key, result in found.items() if result & {"failure", "error"}}
    for patch in PATCHES:
        if patch != ADAPTIVE:
            assert added_by(patch) & failing, patch.name
    # Its tests begin by importing what it adds.
    assert not added_by(ADAPTIVE) & found.keys()
    assert "::test.test_adaptive_egreedy" in failing


def test_the_page_tells_of_every_patch():
    assert PATCHES
    links = re.findall(r"\(upstream/([\w.-]+\.patch)\)", PAGE.read_text())
    assert links == [patch.name for patch in PATCHES]


def test_each_reproducer_shows_its_problem_in_the_installed_torchrl():
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert len(blocks) == len(PATCHES)
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), {})
