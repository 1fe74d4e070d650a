"""What ``bmc train`` finds in its output folder: other settings, broken files, another job."""

from __future__ import annotations

import pickle
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import Ended, bmc, here, started, wait_until

from bmc_torchrl.analysis.tables import load, load_metadata
from bmc_torchrl.experiments.locks import only_job

JOB = (
    *("train", "experiment=grid_sarsa", "runs=2", "episodes=9", "domain.max_steps=30"),
    *("device=cpu", "figure=false", "output=out", "trainer.lockstep_chunk_steps=3"),
)
ENGINES = {
    "numba": JOB,
    "lightning": (
        *("train", "experiment=grid_dqn", "learner=dqn", "engine=torchrl", "runs=2", "episodes=9"),
        *("domain.max_steps=22", "device=cpu", "figure=false", "output=out", "learner.warmup=8"),
        *("learner.batch_size=4", "trainer.chunk_steps=3", "trainer.checkpoint_every_n_updates=9"),
    ),
}
LONG = {name: (*job, "episodes=2000") for name, job in ENGINES.items()}


def said(ended: Ended) -> str:
    """The one line of a refusal, after what compiling may have taken."""
    assert (ended.status, ended.out) == (2, ""), ended
    (line,) = (line for line in ended.err.splitlines() if not line.startswith("compil"))
    return line


@pytest.fixture(scope="module", autouse=True)
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of uninterrupted jobs."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ENGINES}
    for name, folder in folders.items():
        assert here(folder, *ENGINES[name]) == 0
    return folders


@pytest.fixture(scope="module")
def finished(whole: dict[str, Path]) -> Path:
    return whole["numba"]


OTHER = {
    "seed=1": "seed was 0, is 1",
    "gamma=0.5": "gamma was 0.99, is 0.5",
    "families.bmc.alpha0=3": "families.bmc.alpha0 was 1.0, is 3",
    "strategies=[bmc,fixed_01]": "strategies was ['bmc'], is ['bmc', 'fixed_01']",
    "table.learning_rate=0.1": "learner.learning_rate was 0.7, is 0.1",
    "episodes=5": "episodes was 9, is 5",
    "engine=torchrl": "engine was auto, is torchrl",
    "experiment=cart_sarsa": "name was grid_sarsa, is cart_sarsa",
    "stop_after_perfect_tests=2": "stop_after_perfect_tests was None, is 2",
}


@pytest.mark.parametrize("other", OTHER)
def test_a_job_is_not_resumed_with_other_settings(other: str, finished: Path) -> None:
    before = (finished / "out/table.parquet").read_bytes()
    line = said(bmc(finished, *JOB, "resume=true", other))
    assert line.startswith("bmc train: resume=true: out/last.ckpt was made with other settings (")
    assert OTHER[other] in line
    assert (finished / "out/table.parquet").read_bytes() == before


@pytest.mark.parametrize("harmless", ["logger=none", "trainer.threads=2", "families.vdbe.delta=1"])
def test_a_finished_job_says_so_and_with_which_settings(harmless: str, finished: Path) -> None:
    table = finished / "out/table.parquet"
    before = table.read_bytes(), load_metadata(table)
    ended = bmc(finished, *JOB, "resume=true", harmless)
    assert ended.status == 0
    assert ended.lines == [
        "bmc train: out is finished: grid_sarsa with bmc, 2 runs of 9 episodes each, seed 0. "
        "There is nothing left to train."
    ]
    assert "mean (AUC)" in ended.out
    assert (table.read_bytes(), load_metadata(table)) == before


