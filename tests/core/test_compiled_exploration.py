"""The module and its update in one compiled graph."""

import warnings

import pytest
import torch
from contracts import (
    ACTIONS,
    AGENTS,
    FACTORIES,
    MASK,
    REJECT,
    RUNS,
    STRATEGY_SHAPES,
    alike,
    exploring,
    memory,
    observed,
    same,
    transitions,
)
from scipy import stats
from torch import nn
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import QValueActor

from bmc_torchrl import BMCEpsilon, ConstantEpsilon, OneStepReturns
from bmc_torchrl.strategies import walks


@pytest.fixture
def _fresh_compiler():
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param(name, shape, marks=[pytest.mark.slow] * (name == "stacked"))
        for name, shape in STRATEGY_SHAPES
    ],
)
def test_every_strategy_acts_and_learns_in_one_graph(name, shape):
    eager, compiled = exploring(FACTORIES[name](shape)), exploring(FACTORIES[name](shape))

    def act_and_learn(explore, td, data):
        td = explore(td)
        explore.update(data)
        return td["action"], td["epsilon"]

    graph = torch.compile(act_and_learn, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        td, data = observed(shape), transitions(shape)
        torch.manual_seed(1)
        expected = act_and_learn(eager, td.clone(), data.clone())
        torch.manual_seed(1)
        for ours, theirs in zip(graph(compiled, td, data), expected, strict=True):
            assert torch.equal(ours, theirs)
    # Eager steps take libm's logarithm, compiled ones torch's.
    equal = alike if name in ("bmc-free", "bmc-running") else same
    assert equal(memory(compiled), memory(eager))


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("name", ["plain", "bmc"])
def test_greedy_acting_compiles_too(name):
    explore = exploring(FACTORIES[name](RUNS)).eval()
    act = torch.compile(explore, fullgraph=True, backend="eager")
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        acted = act(observed(RUNS))
    assert (acted["action"] == 1).all()
    assert not acted["epsilon"].any()


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_actions_have_the_same_distribution():
    layout = {"one_hot": True, "masked": True, "nested": True}
    act = torch.compile(exploring(ConstantEpsilon(0.6), **layout), fullgraph=True)
    acted = act(observed((20_000,), **layout))["agents"]
    counts = acted["action"].sum((0, 1)).tolist()
    assert counts.pop(MASK.index(False)) == 0
    assert stats.chisquare(counts, [8000, 24000, 8000]).pvalue > REJECT
    torch.testing.assert_close(acted["epsilon"], torch.full((20_000, AGENTS), 0.6))


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("time", [(), (50,)])
def test_returns_and_update_compile_together(time):
    q_actor = QValueActor(
        nn.Linear(3, ACTIONS), in_keys=["observation"], action_space="categorical"
    )
    returns = OneStepReturns(q_actor, gamma=0.9)
    eager, compiled = (exploring(BMCEpsilon(batch_shape=RUNS)) for _ in range(2))
    where = {key: buffer.data_ptr() for key, buffer in compiled.named_buffers()}
    learn = torch.compile(
        lambda data: compiled.update(returns(data)), fullgraph=True, backend="aot_eager"
    )
    for _ in range(2):
        data = transitions((*RUNS, *time)).exclude("greedy_return", "uniform_return")
        data["next", "observation"] = 3 * torch.randn(*RUNS, *time, 3)
        data["next", "terminated"].zero_()
        eager.update(returns(data.clone()))
        learn(data.clone())
    assert (eager.eps < 1 / 2.01).all()
    for key, buffer in compiled.named_buffers():
        torch.testing.assert_close(buffer, eager.get_buffer(key), rtol=1e-12, atol=1e-12)
        assert buffer.data_ptr() == where[key]


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(("numba", "name"), [(True, "bmc_walk"), (False, "scan")])
def test_a_compiled_walk_through_time_is_one_node_and_exact(numba, name, monkeypatch):
    assert walks._has_numba()
    monkeypatch.setattr(walks, "_HAS_NUMBA", numba)
    eager, compiled = BMCEpsilon(batch_shape=RUNS), BMCEpsilon(batch_shape=RUNS)
    graphs = []

    def inductor(graph, inputs):
        graphs.append(graph)
        return torch._inductor.compile(graph, inputs)

    learn = torch.compile(compiled.update, fullgraph=True, backend=inductor)
    for _ in range(2):
        data = transitions((*RUNS, 50))
        data["greedy_return"][0, 3] = torch.nan
        eager.update(data)
        learn(data)
    (graph,) = graphs
    calls = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert sum(name in call for call in calls) == 1
    assert len(calls) < 50
    for key, buffer in compiled.named_buffers():
        torch.testing.assert_close(buffer, eager.get_buffer(key), rtol=1e-12, atol=1e-12)
