"""Several agents: an ε each, or one for all."""

import pytest
import torch
from contracts import (
    AGENTS,
    FACTORIES,
    RUNS,
    STATES,
    alike,
    exploring,
    memory,
    observed,
    transitions,
)
from tensordict import TensorDict
from torchrl.data import Categorical

from bmc_torchrl import AdaptiveEGreedyModule, BMCEpsilon


@pytest.mark.parametrize("time", [(), (6,)])
@pytest.mark.parametrize("name", ["vdbe", "bmc", "bmc-state", "bmc-offline"])
def test_agents_may_each_have_their_own_epsilon(name, time):
    data = transitions((*RUNS, *time), agents=(AGENTS,))
    together = FACTORIES[name]((*RUNS, AGENTS))
    together.update(data)
    for agent in range(AGENTS):
        alone, part = FACTORIES[name](RUNS), data.clone()
        for key in ("greedy_return", "uniform_return", "value_change"):
            part[key] = part[key][..., agent]
        alone.update(part)
        assert torch.equal(together.eps[:, agent], alone.eps)


@pytest.mark.parametrize("name", ["vdbe", "bmc", "bmc-state", "bmc-offline"])
def test_agents_may_share_an_epsilon_and_are_walked_within_each_step(name):
    data = transitions((*RUNS, 6), agents=(AGENTS,))
    pooled, walked = FACTORIES[name](RUNS), FACTORIES[name](RUNS)
    pooled.update(data)
    for time in range(6):
        for agent in range(AGENTS):
            part = data[:, time].clone()
            for key in ("greedy_return", "uniform_return", "value_change"):
                part[key] = part[key][..., agent]
            walked.update(part)
    assert alike(memory(pooled), memory(walked))


@pytest.mark.parametrize("name", ["geometric", "power", "linear"])
def test_schedules_count_a_step_that_any_of_the_agents_took(name):
    data = transitions((*RUNS, 6), agents=(AGENTS,))
    taken = torch.ones(*RUNS, 6, AGENTS, dtype=torch.bool)
    taken[:, 0] = False
    taken[:, 1, 0] = False
    strategy, expected = FACTORIES[name](RUNS), FACTORIES[name](RUNS)
    strategy.update(data, taken)
    expected.update(data[:, 1:])
    assert torch.equal(strategy.eps, expected.eps)
    assert strategy.learned.tolist() == [5] * 4
    assert strategy.skipped["foreign"].tolist() == [1] * 4


def test_as_many_runs_as_agents_are_told_apart():
    data = transitions((3,), agents=(3,))
    per_run, per_agent = BMCEpsilon(batch_shape=[3]), BMCEpsilon(batch_shape=[3])
    per_run.update(data)
    for run in range(3):
        alone = BMCEpsilon()
        for agent in range(3):
            keys = ("greedy_return", "uniform_return")
            alone.update(TensorDict({key: data[key][run, agent] for key in keys}))
        assert torch.equal(per_run.eps[run], alone.eps)
    data.names = ["time"]
    per_agent.update(data)
    transposed = BMCEpsilon(batch_shape=[3])
    swapped = {key: data[key].T for key in ("greedy_return", "uniform_return")}
    transposed.update(TensorDict(swapped, [3, 3]))
    assert torch.equal(per_agent.eps, transposed.eps)


@pytest.mark.parametrize("name", ["bmc-state", "vdbe"])
def test_every_agent_may_have_its_own_state(name):
    agents = STATES  # as many agents as states: indices must not be read as one-hot vectors
    shape = (2, agents)
    strategy = FACTORIES[name](shape)
    strategy.state_key = ("agents", "state")
    data = transitions((2, 6), agents=(agents,))
    state = torch.randint(STATES, (2, 6, agents))
    data["agents"] = TensorDict({"state": state}, (2, 6, agents))
    strategy.update(data)
    for agent in range(agents):
        alone, part = FACTORIES[name]((2,)), data.clone()
        for key in ("greedy_return", "uniform_return", "value_change"):
            part[key] = part[key][..., agent]
        part["state"] = state[..., agent]
        alone.update(part)
        assert torch.equal(strategy.eps[:, agent], alone.eps)
        now = alone.epsilon(part[:, 0])
        assert torch.equal(strategy.epsilon(data[:, 0])[:, agent], now)


@pytest.mark.parametrize("name", FACTORIES)
def test_per_agent_epsilons_act_per_agent(name):
    strategy = FACTORIES[name]((*RUNS, AGENTS))
    td = exploring(strategy, nested=True)(observed(RUNS, nested=True))
    expected = strategy.epsilon(td).float()
    assert torch.equal(td["agents", "epsilon"], expected)
    assert expected.shape == (*RUNS, AGENTS)


def test_agents_keep_their_own_epsilon_when_environments_are_pooled():
    strategy = BMCEpsilon(alpha0=[1e-9, 1.0, 1e9], beta0=[1e9, 1.01, 1.1e9], batch_shape=[3])
    key = ("agents", "action")
    explore = AdaptiveEGreedyModule(Categorical(5, shape=[3]), strategy, action_key=key)
    action = torch.full((400, 3), 4)
    td = explore(TensorDict({"agents": TensorDict({"action": action}, [400, 3])}, [400]))
    torch.testing.assert_close(td["agents", "epsilon"], strategy.eps.float().expand(400, 3))
    assert explore.taken(td).shape == (400, 3)
    changed = (td[key] != 4).float().mean(0)
    expected = 0.8 * torch.tensor([0.0, 1 / 2.01, 1 / 2.1])
    torch.testing.assert_close(changed, expected, atol=0.08, rtol=0)
    returns = {"greedy_return": torch.ones(400, 3), "uniform_return": torch.zeros(400, 3)}
    strategy.update(TensorDict(returns, [400]))
    assert strategy.return_count.tolist() == [400.0] * 3
