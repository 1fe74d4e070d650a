import functools
import io
import itertools

import pytest
import torch
from scipy import stats
from tensordict import TensorDict
from torchrl.data import (
    LazyTensorStorage,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
)
from torchrl.data.replay_buffers.samplers import prioritized

from bmc_torchrl.objectives import ExpectedSarsaLoss
from bmc_torchrl.replay import RunSampler, distinct_indices, run_replay_buffer
from bmc_torchrl.values import QTable, q_actor


def stamped(first: int, steps: int, runs: int) -> TensorDict:
    """Steps numbered from `first`, stamped ``1000 * run + step``, ``[runs, steps]``."""
    step = torch.arange(first, first + steps)
    state = 1000 * torch.arange(runs).unsqueeze(-1) + step
    return TensorDict(
        {"state": state, "next": {"reward": state.unsqueeze(-1).float()}}, state.shape
    )


def filled(steps: int, *, capacity: int = 6, runs: int = 3, batch_size: int = 4) -> ReplayBuffer:
    replay = run_replay_buffer(capacity, runs, batch_size)
    for step in range(steps):
        replay.extend(stamped(step, 1, runs))
    return replay


def test_indices_decode_as_successive_removals_from_a_list():
    uniform = torch.rand(200, 5, dtype=torch.float64)
    for row, drawn in zip(uniform.tolist(), distinct_indices(uniform, 8).tolist(), strict=True):
        left = list(range(8))
        assert drawn == [left.pop(int(u * len(left))) for u in row]


def test_every_ordered_sample_is_equally_likely():
    torch.manual_seed(0)
    drawn = distinct_indices(torch.rand(48_000, 3, dtype=torch.float64), 4)
    code = (drawn * torch.tensor([16, 4, 1])).sum(-1)
    counts = torch.bincount(code, minlength=64)
    orders = [16 * a + 4 * b + c for a, b, c in itertools.permutations(range(4), 3)]
    assert counts.sum() == counts[orders].sum()
    assert stats.chisquare(counts[orders].numpy()).pvalue > 1e-3


def test_the_largest_uniform_stays_in_range_and_a_full_sample_is_a_permutation():
    largest = torch.full((5,), 1 - 2**-53, dtype=torch.float64)
    for population in (5, 8, 2000, 3000, 2**31):
        assert distinct_indices(largest, population).tolist() == [
            population - 1 - i for i in range(5)
        ]
    full = distinct_indices(torch.rand(50, 24, dtype=torch.float64), 24)
    assert torch.equal(full.sort(-1).values, torch.arange(24).expand(50, 24))


def test_population_may_differ_between_runs():
    uniform = torch.rand(2, 3, dtype=torch.float64)
    together = distinct_indices(uniform, torch.tensor([5, 900]))
    assert torch.equal(together[0], distinct_indices(uniform[0], 5))
    assert torch.equal(together[1], distinct_indices(uniform[1], 900))


@pytest.mark.parametrize("steps", [4, 5, 6, 7, 11, 12, 20])
def test_each_run_samples_distinct_transitions_of_its_own_recent_past(steps):
    replay = filled(steps)
    for _ in range(20):
        batch = replay.sample()
        assert batch.batch_size == (3, 4)
        run, step = batch["state"] // 1000, batch["state"] % 1000
        assert torch.equal(run, torch.arange(3).unsqueeze(-1).expand(3, 4))
        assert all(len(set(row)) == 4 for row in step.tolist())
        assert step.min() >= max(0, steps - 6)
        assert step.max() < steps
        assert torch.equal(batch["next", "reward"].squeeze(-1).long(), batch["state"])


def test_every_kept_transition_is_sampled_equally_often_in_every_run():
    torch.manual_seed(1)
    replay = filled(9)
    steps = torch.stack([replay.sample()["state"] % 1000 - 3 for _ in range(2000)])
    for run in range(3):
        counts = torch.bincount(steps[:, run].flatten(), minlength=6)
        # Without replacement, counts vary less than a multinomial's: by the factor (6 − 4) / 5.
        statistic = stats.chisquare(counts.numpy()).statistic * 5 / 2
        assert stats.chi2(5).sf(statistic) > 1e-3
    same = (steps[:, 0].sort(-1).values == steps[:, 1].sort(-1).values).all(-1).float().mean()
    assert abs(same - 1 / 15) < 0.025


