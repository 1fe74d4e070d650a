"""The ladder of Ape-X: a rung for each environment, and for each worker of a collector."""

import functools

import pytest
import torch
from contracts import action_spec, observed
from scipy import stats
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import MultiSyncCollector
from torchrl.data import Categorical
from torchrl.weight_update import MultiProcessWeightSyncScheme

from bmc_torchrl import AdaptiveEGreedyModule, ApexEpsilon, StackedEpsilon
from bmc_torchrl.envs import SubgoalGridEnv
from bmc_torchrl.interop.watched_collectors import watched


def rung(i, number, epsilon=0.4, alpha=7.0):
    return epsilon ** (1 + alpha * i / (number - 1))


def test_the_ladder_is_that_of_the_paper():
    eight = ApexEpsilon(batch_shape=[8]).eps
    assert eight.tolist() == pytest.approx([rung(i, 8) for i in range(8)], rel=1e-12)
    square = ApexEpsilon(batch_shape=[2, 4]).eps
    assert torch.equal(square.flatten(), eight)


def test_one_environment_explores_with_epsilon_itself():
    assert float(ApexEpsilon(0.3).eps) == 0.3
    assert ApexEpsilon(0.3, batch_shape=[1]).eps.tolist() == [0.3]


def test_workers_have_the_rungs_of_one_ladder_in_turn():
    whole = ApexEpsilon(batch_shape=[6]).eps
    parts = [ApexEpsilon(worker=i, workers=3, batch_shape=[2]).eps for i in range(3)]
    assert torch.equal(torch.cat(parts), whole)


def test_every_environment_explores_at_its_rung():
    torch.manual_seed(0)
    draws, strategy = 20_000, ApexEpsilon(0.9, 2.0, batch_shape=[4])
    explore = AdaptiveEGreedyModule(action_spec(False), strategy)
    explored = (explore(observed((4, draws)))["action"] != 1).sum(-1)
    for count, epsilon in zip(explored.tolist(), strategy.eps.tolist(), strict=True):
        assert stats.binomtest(count, draws, epsilon * 3 / 4).pvalue > 1e-3


def test_a_ladder_moves_with_what_it_is_part_of_and_keeps_its_precision():
    stack = StackedEpsilon([ApexEpsilon(batch_shape=[2]), ApexEpsilon(0.5, batch_shape=[1])])
    assert stack.half().eps.dtype == torch.float64
    assert stack.to("meta").strategies[0].eps.device.type == "meta"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": 1.1}, "epsilon must be between 0 and 1, got 1.1"),
        ({"alpha": -1.0}, "alpha must be non-negative and finite"),
        ({"worker": 2, "workers": 2}, "worker must be an index from 0 to workers - 1"),
    ],
)
def test_arguments_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        ApexEpsilon(**options)


def make_env():
    return SubgoalGridEnv(max_steps=50, batch_size=[2])


class FirstAction(nn.Module):
    """Always acts the same, and has a weight to be sent."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, state):
        return (state * 0 + self.weight).long()


def make_policy(worker, workers):
    torch.manual_seed(worker)
    actor = TensorDictModule(FirstAction(), in_keys=["state"], out_keys=["action"])
    strategy = ApexEpsilon(0.8, 2.0, worker=worker, workers=workers, batch_shape=[2])
    return TensorDictSequential(actor, AdaptiveEGreedyModule(Categorical(4), strategy))


@pytest.mark.slow
def test_every_worker_keeps_its_rungs_when_weights_are_sent():
    workers = 2
    learner = make_policy(0, workers)
    collector = MultiSyncCollector(
        [make_env] * workers,
        policy_factory=[functools.partial(make_policy, i, workers) for i in range(workers)],
        frames_per_batch=workers * 2 * 100,
        total_frames=workers * 2 * 400,
        cat_results="stack",
        weight_sync_schemes={"policy": MultiProcessWeightSyncScheme()},
    )
    expected = ApexEpsilon(0.8, 2.0, batch_shape=[2 * workers]).eps.float()
    explored = torch.zeros(2 * workers, dtype=torch.int64)
    with watched(collector):
        for data in collector:
            data = data.reshape(2 * workers, -1)
            assert torch.equal(data["epsilon"], expected[:, None].expand(data["epsilon"].shape))
            explored += (data["action"] != 0).sum(-1)
            collector.update_policy_weights_(TensorDict.from_module(learner).data)
    for count, epsilon in zip(explored.tolist(), expected.tolist(), strict=True):
        assert stats.binomtest(count, 400, epsilon * 3 / 4).pvalue > 1e-3
