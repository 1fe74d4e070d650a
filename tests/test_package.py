"""What is built installs into an environment without the repository, and works there."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pandas as pd
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from bmc_torchrl.experiments import doctor

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = PROJECT["version"]
CONFIGS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.yaml"))
DECLARED = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
PINS = {
    pin.name: pin.specifier
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if not line.startswith("#")
    for pin in [Requirement(line)]
}


@pytest.mark.parametrize("extra", doctor.PURPOSES)
def test_what_a_user_installs_is_bounded_on_both_sides_around_its_pin(extra: str) -> None:
    for line in DECLARED[extra]:
        requirement = Requirement(line)
        assert {bound.operator for bound in requirement.specifier} == {">=", "<"}, line
        for pin in PINS[requirement.name]:
            assert pin.version in requirement.specifier, line


def test_the_doctor_knows_every_extra_but_those_for_developers() -> None:
    assert DECLARED.keys() - {"dev", "docs"} == doctor.PURPOSES.keys()


def classified() -> list[str]:
    """The Python versions of the classifiers."""
    found = (re.fullmatch(r".* Python :: (3\.\d+)", line) for line in PROJECT["classifiers"])
    return [match[1] for match in found if match]


def test_the_pythons_of_the_classifiers_are_those_that_may_install() -> None:
    allowed = SpecifierSet(PROJECT["requires-python"])
    assert classified() == [f"3.{n}" for n in range(30) if f"3.{n}" in allowed]


def test_the_compatibility_page_says_the_bounds_and_the_pins() -> None:
    page = (ROOT / "docs/compatibility.md").read_text().split("\n## ")[0]
    rows = dict(re.findall(r"^\| `?([\w-]+)`? \| ([^|]*\|[^|]*) \|", page, re.MULTILINE))
    assert rows["Python"].startswith(f"{classified()[0]} – {classified()[-1]} ")
    for line in (*DECLARED[""], *DECLARED["experiments"]):
        requirement = Requirement(line)
        bounds = {bound.operator: bound.version for bound in requirement.specifier}
        (pin,) = PINS[requirement.name]
        said = f"≥ {bounds['>=']}, < {bounds['<']} | {pin.version}"
        assert rows[requirement.name] == said


def run(*command: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run in `folder`, with nothing on PYTHONPATH. Errors are in the output."""
    return subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def done(*command: object, folder: Path) -> str:
    ended = run(*command, folder=folder)
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("built")
    hatchling = (sys.executable, "-m", "hatchling", "build", "-d", folder)
    done(*hatchling, "-t", "sdist", folder=ROOT)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as sdist:
        sdist.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    done(*hatchling, "-t", "wheel", folder=source)
    return folder


def with_what_they_need(lines: Iterable[str]) -> set[str]:
    """The distributions that requirements name, and all that those need in turn."""
    found: set[tuple[str, str]] = set()

    def follow(line: str, asked: Iterable[str]) -> None:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker and not any(marker.evaluate({"extra": extra}) for extra in ("", *asked)):
            return
        new = {(requirement.name, extra) for extra in ("", *requirement.extras)} - found
        found.update(new)
        if new:
            for further in importlib.metadata.requires(requirement.name) or ():
                follow(further, requirement.extras)

    for line in lines:
        follow(line, ())
    return {name for name, _ in found}


def environment(folder: Path, wheel: Path, *extras: str) -> Path:
    """The interpreter of a new environment: the wheel, and links to exactly what it declares."""
    venv.create(folder, symlinks=True)
    python = folder / "bin/python"
    (packages,) = folder.glob("lib/python*/site-packages")
    declared = [line for extra in ("", *extras) for line in DECLARED[extra]]
    for name in with_what_they_need(declared):
        distribution = importlib.metadata.distribution(name)
        tops = {Path(file).parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
        for top in tops:
            link = packages / top
            if not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(top))).resolve())
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps")
    done(*pip, "--no-index", "--no-compile", wheel, folder=folder)
    return python


@pytest.fixture(scope="module")
def core(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("core"), next(built.glob("*.whl")))


