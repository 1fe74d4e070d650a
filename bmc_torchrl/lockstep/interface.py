"""What every lockstep engine does, and which one serves which learner on which device."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torchrl.envs import EnvBase
from torchrl.modules import QValueActor

from bmc_torchrl.envs.base import BatchedEnv
from bmc_torchrl.learners.builders import build_network
from bmc_torchrl.learners.settings import (
    ExpectedSarsaSettings,
    LearnerSettings,
    PublishedDQNSettings,
    RunSettings,
)
from bmc_torchrl.learners.values import QNetwork, QTable, q_actor
from bmc_torchrl.lockstep.numba.dqn import NumbaDQNEngine
from bmc_torchrl.lockstep.numba.tabular import NumbaTabularEngine
from bmc_torchrl.lockstep.torch_dqn import DQNLockstep
from bmc_torchrl.lockstep.torch_tabular import TabularLockstep
from bmc_torchrl.strategies import EpsilonStrategy

__all__ = ["Engine", "engine_class", "greedy_actor", "make_engine"]


class Engine(Protocol):
    """Many runs, advanced a chunk at a time; results are ``[runs, episodes]``, NaN at first."""

    runs: int
    episodes: int

    @staticmethod
    def can_run(strategy: EpsilonStrategy) -> bool:
        """Whether the engine has what `strategy` needs."""
        ...

    @property
    def finished(self) -> bool:
        """Whether every run has had its episodes and tests."""
        ...

    @property
    def episodes_done(self) -> Tensor:
        """Finished episodes of each run, ``[runs]``."""
        ...

    @property
    def steps(self) -> Tensor:
        """Mean steps of the tests."""
        ...

    @property
    def returns(self) -> Tensor:
        """Mean discounted return of the tests."""
        ...

    @property
    def epsilons(self) -> Tensor:
        """Mean ε of each training episode."""
        ...

    @property
    def train_returns(self) -> Tensor:
        """Undiscounted return of each training episode."""
        ...

    @property
    def losses(self) -> Tensor:
        """Mean loss of each training episode."""
        ...

    @property
    def train_steps(self) -> Tensor:
        """Length of each training episode."""
        ...

    @property
    def diagnostics(self) -> dict[str, Tensor]:
        """What the strategy said of itself at the end of each training episode, by name."""
        ...

    def advance(self, steps: int) -> None:
        """Take up to `steps` steps of every run, and the tests that come due."""
        ...

    def write_strategy(self, strategy: EpsilonStrategy, /) -> None:
        """Give `strategy` what the runs have learned, if it has not got it yet."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on exactly from here."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Go on from a saved state."""
        ...


def engine_class(learner: LearnerSettings, device: torch.device) -> type[Engine] | None:
    """The engine of a learner on a device, None where there is none.

    On a CPU, tables and networks are loops compiled by numba; on a GPU they are tensors.

    >>> engine_class(ExpectedSarsaSettings(learning_rate=0.5), torch.device("cuda")).__name__
    'TabularLockstep'
    """
    loops: dict[type, type[Engine]] = {
        ExpectedSarsaSettings: NumbaTabularEngine,
        PublishedDQNSettings: NumbaDQNEngine,
    }
    tensors: dict[type, type[Engine]] = {
        ExpectedSarsaSettings: TabularLockstep,
        PublishedDQNSettings: DQNLockstep,
    }
    return (loops if device.type == "cpu" else tensors).get(type(learner))


def make_engine(
    env: BatchedEnv,
    strategy: EpsilonStrategy,
    run: RunSettings,
    learner: LearnerSettings,
    **options: Any,
) -> Engine:
    """The engine of `learner` on the device of `env`, with the engine's own `options`."""
    made: Any = engine_class(learner, env.device)
    if made is None:
        raise ValueError(f"{type(learner).__name__} has no lockstep engine; use engine=torchrl.")
    engine: Engine = made(env, strategy, run, learner, **options)
    return engine


def greedy_actor(engine: Engine, env: EnvBase) -> QValueActor:
    """What the runs of `engine` have learned, as an actor in `env`, batch size ``[runs, …]``."""
    if isinstance(engine, DQNLockstep | NumbaDQNEngine):
        network, key = build_network(env, engine.runs, engine.learner.hidden)
        engine.export(next(part for part in network.modules() if isinstance(part, QNetwork)))
        return q_actor(network, env.num_actions, in_key=key)
    assert isinstance(engine, NumbaTabularEngine | TabularLockstep)
    table = QTable(env.num_states, env.num_actions, runs=engine.runs, device=env.device)
    table.weight.data.copy_(engine.table)
    return q_actor(table, env.num_actions)
