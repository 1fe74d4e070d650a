"""Lightning around a lockstep engine: results, resuming, and which engine is chosen."""

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from lightning.pytorch.callbacks import Callback

from bmc_torchrl.analysis.tables import load
from bmc_torchrl.experiments import train
from bmc_torchrl.experiments.build import build_strategy, uses_lockstep

ROOT = Path(__file__).parents[2]


def settings(output: Path, *overrides: str):
    tiny = ["runs=3", "domain.max_steps=30", "trainer.lockstep_chunk_steps=20", "logger=none"]
    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        return compose("train", [*tiny, f"output={output}", "figure=false", *overrides])


def run(cfg) -> None:
    train.fit(cfg, *train.build_job(cfg))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], True),
        (["runs=1"], False),
        (["engine=torchrl"], False),
        (["runs=1", "engine=lockstep"], True),
        (["strategy=linear"], True),
        (["strategy=linear", "+strategy.parameters.count_by=step"], False),
        (["strategy=linear", "experiment=grid_dqn"], True),
        (["experiment=grid_dqn", "learner=dqn", "runs=1"], False),
    ],
)
def test_the_engine_chooses_itself(tmp_path, overrides, expected):
    cfg = settings(tmp_path, "episodes=2", *overrides)
    strategy = build_strategy(cfg, [cfg.strategy], cfg.runs)
    assert uses_lockstep(cfg, strategy) is expected


class StoppedJobError(Exception):
    pass


class StopAfter(Callback):
    def __init__(self, chunks: int) -> None:
        self.chunks = chunks

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == self.chunks:
            raise StoppedJobError


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["grid_sarsa", "cart_dqn"])
@pytest.mark.parametrize("chunks", [1, 2])
def test_an_engine_killed_after_any_chunk_resumes_to_the_same_table(tmp_path, experiment, chunks):
    job = [f"experiment={experiment}", "episodes=6", "trainer.checkpoint_every_n_chunks=1"]
    run(settings(tmp_path / "whole", *job))
    cfg = settings(tmp_path / "broken", *job)
    learner, stream, own = train.build_job(cfg)
    with pytest.raises(StoppedJobError):
        train.fit(cfg, learner, stream, [*own, StopAfter(chunks)])
    torch.load(tmp_path / "broken" / "last.ckpt", weights_only=True)
    run(settings(tmp_path / "broken", *job, "resume=true"))
    first, second = (load(tmp_path / name / "table.parquet") for name in ("whole", "broken"))
    assert first.equals(second)


def test_strategies_side_by_side_keep_their_labels_and_schedules(tmp_path):
    run(settings(tmp_path, "episodes=3", "strategies=[fixed_01,geom_09]"))
    epsilon = load(tmp_path / "table.parquet").groupby(["strategy", "episode"])["epsilon"].mean()
    assert epsilon["fixed_01"].tolist() == pytest.approx([0.1] * 3, rel=1e-6)
    assert epsilon["geom_09"].tolist() == pytest.approx([0.5, 0.45, 0.405], rel=1e-6)


@pytest.mark.slow
def test_every_run_of_epsilon_bmc_walks_the_grid_in_22_steps_by_episode_300(tmp_path):
    cfg = settings(tmp_path, "runs=100", "domain.max_steps=200", "trainer.lockstep_chunk_steps=500")
    assert cfg.episodes == 500
    run(cfg)
    table = load(tmp_path / "table.parquet")
    assert (table[table["episode"] >= 300]["steps"] == 22).all()
