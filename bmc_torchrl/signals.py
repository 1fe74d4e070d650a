"""A command that is asked to end: SIGINT (Ctrl-C) and SIGTERM, at once or where it is safe."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

__all__ = ["Interrupted", "StopSignals", "held_back"]

_ASKING = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """A signal asked the process to end.

    Args:
        number: Of the signal.

    Attributes:
        left: Where the work stands and how to go on, for the user.

    Examples:
        >>> stop = Interrupted(signal.SIGTERM)
        >>> stop.left = "at episode 3 of 9; continue with resume=true"
        >>> str(stop), stop.exit_status
        ('interrupted at episode 3 of 9; continue with resume=true', 143)
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number, self.left = number, ""

    def __str__(self) -> str:
        joined = "" if not self.left or self.left.startswith((";", ",")) else " "
        return f"interrupted{joined}{self.left}"

    @property
    def exit_status(self) -> int:
        """What a shell expects of a process that ended by the signal."""
        return 128 + self.number


class StopSignals:
    """Within it, SIGINT and SIGTERM raise :class:`Interrupted`; before and after, they do as ever.

    While :attr:`deferred`, the first signal is only noted: whoever set it looks at :attr:`pending`
    where it is safe to end. A second one ends the work at once.

    Attributes:
        deferred: Whether somebody looks.
        pending: The signal that was noted, or None.
    """

    def __init__(self) -> None:
        self.deferred = False
        self.pending: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        self.take_over()
        return self

    def take_over(self) -> None:
        """Put the handlers in place, also over those that somebody has put there since."""
        if threading.current_thread() is threading.main_thread():
            for number in _ASKING:
                before = signal.signal(number, self._asked)
                self._before.setdefault(number, before)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def raise_pending(self) -> None:
        """End now if it was asked for."""
        if self.pending is not None:
            raise Interrupted(self.pending)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if self.deferred and self.pending is None:
            self.pending = number
        else:
            raise Interrupted(number)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Within it, SIGINT and SIGTERM wait: what is short and must be whole is not cut in two.

    Examples:
        >>> done = []
        >>> with StopSignals(), held_back():
        ...     signal.raise_signal(signal.SIGTERM)
        ...     done.append("all of it")
        Traceback (most recent call last):
        bmc_torchrl.signals.Interrupted: interrupted
        >>> done
        ['all of it']
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    noted: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: noted.append(number))
        for number in _ASKING
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if noted:
            signal.raise_signal(noted[0])