@pytest.fixture(scope="module")
def complete(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("complete")
    return environment(folder, next(built.glob("*.whl")), "experiments")


@pytest.mark.slow
def test_the_wheel_carries_the_package_with_its_configs_and_nothing_else(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = wheel.namelist()
    assert sorted(n for n in names if n.endswith(".yaml")) == [f"bmc_torchrl/{c}" for c in CONFIGS]
    assert "bmc_torchrl/py.typed" in names
    tops = {name.split("/")[0] for name in names}
    assert tops == {"bmc_torchrl", f"bmc_torchrl-{VERSION}.dist-info"}


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the git repository")
def test_the_sdist_is_the_repository(built: Path) -> None:
    (source,) = (built / "unpacked").iterdir()
    committed = done("git", "ls-files", folder=ROOT).splitlines()
    assert [path for path in committed if not (source / path).is_file()] == []


def new_side(document: Path) -> str:
    """What the diff of a document leaves."""
    (diff,) = re.findall(r"```diff\n(.*?)```", document.read_text(), re.DOTALL)
    return "\n".join(line[2:] for line in diff.splitlines() if not line.startswith("-"))


DIFF = """
import sys

from tensordict.nn import TensorDictSequential
from torchrl.collectors import Collector
from torchrl.modules import MLP, QValueActor

from bmc_torchrl import AdaptiveEGreedyModule, BMCEpsilon, OneStepReturns
from bmc_torchrl.envs import CartPoleEnv
import bmc_torchrl.interop.trainer_hook

class Collected:
    def __iter__(self):
        options = dict(frames_per_batch=50, total_frames=100)
        return iter(Collector(env, policy, auto_register_policy_transforms=False, **options))

env = CartPoleEnv()
network = MLP(4, 2, num_cells=[8])
q_actor = QValueActor(network, in_keys=["physics"], spec=env.action_spec)
collector = Collected()
{diff}
    print(explore.eps.item())
assert not {absent} & sys.modules.keys(), sys.modules.keys()
"""


@pytest.mark.slow
def test_where_only_the_core_is_installed_the_readmes_diff_runs(core: Path, tmp_path: Path) -> None:
    diff = new_side(ROOT / "README.md")
    assert "explore.update(returns(data))" in diff
    absent = {"lightning", "hydra", "gymnasium", "pandas", "matplotlib", "wandb", "scipy"}
    printed = done(core, "-c", DIFF.format(diff=diff, absent=absent), folder=tmp_path)
    prior = 1.0 / (1.0 + 1.01)
    seen = [float(line) for line in printed.splitlines()[-2:]]
    assert all(0 < epsilon < 1 for epsilon in seen)
    assert len({prior, *seen}) == 3


@pytest.mark.slow
def test_where_only_the_core_is_installed_the_command_says_what_to_install(
    core: Path, tmp_path: Path
) -> None:
    bmc = core.with_name("bmc")
    trained = run(bmc, "train", folder=tmp_path)
    (said,) = trained.stdout.splitlines()
    assert trained.returncode == 1
    assert said.startswith("bmc train needs lightning: pip install 'bmc_torchrl[experiments]' ")
    lines = done(bmc, "doctor", folder=tmp_path).splitlines()
    assert lines[0].startswith(f"bmc_torchrl {VERSION}, Python ")
    assert f"ok       torchrl {importlib.metadata.version('torchrl')}" in lines
    (missing,) = [line for line in lines if line.startswith("missing ") and "lightning" in line]
    assert missing.endswith("pip install 'bmc_torchrl[experiments]'")
    assert lines[-1].startswith("works    the core: ")


@pytest.mark.slow
def test_with_the_extra_the_command_trains_in_any_folder(complete: Path, tmp_path: Path) -> None:
    where = "import bmc_torchrl, sys; print(bmc_torchrl.__file__, *sys.path[1:], sep='\\n')"
    found, *path = done(complete, "-c", where, folder=tmp_path).splitlines()
    assert Path(found).is_relative_to(complete.parents[1])
    assert ROOT not in map(Path, path)
    job = ("experiment=grid_sarsa", "engine=torchrl", "runs=2", "episodes=2", "device=cpu")
    done(complete.with_name("bmc"), "train", *job, folder=tmp_path)
    table = pd.read_parquet(tmp_path / "outputs/train/grid_sarsa/table.parquet")
    assert sorted(zip(table["run"], table["episode"], strict=True)) == [
        (run, episode) for run in (0, 1) for episode in (1, 2)
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"]


IMPORTED = """
import sys
import bmc_torchrl
assert "torch" not in sys.modules
import torchrl.modules, torchrl.envs, torchrl.data
before = set(sys.modules)
from bmc_torchrl import *
bmc_torchrl.BMCEpsilon
print(*{name.split(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)
"""


@pytest.mark.slow
def test_the_package_imports_nothing_that_torchrl_does_not(tmp_path: Path) -> None:
    assert run(sys.executable, "-c", IMPORTED, folder=ROOT).stdout.split() == ["bmc_torchrl"]


ANSWERED = """
import sys
before = set(sys.modules)
from bmc_torchrl.experiments.command import main
sys.argv = ["bmc", "{argument}"]
assert main() == 0
print(*{{name.split(".")[0] for name in set(sys.modules) - before}} - sys.stdlib_module_names)
"""


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_need_only_python(argument: str) -> None:
    printed = done(sys.executable, "-c", ANSWERED.format(argument=argument), folder=ROOT)
    assert printed.splitlines()[-1] == "bmc_torchrl"
