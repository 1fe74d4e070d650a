"""ForgetOnChange watches training returns, tells the strategy, and survives a checkpoint."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import lightning as L  # noqa: N812
import pytest
import torch
from jobs import assert_identical, built, tiny, trained
from torch import nn

from bmc_torchrl import BMCEpsilon, ChangeDetector
from bmc_torchrl.learners.values import QNetwork
from bmc_torchrl.training import EpsilonGreedyDQN, ForgetOnChange

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]
EAGER = {"threshold": 0.5, "tolerance": 0.0, "least_episodes": 2}


QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


def module(network: nn.Module, strategy: BMCEpsilon, **options) -> EpsilonGreedyDQN:
    torch.manual_seed(0)
    options = {"batch_size": 8, "buffer_size": 200, **options}
    return EpsilonGreedyDQN(lambda: gymnasium.make("CartPole-v1"), network, strategy, **options)


def trainer(steps: int, *callbacks: ForgetOnChange) -> L.Trainer:
    return L.Trainer(
        max_steps=steps,
        callbacks=list(callbacks),
        accelerator="cpu",
        enable_checkpointing=False,
        **QUIET,
    )


class Told(BMCEpsilon):
    """Counts how often each run was told to unlearn."""

    def reset(self, *, strength=None, runs=None):
        self.told = getattr(self, "told", 0) + runs.long()
        super().reset(strength=strength, runs=runs)


def made(shape: tuple[int, ...] = (2,)):
    network = QNetwork(4, 2, (8,), runs=2)
    return module(network, Told(batch_shape=shape), runs=2, episodes=12)


@pytest.mark.parametrize("shape", [(2,), ()])
def test_a_run_is_reset_where_its_returns_fall(shape) -> None:
    learner, callback = made(shape), ForgetOnChange(strength=7.0, **EAGER)
    trainer(2000, callback).fit(learner)
    returns = learner.log_of_episodes.train_returns
    expected, fired = ChangeDetector(**EAGER, batch_shape=[2]), []
    for episode in returns.unbind(-1):
        fired.append(expected.observe(episode))
    assert torch.equal(callback.detector.changes, expected.changes)
    assert expected.changes.sum() > 1
    told = learner.strategy.told
    assert torch.equal(told, expected.changes) if shape else told > 0
    assert not learner.step_hooks, "nothing is left behind"


def test_a_resumed_job_watches_on(tmp_path: Path) -> None:
    def build() -> EpsilonGreedyDQN:
        torch.manual_seed(0)
        return module(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), BMCEpsilon())

    whole, watching = build(), ForgetOnChange(0.5, **EAGER)
    trainer(120, watching).fit(whole)
    first, saved = trainer(70, ForgetOnChange(0.5, **EAGER)), tmp_path / "saved.ckpt"
    first.fit(build())
    first.save_checkpoint(saved)
    second, again = build(), ForgetOnChange(0.5, **EAGER)
    trainer(120, again).fit(second, ckpt_path=saved, weights_only=True)
    assert_identical(dict(second.state_dict()), dict(whole.state_dict()))
    assert_identical(again.detector.state_dict(), watching.detector.state_dict())
    assert watching.detector.changes > 0


def test_an_engine_that_steps_alone_is_refused() -> None:
    job = [*tiny("grid_sarsa"), "engine=lockstep"]
    _, learner, *_ = built(*(each for each in job if each != "engine=torchrl"))
    with pytest.raises(ValueError, match="not LockstepLearner: use engine=torchrl"):
        ForgetOnChange().on_fit_start(None, learner)


@pytest.mark.parametrize("options", [{"rate": 0.0}, {"rate": 0.5, "strength": 3.0}])
def test_settings_that_contradict_are_refused(options) -> None:
    with pytest.raises(ValueError, match=r"rate"):
        ForgetOnChange(**options)


@pytest.mark.parametrize("experiment", ["grid_sarsa", "cart_dqn"])
@pytest.mark.parametrize("engine", ["torchrl", "lockstep"])
def test_strategies_without_a_unit_run_from_their_configs(experiment, engine, tmp_path) -> None:
    labels = "[bmc_scale_free,wins,wins_uncorrected]"
    job = [each for each in tiny(experiment) if not each.startswith("engine=")]
    job += [f"engine={engine}", "sweep=untuned", f"strategies={labels}"]
    learner = trained(tmp_path, *job)
    scale_free, *wins = (part for part, _ in learner.strategy.parts())
    assert (scale_free.likelihood.b0 == 0).all()
    for strategy in wins:
        assert (strategy.frames > 0).all()
        assert (strategy.alpha + strategy.beta > strategy.strength).all()
