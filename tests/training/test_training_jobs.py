"""Jobs end to end, made small: same seed, same bits; what tests measure; what leaves the device."""

from __future__ import annotations

import functools
import io
import re
import signal

import lightning as L  # noqa: N812
import pytest
import torch
from fake_accelerator import HostSyncs
from jobs import EXPERIMENTS, assert_identical, built, everything, tiny, train, trained
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from torch import Tensor

from bmc_torchrl.analysis.job_summary import print_job_summary
from bmc_torchrl.analysis.tables import load, load_metadata
from bmc_torchrl.envs import SubgoalGridEnv
from bmc_torchrl.learners.values import QTable, q_actor
from bmc_torchrl.signals import Interrupted, StopSignals
from bmc_torchrl.training import EpisodeProgress, GreedyEvaluation, StopAfterPerfectTests
from bmc_torchrl.training.episodes import EpisodeLog
from bmc_torchrl.training.greedy_tests import greedy_tests

BESIDE = "strategies=[bmc,vdbe_005,geom_095,power_05,fixed_01]"


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_depends_on_its_seed_and_nothing_else(experiment: str, tmp_path) -> None:
    job = tiny(experiment)
    first = trained(tmp_path / "first", *job)
    torch.rand(7)
    assert_identical(everything(trained(tmp_path / "again", *job)), everything(first))
    table = load(tmp_path / "first/table.parquet")
    assert table.equals(load(tmp_path / "again/table.parquet"))
    assert len(table) == 4
    assert not table.isna().any().any()
    assert load_metadata(tmp_path / "first/table.parquet")["config"]["name"] == experiment
    other = trained(tmp_path / "other", *job, "seed=1")
    changed = (
        everything(other)["/q_actor.module.0.module.weight"]
        if "sarsa" in experiment
        else (next(p for p in other.q_actor.parameters()))
    )
    assert not torch.equal(changed, next(p for p in first.q_actor.parameters()))


def test_strategies_side_by_side_are_those_of_the_sweep(tmp_path) -> None:
    learner = trained(tmp_path, *tiny("grid_sarsa", BESIDE))
    table = load(tmp_path / "table.parquet")
    labels = ["bmc", "vdbe_005", "geom_095", "power_05", "fixed_01"]
    assert table["strategy"].unique().tolist() == labels
    epsilon = table.query("episode == 2").groupby("strategy")["epsilon"].mean()
    assert epsilon["geom_095"] == pytest.approx(0.475, rel=0.01)
    assert epsilon["fixed_01"] == pytest.approx(0.1)
    assert learner.log_of_episodes.runs == 10


@pytest.mark.parametrize("experiment", ["grid_sarsa", "supply_dqn"])
def test_runs_never_touch_each_other(experiment: str, tmp_path) -> None:
    results = []
    for shift in (0.0, 1.0):
        cfg, learner, stream, evaluation = built(
            *tiny(experiment, "runs=3"), f"output={tmp_path / str(shift)}"
        )
        for parameter in learner.q_actor.parameters():
            parameter.data[1] += shift * torch.randn_like(parameter.data[1])
        torch.manual_seed(5)
        train.fit(cfg, learner, stream, evaluation)
        results.append(learner)
    log, other = (learner.log_of_episodes for learner in results)
    for name in ("steps", "returns", "epsilons"):
        ours, theirs = getattr(log, name), getattr(other, name)
        assert torch.equal(ours[[0, 2]], theirs[[0, 2]])
    assert not torch.equal(log.epsilons[1], other.epsilons[1])
    for ours, theirs in zip(*(r.q_actor.parameters() for r in results), strict=True):
        assert torch.equal(ours[[0, 2]], theirs[[0, 2]])
        assert not torch.equal(ours[1], theirs[1])
    alphas = [learner.explore.strategy.alpha for learner in results]
    assert torch.equal(alphas[0][[0, 2]], alphas[1][[0, 2]])


