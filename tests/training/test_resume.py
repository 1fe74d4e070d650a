"""A job that was interrupted goes on as if it had not been, to the bit."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import lightning.fabric.plugins.io.torch_io as torch_io
import pytest
import torch
from interruptions import interrupted
from jobs import assert_identical, everything, settings, tiny, trained

from bmc_torchrl.analysis.tables import load
from bmc_torchrl.errors import SettingsError
from bmc_torchrl.signals import Interrupted, StopSignals
from bmc_torchrl.training import AtomicCheckpoint
from bmc_torchrl.training.transitions import random_state, restore_random_state, seed_everything

JOBS = {
    "tabular": tiny("grid_sarsa", "trainer.chunk_steps=8"),
    "published DQN": tiny("cart_dqn", "strategy=vdbe", "trainer.chunk_steps=4"),
    "DQN": tiny(
        "grid_dqn",
        "learner=dqn",
        "learner.warmup=8",
        "learner.batch_size=4",
        "trainer.chunk_steps=3",
    ),
    "prioritised DQN": tiny(
        "grid_dqn",
        "learner=dqn",
        "runs=1",
        "learner.warmup=8",
        "learner.batch_size=4",
        "learner.prioritized=true",
        "trainer.chunk_steps=3",
    ),
}
OFTEN = ["trainer.checkpoint_every_n_chunks=1", "trainer.checkpoint_every_n_updates=1"]
LOGGED = {
    "tabular": [*JOBS["tabular"], "trainer.checkpoint_every_n_chunks=2"],
    "DQN": [*JOBS["DQN"], "trainer.checkpoint_every_n_updates=2"],
    "engine": tiny(
        "grid_sarsa",
        "engine=lockstep",
        "episodes=4",
        "trainer.lockstep_chunk_steps=10",
        "trainer.checkpoint_every_n_chunks=1",
    ),
}


@pytest.mark.parametrize("chunks", [1, 2, 5])
@pytest.mark.parametrize("name", JOBS)
def test_a_job_interrupted_after_any_chunk_and_resumed_equals_one_that_was_not(
    name: str, chunks: int, tmp_path: Path
) -> None:
    job = [*JOBS[name], *OFTEN]
    whole = trained(tmp_path / "whole", *job)
    interrupted(tmp_path / "parts", chunks, *job)
    assert not (tmp_path / "parts/table.parquet").exists()
    torch.manual_seed(99)
    resumed = trained(tmp_path / "parts", *job, "resume=true")
    assert_identical(everything(resumed), everything(whole))
    tables = [load(tmp_path / part / "table.parquet") for part in ("whole", "parts")]
    assert tables[0].equals(tables[1])


def test_chunks_since_the_last_checkpoint_are_done_again(tmp_path: Path) -> None:
    job = [*JOBS["tabular"], "trainer.checkpoint_every_n_chunks=2"]
    whole = trained(tmp_path / "whole", *job)
    interrupted(tmp_path / "parts", 5, *job)
    assert_identical(
        everything(trained(tmp_path / "parts", *job, "resume=true")), everything(whole)
    )


def test_resuming_a_finished_job_changes_nothing(tmp_path: Path) -> None:
    job = JOBS["tabular"]
    first = trained(tmp_path, *job)
    table = load(tmp_path / "table.parquet")
    again = trained(tmp_path, *job, "resume=true")
    assert load(tmp_path / "table.parquet").equals(table)
    assert torch.equal(again.rule.table.weight, first.rule.table.weight)
    assert torch.equal(again.explore.eps, first.explore.eps)


def test_resume_without_a_checkpoint_starts_at_the_beginning(tmp_path: Path) -> None:
    first = trained(tmp_path / "first", *JOBS["tabular"])
    second = trained(tmp_path / "second", *JOBS["tabular"], "resume=true")
    assert_identical(everything(second), everything(first))


@pytest.mark.parametrize("name", JOBS)
def test_checkpoints_hold_tensors_and_plain_values_only(name: str, tmp_path: Path) -> None:
    trained(tmp_path, *JOBS[name], "episodes=1")
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", "table.parquet"]


def test_checkpoints_come_every_so_many_updates_where_lightning_counts_them(tmp_path: Path) -> None:
    job = [*JOBS["DQN"], "trainer.chunk_steps=1", "trainer.checkpoint_every_n_updates=10"]
    with pytest.MonkeyPatch.context() as patch:
        steps: list[int] = []
        patch.setattr(
            AtomicCheckpoint, "save", lambda _, trainer: steps.append(trainer.global_step)
        )
        trained(tmp_path, *job, "trainer.checkpoint_every_n_chunks=1")
    assert steps[:3] == [10, 20, 30]


@pytest.mark.parametrize("moment", range(24))
def test_a_job_that_is_asked_to_end_between_any_two_lines_saves_first(
    moment: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[int] = []
    monkeypatch.setattr(
        AtomicCheckpoint, "save", lambda _, trainer: saved.append(trainer.global_step)
    )
    trainer, lines = SimpleNamespace(global_step=0, world_size=1), itertools.count()

    def ask(frame, event, _):
        if frame.f_code is not AtomicCheckpoint.on_train_batch_end.__code__:
            return None
        if event == "line" and next(lines) == moment:
            signal.raise_signal(signal.SIGTERM)
        return ask

    def take_steps(callback):
        for trainer.global_step in range(1, 20):
            callback.on_train_batch_end(trainer, None)

    before = sys.gettrace()
    with StopSignals() as signals:
        signals.deferred = True
        callback = AtomicCheckpoint(tmp_path, 3, signals=signals)
        sys.settrace(ask)
        try:
            with pytest.raises(Interrupted):
                take_steps(callback)
        finally:
            sys.settrace(before)
    assert saved[-1] == trainer.global_step


def rows(output: Path) -> list[str]:
    return (output / "metrics/metrics.csv").read_text().splitlines()


@pytest.mark.parametrize("name", LOGGED)
@pytest.mark.parametrize("chunks", [1, 5])
def test_the_log_of_a_resumed_job_is_that_of_an_uninterrupted_one(
    name: str, chunks: int, tmp_path: Path
) -> None:
    job = [*LOGGED[name], "logger=csv", "figure=false"]
    trained(tmp_path / "whole", *job)
    interrupted(tmp_path / "parts", chunks, *job)
    with (tmp_path / "parts/metrics/metrics.csv").open("a") as stream:
        stream.write("5.0,5,0.1")  # As a killed job may leave it.
    trained(tmp_path / "parts", *job, "resume=true")
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")


def _killed_while_writing(output: Path, writing: Path, job: list[str]) -> None:
    """In a child: the third checkpoint is written halfway and never finished."""
    save, count = torch_io._atomic_save, iter(range(1000))

    def slow_save(checkpoint, path):
        if next(count) < 2:
            return save(checkpoint, path)
        save(checkpoint, path)
        os.truncate(path, os.path.getsize(path) // 2)
        writing.touch()
        return time.sleep(600)

    torch_io._atomic_save = slow_save
    trained(output, *job)


def test_a_checkpoint_killed_while_it_is_written_leaves_the_previous_one(tmp_path: Path) -> None:
    job = [*JOBS["tabular"], "trainer.checkpoint_every_n_chunks=1"]
    whole = trained(tmp_path / "whole", *job)
    output, writing = tmp_path / "killed", tmp_path / "writing"
    child = multiprocessing.get_context("fork").Process(
        target=_killed_while_writing, args=(output, writing, job), daemon=True
    )
    child.start()
    while not writing.exists() and child.is_alive():
        time.sleep(0.02)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert torch.load(output / "last.ckpt", weights_only=True)["global_step"] == 2
    with pytest.raises((RuntimeError, OSError)):
        torch.load(output / "last.tmp", weights_only=True)
    resumed = trained(output, *job, "resume=true")
    assert_identical(everything(resumed), everything(whole))


@pytest.mark.slow
def test_jobs_killed_at_any_moment_resume_exactly(tmp_path: Path) -> None:
    job = [*JOBS["tabular"], "trainer.checkpoint_every_n_chunks=1", "trainer.chunk_steps=2"]
    whole = trained(tmp_path / "whole", *job)
    output = tmp_path / "killed"
    for attempt in range(20):
        child = multiprocessing.get_context("fork").Process(
            target=trained, args=(output, *job, "resume=true"), daemon=True
        )
        child.start()
        child.join(0.3 + 0.07 * (attempt % 7))
        if child.exitcode == 0:
            break
        os.kill(child.pid, signal.SIGKILL)
        child.join()
    resumed = trained(output, *job, "resume=true")
    for name in ("rule.table.weight", "log_of_episodes.measured", "explore.strategy.alpha"):
        assert torch.equal(resumed.state_dict()[name], whole.state_dict()[name])


def test_a_checkpoint_of_another_job_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, *JOBS["tabular"])
    with pytest.raises(SettingsError, match="runs was 2, is 3"):
        trained(tmp_path, *JOBS["tabular"], "runs=3", "resume=true")


def test_all_random_numbers_are_seeded_and_restored() -> None:
    import numpy as np

    def drawn():
        return torch.rand(3).tolist(), np.random.uniform(size=3).tolist()

    seed_everything(7)
    state, first = random_state(), drawn()
    assert drawn() != first
    restore_random_state(state)
    assert drawn() == first
    seed_everything(7)
    assert drawn() == first


def test_a_resume_setting_is_a_setting() -> None:
    assert settings("resume=true").resume is True
