"""What is not public in torch has a substitute, and the substitute gives the same numbers."""

import importlib.util
import sys

import pytest
import torch
from contracts import FACTORIES, RUNS, STATES, alike, memory, same, transitions

from bmc_torchrl import BMCEpsilon
from bmc_torchrl.strategies import base, bmc, walks


def loaded_again(module):
    """A second copy of a module, as if it were imported now."""
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_again", module.__file__)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


def test_a_torch_without_them_is_enough(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._higher_order_ops.scan", None)
    monkeypatch.delattr(torch, "_foreach_copy_")
    monkeypatch.delattr(torch, "_assert_async")
    assert (bmc.scan, bmc._foreach_copy, base._assert_async).count(None) == 0
    assert loaded_again(bmc).scan is None
    assert loaded_again(bmc)._foreach_copy is None
    assert loaded_again(base)._assert_async is None


@pytest.mark.parametrize("time", [(), (6,)])
def test_buffers_are_copied_one_by_one_without_the_fused_copy(time, monkeypatch):
    fused, single = BMCEpsilon(batch_shape=RUNS), BMCEpsilon(batch_shape=RUNS)
    data = transitions((*RUNS, *time))
    fused.update(data)
    monkeypatch.setattr(bmc, "_foreach_copy", None)
    where = {key: buffer.data_ptr() for key, buffer in single.named_buffers()}
    single.update(data)
    assert same(memory(fused), memory(single))
    assert where == {key: buffer.data_ptr() for key, buffer in single.named_buffers()}


@pytest.mark.parametrize("name", ["vdbe", "bmc-state", "stacked"])
@pytest.mark.parametrize("bad", [STATES, -1])
def test_states_are_checked_on_the_host_without_the_devices_assertion(name, bad, monkeypatch):
    monkeypatch.setattr(base, "_assert_async", None)
    strategy, data = FACTORIES[name](RUNS), transitions(RUNS)
    strategy.update(data)
    before = memory(strategy)
    data["state"][:] = bad
    with pytest.raises(RuntimeError, match=r"'state' must be an index from 0 to 2; raise num_sta"):
        strategy.update(data)
    assert same(memory(strategy), before)


@pytest.mark.parametrize("steps", [1, 5])
def test_a_compiled_walk_is_unrolled_without_a_scan(steps, monkeypatch):
    monkeypatch.setattr(bmc, "scan", None)
    assert walks._has_numba()
    monkeypatch.setattr(walks, "_HAS_NUMBA", False)
    torch._dynamo.reset()
    eager, compiled = BMCEpsilon(batch_shape=RUNS), BMCEpsilon(batch_shape=RUNS)
    graphs = []

    def count(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    learn = torch.compile(compiled.update, fullgraph=True, backend=count)
    for _ in range(2):
        data = transitions((*RUNS, steps))
        eager.update(data)
        learn(data)
    assert not any("scan" in target for graph in graphs for target in graph)
    assert alike(memory(compiled), memory(eager))
    torch._dynamo.reset()
