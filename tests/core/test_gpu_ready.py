import copy

import pytest
import torch
from contracts import ACTIONS, FACTORIES, RUNS, exploring, observed, transitions
from fake_accelerator import HostSyncs, fake_accelerator
from tensordict import TensorDict
from torch import nn
from torchrl.data import Categorical
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import QValueActor

from bmc_torchrl import AdaptiveEGreedyModule, ConstantEpsilon, OneStepReturns

LAYOUTS = {
    "plain": {},
    "everything": {"one_hot": True, "masked": True, "nested": True},
    "softmax": {"masked": True, "explore": "softmax"},
}
each_strategy = pytest.mark.parametrize("name", FACTORIES)


def lookalikes(module: nn.Module, device: torch.device) -> nn.Module:
    """The module with fake tensors of the same shapes on `device`."""
    for part in module.modules():
        for entries in (part._buffers, part._parameters):
            for name, value in entries.items():
                if value is not None:
                    empty = torch.empty(value.shape, dtype=value.dtype, device=device)
                    keep = isinstance(value, nn.Parameter)
                    entries[name] = nn.Parameter(empty) if keep else empty
    return module


def fake(td: TensorDict, device: torch.device) -> TensorDict:
    entries = {
        key: torch.empty(value.shape, dtype=value.dtype, device=device)
        for key, value in td.items(True, True)
    }
    nested = {"agents": TensorDict({}, td["agents"].batch_size)} if "agents" in td else {}
    result = TensorDict(nested, td.batch_size)
    for key, value in entries.items():
        result.set(key, value)
    return result


def q_actor() -> QValueActor:
    return QValueActor(nn.Linear(3, ACTIONS), in_keys=["observation"], action_space="categorical")


def with_observation(batch) -> TensorDict:
    data = transitions(batch)
    data["next", "observation"] = torch.randn(*batch, 3)
    data["collector"] = TensorDict({"mask": torch.ones(batch, dtype=torch.bool)}, batch)
    return data


@each_strategy
@pytest.mark.parametrize("layout", LAYOUTS)
def test_acting_stays_on_an_accelerator(name, layout):
    kinds = {key: value for key, value in LAYOUTS[layout].items() if key != "explore"}
    explore, td = exploring(FACTORIES[name](RUNS), **LAYOUTS[layout]), observed(RUNS, **kinds)
    with fake_accelerator() as device:
        acted = lookalikes(explore, device)(fake(td, device))
        for key in explore.out_keys:
            assert acted[key].device == device


@each_strategy
def test_greedy_acting_stays_on_an_accelerator(name):
    explore, td = exploring(FACTORIES[name](RUNS)), observed(RUNS)
    with fake_accelerator() as device, set_exploration_type(ExplorationType.DETERMINISTIC):
        acted = lookalikes(explore, device)(fake(td, device))
        for key in explore.out_keys:
            assert acted[key].device == device


@each_strategy
@pytest.mark.parametrize("time", [(), (3,)])
def test_returns_and_updates_stay_on_an_accelerator(name, time):
    explore, returns = exploring(FACTORIES[name](RUNS)), OneStepReturns(q_actor(), 0.9)
    data = with_observation((*RUNS, *time))
    with fake_accelerator() as device:
        lookalikes(explore, device)
        data = lookalikes(returns, device)(fake(data, device))
        assert data["greedy_return"].device == device
        explore.update(data)
        explore.step(3)
        assert name == "plain" or explore.eps.device == device
        assert all(buffer.device == device for buffer in explore.buffers())


def test_the_fake_accelerator_catches_a_synchronisation():
    with fake_accelerator() as device:
        flag = torch.ones(3, device=device).any()
        with pytest.raises(RuntimeError, match="_local_scalar_dense"):
            bool(flag)


@each_strategy
@pytest.mark.parametrize("layout", LAYOUTS)
def test_acting_never_makes_the_host_wait(name, layout):
    kinds = {key: value for key, value in LAYOUTS[layout].items() if key != "explore"}
    explore, td = exploring(FACTORIES[name](RUNS), **LAYOUTS[layout]), observed(RUNS, **kinds)
    with HostSyncs() as syncs:
        explore(td)
    assert syncs.seen == []


@each_strategy
@pytest.mark.parametrize("time", [(), (3,)])
def test_learning_never_makes_the_host_wait(name, time):
    explore, returns = exploring(FACTORIES[name](RUNS)), OneStepReturns(q_actor(), 0.9)
    data = with_observation((*RUNS, *time))
    with HostSyncs() as syncs:
        explore.update(returns(data))
        explore.step(3)
    assert syncs.seen == []


def test_the_counter_sees_what_egreedy_would_cost():
    with HostSyncs() as syncs:
        bool(torch.ones(2).any())
        torch.arange(3)[torch.tensor([True, False, True])]
    assert len(syncs.seen) >= 2


@pytest.mark.gpu
@each_strategy
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gpu_acts_and_learns_like_a_cpu(name, layout):
    kinds = {key: value for key, value in LAYOUTS[layout].items() if key != "explore"}
    here = exploring(FACTORIES[name](RUNS), **LAYOUTS[layout])
    there = copy.deepcopy(here).cuda()
    data = transitions((*RUNS, 5))
    for _ in range(2):
        acted = there(observed(RUNS, **kinds).cuda())
        assert acted[there.out_keys[0]].is_cuda
        here.update(data)
        there.update(data.cuda())
    torch.testing.assert_close(there.eps.cpu(), here.eps, rtol=1e-9, atol=0)


@pytest.mark.gpu
@each_strategy
def test_a_gpu_is_never_waited_for(name):
    explore = exploring(FACTORIES[name](RUNS)).cuda()
    td, data = observed(RUNS).cuda(), transitions((*RUNS, 5)).cuda()
    explore(td)
    torch.cuda.set_sync_debug_mode("error")
    try:
        explore(td)
        explore.update(data)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_device_argument_and_to_move_everything():
    explore = AdaptiveEGreedyModule(Categorical(4), ConstantEpsilon(0.5), device="cuda")
    td = TensorDict({"action": torch.zeros(10, dtype=torch.int64, device="cuda")}, [10])
    assert explore(td)["epsilon"].is_cuda
