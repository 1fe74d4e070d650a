"""Workers of TorchRL's collectors: a dead one is an error that names it, and never a hang."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from torchrl.collectors import BaseCollector
from torchrl.envs import EnvBase, ParallelEnv

__all__ = ["watched", "worker_processes"]

POLL_SECONDS = 0.1

T = TypeVar("T", bound=BaseCollector)


@contextlib.contextmanager
def watched(
    collector: T, *, checkpoint: str | Path | None = None, grace: float = 10.0
) -> Iterator[T]:
    """A collector whose dead workers are errors, and that is shut down in the end.

    Whatever TorchRL makes of a worker that was killed or crashed inside the ``with`` block (an
    error of its own, a broken pipe, a wait without end), the block ends with a ``RuntimeError``
    that says which worker it was, its process and exit code, and where to resume. The other workers
    are ended, and so are the threads without which a program that used a ``MultiSyncCollector``
    does not exit.

    Args:
        collector: a ``MultiSyncCollector``, ``MultiAsyncCollector`` or ``RayCollector``, or a
            ``Collector`` that steps a ``ParallelEnv``.
        checkpoint: what the error tells to resume from, if it exists. It must be written
            atomically: the error may come at any moment.
        grace: seconds after a death in which the block may fail by itself before it is
            interrupted, which only a block in the main thread can be.

    >>> from bmc_torchrl.envs import CartPoleEnv
    >>> from torchrl.collectors import Collector
    >>> collector = Collector(CartPoleEnv(batch_size=[2]), frames_per_batch=4, total_frames=8)
    >>> with watched(collector):
    ...     [data.shape for data in collector]
    [torch.Size([2, 2]), torch.Size([2, 2])]
    """
    processes, actors = worker_processes(collector), _actors(collector)
    watch = _Watch(processes, grace)
    try:
        with watch:
            yield collector
    except (Exception, _Interrupt) as error:
        reason = watch.reason() or _actor_reason(error, actors)
        reason = reason or _actor_reason(_dead_actors_error(collector), actors)
        _end(collector, processes)
        if reason is None:
            raise
        resume = "there is no checkpoint."
        if checkpoint is not None and Path(checkpoint).exists():
            resume = f"the last checkpoint is {checkpoint}."
        raise RuntimeError(f"{reason}; {resume}") from error
    except BaseException:
        _end(collector, processes)
        raise
    collector.shutdown()
    _end_weight_sync(collector)


def worker_processes(collector: BaseCollector) -> list[BaseProcess]:
    """The processes of a multi-process collector, or of the ``ParallelEnv`` that it steps."""
    processes: Sequence[BaseProcess] = getattr(collector, "procs", ())
    env: EnvBase | None = getattr(collector, "env", None)
    while env is not None and not isinstance(env, ParallelEnv):
        env = getattr(env, "base_env", None)
    return list(processes if env is None else env._workers)


class _Interrupt(BaseException):
    """Raised in a block that waits for a dead worker."""


class _Watch:
    """Sees which of some processes ends first, and interrupts a main thread that waits for it."""

    # Ignored unless handled, and used by nothing else here.
    SIGNAL = signal.SIGURG

    def __init__(self, processes: list[BaseProcess], grace: float) -> None:
        self.processes, self.grace = processes, grace
        self.pids = [process.pid for process in processes]
        self.dead: dict[int, int] = {}
        self.left = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.main = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> None:
        if self.main:
            self.previous = signal.signal(self.SIGNAL, self._interrupt)
        if self.processes:
            self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.left.set()
        if self.main:
            signal.signal(self.SIGNAL, self.previous)
        if self.processes:
            self.thread.join()

    def _watch(self) -> None:
        while not self.dead and not self.left.wait(POLL_SECONDS):
            self.dead = self._ended()
        if not self.left.wait(self.grace) and self.main:
            signal.pthread_kill(threading.main_thread().ident or 0, self.SIGNAL)

    def _interrupt(self, *_: object) -> None:
        if not self.left.is_set():
            raise _Interrupt

    def _ended(self) -> dict[int, int]:
        """Exit codes by worker; a process that the collector closed, it has ended itself."""
        codes = {i: _exit_code(process) for i, process in enumerate(self.processes)}
        return {i: code for i, code in codes.items() if code is not None}

    def reason(self) -> str | None:
        """Which workers died, if any."""
        dead = self.dead or self._ended()
        # TorchRL terminates the others when it finds a dead one.
        killed = {i: code for i, code in dead.items() if code != -signal.SIGTERM} or dead
        texts = [
            f"Worker {i} (pid {self.pids[i]}) ended with exit code {code}"
            for i, code in killed.items()
        ]
        return "; ".join(texts) or None


def _exit_code(process: BaseProcess) -> int | None:
    try:
        return process.exitcode
    except ValueError:  # It is closed.
        return None


def _actors(collector: BaseCollector) -> list[str]:
    """The ids of a ``RayCollector``'s workers."""
    return [actor._actor_id.hex() for actor in getattr(collector, "_remote_collectors", ())]


def _dead_actors_error(collector: BaseCollector) -> BaseException | None:
    """What Ray says of the first worker that does not answer; its peers may have failed first."""
    ray: Any = sys.modules.get("ray")
    for actor in getattr(collector, "_remote_collectors", ()):
        try:
            ray.get(actor.__ray_ready__.remote(), timeout=10)
        except ray.exceptions.RayError as error:
            found: BaseException = error
            return found
    return None


def _actor_reason(error: BaseException | None, actors: list[str]) -> str | None:
    """Which of Ray's workers died, if `error` says that one did."""
    actor = getattr(error, "actor_id", None)
    if actor not in actors:
        return None
    pid = re.search(r"pid: (\d+)", str(error))
    cause = re.search(r"Worker exit type: .*?\.", str(error))
    return (
        f"Worker {actors.index(actor)} (pid {pid[1] if pid else 'unknown'}, actor {actor}) died"
        f"{': ' + cause[0].rstrip('.') if cause else ''}"
    )


def _end(collector: BaseCollector, processes: list[BaseProcess]) -> None:
    """Shut down what is left after an error, which is not to be hidden by another."""
    for process in processes:
        with contextlib.suppress(ValueError):
            process.kill()
    for clean in (collector.shutdown, lambda: _end_weight_sync(collector)):
        with contextlib.suppress(Exception):
            clean()
    deadline = time.monotonic() + 5
    for process in processes:
        with contextlib.suppress(ValueError):
            process.join(max(0.0, deadline - time.monotonic()))


def _end_weight_sync(collector: BaseCollector) -> None:
    # Left to the garbage collector at the interpreter's exit, TorchRL 0.14.1's schemes start a
    # thread there, and the interpreter waits for it for ever.
    for scheme in (getattr(collector, "_weight_sync_schemes", None) or {}).values():
        scheme.shutdown()