def test_greedy_tests_equal_a_plain_loop() -> None:
    env = SubgoalGridEnv(batch_size=[3], max_steps=30)
    actor = q_actor(QTable(150, 4, runs=3, initializer="normal"), 4)
    steps, returns = greedy_tests(env, actor, gamma=0.9, max_steps=30)
    single = SubgoalGridEnv(max_steps=30)
    for run in range(3):
        table, state = actor[0].module.weight[run], single.reset()
        count = total = 0.0
        while True:
            state["action"] = table[state["state"]].argmax()
            state = single.step(state)["next"]
            total += 0.9**count * float(state["reward"])
            count += 1
            if bool(state["done"]):
                break
        assert float(steps[run]) == count
        assert float(returns[run]) == pytest.approx(total, rel=1e-5)


class Watch(Callback):
    """Keeps the table of each run as it is right after an episode, by a hook of its own."""

    def __init__(self) -> None:
        self.tables: dict[tuple[int, int], Tensor] = {}

    def on_fit_start(self, trainer, pl_module) -> None:
        pl_module.step_hooks.append(self.keep)
        self.learner = pl_module

    def keep(self, ended: Tensor) -> None:
        for run in ended.nonzero().flatten().tolist():
            episode = int(self.learner.log_of_episodes.done[run]) - 1
            self.tables[run, episode] = self.learner.rule.table.weight[run].detach().clone()


def test_a_test_uses_q_of_right_after_the_episode(tmp_path, monkeypatch) -> None:
    watch, callbacks = Watch(), train.callbacks
    monkeypatch.setattr(train, "callbacks", lambda *args: [watch, *callbacks(*args)])
    job = tiny("grid_sarsa", "trainer.chunk_steps=17", "episodes=3", "domain.max_steps=20")
    learner = trained(tmp_path, *job)
    assert len(watch.tables) == 6
    env = SubgoalGridEnv(batch_size=[1], max_steps=20)
    for (run, episode), weight in watch.tables.items():
        table = QTable(150, 4, runs=1)
        table.weight.data[0] = weight
        steps, returns = greedy_tests(env, q_actor(table, 4), gamma=0.99, max_steps=20)
        log = learner.log_of_episodes
        assert float(log.steps[run, episode]) == float(steps)
        assert float(log.returns[run, episode]) == pytest.approx(float(returns), rel=1e-6)


def test_tests_never_change_what_is_learned(tmp_path, monkeypatch) -> None:
    job = tiny("supply_sarsa")
    tested = trained(tmp_path / "tested", *job)
    monkeypatch.setattr(GreedyEvaluation, "on_train_batch_end", lambda *_: None)
    monkeypatch.setattr(train.ResultsTable, "on_train_end", lambda *_: None)
    untested = trained(tmp_path / "untested", *job)
    assert torch.equal(tested.rule.table.weight, untested.rule.table.weight)
    assert torch.equal(tested.explore.eps, untested.explore.eps)
    assert untested.log_of_episodes.steps.isnan().all()


def test_a_chunk_that_holds_two_episodes_of_a_run_is_refused(tmp_path) -> None:
    with pytest.raises(RuntimeError, match=r"2 episodes within one chunk.*set chunk_steps to"):
        trained(tmp_path, *tiny("grid_sarsa", "trainer.chunk_steps=48"))
    assert not (tmp_path / "table.parquet").exists()


class Perfect(Callback):
    """Declares every test of run 0 perfect."""

    def on_train_batch_end(self, trainer, pl_module, *_) -> None:
        log = pl_module.log_of_episodes
        log.steps[0] = torch.where(log.steps[0].isnan(), log.steps[0], 24.0)


def test_a_run_stops_after_perfect_tests_and_its_results_stay(tmp_path, monkeypatch) -> None:
    def callbacks(*args):
        parts = original(*args)
        assert isinstance(parts[1], StopAfterPerfectTests)
        return [parts[0], Perfect(), *parts[1:]]

    original = train.callbacks
    monkeypatch.setattr(train, "callbacks", callbacks)
    job = tiny("grid_sarsa", "episodes=4", "stop_after_perfect_tests=2")
    monkeypatch.setattr(StopAfterPerfectTests, "__init__", _two_tests_of_24_steps)
    learner = trained(tmp_path, *job, "domain.max_steps=23")
    log = learner.log_of_episodes
    assert log.stopped.tolist() == [True, False]
    assert log.done.tolist() == [2, 4]
    for table in (log.steps, log.returns, log.epsilons):
        assert (table[0, 2:] == table[0, 1]).all()
        assert not table.isnan().any()
    assert int(learner.explore.strategy.return_count[0]) == 3 * 22  # To the end of the chunk.


