"""What other strategies would have shown: beside a job, in its log, and as advice."""

from __future__ import annotations

import csv
from pathlib import Path

import gymnasium
import lightning as L  # noqa: N812
import pytest
import torch
from jobs import assert_identical, everything, settings, tiny, trained
from lightning.pytorch.callbacks import Callback
from torch import nn

from bmc_torchrl import BMCEpsilon, ConstantEpsilon, VDBEEpsilon
from bmc_torchrl.analysis.plots import whatif_figure
from bmc_torchrl.analysis.whatif import Counterfactual
from bmc_torchrl.envs import SubgoalGridEnv
from bmc_torchrl.errors import SettingsError
from bmc_torchrl.experiments import train
from bmc_torchrl.experiments.build import build_job
from bmc_torchrl.learners.values import QNetwork, QTable
from bmc_torchrl.training import EpisodeMetrics, EpsilonGreedyDQN, WhatIf
from bmc_torchrl.training.tracking import EpisodeCSVLogger

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]
PRIORS = {f"alpha0_{x:g}": x for x in (1.0, 10.0)}


PATHS = {
    "plain": {},
    "runs": {
        "runs": 2,
        "q_network": lambda: QNetwork(4, 2, (8,), runs=2),
        "strategy": lambda: BMCEpsilon(batch_shape=[2]),
    },
    "state-dependent": {
        "env": lambda: SubgoalGridEnv(max_steps=10),
        "q_network": lambda: QTable(150, 4),
        "strategy": lambda: VDBEEpsilon(150, 0.1, 0.25),
    },
}


def built(path: str, **more) -> EpsilonGreedyDQN:
    torch.manual_seed(0)
    given = dict(PATHS[path])
    env = given.pop("env", lambda: gymnasium.make("CartPole-v1"))
    network = given.pop("q_network", lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)))()
    strategy = given.pop("strategy", BMCEpsilon)()
    return EpsilonGreedyDQN(env, network, strategy, batch_size=8, buffer_size=99, **given, **more)


def trainer(steps: int, **options) -> L.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "accelerator": "cpu"}
    return L.Trainer(max_steps=steps, **{**quiet, **options})


