"""The console command: ``bmc train``, ``bmc reproduce`` and so on, from any folder."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from bmc_torchrl.signals import Interrupted, StopSignals

__all__ = ["main"]

COMMANDS = {
    "train": ("bmc_torchrl.experiments.train", "train one job"),
    "reproduce": ("bmc_torchrl.experiments.reproduce", "run the paper's sweep, or what is missing"),
    "compare": ("bmc_torchrl.experiments.compare", "judge results against the published data"),
    "figures": ("bmc_torchrl.experiments.figures", "draw the figures of results folders"),
    "study": ("bmc_torchrl.experiments.study", "every strategy on finite MDPs and with networks"),
    "sensitivity": ("bmc_torchrl.experiments.sensitivity", "vary the prior and the rewards' scale"),
    "benchmark": ("bmc_torchrl.benchmarks.command", "ratios against peers"),
    "doctor": ("bmc_torchrl.experiments.doctor", "versions, devices, what is missing for what"),
}
"""What can be asked for: its module, which is imported only then, and what it does."""

INSTALL = "pip install 'bmc_torchrl[experiments]' installs what trains, draws and compares."


def _usage() -> str:
    lines = [f"  bmc {name:<12} {what}" for name, (_, what) in COMMANDS.items()]
    example = "example: bmc train experiment=grid_sarsa strategy=bmc runs=100"
    more = "bmc COMMAND --help says what a command takes."
    return "\n".join(["usage: bmc COMMAND [overrides or arguments]", *lines, example, more])


def main() -> int:
    """Run the command that the first argument names, with the other arguments."""
    asked = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if asked in ("--help", "-h"):
        print(_usage())
        return 0
    if asked == "--version":
        print(f"bmc_torchrl {version('bmc_torchrl')}")
        return 0
    if asked not in COMMANDS:
        print(f"bmc: there is no command {asked!r}.\n{_usage()}", file=sys.stderr)
        return 2
    try:
        with StopSignals():  # What a command imports takes seconds.
            command: Callable[[], int | None] = importlib.import_module(COMMANDS[asked][0]).main
    except Interrupted as stop:
        print(f"bmc {asked}: {stop} before it began", file=sys.stderr)
        return stop.exit_status
    except ModuleNotFoundError as error:
        print(f"bmc {asked} needs {error.name}: {INSTALL}", file=sys.stderr)
        return 1
    sys.argv = [f"bmc {asked}", *sys.argv[2:]]
    _be_started_as(COMMANDS[asked][0])
    return command() or 0


def _be_started_as(module: str) -> None:
    """Let whoever starts this process again, as Lightning does for each rank, start `module`."""
    started = sys.modules["__main__"]
    file = Path(getattr(started, "__file__", None) or "")
    if file.name == "bmc" or file.parts[-2:] == ("bmc_torchrl", "__main__.py"):
        started.__spec__ = importlib.util.find_spec(module)