def _two_tests_of_24_steps(self, tests: int, max_steps: int) -> None:
    self.tests, self.max_steps = tests, 24


def test_no_test_is_perfect_before_there_are_enough() -> None:
    with pytest.raises(ValueError, match="tests must be at least 1, got 0"):
        StopAfterPerfectTests(0, 200)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_host_never_waits_for_the_device_within_a_chunk(experiment: str) -> None:
    _, learner, stream, evaluation = built(*tiny(experiment), "strategies=[bmc,vdbe_005,geom_09]")
    evaluation[0].on_fit_start(None, learner)
    stream._start()
    steps = stream._chunk()
    for _ in range(6):  # The replay buffer fills, and is made, before.
        learner.step(next(steps))
    with HostSyncs() as syncs:
        learner.step(next(steps))
    # TorchRL's storage reads its own cursor, which is on the host whatever the device.
    cursor = ["_local_scalar_dense"] if "dqn" in experiment else []
    assert syncs.seen == cursor


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-mixed"])
@pytest.mark.parametrize("learner", ["expected_sarsa", "published_dqn", "dqn"])
def test_half_precision_leaves_posterior_and_results_intact(learner, precision, tmp_path) -> None:
    experiment = "grid_sarsa" if learner == "expected_sarsa" else "grid_dqn"
    job = tiny(experiment, f"learner={learner}", "runs=1")
    job += ["learner.warmup=8", "learner.batch_size=4"] if learner == "dqn" else []
    fitted = trained(tmp_path, *job, f"trainer.lightning.precision={precision}")
    strategy, log = fitted.strategy, fitted.log_of_episodes
    for name in ("alpha", "beta", "return_count", "return_mean", "return_m2"):
        assert getattr(strategy, name).dtype == torch.float64
    assert int(strategy.return_count) == 48
    assert 0.3 < float(strategy.mean) < 0.4976
    assert log.epsilons.dtype == log.steps.dtype == torch.float32
    assert float(log.epsilons[0, 1]) != float(log.epsilons[0, 1].bfloat16())
    half = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert all(parameter.dtype == half for parameter in fitted.q_actor.parameters())
    if learner == "published_dqn":
        counts = {value["step"].dtype for value in fitted.rule.adam.state().values()}
        assert counts == {torch.float64}


@pytest.mark.slow
def test_compiled_learning_learns_the_same(tmp_path) -> None:
    job = tiny("grid_sarsa", "episodes=1")
    plain = trained(tmp_path / "plain", *job)
    compiled = trained(tmp_path / "compiled", *job, "trainer.compile={backend: eager}")
    assert_identical(everything(compiled), everything(plain))


def test_jobs_run_on_the_device_that_is_asked_for(tmp_path) -> None:
    cfg, *job = built(*tiny("grid_sarsa", "episodes=1"), f"output={tmp_path}")
    trainer = train.fit(cfg, *job)
    assert trainer.strategy.root_device == torch.device("cpu")
    assert job[1].env.device == torch.device("cpu")


def test_the_episode_log_records_until_a_run_is_finished() -> None:
    log = EpisodeLog(runs=2, episodes=2, diagnostics=["posterior/alpha"])
    half, one = torch.tensor([0.5, 0.25]), torch.ones(2)

    def record(done: list[bool], epsilon: Tensor, alpha: float) -> list[bool]:
        said = {"posterior/alpha": torch.tensor(alpha)}
        return log.record(one, torch.tensor(done), epsilon, 3 * epsilon, said).tolist()

    assert record([False, True], half, 0.75) == [False, True]
    record([True, True], half * 2, 0.5)
    torch.testing.assert_close(log.epsilons[:, 0], torch.tensor([0.75, 0.25]))
    torch.testing.assert_close(log.losses[:, 0], torch.tensor([2.25, 0.75]))
    assert log.train_returns[:, 0].tolist() == log.train_steps[:, 0].tolist() == [2.0, 1.0]
    assert log.diagnostics["posterior/alpha"].T[0].tolist() == [0.5, 0.75]
    assert log.finished.tolist() == [False, True]
    assert log.ended.tolist() == [1, 2]
    assert record([True, True], half, 0.25) == [True, False]
    assert log.done.tolist() == [2, 2]
    torch.testing.assert_close(log.epsilons[1], torch.tensor([0.25, 0.5]))
    with pytest.raises(ValueError, match="runs and episodes must be positive, got 0 and 3"):
        EpisodeLog(0, 3)