class SaveAt(Callback):
    """Saves a checkpoint in the middle of an epoch."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, *_) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def bank() -> dict:
    return {
        "twin": BMCEpsilon(),
        **{label: BMCEpsilon(x, x + 0.01) for label, x in PRIORS.items()},
        "vdbe": VDBEEpsilon(1, 0.1, 0.25),
        "constant": ConstantEpsilon(0.3),
    }


def known(callback: WhatIf) -> dict[str, torch.Tensor]:
    state = callback.state_dict()
    return {**state["bank"], "episodes": state["episodes"]}


@pytest.mark.parametrize("path", ["plain", "runs", "state-dependent"])
@pytest.mark.parametrize("chunk_steps", [1, 7])
def test_a_bank_changes_nothing_and_its_twin_shows_the_same(path: str, chunk_steps: int) -> None:
    strategies = bank()
    if path == "state-dependent":
        strategies["twin"] = PATHS[path]["strategy"]()
        del strategies["vdbe"]
    options = {"episodes": 30, "chunk_steps": chunk_steps}
    alone = built(path, **options)
    trainer(60).fit(alone)
    watched, callback = built(path, **options), WhatIf(strategies)
    trainer(60, callbacks=[callback]).fit(watched)
    assert_identical(everything(watched), everything(alone))
    epsilon = callback.bank.epsilons()
    torch.testing.assert_close(epsilon["twin"], watched.strategy.eps, rtol=1e-12, atol=0)
    assert (epsilon["alpha0_10"] > epsilon["alpha0_1"]).all()
    if path != "state-dependent":
        assert (epsilon["vdbe"] != 0.5).all()
    log = watched.log_of_episodes
    assert int(log.done.min()) > 0
    first = log.diagnostics["whatif/acting"][:, 0]
    torch.testing.assert_close(first, log.diagnostics["whatif/epsilon/twin"][:, 0])


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_a_bank_resumes_to_the_bit(compile: bool, tmp_path: Path) -> None:
    options = {"compile": compile, "chunk_steps": 5, "episodes": 30}
    with torch.compiler.set_stance("force_eager"):
        whole, saved = WhatIf(bank()), tmp_path / "saved.ckpt"
        trainer(60, callbacks=[whole]).fit(built("plain", **options))
        first = WhatIf(bank())
        trainer(35, callbacks=[first, SaveAt(30, saved)]).fit(built("plain", **options))
        second = WhatIf(bank())
        made = built("plain", **options)
        trainer(60, callbacks=[second]).fit(made, ckpt_path=saved, weights_only=True)
    assert_identical(known(second), known(whole))
    assert second.found()[0].others == whole.found()[0].others
    built("plain", episodes=30).load_state_dict(made.state_dict())


# ΔQ is that of the action taken, after an episode's end too, which happens here.
@pytest.mark.slow
def test_a_bank_is_part_of_the_compiled_update() -> None:
    callbacks = [WhatIf(bank()) for _ in range(2)]
    trainer(30, callbacks=callbacks[:1]).fit(built("plain"))
    made = built("plain", compile=True, chunk_steps=7)
    trainer(30, callbacks=callbacks[1:]).fit(made)
    assert len(made.compiled.graphs) == 1
    eager, compiled = (callback.bank.epsilons() for callback in callbacks)
    for label, value in eager.items():
        torch.testing.assert_close(compiled[label], value, rtol=2e-4, atol=2e-5)


def test_rows_have_what_each_would_have_shown(tmp_path: Path) -> None:
    logger, callback = EpisodeCSVLogger(tmp_path), WhatIf(bank(), tmp_path)
    fit = trainer(60, callbacks=[callback, EpisodeMetrics()], logger=logger)
    made = built("plain", episodes=30)
    fit.fit(made)
    with (tmp_path / "metrics/metrics.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    log = made.log_of_episodes.diagnostics
    for name in ("whatif/acting", *(f"whatif/epsilon/{label}" for label in bank())):
        assert float(rows[1][name]) == pytest.approx(float(log[name][0, 0]))
    assert float(rows[0]["whatif/epsilon/alpha0_10"]) == pytest.approx(10 / 20.01)
    assert (tmp_path / "whatif.png").exists()
    assert "Counterfactual" in (tmp_path / "whatif.txt").read_text()


# Jobs of bmc train.

CART_POLE = ("experiment=cartpole_dqn", "episodes=4", "runs=1", "domain.tests=1", "device=cpu")
SMALL = (*CART_POLE, "logger=none", "figure=false", "learner.hidden=[8]", "domain.test_every=2")


def test_the_command_gives_advice(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["bmc", *SMALL, "whatif=bank", f"output={tmp_path}/out"])
    train.main()
    said = " ".join(capsys.readouterr().out.split())
    assert "ε of bmc" in said
    assert "Counterfactual: all of them learned from the transitions that bmc took" in said


@pytest.mark.parametrize("how", ["softmax", "zeta"])
def test_the_command_explores_as_it_is_told(how: str, tmp_path: Path) -> None:
    learner = trained(tmp_path, *SMALL, "episodes=2", f"explore={how}")
    uniform = trained(tmp_path / "uniform", *SMALL, "episodes=2")
    assert type(learner.replacement).__name__ == {"softmax": "SoftmaxAction"}.get(
        how, "RepeatedAction"
    )
    steps = [each.log_of_episodes.train_steps for each in (learner, uniform)]
    assert not torch.equal(*steps)


PAPER = "protocol=paper"


def test_a_table_learns_with_held_actions_and_a_bank_and_resumes_exactly(tmp_path: Path) -> None:
    job = [*tiny("grid_sarsa"), PAPER, "explore=zeta", "whatif=bank", "figure=false"]
    job += ["trainer.checkpoint_every_n_chunks=1", "engine=auto", "strategy=constant"]
    whole = trained(tmp_path / "whole", *job)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bmc_torchrl.training.callbacks.ResultsTable.on_train_end", lambda *_: None)
        trained(tmp_path / "parts", *job, "+trainer.lightning.limit_train_batches=3")
    resumed = trained(tmp_path / "parts", *job, "resume=true")
    assert_identical(everything(resumed), everything(whole))
    assert any("left" in name for name in everything(whole))
    assert torch.equal(whole.log_of_episodes.watched, resumed.log_of_episodes.watched)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("engine=lockstep explore=softmax", "replace actions uniformly, not by SoftmaxAction"),
        ("engine=lockstep whatif=bank", "keep their transitions to themselves"),
        ("engine=torchrl explore=zeta", "next_action='before' draws.*protocol=paper"),
    ],
)
def test_what_an_engine_or_protocol_cannot_do_is_one_message(overrides: str, message: str) -> None:
    with pytest.raises((SettingsError, ValueError), match=message):
        build_job(settings("experiment=grid_sarsa", "runs=2", "device=cpu", *overrides.split()))


def test_an_engine_that_cannot_is_not_chosen() -> None:
    overrides = ("experiment=grid_sarsa", "runs=2", "device=cpu", "explore=softmax")
    learner, *_ = build_job(settings(*overrides))
    assert type(learner.explore.explore).__name__ == "SoftmaxAction"


# Advice.


def counterfactual(own, others, **more) -> Counterfactual:
    return Counterfactual("bmc", list(range(len(own))), own, others, **more)


def test_an_epsilon_that_stands_still_is_told_what_would_have_moved() -> None:
    others = {"alpha0_1": [0.5, 0.4, 0.2], "alpha0_1000": [0.5, 0.5, 0.5], "linear": [1, 0.5, 0.1]}
    found = counterfactual(
        [0.5, 0.5, 0.499], others, related=["alpha0_1", "alpha0_1000"], evidence=3e-6
    )
    said, caveat = found.advice()
    assert said == (
        "ε of bmc has not moved from 0.5: evidence per transition is 3e-06; alpha0_1 would be at "
        "0.2 by now."
    )
    assert caveat.startswith("Counterfactual")
    still = counterfactual([0.5] * 3, {"alpha0_1": [0.5] * 3})
    assert still.advice()[0].endswith("none of its kind would have moved either.")


def test_an_epsilon_that_falls_early_is_told_what_would_have_stayed() -> None:
    others = {"alpha0_100": [0.5, *[0.3] * 20], "alpha0_1": [0.5, *[0.001] * 20]}
    said, _ = counterfactual([0.5, 0.2, *[0.01] * 19], others).advice()
    assert said == (
        "ε of bmc was below a tenth of its first 0.5 by episode 2 of 20; alpha0_100 would still "
        "be at 0.3 in the end."
    )


def test_otherwise_the_range_is_told() -> None:
    said, _ = counterfactual([0.5, 0.4, 0.3], {"low": [0.5, 0.1], "high": [0.5, 0.45]}).advice()
    assert "went from 0.5 to 0.3; low would be at 0.1 by now, high at 0.45" in said


def test_the_figure_says_that_it_is_counterfactual() -> None:
    found = counterfactual([0.5, 0.4], {"alpha0_1": [0.5, 0.2]})
    (axes,) = whatif_figure(found).axes
    assert axes.get_title().startswith("Counterfactual")
    labels = [line.get_label() for line in axes.get_lines()]
    assert labels == ["alpha0_1", "bmc, which acted"]
    assert list(axes.get_lines()[0].get_ydata()) == [0.5, 0.2]
    assert found.table()["epsilon"].tolist() == [0.5, 0.4, 0.5, 0.2]
