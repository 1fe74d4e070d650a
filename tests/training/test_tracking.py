"""What a job leaves for Weights & Biases and in CSV, read back from the offline run."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from interruptions import interrupted
from jobs import ROOT, built, settings, tiny, train, trained
from wandb.proto.wandb_internal_pb2 import Record

from bmc_torchrl.analysis.tables import load
from bmc_torchrl.envs import CartPoleEnv, SubgoalGridEnv, SupplyChainEnv
from bmc_torchrl.training import EpisodeProgress
from bmc_torchrl.training.tracking import EpisodeCSVLogger, resend, wandb_loggers

JOB = tiny("grid_sarsa", "trainer.chunk_steps=8")
BESIDE = [*JOB, "sweep=study", "strategies=[bmc,fixed_01]"]


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


def history(run: Path) -> list[dict]:
    """The rows of episodes."""
    found = [items(entry.item) for entry in of_kind(run, "history")]
    rows = [row for row in found if "train/episodes" in row or "train/episodes/bmc" in row]
    hidden = ("_runtime", "_timestamp", "_step", "trainer/global_step")
    return [{k: v for k, v in row.items() if k not in hidden} for row in rows]


def csv_rows(output: Path) -> list[dict]:
    rows = EpisodeCSVLogger(output).rows()
    return [{k: float(text) for k, text in row.items() if k != "step"} for row in rows]


def test_wandb_has_the_rows_of_the_csv_file(run: Path, output: Path) -> None:
    assert [row["episode"] for row in history(run)] == [0, 1, 2]
    assert history(run) == csv_rows(output)
    axes = {entry.glob_name: entry.step_metric for entry in of_kind(run, "metric")}
    for names in ("train/*", "eval/*", "posterior/*", "skipped*"):
        assert axes[names] == "episode"


def test_figures_film_histogram_and_results_table_are_in_the_run(run: Path, output: Path) -> None:
    sent = {}
    for entry in of_kind(run, "history"):
        sent |= items(entry.item)
    for name in ("figures/posterior", "figures/curves"):
        assert sent[f"{name}._type"] == "image-file"
        assert (run / "files" / sent[f"{name}.path"]).stat().st_size > 10_000
    assert sent["figures/greedy_episode._type"] == "video-file"
    assert sent["figures/epsilon_over_runs._type"] == "histogram"
    assert sum(sent["figures/epsilon_over_runs.values"]) == 2
    table = json.loads((run / "files" / sent["tables/results.path"]).read_text())
    results = load(output / "table.parquet")
    assert table["columns"] == list(results.columns)
    assert len(table["data"]) == len(results) == 4


def test_the_run_has_its_group_type_tags_and_a_flat_config(run: Path) -> None:
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
    assert config["families.bmc.alpha0"] == 1.0
    assert config["sweep.bmc.parameters._target_"] == "bmc_torchrl.BMCEpsilon"
    assert config["learner.learning_rate"] == 0.7
    assert not any(isinstance(v, dict) and v for k, v in config.items() if k != "_wandb")


def test_the_summary_and_the_artifact_hold_the_result(run: Path, output: Path) -> None:
    summary = {}
    for entry in of_kind(run, "summary"):
        summary |= items(entry.update)
    results = load(output / "table.parquet")
    assert summary["summary/auc"] == pytest.approx(results["steps"].mean())
    last = results.query("episode == 2")
    assert summary["summary/final_return"] == pytest.approx(last["return"].mean())
    assert summary["summary/final_epsilon"] == pytest.approx(last["epsilon"].mean())
    (artifact,) = (a for a in of_kind(run, "artifact") if a.type == "results")
    names = {entry.path for entry in artifact.manifest.contents}
    pictures = {"posterior.png", "curves.png", "greedy.gif"}
    assert names == {"table.parquet", "last.ckpt", "metrics.csv"} | pictures


def test_several_strategies_have_a_summary_each(tmp_path: Path) -> None:
    trained(tmp_path, *BESIDE, "logger=wandb")
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    summary = {}
    for entry in of_kind(run, "summary"):
        summary |= items(entry.update)
    assert summary["summary/final_epsilon/fixed_01"] == pytest.approx(0.1)
    assert {"summary/auc/bmc", "summary/auc/fixed_01"} < summary.keys()
    assert "summary/auc" not in summary
    assert of_kind(run, "run")[0].display_name == "grid_sarsa-bmc+fixed_01-0"


def _killed(output: Path, job: list[str]) -> None:
    """In a process of its own: the job kills itself, without goodbye, in its fourth chunk."""

    def kill(self, trainer, *_):
        if trainer.global_step == 4:
            os.kill(os.getpid(), signal.SIGKILL)

    EpisodeProgress.on_train_batch_end = kill
    trained(output, *job)


@pytest.mark.parametrize("how", ["kill -9", "exception"])
def test_the_wandb_run_of_a_resumed_job_is_that_of_an_uninterrupted_one(
    how: str, tmp_path: Path
) -> None:
    job = [*JOB, "logger=wandb", "trainer.checkpoint_every_n_chunks=1", "figure=false"]
    trained(tmp_path / "whole", *job)
    parts = tmp_path / "parts"
    if how == "exception":
        interrupted(parts, 4, *job)
    else:
        context = multiprocessing.get_context("spawn")
        child = context.Process(target=_killed, args=(parts, job))
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("WANDB_SERVICE", raising=False)  # This process' own outlives the child.
            child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL
    identity = (parts / "wandb_id").read_text()
    trained(parts, *job, "resume=true")
    assert (parts / "wandb_id").read_text() == identity
    (run,) = (parts / "wandb").glob("offline-run-*")
    (uninterrupted,) = (tmp_path / "whole/wandb").glob("offline-run-*")
    assert of_kind(run, "run")[0].run_id == identity
    assert len(list((parts / "wandb/superseded").glob("offline-run-*"))) == 1
    assert history(run) == history(uninterrupted) == csv_rows(parts)


class OnlineRun:
    """What a W&B run that goes on knows of before."""

    resumed = True

    def __init__(self, episode: float) -> None:
        self.summary, self.sent = {"episode": episode}, []

    def log(self, row: dict) -> None:
        self.sent.append(row)


def test_a_run_that_goes_on_is_sent_what_it_lacks_only() -> None:
    run = OnlineRun(1.0)
    rows = [{"episode": float(number), "step": number} for number in range(4)]
    assert resend(run, rows) == 3
    assert run.sent == [{"episode": 2.0}, {"episode": 3.0}]
    ahead = OnlineRun(9.0)
    assert resend(ahead, [{"episode": 2.0, "step": 2}]) == 9
    assert ahead.sent == []


def test_a_strategy_without_a_posterior_has_none_in_its_metrics(tmp_path: Path) -> None:
    trained(tmp_path, *tiny("grid_sarsa", "strategy=power", "logger=csv"))
    row = csv_rows(tmp_path)[-1]
    assert {"train/epsilon", "eval/steps"} < row.keys()
    assert not any(name.startswith("posterior") for name in row)
    assert not list(tmp_path.glob("posterior*"))


def test_several_posteriors_have_a_figure_each(tmp_path: Path) -> None:
    same = "family: bmc, parameters: ${strategy.parameters}"
    twice = f"sweep.strategies=[{{label: one, {same}}}, {{label: other, {same}}}]"
    trained(tmp_path, *JOB, "logger=csv", twice, "strategies=[one,other]")
    names = sorted(path.name for path in tmp_path.glob("posterior*"))
    assert names == ["posterior_one.png", "posterior_other.png"]


def test_the_wandb_sweep_runs_jobs_that_exist(monkeypatch) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "abc123")
    sweep = yaml.safe_load((ROOT / "configs/sweep_wandb.yaml").read_text())
    assert sweep["method"] == "grid"
    fixed = [part for part in sweep["command"] if not part.startswith("${")]
    assert sweep["command"][:3] == ["${env}", "bmc", "train"]
    fixed = fixed[2:]
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
    assert sweep["metric"] == {"name": "summary/auc", "goal": "minimize"}


def test_a_sweep_agent_names_the_wandb_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "abc123")
    logger, beside = wandb_loggers(tmp_path, offline=True)
    assert logger.version == "abc123"
    assert beside.log_dir == str(tmp_path / "metrics")


@pytest.mark.parametrize("env", [SubgoalGridEnv, CartPoleEnv, SupplyChainEnv])
def test_every_domain_can_be_painted(env) -> None:
    many = env(batch_size=[2, 3])
    picture = many.picture(many.reset()[0, 0], 0)
    assert picture.shape[-1] == 3
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 3


def test_what_if_has_its_axis_its_figure_and_a_panel_that_says_counterfactual(
    tmp_path: Path,
) -> None:
    trained(tmp_path, *JOB, "logger=wandb", "whatif=bank")
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    axes = {entry.glob_name: entry.step_metric for entry in of_kind(run, "metric")}
    assert axes["whatif/*"] == "episode"
    assert history(run) == csv_rows(tmp_path)
    assert all("whatif/epsilon/alpha0_10" in row for row in history(run))
    sent: dict = {}
    for entry in of_kind(run, "history"):
        sent |= items(entry.item)
    assert sent["figures/whatif._type"] == "image-file"
    assert sent["counterfactual/epsilon_table.nrows"] == 8 * 3
    configs = [items(entry.update) for entry in of_kind(run, "config")]
    assert any("Counterfactual" in str(config) for config in configs)
