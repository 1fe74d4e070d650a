"""Several processes: one run on two ranks, and many jobs by Hydra's launchers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import SERVED
from jobs import ROOT, built, tiny, train, trained
from lightning.pytorch.callbacks import Callback

from bmc_torchrl.analysis.tables import load
from bmc_torchrl.errors import SettingsError

ONE_RUN = tiny(
    "grid_dqn",
    "learner=dqn",
    "trainer=ddp",
    "runs=1",
    "learner.warmup=8",
    "learner.batch_size=4",
    "trainer.chunk_steps=8",
)


class SaveRank(Callback):
    """Writes what a rank has in the end, or dies before."""

    def __init__(self, folder: Path, stop_after: int | None) -> None:
        self.folder, self.stop_after = folder, stop_after

    def on_train_batch_end(self, trainer, pl_module, *_) -> None:
        if trainer.global_step == self.stop_after:
            os._exit(0)

    def on_train_end(self, trainer, pl_module) -> None:
        state = {
            "q": list(pl_module.q_actor.parameters()),
            "alpha": pl_module.explore.strategy.alpha,
            "count": pl_module.explore.strategy.return_count,
            "replay": pl_module.learning.contents(),
            "done": pl_module.log_of_episodes.done,
        }
        torch.save(state, self.folder / f"rank{trainer.global_rank}.pt")


def _rank(rank: int, port: int, output: Path, overrides: list[str], stop: int | None) -> None:
    """In a child: the job as ``torchrun`` would start it."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "test"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    callbacks = train.callbacks
    train.callbacks = lambda *args: [*callbacks(*args), SaveRank(output, stop)]
    trained(output, *ONE_RUN, *overrides)


def on_two_ranks(output: Path, *overrides: str, stop_after: int | None = None) -> list[dict]:
    """What each of two ranks has after the job."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        SERVED.Process(target=_rank, args=(rank, port, output, list(overrides), stop_after))
        for rank in (0, 1)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(300)
        assert process.exitcode == 0
    written = [output / f"rank{rank}.pt" for rank in (0, 1)]
    return [torch.load(path, weights_only=True) for path in written if path.exists()]


@pytest.fixture(scope="module")
def own_posteriors(tmp_path_factory) -> list[dict]:
    return on_two_ranks(tmp_path_factory.mktemp("own"))


@pytest.mark.slow
def test_gradients_are_averaged_so_that_ranks_have_one_network(own_posteriors) -> None:
    first, second = own_posteriors
    for ours, theirs in zip(first["q"], second["q"], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
def test_every_rank_collects_for_itself_and_keeps_its_own_posterior(own_posteriors) -> None:
    first, second = own_posteriors
    assert not torch.equal(first["replay"]["action"], second["replay"]["action"])
    assert not torch.equal(first["alpha"], second["alpha"])
    assert float(first["count"]) == float(second["count"]) == 48
    assert int(first["done"]) == int(second["done"]) == 2


@pytest.mark.slow
def test_a_shared_posterior_learns_from_all_ranks(tmp_path: Path) -> None:
    first, second = on_two_ranks(tmp_path, "shared_posterior=true")
    assert torch.equal(first["alpha"], second["alpha"])
    assert float(first["count"]) == float(second["count"]) == 2 * 48
    assert not torch.equal(first["replay"]["action"], second["replay"]["action"])


@pytest.mark.slow
def test_a_distributed_job_resumes_every_rank_exactly(tmp_path: Path, own_posteriors) -> None:
    assert on_two_ranks(tmp_path, "trainer.checkpoint_every_n_updates=1", stop_after=3) == []
    resumed = on_two_ranks(tmp_path, "resume=true")
    for ours, theirs in zip(resumed, own_posteriors, strict=True):
        assert torch.equal(ours["alpha"], theirs["alpha"])
        assert torch.equal(ours["replay"]["action"], theirs["replay"]["action"])
        for weight, expected in zip(ours["q"], theirs["q"], strict=True):
            assert torch.equal(weight, expected)
    alone = [override for override in ONE_RUN if override != "trainer=ddp"]
    cfg, *job = built(*alone, f"output={tmp_path}", "resume=true")
    with pytest.raises(SettingsError, match=r"trainer.lightning.devices was 2, is 1"):
        train.fit(cfg, *job)


def command(folder: Path, *overrides: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/train.py", *overrides],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_the_command_trains_on_two_processes(tmp_path: Path) -> None:
    done = command(tmp_path, *ONE_RUN, "episodes=1", "output=out", "figure=false")
    assert done.stdout.count("grid-world, DQN") == 1
    assert len(load(tmp_path / "out/table.parquet")) == 1
    assert torch.load(tmp_path / "out/last.ckpt", weights_only=True)["online"]


@pytest.mark.slow
def test_many_jobs_are_run_by_a_launcher(tmp_path: Path) -> None:
    job = tiny("grid_sarsa", "episodes=1", "seed=0,1", "figure=false", "output=many")
    command(tmp_path, "--multirun", *job, "hydra/launcher=joblib")
    made = sorted((tmp_path / "many").glob("*/table.parquet"))
    assert ["seed=0" in str(path) for path in made] == [True, False]
    tables = [load(path) for path in made]
    assert [len(table) for table in tables] == [2, 2]
    assert not tables[0]["epsilon"].equals(tables[1]["epsilon"])
    assert not (tmp_path / "many/table.parquet").exists()


@pytest.mark.slow
def test_the_command_shows_the_result_and_nothing_else(tmp_path: Path) -> None:
    done = command(tmp_path, *tiny("grid_dqn", "episodes=1"), "output=out", "figure=false")
    assert "INFO" not in done.stdout + done.stderr
    assert "LazyTensorStorage" not in done.stdout + done.stderr
    assert "Tip" not in done.stdout + done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "ε-BMC" in done.stdout