def broken(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(
            {
                "truncated": content[: len(content) // 2],
                "empty": b"",
                "corrupt": flipped(content),
                "foreign": b"PK not a checkpoint, nor a table\n" * 30,
                "malicious": pickle.dumps(Malicious()),
            }[how]
        )


def flipped(content: bytes) -> bytes:
    """One bit of a middle byte is another."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


class Malicious:
    """Unpickled, it would end the process with a status of its own."""

    def __reduce__(self):
        return exit, (99,)


@pytest.mark.parametrize("how", ["truncated", "empty", "corrupt", "foreign", "malicious"])
def test_a_broken_checkpoint_is_named_with_the_remedy(
    how: str, finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished / "out", tmp_path / "out")
    checkpoint = tmp_path / "out/last.ckpt"
    broken(checkpoint, how)
    content = checkpoint.read_bytes()
    line = said(bmc(tmp_path, *JOB, "resume=true"))
    assert line == (
        "bmc train: out/last.ckpt is truncated, corrupt or no checkpoint of this command. Move it "
        "away, or choose another output=; without it the job starts from the beginning."
    )
    assert checkpoint.read_bytes() == content


def test_a_checkpoint_of_another_program_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    torch.save({"state_dict": {}, "global_step": 3}, tmp_path / "out/last.ckpt")
    line = said(bmc(tmp_path, *JOB, "resume=true"))
    assert "out/last.ckpt is truncated, corrupt or no checkpoint of this command" in line


@pytest.mark.parametrize("how", ["truncated", "empty", "foreign", "missing"])
def test_a_finished_job_makes_its_table_again_from_the_checkpoint(how: str, finished: Path) -> None:
    table = finished / "out/table.parquet"
    before = load(table)
    broken(table, how)
    assert bmc(finished, *JOB, "resume=true").status == 0
    assert load(table).equals(before)


def test_metrics_that_are_none_are_named_with_the_remedy(tmp_path: Path) -> None:
    process = started(tmp_path, *LONG["numba"])
    wait_until(more_rows(tmp_path, 4), process)
    process.kill(signal.SIGTERM)
    assert process.wait().status == 143
    (tmp_path / "out/metrics/metrics.csv").write_text("episode,step,loss\n1,2,much\n")
    ended = bmc(tmp_path, *LONG["numba"], "resume=true")
    assert ended.status == 2
    assert ended.lines == [
        "bmc train: out/metrics/metrics.csv is corrupt or no file of this logger; move it away, "
        "and the job logs what comes from now on"
    ]
    assert bmc(tmp_path, *JOB).status == 0, "a job that begins anew does not read it"


@pytest.mark.parametrize("name", LONG)
def test_two_jobs_do_not_share_a_folder(name: str, tmp_path: Path) -> None:
    first = started(tmp_path, *LONG[name])
    wait_until((tmp_path / "out/last.ckpt").exists, first)
    line = said(bmc(tmp_path, *LONG[name]))
    first.kill()
    first.wait()
    assert line == (
        f"bmc train: out is being written by another job (process {first.pid}); wait for it, or "
        "choose another output=."
    )
    assert bmc(tmp_path, *JOB, "episodes=1").status == 0, "the lock died with its process"


def test_a_lock_is_free_when_its_section_is_over(tmp_path: Path) -> None:
    for _ in range(2):
        with only_job(tmp_path / "new/.lock", "new"):
            pass


SIGNALS = {signal.SIGTERM: 143, signal.SIGINT: 130}


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("name", LONG)
def test_a_job_that_is_asked_to_end_leaves_a_checkpoint_and_says_so(
    name: str, number: int, tmp_path: Path
) -> None:
    seldom = "trainer.checkpoint_every_n_chunks=0", "trainer.checkpoint_every_n_updates=0"
    process = started(tmp_path, *LONG[name], *seldom)
    wait_until(more_rows(tmp_path, 4), process)
    process.kill(number)
    ended = process.wait()
    assert ended.status == SIGNALS[number]
    episode = torch.load(tmp_path / "out/last.ckpt", weights_only=True)["job"]["episode"]
    assert episode > 0
    assert ended.lines == [
        f"bmc train: interrupted at episode {episode} of 2000; continue with resume=true"
    ]
    assert "Traceback" not in ended.err
    assert not list((tmp_path / "out").rglob("*.tmp"))


def test_a_job_that_is_asked_to_end_before_its_first_chunk_says_so(tmp_path: Path) -> None:
    process = started(tmp_path, *LONG["numba"], "trainer.lockstep_chunk_steps=1000000")
    wait_until((tmp_path / "out/metrics/metrics.csv").exists, process)
    process.kill(signal.SIGTERM)
    ended = process.wait()
    assert ended.status == 143
    (line,) = ended.lines
    at, _, remedy = line.removeprefix("bmc train: interrupted at episode ").partition(" of 2000, ")
    assert int(at) in (0, 2000)
    assert remedy == "before there was a checkpoint; start it again"


@pytest.mark.parametrize("name", ENGINES)
def test_a_job_ended_by_signals_gives_what_an_uninterrupted_one_gives(
    name: str, whole: dict[str, Path], tmp_path: Path
) -> None:
    job = (*ENGINES[name], "resume=true")
    for number, status in SIGNALS.items():
        process = started(tmp_path, *job)
        wait_until(more_rows(tmp_path), process)
        process.kill(number)
        assert process.wait().status == status
    assert bmc(tmp_path, *job).status == 0
    tables = [load(folder / "out/table.parquet") for folder in (tmp_path, whole[name])]
    assert tables[0].equals(tables[1])
    assert rows(tmp_path) == rows(whole[name])


def rows(folder: Path) -> list[str]:
    path = folder / "out/metrics/metrics.csv"
    return path.read_text().splitlines() if path.exists() else []


def more_rows(folder: Path, new: int = 2) -> Callable[[], bool]:
    """Whether a job has logged so many rows more than there are now."""
    before = len(rows(folder))
    return lambda: len(rows(folder)) >= before + new


@pytest.mark.parametrize("name", ENGINES)
def test_a_full_disk_is_a_line_and_leaves_no_temporary_file(name: str, tmp_path: Path) -> None:
    process = started(tmp_path, *ENGINES[name], largest_file=5000)
    ended = process.wait()
    assert ended.status == 1
    assert len(ended.lines) == 1
    assert "File too large" in ended.lines[0]
    assert "Traceback" not in ended.err
    left = [path for path in (tmp_path / "out").rglob("*") if "tmp" in path.suffix]
    assert left == []
