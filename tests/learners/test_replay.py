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
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers.samplers import prioritized

from bmc_torchrl.learners.objectives import ExpectedSarsaLoss
from bmc_torchrl.learners.replay import (
    ProportionalSampler,
    RunSampler,
    distinct_indices,
    run_replay_buffer,
)
from bmc_torchrl.learners.values import QTable, q_actor


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


def prioritised(priorities, alpha=0.6, beta=0.4, batch_size=1000):
    """A buffer of so many numbered transitions with these priorities."""
    size = len(priorities)
    sampler = ProportionalSampler(size, alpha=alpha, beta=beta)
    replay = TensorDictReplayBuffer(
        storage=LazyTensorStorage(size), sampler=sampler, batch_size=batch_size
    )
    index = replay.extend(TensorDict({"state": torch.arange(size)}, [size]))
    replay.update_priority(index, torch.as_tensor(priorities))
    return replay


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_transitions_are_drawn_in_proportion_to_their_priority_to_the_alpha(alpha):
    priorities = torch.rand(20) * 3 + 0.05
    replay = prioritised(priorities, alpha=alpha, batch_size=40_000)
    counts = torch.bincount(replay.sample()["state"], minlength=20)
    share = priorities.double() ** alpha
    assert stats.chisquare(counts.numpy(), (40_000 * share / share.sum()).numpy()).pvalue > 1e-3


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_weights_are_those_of_schaul_et_al(beta):
    priorities = torch.rand(20) * 3 + 0.05
    batch = prioritised(priorities, alpha=0.6, beta=beta).sample()
    probability = priorities**0.6 / (priorities**0.6).sum()
    weight = (20 * probability) ** -beta
    torch.testing.assert_close(batch["priority_weight"], (weight / weight.max())[batch["state"]])


def test_weighted_samples_average_as_uniform_ones_would():
    priorities, value = torch.rand(20) * 3 + 0.05, torch.randn(20)
    batch = prioritised(priorities, alpha=1.0, beta=1.0, batch_size=200_000).sample()
    weight = batch["priority_weight"]
    mean = (weight * value[batch["state"]]).sum() / weight.sum()
    assert float(mean) == pytest.approx(float(value.mean()), abs=0.02)


def test_new_transitions_get_the_greatest_priority_and_a_full_buffer_forgets_the_oldest():
    replay = prioritised([1.0, 4.0, 2.0], alpha=1.0, batch_size=20_000)
    replay.extend(TensorDict({"state": torch.tensor([7])}, [1]))
    counts = torch.bincount(replay.sample()["state"], minlength=8)
    assert counts[0] == 0
    torch.testing.assert_close(
        counts[[7, 1, 2]] / 20_000, torch.tensor([4, 4, 2]) / 10, atol=0.02, rtol=0
    )


def test_a_zero_error_is_hardly_ever_drawn_and_never_breaks_the_weights():
    batch = prioritised([0.0, 5.0, 0.0], alpha=1.0).sample()
    assert batch["state"].unique().tolist() == [1]
    assert prioritised([0.0, 0.0], alpha=1.0).sample()["priority_weight"].unique().tolist() == [1]


def test_a_saved_prioritised_buffer_draws_what_the_original_draws():
    replay, restored = prioritised([1.0, 4.0, 2.0]), prioritised([1.0, 1.0, 1.0])
    file = io.BytesIO()
    torch.save(replay.sampler.state_dict(), file)
    file.seek(0)
    restored.sampler.load_state_dict(torch.load(file, weights_only=True))
    for each in (replay, restored):
        each.update_priority(torch.tensor([0]), torch.tensor([3.0]))
    drawn = []
    for each in (replay, restored):
        torch.manual_seed(1)
        drawn.append(each.sample())
    assert (drawn[0] == drawn[1]).all()


# TorchRL gives the indices to NumPy.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_priorities_of_a_storage_with_runs_belong_to_time_and_run():
    sampler = ProportionalSampler(12, alpha=1.0, beta=1.0)
    replay = TensorDictReplayBuffer(
        storage=LazyTensorStorage(12, ndim=2), sampler=sampler, batch_size=50
    )
    replay.extend(stamped(0, 4, 3))
    priorities = torch.zeros(12)
    priorities[4] = 1.0
    sampler.update_priority(torch.arange(12), priorities)
    assert (replay.sample()["state"] == 1001).all()


def test_impossible_exponents_and_an_empty_buffer_are_refused():
    with pytest.raises(ValueError, match=r"must not be negative, got -0\.1 and 1"):
        ProportionalSampler(4, alpha=-0.1, beta=1)
    with pytest.raises(RuntimeError, match="empty storage"):
        ProportionalSampler(4, alpha=1, beta=1).sample(LazyTensorStorage(4), 2)


def compiled_or_own(kind, **options):
    if kind == "own":
        sampler = ProportionalSampler(4, alpha=1.0, beta=1.0)
        return TensorDictReplayBuffer(sampler=sampler, **options)
    if prioritized.SumSegmentTreeFp32 is None:
        pytest.skip("torchrl's compiled segment trees do not load beside this torch")
    return TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, **options)


@pytest.mark.parametrize("kind", ["compiled", "own"])
def test_prioritised_replay_reads_the_errors_of_our_loss(kind):
    loss = ExpectedSarsaLoss(q_actor(QTable(4, 2), 2), epsilon=0.1)
    loss.make_value_estimator(gamma=0.5)
    replay = compiled_or_own(
        kind, storage=LazyTensorStorage(4), batch_size=64, priority_key="td_error"
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
