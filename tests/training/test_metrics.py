"""One vocabulary for every engine and path: the rows of a job, read back from its CSV file."""

from __future__ import annotations

import itertools
from pathlib import Path

import gymnasium
import lightning as L  # noqa: N812
import pytest
import torch
from jobs import built, settings, train
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from bmc_torchrl import BMCEpsilon, ConstantEpsilon
from bmc_torchrl.lockstep import DQNLockstep, interface
from bmc_torchrl.training import EpisodeMetrics, EpsilonGreedyDQN
from bmc_torchrl.training.metrics import episode_row, log_points
from bmc_torchrl.training.tracking import EpisodeCSVLogger

pytestmark = [
    # Lightning 2.6 about torch's pytrees, and about loaders that are not torch's.
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]
MEANS = {
    *(f"train/{name}" for name in ("loss", "return", "epsilon")),
    *(f"eval/{name}" for name in ("return", "steps")),
}
PLAIN = {"train/epsilon_min", "train/epsilon_max", "train/episodes", "train/frames"}
SAID = {
    *(f"posterior/{name}" for name in ("alpha", "beta", "strength", "log_evidence")),
    "posterior/return_variance",
    *(f"skipped/{cause}" for cause in ("mask", "foreign", "nonfinite")),
}
SHORT = ["domain.max_steps=30", "domain.tests=2", "device=cpu", "logger=csv", "episodes=5"]
DQN = ["experiment=cartpole_dqn", "domain.test_every=1", "learner.warmup=8", "learner.batch_size=4"]
TABLE = ["experiment=grid_sarsa", "trainer.lockstep_chunk_steps=20"]
NETWORK = ["network.batch_size=4", "network.epochs=1"]
PATHS = {
    "EpsilonGreedyDQN, one run": [*DQN, "runs=1"],
    "EpsilonGreedyDQN, two runs": [*DQN, "runs=2"],
    "TorchRL": ["experiment=grid_sarsa", "engine=torchrl", "runs=2"],
    "published DQN": ["experiment=cart_dqn", "engine=torchrl", "runs=2", *NETWORK],
    "torch engine": ["experiment=cart_dqn", "engine=lockstep", "runs=2", *NETWORK],
    "numba": [*TABLE, "engine=lockstep", "runs=2"],
    "numba networks": ["experiment=cart_dqn", "engine=lockstep", "runs=2", *NETWORK],
}


def job(output: Path, name: str, *more: str) -> list[dict[str, float]]:
    """The rows of a short job on one of the paths."""
    with torch.compiler.set_stance("force_eager"), pytest.MonkeyPatch.context() as patch:
        if name == "torch engine":
            # What device=cuda chooses.
            patch.setattr(interface, "engine_class", lambda learner, device: DQNLockstep)
        cfg, *parts = built(*SHORT, *PATHS[name], *more, f"output={output}")
        train.fit(cfg, *parts)
    rows = EpisodeCSVLogger(output).rows()
    return [{key: float(text) for key, text in row.items()} for row in rows]


@pytest.mark.parametrize("name", PATHS)
def test_every_path_logs_the_same_names_for_every_episode(name: str, tmp_path: Path) -> None:
    rows = job(tmp_path, name)
    assert [row["episode"] for row in rows] == [0, 1, 2, 3, 4, 5]
    several = "runs=2" in PATHS[name]
    errors = {f"{metric}_se" for metric in MEANS} if several else set()
    for row in rows[1:]:
        assert set(row) == MEANS | errors | PLAIN | SAID | {"episode", "step"}
        assert row["train/epsilon_min"] <= row["train/epsilon"] <= row["train/epsilon_max"]
        assert row["train/episodes"] == row["episode"]
        total = row["posterior/alpha"] + row["posterior/beta"]
        assert row["posterior/strength"] == pytest.approx(total)
    prior = rows[0]
    assert SAID | PLAIN | {"train/epsilon"} <= set(prior)
    assert prior["train/frames"] == prior["train/episodes"] == 0
    for row in rows:
        assert row["skipped/mask"] == row["skipped/foreign"] == row["skipped/nonfinite"] == 0
    frames = [row["train/frames"] for row in rows]
    assert all(later > earlier for earlier, later in itertools.pairwise(frames))
    assert max(row["train/loss"] for row in rows[1:]) > 0
    assert rows[-1]["posterior/return_variance"] > 0
    assert (tmp_path / "posterior.png").stat().st_size > 10_000
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert (tmp_path / "greedy.gif").stat().st_size > 1_000


