"""A strategy is one file for the engines too: tensors for torch, numbers for numba."""

import math
from dataclasses import replace

import pytest
import torch
from chain_domain import ChainEnv
from tensordict import TensorDict

from bmc_torchrl.envs.lanes import Noise
from bmc_torchrl.learners.settings import ExpectedSarsaSettings, RunSettings
from bmc_torchrl.learners.values import QTable
from bmc_torchrl.lockstep import TabularDraws, TabularLockstep
from bmc_torchrl.lockstep.numba.tabular import NumbaTabularEngine
from bmc_torchrl.strategies import (
    BMCEpsilon,
    EpsilonStrategy,
    ScalarForm,
    ScalarRule,
    StackedEpsilon,
)

RUNS, STEPS = 5, 200
RUN = RunSettings(gamma=0.5, episodes=10_000, next_action="before")
SARSA = ExpectedSarsaSettings(learning_rate=0.5, initializer="normal")


def thinned(gap, visits):
    return gap / (1 + gap) / math.sqrt(1 + visits)


class GapRule(ScalarRule):
    """Parameter is the step size; memory the mean gap; `local` ε of each state and its visits."""

    @staticmethod
    def epsilon(memory, local, state):
        return thinned(memory[0], local[state])

    @staticmethod
    def learn(parameters, memory, local, state, greedy, uniform, change):
        memory[0] += parameters[0] * (abs(greedy - uniform) - memory[0])
        local[state] += 1.0


class GapEpsilon(EpsilonStrategy):
    """ε follows the gap between greedy and uniform return, less in states seen often."""

    state_key = "state"
    in_keys = ["greedy_return", "uniform_return", "state"]  # noqa: RUF012

    def __init__(self, rate, num_states, batch_shape):
        super().__init__(batch_shape)
        self.rate = rate
        self.register_buffer("gap", torch.ones(self.batch_shape, dtype=torch.float64))
        shape = (*self.batch_shape, num_states)
        self.register_buffer("visits", torch.zeros(shape, dtype=torch.float64))

    def at(self, visits):
        return self.gap / (1 + self.gap) / (1 + visits).sqrt()

    @property
    def eps(self):
        return self.at(self.visits.mean(-1))

    def epsilon(self, tensordict):
        return self.at(self.visits.gather(-1, tensordict["state"].unsqueeze(-1)).squeeze(-1))

    def read(self, transition, taken):
        return tuple(transition[key] for key in self.in_keys)

    def learn(self, greedy, uniform, state):
        self.gap += self.rate * ((greedy.double() - uniform.double()).abs() - self.gap)
        self.visits.scatter_add_(-1, state.unsqueeze(-1), torch.ones_like(self.visits[:, :1]))

    def diagnostics(self):
        return {"gap": self.gap}

    def scalars(self):
        return ScalarForm(GapRule, parameters=[self.rate], memory=[self.gap], local=self.visits)

    def load_scalars(self, memory, local):
        self.gap.copy_(memory[:, 0])
        self.visits.copy_(local)

    @staticmethod
    def scalar_diagnostics(memory):
        return {"gap": memory[..., 0]}


def strategy():
    return StackedEpsilon([BMCEpsilon(batch_shape=[2]), GapEpsilon(0.25, 3, batch_shape=[3])])


@pytest.mark.parametrize("order", ["before", "after"])
def test_both_engines_learn_equal_tables_from_equal_draws_with_a_strategy_of_one_file(
    order, random
):
    env, run = ChainEnv(batch_size=[RUNS], max_steps=7), replace(RUN, next_action=order)
    table = QTable(3, 2, runs=RUNS, initializer="normal")
    tensors = TabularLockstep(env, strategy(), run, SARSA, table=table, compiled=False)
    loops = NumbaTabularEngine(env, strategy(), run, SARSA, table=table.weight, threads=1)
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
    learned = strategy()
    loops.write_strategy(learned)
    for key, value in tensors.strategy.state_dict().items():
        torch.testing.assert_close(learned.state_dict()[key], value, rtol=1e-5, atol=1e-6)


def test_its_diagnostics_are_recorded_at_the_end_of_each_episode():
    env = ChainEnv(batch_size=[RUNS], max_steps=7)
    engine = NumbaTabularEngine(env, strategy(), replace(RUN, episodes=20), SARSA, threads=1)
    engine.advance(140)
    learned = strategy()
    engine.write_strategy(learned)
    gap = engine.diagnostics["gap"]
    torch.testing.assert_close(gap[:, -1], learned.diagnostics()["gap"], equal_nan=True)
    assert gap[:2].isnan().all()
    assert gap[2:].isfinite().all()
    assert (gap[2:].diff() != 0).any(-1).all()


def test_the_rule_is_the_strategy(random):
    made = GapEpsilon(0.25, 3, batch_shape=[1])
    form = made.scalars()
    memory, local = [1.0], [0.0] * 3
    for greedy, uniform, state in torch.rand(50, 3, generator=random).tolist():
        where = int(3 * state)
        at = TensorDict({"state": torch.tensor([where])}, [1])
        assert form.rule.epsilon(memory, local, where) == pytest.approx(made.epsilon(at).item())
        returns = {"greedy_return": [greedy], "uniform_return": [uniform]}
        at.update({key: torch.tensor(x).double() for key, x in returns.items()})
        made.update(at)
        form.rule.learn(form.parameters, memory, local, where, greedy, uniform, 0.0)