def test_chunks_of_time_are_kept_like_single_steps():
    chunked = run_replay_buffer(6, 3, 4)
    chunked.extend(stamped(0, 5, 3))
    chunked.extend(stamped(5, 4, 3))
    stepped = filled(9)
    torch.manual_seed(0)
    expected = stepped.sample()
    torch.manual_seed(0)
    assert (chunked.sample() == expected).all()


@pytest.mark.parametrize("steps", [4, 6, 10])
def test_a_restored_buffer_continues_identically(steps):
    replay, restored = filled(steps), run_replay_buffer(6, 3, 4)
    file = io.BytesIO()
    torch.save(replay.state_dict(), file)
    file.seek(0)
    restored.load_state_dict(torch.load(file, weights_only=True))
    for step in range(steps, steps + 8):
        for each in (replay, restored):
            each.extend(stamped(step, 1, 3))
        torch.manual_seed(step)
        expected = replay.sample()
        torch.manual_seed(step)
        assert (restored.sample() == expected).all()


def test_sampling_waits_until_every_run_holds_a_batch():
    sampler, storage = RunSampler(), LazyTensorStorage(18, ndim=2)
    assert not sampler.can_sample(storage, 4)
    replay = filled(3)
    with pytest.raises(RuntimeError, match=r"batch_size=4 .* holds 3"):
        replay.sample()
    replay.extend(stamped(3, 1, 3))
    assert sampler.can_sample(replay.storage, 4)
    with pytest.raises(ValueError, match="ndim=2"):
        sampler.can_sample(LazyTensorStorage(18), 4)


class ScanTree:
    """A segment tree's interface over a plain tensor."""

    def __init__(self, size, empty, reduce):
        self.values, self.reduce = torch.full((size,), empty), reduce

    def __setitem__(self, index, value):
        self.values[index] = torch.as_tensor(value, dtype=self.values.dtype)

    def __getitem__(self, index):
        return self.values[index]

    def query(self, left, right):
        return self.reduce(self.values[left:right]).item()

    def scan_lower_bound(self, mass):
        return torch.searchsorted(self.values.cumsum(0), torch.as_tensor(mass))


@pytest.fixture(params=["compiled", "scan"])
def segment_tree(request, monkeypatch):
    """TorchRL's trees; where its binary does not load beside our torch, a stand-in for them."""
    if request.param == "compiled" and prioritized.SumSegmentTreeFp32 is None:
        pytest.skip("torchrl's compiled segment trees do not load beside this torch")
    if request.param == "scan":
        for dtype in ("Fp32", "Fp64"):
            for kind, empty, reduce in (("Sum", 0.0, torch.sum), ("Min", torch.inf, torch.amin)):
                tree = functools.partial(ScanTree, empty=empty, reduce=reduce)
                monkeypatch.setattr(prioritized, f"{kind}SegmentTree{dtype}", tree)


@pytest.mark.usefixtures("segment_tree")
def test_torchrls_prioritised_replay_reads_the_errors_of_our_loss():
    torch.manual_seed(0)
    loss = ExpectedSarsaLoss(q_actor(QTable(4, 2), 2), epsilon=0.1)
    loss.make_value_estimator(gamma=0.5)
    replay = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, storage=LazyTensorStorage(4), batch_size=64, priority_key="td_error"
    )
    reward = torch.tensor([[1.0], [0.0], [0.0], [3.0]])
    done = torch.ones(4, 1, dtype=torch.bool)
    state = torch.arange(4)
    following = {"state": state, "reward": reward, "done": done, "terminated": done}
    transitions = {"state": state, "action": torch.zeros(4, dtype=torch.int64), "next": following}
    replay.extend(TensorDict(transitions, [4]))
    for _ in range(20):
        batch = replay.sample()
        weighted = loss(batch)["loss"]
        torch.testing.assert_close(batch["td_error"], batch["next", "reward"].square())
        replay.update_tensordict_priority(batch)
    error, weight = batch["td_error"].squeeze(-1), batch["priority_weight"]
    torch.testing.assert_close(weighted, (error * weight).sum() / weight.sum())
    counts = torch.bincount(torch.cat([replay.sample()["state"] for _ in range(50)]), minlength=4)
    assert counts[1] == counts[2] == 0
    assert abs(counts[3] / counts.sum() - 0.9) < 0.03


@pytest.mark.slow
def test_sampling_compiles_without_graph_breaks():
    compiled = torch.compile(distinct_indices, fullgraph=True, backend="aot_eager")
    uniform, population = torch.rand(3, 8, dtype=torch.float64), torch.full((3,), 20)
    assert torch.equal(compiled(uniform, population), distinct_indices(uniform, population))
