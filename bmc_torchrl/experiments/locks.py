"""Who may write where: locks that are free again when their process has ended, however it ended."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from bmc_torchrl.errors import SettingsError

__all__ = ["one_at_a_time", "only_job"]


@contextlib.contextmanager
def only_job(path: Path, what: str) -> Iterator[None]:
    """A section for one process; another one is refused.

    Args:
        path: The lock's file, made if need be, and left; it is the lock that counts.
        what: What both would write to, for the message.

    Raises:
        SettingsError: If another process is in it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            stream.seek(0)
            owner = stream.read().strip()
            raise SettingsError(
                f"{what} is being written by another job (process {owner}); wait for it, or choose "
                "another output=."
            ) from error
        stream.truncate(0)
        stream.write(f"{os.getpid()}\n")
        stream.flush()
        yield


@contextlib.contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """A section that one process at a time is in; others wait."""
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