@pytest.mark.parametrize(
    "name", ["EpsilonGreedyDQN, two runs", "TorchRL", "numba", "numba networks"]
)
def test_strategies_are_never_averaged_together(name: str, tmp_path: Path) -> None:
    row = job(tmp_path, name, "sweep=study", "strategies=[bmc,fixed_01]")[-1]
    assert row["train/epsilon/fixed_01"] == pytest.approx(0.1)
    assert 0.3 < row["train/epsilon/bmc"] < 0.5
    both = {f"{metric}/{label}" for metric in MEANS | PLAIN for label in ("bmc", "fixed_01")}
    assert both | {f"{metric}/bmc" for metric in SAID} <= set(row)
    assert not {f"{metric}/fixed_01" for metric in SAID} & set(row)
    assert not (MEANS | PLAIN | SAID) & set(row)


@pytest.mark.parametrize("engine", ["torch engine", "numba networks"])
def test_an_engine_and_the_torchrl_path_measure_alike(engine: str, tmp_path: Path) -> None:
    ours, theirs = (
        job(tmp_path / name, name, "strategy=constant", "strategy.parameters.value=0.0")
        for name in (engine, "published DQN")
    )
    for row in (*ours[1:], *theirs[1:]):
        assert row["train/return"] <= 30
        assert row["train/epsilon"] == 0
        assert not any(key.startswith("posterior") for key in row)


def test_a_torch_engine_sums_rewards_and_losses_of_each_episode() -> None:
    from bmc_torchrl.envs import SubgoalGridEnv
    from bmc_torchrl.learners.settings import ExpectedSarsaSettings, RunSettings
    from bmc_torchrl.lockstep import TabularLockstep

    engine = TabularLockstep(
        SubgoalGridEnv(batch_size=[3], max_steps=8),
        BMCEpsilon(batch_shape=[3]),
        RunSettings(gamma=0.99, episodes=4),
        ExpectedSarsaSettings(learning_rate=0.5),
        compiled=False,
    )
    engine.advance(40)
    assert engine.finished
    assert (engine.train_steps == 8).all()
    # A step costs 0.1, one against a wall 0.2: returns are multiples of 0.1 in between.
    tenths = engine.train_returns * 10
    assert torch.allclose(tenths, tenths.round(), atol=1e-4)
    assert ((tenths.round() >= -16) & (tenths.round() <= -8)).all()
    assert (engine.losses > 0).all()
    alpha = engine.diagnostics["posterior/alpha"]
    assert torch.equal(alpha[:, -1], engine.strategy.alpha)
    assert not torch.equal(alpha[:, 0], alpha[:, -1])


def test_a_torch_engine_counts_what_it_leaves_out_by_cause() -> None:
    from bmc_torchrl.envs import SubgoalGridEnv
    from bmc_torchrl.learners.settings import ExpectedSarsaSettings, RunSettings
    from bmc_torchrl.lockstep import TabularLockstep

    engine = TabularLockstep(
        SubgoalGridEnv(batch_size=[3], max_steps=8),
        BMCEpsilon(batch_shape=[3]),
        RunSettings(gamma=0.99, episodes=2),
        ExpectedSarsaSettings(learning_rate=0.5),
        compiled=False,
    )
    engine.table.fill_(torch.inf)
    engine.advance(40)
    assert (engine.diagnostics["skipped/nonfinite"] == engine.train_steps.cumsum(-1)).all()
    assert (engine.diagnostics["skipped/mask"] == 0).all()
    assert (engine.diagnostics["posterior/alpha"] == 1).all()
    counts = engine.strategy.skipped
    assert counts["nonfinite"].tolist() == [16] * 3
    # Lanes that have had their episodes go on stepping while tests are run.
    assert (sum(counts.values()) == engine.time).all()


