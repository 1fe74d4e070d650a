"""ForgetOnChange watches training returns, tells the strategy, and survives a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from jobs import built, tiny, trained
from test_dqn import SaveAt, assert_identical, everything, module, trainer

from bmc_torchrl import BMCEpsilon, ChangeDetector
from bmc_torchrl.learners.values import QNetwork
from bmc_torchrl.training import ForgetOnChange

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]
EAGER = {"threshold": 0.5, "tolerance": 0.0, "least_episodes": 2}


class Told(BMCEpsilon):
    """Counts how often each run was told to unlearn."""

    def reset(self, *, strength=None, runs=None):
        self.told = getattr(self, "told", 0) + runs.long()
        super().reset(strength=strength, runs=runs)


def made(shape: tuple[int, ...] = (2,)):
    network = QNetwork(4, 2, (8,), runs=2)
    return module(runs=2, episodes=12, q_network=network, strategy=Told(batch_shape=shape))


@pytest.mark.parametrize("shape", [(2,), ()])
def test_a_run_is_reset_where_its_returns_fall(shape) -> None:
    learner, callback = made(shape), ForgetOnChange(strength=7.0, **EAGER)
    trainer(2000, callbacks=[callback]).fit(learner)
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
    build = lambda: module(strategy=BMCEpsilon())  # noqa: E731
    whole, watching = build(), ForgetOnChange(0.5, **EAGER)
    trainer(120, callbacks=[watching]).fit(whole)
    saved, again = tmp_path / "saved.ckpt", ForgetOnChange(0.5, **EAGER)
    first = trainer(90, callbacks=[ForgetOnChange(0.5, **EAGER), SaveAt(70, saved)])
    first.fit(build())
    second = build()
    trainer(120, callbacks=[again]).fit(second, ckpt_path=saved, weights_only=True)
    assert_identical(everything(whole), everything(second))
    assert_identical(watching.detector.state_dict(), again.detector.state_dict())
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
