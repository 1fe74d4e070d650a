"""``bmc`` as a user runs it: in a process of its own, which ends with a status and its words."""

from __future__ import annotations

import logging
import multiprocessing
import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bmc_torchrl.experiments.command import main

# Children of a server that has imported what ``bmc`` needs and runs no threads: a fork of a process
# that does, as pytest's does after a few hundred tests, may wait for ever; another interpreter
# would first import for seven seconds.
SERVED = multiprocessing.get_context("forkserver")
SERVED.set_forkserver_preload(
    [f"bmc_torchrl.experiments.{name}" for name in ("train", "reproduce", "study", "sensitivity")]
)


@dataclass
class Process:
    """A running ``bmc``."""

    child: Any
    out: Path
    err: Path

    @property
    def pid(self) -> int:
        return self.child.pid

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def running(self) -> bool:
        return self.child.is_alive()

    def wait(self) -> Ended:
        self.child.join(300)
        assert not self.running(), f"{self.err.read_text()}\nbmc has not ended after 300 s"
        return Ended(self.child.exitcode, self.out.read_text(), self.err.read_text())


@dataclass(frozen=True)
class Ended:
    """Exit status (−9 for one that was killed), output and errors."""

    status: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """What was said of errors, without the progress bar."""
        return [line for line in self.err.splitlines() if line.startswith("bmc")]


def started(folder: Path, *arguments: str, largest_file: int | None = None) -> Process:
    """Start ``bmc *arguments`` in `folder`, where no file may be larger than so many bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.glob(".said.*")))
    out, err = (folder / f".said.{number}.{name}" for name in ("out", "err"))
    out.touch()
    given = (folder, out, err, arguments, largest_file, dict(os.environ))
    child = SERVED.Process(target=_run, args=given)
    child.start()
    return Process(child, out, err)


def _run(
    folder: Path,
    out: Path,
    err: Path,
    arguments: tuple[str, ...],
    largest_file: int | None,
    environment: dict[str, str],
) -> None:
    os.environ.update(environment)
    status = 70
    try:
        with out.open("w") as said, err.open("w") as complained:
            os.dup2(said.fileno(), 1)
            os.dup2(complained.fileno(), 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            os.chdir(folder)
            sys.argv = ["bmc", *arguments]
            warnings.resetwarnings()
            warnings.simplefilter("ignore")
            if largest_file is not None:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))
            status = main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def bmc(folder: Path, *arguments: str) -> Ended:
    """Run ``bmc *arguments`` in `folder` to its end."""
    return started(folder, *arguments).wait()


def wait_until(true: Callable[[], bool], process: Process, seconds: float = 120.0) -> None:
    """Wait until something is `true`, while `process` is running."""
    deadline = time.monotonic() + seconds
    while not true() and process.running() and time.monotonic() < deadline:
        time.sleep(0.002)


def here(folder: Path, *arguments: str) -> int:
    """Run ``bmc *arguments`` in this process: what it compiles, forked ones find done."""
    folder.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Hydra's handlers write to what is standard output now.
        patch.setattr(logging.root, "handlers", logging.root.handlers[:])
        patch.setattr(logging.root, "level", logging.root.level)
        # Its configuration closes every handler there is, and absl's closes pytest's own stream.
        patch.setattr(logging, "_handlerList", [])
        patch.chdir(folder)
        patch.setenv("HYDRA_FULL_ERROR", "1")
        patch.setattr(sys, "argv", ["bmc", *arguments])
        try:
            return main()
        except SystemExit as end:
            return int(end.code or 0)