@pytest.mark.parametrize("name", ["EpsilonGreedyDQN, two runs", "TorchRL"])
def test_the_training_paths_count_returns_that_are_not_finite(name: str, tmp_path: Path) -> None:
    cfg, learner, *parts = built(*SHORT, *PATHS[name], f"output={tmp_path}", "episodes=2")
    for parameter in learner.parameters():
        parameter.data.fill_(torch.nan)
    train.fit(cfg, learner, *parts)
    row = EpisodeCSVLogger(tmp_path).rows()[-1]
    # A fallen cart's last return is its reward, which is finite.
    fallen = 2 if name.startswith("Epsilon") else 0
    assert float(row["skipped/nonfinite"]) == float(row["train/frames"]) - fallen
    assert float(row["skipped/mask"]) == float(row["skipped/foreign"]) == 0
    assert float(row["posterior/alpha"]) == 1


def test_a_job_of_many_episodes_has_at_least_200_rows_and_its_last() -> None:
    for episodes in (1, 7, 200, 399, 400, 401, 500, 2000):
        points = log_points(episodes)
        assert points[-1] == episodes
        assert len(points) >= min(episodes, 200)
        assert len(points) == len(set(points)) == min(episodes, 400)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def cart_pole() -> gymnasium.Env:
    return gymnasium.make("CartPole-v1", max_episode_steps=20)


def lightning(**options) -> L.Trainer:
    options = {"enable_checkpointing": False, "enable_progress_bar": False} | options
    return L.Trainer(enable_model_summary=False, **options)


def test_one_line_gives_a_lightning_user_the_rows(tmp_path: Path) -> None:
    module = EpsilonGreedyDQN(cart_pole, network(), ConstantEpsilon(0.2), episodes=4, batch_size=8)
    metrics = EpisodeMetrics()
    logger = EpisodeCSVLogger(tmp_path)
    lightning(callbacks=[metrics], logger=logger, limit_val_batches=0).fit(module)
    rows = EpisodeCSVLogger(tmp_path).rows()
    assert [float(row["episode"]) for row in rows] == [0, 1, 2, 3, 4]
    assert metrics.last == episode_row(module.log_of_episodes, ["ε"], 4)
    assert not any(name.startswith("eval") for name in metrics.last)


def test_without_a_number_of_episodes_the_last_one_is_logged(tmp_path: Path) -> None:
    module = EpsilonGreedyDQN(cart_pole, network(), BMCEpsilon(), batch_size=8)
    metrics = EpisodeMetrics()
    lightning(max_steps=100, callbacks=[metrics], logger=EpisodeCSVLogger(tmp_path)).fit(module)
    rows = EpisodeCSVLogger(tmp_path).rows()
    episodes = [int(float(row["episode"])) for row in rows]
    assert episodes == list(range(int(module.log_of_episodes.done) + 1))
    frames = [float(row["train/frames"]) for row in rows]
    assert frames == sorted(frames)
    assert frames[-1] <= 107


def test_validation_does_not_mix_with_rows_of_episodes(tmp_path: Path) -> None:
    module = EpsilonGreedyDQN(
        cart_pole, network(), BMCEpsilon(), batch_size=8, eval_episodes=2, epoch_steps=40
    )
    logger = EpisodeCSVLogger(tmp_path)
    lightning(max_steps=80, callbacks=[EpisodeMetrics()], logger=logger).fit(module)
    rows = logger.rows()
    validated = [row for row in rows if "eval/return" in row]
    assert [int(row["step"]) for row in validated] == [39, 79]
    assert not any("episode" in row for row in validated)
    assert all("train/return" in row for row in rows if float(row.get("episode", 0)) > 0)


def test_lightnings_own_csv_logger_gets_the_rows_too(tmp_path: Path) -> None:
    module = EpsilonGreedyDQN(cart_pole, network(), BMCEpsilon(), episodes=3, batch_size=8)
    logger = CSVLogger(tmp_path, "", "")
    lightning(callbacks=[EpisodeMetrics()], logger=logger, limit_val_batches=0).fit(module)
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert len(lines) == 5


def test_a_run_is_called_by_all_its_strategies() -> None:
    chosen = ["sweep=study", "logger=wandb", "strategies=[bmc,fixed_01,linear]"]
    assert settings(*chosen).logger.name == "grid_sarsa-bmc+fixed_01+linear-0"
    assert settings("logger=wandb").logger.name == "grid_sarsa-bmc-0"