def test_progress_shows_episodes_tests_epsilon_and_speed(tmp_path, monkeypatch) -> None:
    shown = io.StringIO()
    terminal = Console(file=shown, force_terminal=True, width=80)
    monkeypatch.setattr("bmc_torchrl.training.callbacks.Console", lambda **_: terminal)
    always = functools.partial(EpisodeProgress, every_seconds=0.0)
    monkeypatch.setattr(train, "EpisodeProgress", always)
    trained(tmp_path, *tiny("grid_sarsa", BESIDE, "runs=2000", "episodes=1"))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue())
    for part in ("0/10000 episodes", "10000/10000 episodes", "bmc: return -", "ε 0.49", "steps/s"):
        assert part in text, part
    lines = [line for line in re.split("[\r\n]", text) if line]
    assert all(len(line) <= 80 and re.search("[-0-9]:[-0-9]{2} *$", line) for line in lines), lines
    assert "steps/s" in lines[-1]


def test_a_report_is_a_table_and_says_where_everything_is(tmp_path, capsys) -> None:
    trained(tmp_path, *tiny("grid_sarsa", BESIDE))
    print_job_summary(tmp_path)
    printed = capsys.readouterr().out
    for part in ("ε-BMC", "VDBE", "mean (AUC)", "24.00 ± 0.00", "final ε", "one standard error"):
        assert part in printed, part
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert "table.parquet" in printed.replace("\n", "")
    assert "curves.png" in printed.replace("\n", "")


def test_the_report_of_one_short_run_says_what_it_is(tmp_path, capsys) -> None:
    trained(tmp_path, *tiny("grid_sarsa", "runs=1", "episodes=2"))
    print_job_summary(tmp_path, figure=False)
    printed = capsys.readouterr().out
    assert "last 2 episodes" in printed
    assert "nan" not in printed
    assert "±" not in printed


def test_the_progress_of_a_long_job_fits_80_columns(monkeypatch) -> None:
    shown = io.StringIO()
    terminal = Console(file=shown, force_terminal=True, width=80)
    monkeypatch.setattr("bmc_torchrl.training.callbacks.Console", lambda **_: terminal)
    _, learner, *_ = built(*tiny("grid_sarsa", "runs=400", "episodes=5000", BESIDE))
    learner.log_of_episodes.measured.fill_(-123456.7)
    learner.vector_steps = 10
    progress = EpisodeProgress(["a strategy with a long name", *"bcde"])
    trainer = L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    progress.on_train_start(trainer, learner)
    learner.log_of_episodes.done.fill_(5000)
    progress.on_train_end(trainer, learner)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue())
    last = [line for line in re.split("[\r\n]", text) if line][-1]
    assert last.startswith("10M/10M episodes ━━━━━━ a strate: return -123457 ε 0.4")
    assert re.search("steps/s [0-9]+:[0-9]{2}$", last.strip())


@pytest.mark.parametrize("cut", ["set_live", "push_render_hook", "show_cursor"])
def test_a_signal_while_the_progress_bar_appears_leaves_a_terminal_behind(
    cut: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.StringIO()
    terminal = Console(file=shown, force_terminal=True, width=80)
    monkeypatch.setattr("bmc_torchrl.training.callbacks.Console", lambda **_: terminal)
    step = getattr(terminal, cut)

    def asked(*args):
        monkeypatch.setattr(terminal, cut, step)
        signal.raise_signal(signal.SIGTERM)
        return step(*args)

    monkeypatch.setattr(terminal, cut, asked)
    _, learner, *_ = built(*tiny("grid_sarsa"))
    progress = EpisodeProgress()
    trainer = L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    with StopSignals(), pytest.raises(Interrupted) as stop:
        progress.on_train_start(trainer, learner)
    progress.on_exception(trainer, learner, stop.value)
    hidden, visible = "\x1b[?25l", "\x1b[?25h"
    assert shown.getvalue().rindex(hidden) < shown.getvalue().rindex(visible)
