"""A page in headless Chromium, driven over the pipe of its DevTools protocol."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync")
QUIET = ("--disable-background-networking", "--disable-dev-shm-usage", "--remote-debugging-pipe")


SECONDS = 60
"""How long Chromium may say nothing."""


class Page:
    """One page.

    Args:
        profile: an empty folder for what Chromium keeps.
        size: width and height of the window.
    """

    def __init__(self, profile: Path, size: tuple[int, int] = (1280, 900)) -> None:
        assert CHROMIUM is not None
        # Chromium reads commands from descriptor 3 and answers on 4.
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        window = f"--window-size={size[0]},{size[1]}"
        chromium = [CHROMIUM, *OPTIONS, *QUIET, f"--user-data-dir={profile}", window, "about:blank"]
        redirected = f'exec "$0" "$@" 3<&{commands} 4>&{answers}'
        self._process = subprocess.Popen(
            ["bash", "-c", redirected, *chromium],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._unread, self._events = b"", list[str]()
        self._last, self._session = 0, None
        (target,) = (
            target["targetId"]
            for target in self.call("Target.getTargets")["targetInfos"]
            if target["type"] == "page"
        )
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self.call("Page.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def call(self, method: str, **parameters: Any) -> Any:
        """What a command of the protocol answers."""
        self._last += 1
        command = {"id": self._last, "method": method, "params": parameters}
        if self._session is not None:
            command["sessionId"] = self._session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while (message := self._next()).get("id") != self._last:
            self._events.append(message.get("method"))
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']['message']}")
        return message["result"]

    def _next(self) -> Any:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._answers], [], [], SECONDS)
            read = os.read(self._answers, 1 << 16) if ready else b""
            if not read:
                raise RuntimeError("Chromium ended, or does not answer.")
            self._unread += read
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)

    def open(self, address: str) -> None:
        """Go to an address, and wait until all that it loads is there."""
        self._events.clear()
        self.call("Page.navigate", url=address)
        while "Page.loadEventFired" not in self._events:
            self._events.append(self._next().get("method"))

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise."""
        options = {"returnByValue": True, "awaitPromise": True}
        answer = self.call("Runtime.evaluate", expression=expression, **options)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"].get("description", answer))
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Press a named key such as ``ArrowRight`` where the focus is."""
        codes = {"ArrowLeft": 37, "ArrowRight": 39, "Tab": 9, "Home": 36, "Space": 32}
        named = {"key": " " if key == "Space" else key, "code": key}
        for kind in ("rawKeyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, windowsVirtualKeyCode=codes[key], **named
            )
