"""What happens around learning: tests, stopping, records, checkpoints, progress."""

from __future__ import annotations

import copy
import functools
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torchrl.envs import EnvBase

from bmc_torchrl.analysis.tables import provenance, save, tidy
from bmc_torchrl.signals import StopSignals, held_back
from bmc_torchrl.strategies import ChangeDetector
from bmc_torchrl.training.episodes import EpisodeLog
from bmc_torchrl.training.greedy_tests import greedy_tests
from bmc_torchrl.training.run_records import ChunkedLearner, RecordedLearner

__all__ = [
    "AtomicCheckpoint",
    "EpisodeProgress",
    "ForgetOnChange",
    "GreedyEvaluation",
    "ResultsTable",
    "StopAfterPerfectTests",
]


class GreedyEvaluation(Callback):
    """Greedy test episodes after every training episode of every run, or every few.

    The tests of a chunk run together when it ends, each run's with its Q of right after the
    episode: a copy is taken at that step, on the device. Test episodes draw from a generator of
    their own, so that they never change what is learned. Episodes that end while replay fills,
    before the first update, share a test.

    Args:
        env: test environments, batch size ``[runs, tests]``.
        gamma: discount factor of the recorded return.
        max_steps: where a test is cut.
        seed: of the tests' random numbers.
        snapshot: keep a copy of Q at each episode's end. Without it, the tests use Q at the end of
            the chunk, which is the same where all episodes end with the chunk.
        at_once: test in the very step in which an episode ends, without waiting for the chunk; the
            host must then look at every step.
        one_by_one: whether `env` steps its copies one by one; see
            :func:`~bmc_torchrl.training.greedy_tests.greedy_tests`.
    """

    def __init__(
        self,
        env: EnvBase,
        *,
        gamma: float,
        max_steps: int,
        seed: int = 0,
        snapshot: bool = True,
        at_once: bool = False,
        one_by_one: bool = False,
    ) -> None:
        self.env, self.gamma, self.max_steps = env, gamma, max_steps
        self.seed, self.at_once, self.one_by_one = seed, at_once, one_by_one
        self.snapshot = snapshot and not at_once

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Make the copy of Q that tests use."""
        assert isinstance(pl_module, RecordedLearner)
        self.actor = pl_module.q_actor
        self.hook = self._keep
        if self.at_once:
            self.hook = functools.partial(self._test_now, pl_module)
            pl_module.step_hooks.append(self.hook)
        if self.snapshot:
            self.actor = copy.deepcopy(pl_module.q_actor)
            self.pairs = list(
                zip(self.actor.parameters(), pl_module.q_actor.parameters(), strict=True)
            )
            pl_module.step_hooks.append(self.hook)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Leave the learner as it was."""
        assert isinstance(pl_module, RecordedLearner)
        if self.hook in pl_module.step_hooks:
            pl_module.step_hooks.remove(self.hook)

    @torch.no_grad()
    def _keep(self, ended: Tensor) -> None:
        for kept, live in self.pairs:
            shape = () if ended.numel() == 1 else (-1, *[1] * (live.ndim - 1))
            kept.copy_(torch.where(ended.reshape(shape), live, kept))

    def _test_now(self, learner: RecordedLearner, due: Tensor) -> None:
        if bool(due.any()):
            self._test(learner)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Test the runs whose episode ended in this chunk."""
        assert isinstance(pl_module, RecordedLearner)
        log = pl_module.log_of_episodes
        most = int(log.ended.max())
        filling = not isinstance(pl_module, ChunkedLearner) and bool(log.steps.isnan().all())
        if most > 1 and not filling:
            raise RuntimeError(
                f"A run ended {most} episodes within one chunk of vector steps, so their tests "
                "cannot be told apart: set chunk_steps to at most the shortest episode's length "
                "(times domain.test_every)."
            )
        if most > 0:
            self._test(pl_module)

    def _test(self, learner: RecordedLearner) -> None:
        log = learner.log_of_episodes
        devices = [self.env.device] if self.env.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(self.seed + learner.global_step)
            steps, returns = greedy_tests(
                self.env,
                self.actor,
                gamma=self.gamma,
                max_steps=self.max_steps,
                runs=log.ended > 0,
                one_by_one=self.one_by_one,
                episode=(log.tested - 1).clamp(min=0),
            )
        if steps.ndim > 1:
            steps, returns = steps.mean(-1), returns.mean(-1)
        log.write_tests(log.ended > 0, steps, returns)


class StopAfterPerfectTests(Callback):
    """Stops a run after `tests` consecutive tests of `max_steps` steps; its results stay."""

    def __init__(self, tests: int, max_steps: int) -> None:
        if tests < 1:
            raise ValueError(f"tests must be at least 1, got {tests}.")
        self.tests, self.max_steps = tests, max_steps

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Look at the last tests of each run."""
        assert isinstance(pl_module, RecordedLearner)
        log = pl_module.log_of_episodes
        back = torch.arange(1, self.tests + 1, device=log.done.device)
        index = (log.done.unsqueeze(-1) - back).clamp(min=0)
        perfect = (log.steps.gather(-1, index) >= self.max_steps).all(-1)
        log.stop(perfect & (log.done >= self.tests))


