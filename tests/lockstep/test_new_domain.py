"""A domain is one file for the engines too, and every learner has one engine per device."""

import importlib
import sys
from pathlib import Path

import chain_domain
import pytest
import torch
from chain_domain import ChainEnv
from probes import ProbeEnv
from torchrl.envs.utils import check_env_specs

from bmc_torchrl.envs import SubgoalGridEnv
from bmc_torchrl.envs.base import BatchedEnv
from bmc_torchrl.envs.lanes import Noise
from bmc_torchrl.learners.builders import build_learner
from bmc_torchrl.learners.settings import (
    DQNSettings,
    ExpectedSarsaSettings,
    PublishedDQNSettings,
    RunSettings,
)
from bmc_torchrl.learners.values import QTable
from bmc_torchrl.lockstep import DQNLockstep, TabularDraws, TabularLockstep
from bmc_torchrl.lockstep.interface import engine_class, make_engine
from bmc_torchrl.lockstep.numba.dqn import NumbaDQNEngine
from bmc_torchrl.lockstep.numba.tabular import NumbaTabularEngine
from bmc_torchrl.strategies import BMCEpsilon, ConstantEpsilon, LinearEpsilon, StackedEpsilon

RUNS, STEPS = 5, 200
RUN = RunSettings(gamma=0.5, episodes=10_000, next_action="before")
SARSA = ExpectedSarsaSettings(learning_rate=0.5, initializer="normal")
PUBLISHED = PublishedDQNSettings(
    hidden=(8,), learning_rate=0.01, batch_size=4, capacity=50, epochs=2
)


def chain(runs: int = RUNS) -> ChainEnv:
    return ChainEnv(batch_size=[runs], max_steps=7)


@pytest.mark.parametrize("order", ["before", "after"])
def test_both_engines_learn_equal_tables_from_equal_draws_in_a_domain_of_one_file(order, random):
    check_env_specs(chain())
    run = RunSettings(gamma=0.5, episodes=10_000, next_action=order)
    table = QTable(3, 2, runs=RUNS, initializer="normal")
    build = lambda: StackedEpsilon(  # noqa: E731
        [BMCEpsilon(batch_shape=[3]), ConstantEpsilon(0.25, batch_shape=[2])]
    )
    tensors = TabularLockstep(chain(), build(), run, SARSA, table=table, compiled=False)
    loops = NumbaTabularEngine(chain(), build(), run, SARSA, table=table.weight, threads=1)
    tensors.state.copy_(loops.state_dict()["state"])
    uniforms = torch.rand(STEPS, RUNS, 9, generator=random)
    act, noise, reset, act_next = (
        uniforms[..., part] for part in (slice(2), slice(2, 3), slice(3, 4), slice(7, 9))
    )
    loops.advance(STEPS, uniforms=uniforms)
    with torch.no_grad():
        tensors.vector_steps(
            TabularDraws(act.mT, Noise(noise.double(), reset), act_next.mT.contiguous())
        )
    assert (loops.episodes_done > 10).all()
    assert torch.equal(loops.episodes_done, tensors.episodes_done)
    torch.testing.assert_close(loops.table, tensors.table, rtol=0, atol=1e-6)


@pytest.mark.parametrize("learner", [SARSA, PUBLISHED])
def test_a_domain_of_one_file_is_trained_and_tested_to_the_end(learner) -> None:
    run = RunSettings(gamma=0.5, episodes=60, tests=4, seed=1)
    strategy = ConstantEpsilon(0.5, batch_shape=[RUNS])
    engine = make_engine(chain(), strategy, run, learner, threads=1)
    while not engine.finished:
        engine.advance(50)
    # Going right from 0 or 1 takes 4 steps on average with a slip of a quarter, going left 20.
    assert 1 <= engine.steps[:, 20:].mean() < 5


