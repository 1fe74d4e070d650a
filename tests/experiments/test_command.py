"""``bmc`` is one command for everything."""

from __future__ import annotations

import itertools
import re
import shlex
import sys
import types
from importlib.metadata import version
from pathlib import Path

import pytest
from commands import here
from hydra import compose, initialize_config_dir
from lightning.fabric.strategies.launchers import subprocess_script

from bmc_torchrl.experiments import command
from bmc_torchrl.experiments.command import COMMANDS, main

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bmc(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run ``bmc`` with arguments in this process; returns its exit status, output and errors."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["bmc", *arguments])
        return (main(), *capsys.readouterr())

    return call


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_names_every_command(bmc, arguments: tuple[str, ...]) -> None:
    status, output, errors = bmc(*arguments)
    assert (status, errors) == (0, "")
    assert output.startswith("usage: bmc COMMAND")
    assert all(f"bmc {name} " in output for name in COMMANDS)


def test_an_unknown_command_is_named_once_and_the_known_ones_are_shown(bmc) -> None:
    status, output, errors = bmc("trian", "runs=2")
    assert (status, output) == (2, "")
    said, *usage = errors.splitlines()
    assert said == "bmc: there is no command 'trian'."
    assert usage == bmc("--help")[1].splitlines()


def test_the_version_is_the_installed_one(bmc) -> None:
    assert bmc("--version") == (0, f"bmc_torchrl {version('bmc_torchrl')}\n", "")


def test_a_command_gets_the_arguments_after_its_name(bmc, tmp_path: Path) -> None:
    status, _, errors = bmc("compare", str(tmp_path), "nowhere.xlsx")
    assert status == 2
    assert errors.startswith("bmc compare: ")


@pytest.mark.parametrize("file", ["/usr/bin/bmc", "/somewhere/bmc_torchrl/__main__.py"])
def test_lightning_starts_further_ranks_as_the_command(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = types.ModuleType("__main__")
    started.__file__ = file
    monkeypatch.setitem(sys.modules, "__main__", started)
    monkeypatch.setattr(sys, "argv", ["bmc train", "runs=2"])
    command._be_started_as(COMMANDS["train"][0])
    again = subprocess_script._basic_subprocess_cmd()
    assert again == [sys.executable, "-m", "bmc_torchrl.experiments.train", "runs=2"]


def test_without_the_extra_a_command_says_how_to_install_it(
    bmc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(COMMANDS, "train", ("not_installed.train", "train"))
    status, output, errors = bmc("train")
    assert (status, output) == (1, "")
    assert errors.startswith(
        "bmc train needs not_installed: pip install 'bmc_torchrl[experiments]'"
    )


@pytest.fixture
def helped(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """What ``bmc COMMAND --help`` prints."""

    def ask(command: str) -> str:
        assert here(tmp_path, command, "--help") == 0
        return capsys.readouterr().out

    return ask


@pytest.mark.parametrize("command", ["train", "reproduce", "study", "sensitivity"])
def test_a_commands_help_has_three_examples_and_its_settings_on_a_page(
    helped, command: str
) -> None:
    text = helped(command)
    lines = text.strip().splitlines()
    assert lines[0].startswith(f"bmc {command} ")
    assert len(lines) < 40
    first = lines.index("Examples:") + 1
    examples = list(itertools.takewhile(str.strip, lines[first:]))
    assert len(examples) == 3
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        for example in examples:
            said, name, *overrides = shlex.split(example)
            assert (said, name) == ("bmc", command)
            compose(command, overrides=overrides)
        known = compose(command)
    described = re.findall(r"^  (\w+)=(\w+) ", text, re.MULTILINE)
    assert described
    for name, value in described:
        assert name in known
        if value.isdigit():
            assert known[name] == int(value), name


def test_the_help_of_train_leads_with_the_groups_and_hides_the_sweep(helped) -> None:
    text = helped("train")
    assert text.index("Groups:") < text.index("Examples:") < text.index("Settings")
    kinds = "apex, bmc, bmc_scale_free, constant, geometric, linear, power, vdbe, wins"
    assert f"strategy: {kinds}" in text
    assert "power_15" not in text


def test_jobs_of_a_multirun_are_named_by_their_overrides() -> None:
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        given = ["seed=1", "strategy=vdbe", "resume=true", "output=many"]
        cfg = compose("train", overrides=given, return_hydra_config=True)
        cfg.hydra.job.override_dirname = "seed=1,strategy=vdbe"
        assert cfg.hydra.sweep.dir == "many"
        assert cfg.hydra.sweep.subdir == "seed=1,strategy=vdbe"
        excluded = cfg.hydra.job.config.override_dirname.exclude_keys
    assert {"output", "resume", "figure"} <= set(excluded)