class ForgetOnChange(Callback):
    """Lets the strategy unlearn, in the runs whose training returns fall, as for a new task.

    After every step, in the order of learning; nothing leaves the device. The detector is part of
    the checkpoint. In a distributed run each rank watches its own runs. A lockstep engine has no
    hook for its steps: use ``engine=torchrl``.

    Args:
        rate: what share to forget; with 1, the strategy is reset.
        strength: α + β to begin with after a reset, at the prior's mean; the prior's by default.
        **options: of :class:`~bmc_torchrl.ChangeDetector`.
    """

    def __init__(self, rate: float = 1.0, *, strength: float | None = None, **options: Any) -> None:
        if not 0 < rate <= 1:
            raise ValueError(f"rate must be in (0, 1], got {rate}.")
        if strength is not None and rate < 1:
            raise ValueError(f"strength={strength} is for a reset: leave out rate={rate}.")
        self.rate, self.strength, self.options = rate, strength, options
        ChangeDetector(**options)
        self.detector: ChangeDetector | None = None
        self.hook: Any = None
        self._loaded: dict[str, Any] | None = None

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Watch from now on, or go on where a checkpoint stopped."""
        assert isinstance(pl_module, RecordedLearner)
        if not hasattr(pl_module, "step_hooks"):
            raise ValueError(
                "ForgetOnChange needs a module that steps by itself, not "
                f"{type(pl_module).__name__}: use engine=torchrl."
            )
        log = pl_module.log_of_episodes
        self.detector = ChangeDetector(**self.options, batch_shape=[log.runs]).to(log.done.device)
        self.seen = log.done.clone()
        if self._loaded is not None:
            self.detector.load_state_dict(self._loaded)
            self._loaded = None
        self.hook = functools.partial(self._watch, pl_module)
        pl_module.step_hooks.append(self.hook)

    def _watch(self, learner: RecordedLearner, due: Tensor) -> None:
        log, strategy = learner.log_of_episodes, learner.strategy
        ended = log.done > self.seen
        if ended.device.type == "cpu" and not bool(ended.any()):
            return
        assert self.detector is not None
        self.seen.copy_(log.done)
        fired = self.detector.observe(log.last_return, ended)
        runs = fired if strategy.batch_shape else fired.any()
        if self.rate < 1:
            strategy.forget(self.rate, runs=runs)
        else:
            strategy.reset(strength=self.strength, runs=runs)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Leave the learner as it was."""
        assert isinstance(pl_module, RecordedLearner)
        if self.hook is not None and self.hook in pl_module.step_hooks:
            pl_module.step_hooks.remove(self.hook)

    def state_dict(self) -> dict[str, Any]:
        """What the detector knows."""
        return {} if self.detector is None else {"detector": self.detector.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there when training starts."""
        self._loaded = state_dict.get("detector")


class ResultsTable(Callback):
    """Writes the tidy results table when training ends.

    Args:
        path: Parquet file.
        strategies: labels; run i belongs to strategy i // (runs / strategies).
        experiment: its name.
        config: plain containers that say how it was made.
        seed: of the job.
    """

    def __init__(
        self,
        path: str | Path,
        strategies: Sequence[str],
        *,
        experiment: str,
        config: Mapping[str, Any],
        seed: int,
    ) -> None:
        self.path, self.experiment, self.strategies = Path(path), experiment, list(strategies)
        self.metadata = provenance(config, seed)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the table, if every run has finished."""
        assert isinstance(pl_module, RecordedLearner)
        if trainer.is_global_zero and pl_module.finished:
            self.write(pl_module.log_of_episodes)

    def write(self, log: EpisodeLog) -> None:
        """Write the table of runs that have finished."""
        tables = (log.steps, log.returns, log.epsilons)
        shape = (len(self.strategies), -1, log.episodes)
        arrays = [table.cpu().double().reshape(shape).numpy() for table in tables]
        save(tidy(self.experiment, self.strategies, *arrays), self.path, self.metadata)


class AtomicCheckpoint(Checkpoint):
    """Saves everything to ``last.ckpt`` every so many steps; a crash leaves the previous one.

    Args:
        folder: where to.
        every_n_steps: of Lightning's ``global_step``, whether it counts updates or chunks; 0 for
            only at the end. A chunk of updates that passes a multiple counts.
        settings: plain values by name, kept in the checkpoint: those that decide the results.
        signals: a job that is asked to end saves after the step it is in, and ends.

    Attributes:
        episode: What all runs have finished in the last checkpoint; None while there is none.
    """

    def __init__(
        self,
        folder: str | Path,
        every_n_steps: int = 100,
        *,
        settings: Mapping[str, Any] | None = None,
        signals: StopSignals | None = None,
    ) -> None:
        self.path, self.every_n_steps = Path(folder) / "last.ckpt", every_n_steps
        self.settings, self.signals = dict(settings or {}), signals
        self.episode: int | None = None
        self._due = 0

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Say whose checkpoint it is, and how far the job is."""
        assert isinstance(pl_module, RecordedLearner)
        checkpoint["job"] = {
            "settings": self.settings,
            "episode": pl_module.episodes_finished,
            "finished": pl_module.finished,
        }

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Remember how far the job was."""
        self.episode = checkpoint["job"]["episode"]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Count from where training starts."""
        self._wait(trainer)
        if self.signals is not None:
            self.signals.take_over()

    def _wait(self, trainer: L.Trainer) -> None:
        if self.every_n_steps:
            self._due = (trainer.global_step // self.every_n_steps + 1) * self.every_n_steps

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Save after every `every_n_steps` steps, and before the job ends because it was asked."""
        asked = self.signals is not None and self.signals.pending is not None
        if asked or (self.every_n_steps and trainer.global_step >= self._due):
            self.save(trainer)
            self._wait(trainer)
        if self.signals is not None:
            # One that came after the look above waits for the next step, which is saved.
            if asked:
                self.signals.raise_pending()
            # Ranks save together, so one that was asked cannot save alone.
            self.signals.deferred = trainer.world_size == 1

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save at the end."""
        self.save(trainer)

    def save(self, trainer: L.Trainer) -> None:
        """Write beside the old checkpoint, then take its place.

        Raises:
            OSError: If it cannot be written; the old checkpoint is still there.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        try:
            trainer.save_checkpoint(temporary)
            if trainer.is_global_zero:
                with open(temporary, "rb") as stream:
                    os.fsync(stream.fileno())
                os.replace(temporary, self.path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        learner = trainer.lightning_module
        assert isinstance(learner, RecordedLearner)
        self.episode = learner.episodes_finished


class EpisodeProgress(Callback):
    """A progress bar over all runs' episodes, with the last tests, ε and speed, in 80 columns.

    Args:
        labels: of the strategies, equal shares of the runs each; the first one's results are shown.
        every_seconds: between two looks.
    """

    def __init__(self, labels: Sequence[str] = ("",), every_seconds: float = 0.5) -> None:
        self.labels, self.every_seconds = list(labels), every_seconds
        self.bar: Progress | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Show the bar."""
        assert isinstance(pl_module, RecordedLearner)
        log = pl_module.log_of_episodes
        self.bar = Progress(
            TextColumn("{task.fields[count]} episodes"),
            BarColumn(bar_width=6),
            TextColumn("{task.fields[known]}"),
            TimeRemainingColumn(compact=True),
            console=Console(stderr=True),
            disable=not trainer.is_global_zero,
        )
        total = log.runs * log.episodes
        self.task = self.bar.add_task("", total=total, known="", count=_count(0, total))
        with held_back():
            self.bar.start()
        self.shown = self.began = time.monotonic()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Refresh, at most every half second."""
        assert isinstance(pl_module, RecordedLearner)
        now = time.monotonic()
        if now - self.shown >= self.every_seconds:
            self.shown = now
            self._refresh(pl_module, now)

    def _refresh(self, learner: RecordedLearner, now: float) -> None:
        log = learner.log_of_episodes
        last, own = log.last_tested, slice(0, log.runs // len(self.labels))
        speed = learner.vector_steps * log.runs / (now - self.began)
        returns = float(log.returns.gather(-1, last)[own].nanmean())
        name = f"{self.labels[0][:8]}: " if len(self.labels) > 1 else ""
        epsilon = float(learner.strategy.eps[own].mean())
        known = f"{name}return {_short_return(returns)} ε {epsilon:.3f} {_short(speed)} steps/s"
        done = int(torch.where(log.stopped, log.episodes, log.done).sum())
        count = _count(done, log.runs * log.episodes)
        assert self.bar is not None
        self.bar.update(self.task, completed=done, known=known, count=count)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Show the final state."""
        assert isinstance(pl_module, RecordedLearner)
        self._refresh(pl_module, time.monotonic())
        assert self.bar is not None
        with held_back():
            self.bar.stop()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Leave the terminal as it was."""
        if self.bar is not None:
            with held_back():
                self.bar.stop()


def _count(done: int, total: int) -> str:
    """So many of so many, the numbers in full while they are short.

    >>> _count(7, 500), _count(1_100_000, 2_200_000)
    ('7/500', '1.1M/2.2M')
    """
    return f"{done}/{total}" if total < 1e6 else f"{_short(done)}/{_short(total)}"


def _short_return(value: float) -> str:
    """A return in at most eight characters.

    >>> _short_return(-12.34), _short_return(-123456.7), _short_return(-12345678.0)
    ('-12.3', '-123457', '-1.2e+07')
    """
    if abs(value) < 1e4:
        return f"{value:.1f}"
    return f"{value:.0f}" if abs(value) < 1e6 else f"{value:.1e}"


def _short(number: float) -> str:
    """A number in at most four characters.

    >>> _short(950), _short(12_345), _short(3_000_000), _short(25_000_000), _short(8.5e9)
    ('950', '12k', '3.0M', '25M', '8.5G')
    """
    if number < 1e4:
        return f"{number:.0f}"
    for size, letter in ((1e3, "k"), (1e6, "M")):
        if number < 1000 * size:
            return f"{number / size:.{int(size > 1e3 and number < 10 * size)}f}{letter}"
    return f"{number / 1e9:.1f}G"