def test_an_engine_is_chosen_by_learner_and_device_and_says_what_it_can_run() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert engine_class(SARSA, cpu) is NumbaTabularEngine
    assert engine_class(SARSA, gpu) is TabularLockstep
    assert engine_class(PUBLISHED, cpu) is NumbaDQNEngine
    assert engine_class(PUBLISHED, gpu) is DQNLockstep
    assert engine_class(DQNSettings(), cpu) is None
    linear = LinearEpsilon(count_by="step", batch_shape=[1])
    stacked = StackedEpsilon([ConstantEpsilon(0.1, batch_shape=[1]), linear])
    assert not NumbaTabularEngine.can_run(linear)
    assert not NumbaTabularEngine.can_run(stacked)
    assert NumbaTabularEngine.can_run(BMCEpsilon())
    assert not NumbaTabularEngine.can_run(BMCEpsilon(num_states=3))
    assert TabularLockstep.can_run(stacked)
    with pytest.raises(ValueError, match="DQNSettings has no lockstep engine; use engine=torchrl"):
        make_engine(chain(), stacked, RUN, DQNSettings())
    with pytest.raises(ValueError, match=r"LinearEpsilon.*use engine=torchrl"):
        make_engine(chain(2), stacked, RUN, SARSA)


@pytest.mark.parametrize("learner", ["tables", "networks"])
def test_the_torch_engines_run_a_strategy_that_numba_does_not_have(learner: str) -> None:
    strategy = BMCEpsilon(1.0, 1.5, update="offline", batch_shape=[RUNS])
    run = RunSettings(gamma=0.5, episodes=30)
    kind, settings = {"tables": (TabularLockstep, SARSA), "networks": (DQNLockstep, PUBLISHED)}[
        learner
    ]
    engine = kind(chain(), strategy, run, settings, compiled=False)
    engine.advance(60)
    assert (strategy.eps < 0.4).all()
    torch.testing.assert_close(engine.epsilons[:, 0], torch.full((RUNS,), 0.4).double())


def test_an_environment_without_lanes_or_scalars_says_so() -> None:
    class Bare(BatchedEnv):
        pass

    bare = Bare(sizes=(2,), num_actions=2, batch_size=[1])
    with pytest.raises(TypeError, match=r"define Bare.lanes\(\), or use.*engine=torchrl"):
        bare.lanes()
    with pytest.raises(TypeError, match=r"define Bare.scalars\(\), or use.*engine=torchrl"):
        bare.scalars()
    assert bare.picture(None, 0) is None
    with pytest.raises(ValueError, match="needs a step limit: build env with max_steps="):
        SubgoalGridEnv(batch_size=[2], max_steps=None).lanes()


def test_settings_that_no_learner_has_are_refused() -> None:
    with pytest.raises(TypeError, match="No learner has settings of the class RunSettings"):
        build_learner(RUN, ProbeEnv(batch_size=[1]), 0.9)


@pytest.mark.slow
def test_a_changed_domain_is_compiled_again(tmp_path, monkeypatch) -> None:
    """Numba's cache on disk would give the old functions to a class of the same name."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    source = Path(chain_domain.__file__).read_text()
    returns = []
    for slip in ("0.25", "1.5"):
        text = source.replace("u < self.slip", f"u < {slip}")
        (tmp_path / "changed_chain.py").write_text(text)
        sys.modules.pop("changed_chain", None)
        importlib.invalidate_caches()
        env = importlib.import_module("changed_chain").ChainEnv(batch_size=[20], max_steps=9)
        strategy = ConstantEpsilon(0.0, batch_shape=[20])
        table = torch.tensor([0.0, 1.0]).expand(20, 3, 2)
        learner = ExpectedSarsaSettings(learning_rate=1e-6)
        run = RunSettings(gamma=0.5, episodes=1, tests=1)
        engine = NumbaTabularEngine(env, strategy, run, learner, table=table, threads=1)
        engine.advance(9)
        returns.append(engine.steps.mean())
    assert returns[0] < 9
    assert returns[1] == 9
