"""What a job leaves for Weights & Biases and in CSV, read back from the offline run."""

from __future__ import annotations

import csv
import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from interruptions import interrupted
from jobs import ROOT, built, settings, tiny, train, trained
from wandb.proto.wandb_internal_pb2 import Record

from bmc_torchrl.analysis.tables import load
from bmc_torchrl.envs import CartPoleEnv, SubgoalGridEnv, SupplyChainEnv

METRICS = {
    *(f"train/{name}" for name in ("loss", "return", "epsilon", "epsilon_min", "epsilon_max")),
    *(f"posterior/{name}" for name in ("alpha", "beta", "strength", "log_evidence_ratio")),
    "posterior/return_variance",
    "train/episodes",
    "eval/return",
    "eval/steps",
}
JOB = tiny("grid_sarsa", "trainer.log_every_n_chunks=1", "trainer.chunk_steps=8")


def records(path: Path) -> Iterator[Record]:
    """The records of a ``.wandb`` file: LevelDB's log format after a header of seven bytes."""
    data, position, whole = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        length, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        if position + 7 + length > len(data):
            return
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def finished_records(run: Path) -> list[Record]:
    """All records of a run; W&B's service writes them in its own time, the exit last."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = [record for path in run.glob("*.wandb") for record in records(path)]
        if any(record.WhichOneof("record_type") == "exit" for record in found):
            return found
        time.sleep(0.2)
    raise TimeoutError(f"{run} has no exit record.")


def of_kind(run: Path, kind: str) -> list:
    found = finished_records(run)
    return [getattr(r, kind) for r in found if r.WhichOneof("record_type") == kind]


def items(entries) -> dict:
    return {
        ".".join(entry.nested_key) or entry.key: json.loads(entry.value_json) for entry in entries
    }


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wandb")
    trained(folder, *JOB, "logger=wandb", "logger.tags=[grid_sarsa,published,mine]")
    return folder


@pytest.fixture(scope="module")
def run(output: Path) -> Path:
    (found,) = (output / "wandb").glob("offline-run-*")
    return found


def test_every_metric_is_logged_per_chunk(run: Path) -> None:
    history = [items(entry.item) for entry in of_kind(run, "history")]
    rows = [row for row in history if "train/epsilon" in row]
    assert [row["trainer/global_step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert rows[-1].keys() >= METRICS
    last = rows[-1]
    assert last["train/epsilon_min"] <= last["train/epsilon"] <= last["train/epsilon_max"] < 0.4976
    assert last["posterior/strength"] == pytest.approx(
        last["posterior/alpha"] + last["posterior/beta"]
    )
    assert last["train/episodes"] == 2


def test_figure_histogram_and_results_table_are_in_the_run(run: Path, output: Path) -> None:
    sent = {}
    for entry in of_kind(run, "history"):
        sent |= items(entry.item)
    assert sent["posterior._type"] == "image-file"
    assert sent["greedy_episode._type"] == "video-file"
    assert (run / "files" / sent["posterior.path"]).stat().st_size > 10_000
    assert sent["epsilon_over_runs._type"] == "histogram"
    assert sum(sent["epsilon_over_runs.values"]) == 2
    table = json.loads((run / "files" / sent["results.path"]).read_text())
    results = load(output / "table.parquet")
    assert table["columns"] == list(results.columns)
    assert len(table["data"]) == len(results) == 4


def test_the_run_has_its_group_type_tags_and_config(run: Path) -> None:
    described = of_kind(run, "run")[0]
    assert described.project == "bmc_torchrl"
    assert described.run_group == "grid_sarsa"
    assert described.job_type == "train"
    assert set(described.tags) == {"grid_sarsa", "published", "mine"}
    assert described.display_name == "grid_sarsa-bmc-0"
    config = {}
    for entry in [*(r.config for r in of_kind(run, "run")), *of_kind(run, "config")]:
        config |= items(entry.update)
    assert config["episodes"] == 2
    assert config["families"]["bmc"] == {"alpha0": 1.0, "beta0": 1.01}


def test_the_summary_and_the_artifact_hold_the_result(run: Path, output: Path) -> None:
    summary = {}
    for entry in of_kind(run, "summary"):
        summary |= items(entry.update)
    results = load(output / "table.parquet")
    assert summary["eval/auc"] == pytest.approx(results["steps"].mean())
    last = results.query("episode == 2")
    assert summary["eval/final_return"] == pytest.approx(last["return"].mean())
    (artifact,) = (a for a in of_kind(run, "artifact") if a.type == "results")
    names = {entry.path for entry in artifact.manifest.contents}
    assert names == {"table.parquet", "last.ckpt"}


def test_csv_metrics_are_written_beside_wandb(output: Path) -> None:
    rows = list(csv.DictReader((output / "metrics/metrics.csv").read_text().splitlines()))
    assert [row["step"] for row in rows] == list("012345")
    assert rows[-1].keys() >= METRICS
    assert float(rows[-1]["eval/steps"]) == 24


def test_a_resumed_job_goes_on_with_its_wandb_run(tmp_path: Path) -> None:
    job = [*JOB, "logger=wandb", "trainer.checkpoint_every_n_chunks=1"]
    interrupted(tmp_path, 2, *job)
    import wandb

    wandb.finish()
    identity = (tmp_path / "wandb_id").read_text()
    trained(tmp_path, *job, "resume=true")
    assert (tmp_path / "wandb_id").read_text() == identity
    runs = sorted((tmp_path / "wandb").glob("offline-run-*"))
    steps = set()
    for run in runs:
        # W&B appends a number to a second run of the same second.
        assert identity in run.name
        assert of_kind(run, "run")[0].run_id == identity
        history = (items(entry.item) for entry in of_kind(run, "history"))
        steps |= {row["trainer/global_step"] for row in history if "train/loss" in row}
    assert steps == set(range(6))


def test_metrics_leave_the_device_every_so_many_chunks_only(tmp_path: Path) -> None:
    job = tiny("grid_sarsa", "logger=csv", "trainer.chunk_steps=4", "trainer.log_every_n_chunks=5")
    trained(tmp_path, *job)
    rows = list(csv.DictReader((tmp_path / "metrics/metrics.csv").read_text().splitlines()))
    assert [int(row["step"]) for row in rows] == [4, 9, 11]
    assert len({row["train/epsilon"] for row in rows}) == 3


def test_a_strategy_without_a_posterior_has_none_in_its_metrics(tmp_path: Path) -> None:
    job = tiny("grid_sarsa", "strategy=power", "logger=csv", "trainer.log_every_n_chunks=1")
    trained(tmp_path, *job)
    rows = list(csv.DictReader((tmp_path / "metrics/metrics.csv").read_text().splitlines()))
    assert {"train/epsilon", "eval/steps"} < rows[0].keys()
    assert not any(name.startswith("posterior") for name in rows[0])
    assert not list(tmp_path.glob("posterior*"))


def test_the_posterior_is_drawn_over_time(tmp_path: Path) -> None:
    trained(tmp_path, *JOB)
    assert (tmp_path / "posterior.png").stat().st_size > 10_000
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    (history,) = (
        state["history"] for name, state in checkpoint["callbacks"].items() if "History" in name
    )
    assert len(history) == 6
    assert history[-1][1] < history[0][1] < 1.0


def test_the_wandb_sweep_runs_jobs_that_exist(monkeypatch) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "abc123")
    sweep = yaml.safe_load((ROOT / "configs/sweep_wandb.yaml").read_text())
    assert (ROOT / sweep["program"]).exists()
    assert sweep["method"] == "grid"
    fixed = [part for part in sweep["command"] if not part.startswith("${")]
    assert {"${env}", "${interpreter}", "${program}", "${args_no_hyphens}"} < set(sweep["command"])
    strengths = []
    for prior in sweep["parameters"]["families.bmc"]["values"]:
        cfg = settings(*fixed, f"families.bmc={prior}", "seed=1")
        train.check_settings(cfg)
        assert cfg.output == "outputs/sweep/abc123"
        bmc = cfg.families.bmc
        assert bmc.beta0 == pytest.approx(bmc.alpha0 + 0.01)
        strengths.append(bmc.alpha0 + bmc.beta0)
    assert strengths == sorted(strengths)
    _, learner, *_ = built(*fixed, f"families.bmc={prior}", "engine=torchrl")
    assert float(learner.explore.strategy.alpha[0]) == 100.0
    assert sweep["metric"] == {"name": "eval/auc", "goal": "minimize"}


def test_a_sweep_agent_names_the_wandb_run(tmp_path: Path, monkeypatch) -> None:
    from bmc_torchrl.training.tracking import wandb_loggers

    monkeypatch.setenv("WANDB_RUN_ID", "abc123")
    logger, beside = wandb_loggers(tmp_path, offline=True)
    assert logger.version == "abc123"
    assert beside.log_dir.startswith(str(tmp_path))


@pytest.mark.parametrize("env", [SubgoalGridEnv, CartPoleEnv, SupplyChainEnv])
def test_every_domain_can_be_painted(env) -> None:
    many = env(batch_size=[2, 3])
    picture = many.picture(many.reset()[0, 0], 0)
    assert picture.shape[-1] == 3
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 3
