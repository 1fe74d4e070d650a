"""Learning on plain tensors: TorchRL's losses, n-step returns and priorities, to the number."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from tensordict import TensorDict
from torch import nn
from torchrl.data import Categorical, MultiStep
from torchrl.modules import QValueActor
from torchrl.objectives import DQNLoss

from bmc_torchrl.learners.objectives import ExpectedSarsaLoss
from bmc_torchrl.learners.q_learning import Experience, QLearning
from bmc_torchrl.learners.ring import Priorities, RingReplay
from bmc_torchrl.learners.values import QNetwork, QTable


def experience(generator: torch.Generator, runs: int = 1, actions: int = 3) -> Experience:
    def flag(chance: float) -> torch.Tensor:
        return torch.rand(runs, generator=generator) < chance

    terminated = flag(0.2)
    return Experience(
        before=torch.randn(runs, 5, generator=generator),
        action=torch.randint(actions, (runs,), generator=generator),
        reward=torch.randn(runs, generator=generator),
        after=torch.randn(runs, 5, generator=generator),
        terminated=terminated,
        done=terminated | flag(0.1),
    )


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.filterwarnings("ignore:No target network updater:UserWarning")
@pytest.mark.parametrize("target", ["dqn", "double_dqn", "expected_sarsa"])
@pytest.mark.parametrize("loss_function", ["l2", "smooth_l1"])
def test_the_loss_is_torchrls(target: str, loss_function: str, random: torch.Generator) -> None:
    online, delayed = network(), network()
    learning = QLearning(
        online, 0.9, target=target, loss_function=loss_function, batch_size=16, capacity=16
    )
    learning.target_network.load_state_dict(delayed.state_dict())
    for _ in range(16):
        learning.add(experience(random))
    batch, epsilon = learning.sample(), torch.tensor([0.3])
    actor = QValueActor(online, in_keys=["observation"], spec=Categorical(3))
    options = {"loss_function": loss_function, "delay_value": True, "action_space": "categorical"}
    if target == "expected_sarsa":
        theirs = ExpectedSarsaLoss(actor, epsilon=0.3, **options)
    else:
        theirs = DQNLoss(actor, double_dqn=target == "double_dqn", **options)
    theirs.make_value_estimator(gamma=0.9)
    fixed = dict(delayed.named_parameters())
    for name, parameter in theirs.target_value_network_params.items(True, True):
        parameter.data.copy_(fixed[".".join(name[3:])])
    flags = {"terminated": batch.terminated.unsqueeze(-1), "reward": batch.reward.unsqueeze(-1)}
    after = {"observation": batch.after, "done": batch.terminated.unsqueeze(-1), **flags}
    data = TensorDict({"observation": batch.before, "action": batch.action, "next": after}, [16])
    expected = theirs(data)["loss"]
    ours, _ = learning.loss(batch, epsilon)
    torch.testing.assert_close(ours.reshape(()), expected)
    gradients = [torch.autograd.grad(x, list(online.parameters())) for x in (ours.sum(), expected)]
    torch.testing.assert_close(*gradients)


def test_n_step_transitions_are_those_of_multistep(random: torch.Generator) -> None:
    length, steps, gamma = 12, 3, 0.9
    ring = RingReplay(length, None, gamma, n_steps=steps)
    seen = [experience(random) for _ in range(length)]
    for one in seen:
        ring.add(one.columns())
    stacked = [torch.cat(column) for column in zip(*(one[:6] for one in seen), strict=True)]
    before, action, reward, after, terminated, done = stacked
    following = {"observation": after, "reward": reward.unsqueeze(-1), "done": done.unsqueeze(-1)}
    following["terminated"] = terminated.unsqueeze(-1)
    entries = {"observation": before, "action": action, "next": following}
    data = TensorDict(entries, [length]).unsqueeze(0)
    expected = MultiStep(gamma=gamma, n_steps=steps)(data).squeeze(0)[: len(ring)]
    kept = torch.arange(len(ring))
    draws = (len(ring) - 1 - kept + 0.5) / len(ring)  # age by age, oldest first
    ours = ring.sample(draws)
    assert torch.equal(ours.rows, kept)
    torch.testing.assert_close(ours.reward, expected["next", "reward"].squeeze(-1))
    torch.testing.assert_close(ours.after, expected["next", "observation"])
    spanned = expected["steps_to_next_obs"].squeeze(-1)
    torch.testing.assert_close(ours.discount, gamma ** spanned.float())
    # TorchRL's MultiStep leaves "terminated" as it was at the first step.
    assert torch.equal(ours.terminated, terminated[kept + spanned - 1])


def test_replay_forgets_the_oldest_and_samples_all_others_alike(random: torch.Generator) -> None:
    ring = RingReplay(5, 2, 0.9)
    for number in range(13):
        one = experience(random, runs=2)
        ring.add(one._replace(reward=torch.tensor([number, 100.0 + number])).columns())
    draws = torch.rand(2, 20_000, generator=random)
    for run, offset in ((0, 0.0), (1, 100.0)):
        values, counts = ring.sample(draws).reward[run].unique(return_counts=True)
        assert (values - offset).tolist() == [8.0, 9.0, 10.0, 11.0, 12.0]
        assert stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize("runs", [None, 2])
def test_priorities_decide_how_often_and_with_what_weight(runs, random: torch.Generator) -> None:
    how, capacity = Priorities(alpha=0.5, beta=1.0), 4
    ring = RingReplay(capacity, runs, 0.9, priorities=how)
    for _ in range(capacity):
        ring.add(experience(random, runs=runs or 1).columns())
    errors = torch.tensor([1.0, 4.0, 9.0, 16.0])
    rows = torch.arange(capacity)
    shape = (capacity,) if runs is None else (runs, capacity)
    ring.surprise(rows.expand(shape), errors.expand(shape))
    share = errors.sqrt() / errors.sqrt().sum()
    draws = torch.rand((*shape[:-1], 40_000), generator=random)
    batch = ring.sample(draws)
    found = batch.rows.reshape(-1, 40_000)[0]
    counts = found.bincount(minlength=capacity)
    assert stats.chisquare(counts, 40_000 * share.double() / share.double().sum()).pvalue > 1e-4
    weight = batch.weight.reshape(-1, 40_000)[0]
    expected = (share.min() / share)[found]
    torch.testing.assert_close(weight, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("priorities", [None, Priorities()])
def test_a_ring_is_refilled_as_it_was(priorities, random: torch.Generator) -> None:
    ring, copy = (RingReplay(6, 2, 0.9, n_steps=2, priorities=priorities) for _ in range(2))
    for _ in range(9):
        ring.add(experience(random, runs=2).columns())
    if priorities is not None:
        ring.surprise(torch.tensor([[0, 1], [2, 3]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    copy.refill(ring.contents())
    for one in (ring, copy):
        generator = torch.Generator().manual_seed(1)
        one.add(experience(generator, runs=2).columns())
    draws = torch.rand(2, 50, generator=random)
    for ours, theirs in zip(ring.sample(draws), copy.sample(draws), strict=True):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)


def test_the_target_network_follows_by_its_share_and_interval() -> None:
    learning = QLearning(
        network(), 0.9, batch_size=1, capacity=1, target_tau=0.25, target_interval=2
    )
    start = [p.clone() for p in learning.target_network.parameters()]
    with torch.no_grad():
        for parameter in learning.network.parameters():
            parameter += 1.0
    generator = torch.Generator().manual_seed(0)
    learning.add(experience(generator))
    for expected in (0.0, 0.25, 0.25, 0.4375):
        batch = learning.sample()
        learning.after_step(batch, torch.zeros(1))
        for now, before in zip(learning.target_network.parameters(), start, strict=True):
            torch.testing.assert_close(now - before, torch.full_like(now, expected))


def test_one_network_per_run_has_one_loss_per_run(random: torch.Generator) -> None:
    networks = QNetwork(5, 3, (8,), runs=2)
    learning = QLearning(networks, 0.9, runs=2, batch_size=4, capacity=8, priorities=Priorities())
    for _ in range(8):
        learning.add(experience(random, runs=2))
    loss, error = learning.loss(learning.sample())
    assert loss.shape == (2,)
    assert error.shape == (2, 4)
    (weights,) = torch.autograd.grad(loss[0], [networks.layers[0].weight])
    assert bool(weights[0].any())
    assert not bool(weights[1].any())


def test_expected_sarsa_on_a_table_with_sgd_is_the_tabular_update() -> None:
    table = QTable(4, 2)
    nn.init.normal_(table.weight)
    learning = QLearning(
        table, 0.5, target="expected_sarsa", loss_function="l2", batch_size=1, capacity=1,
        target_tau=None,
    )  # fmt: skip
    flag = torch.zeros(1, dtype=torch.bool)
    state, after = torch.tensor([1]), torch.tensor([2])
    one = Experience(state, torch.tensor([0]), torch.tensor([1.0]), after, flag, flag)
    learning.add(one)
    q = table.weight.detach().clone()
    loss, _ = learning.loss(learning.sample(), torch.tensor([0.2]))
    loss.sum().backward()
    torch.optim.SGD(table.parameters(), lr=0.7 / 2).step()
    goal = 1.0 + 0.5 * (0.8 * q[2].max() + 0.2 * q[2].mean())
    q[1, 0] += 0.7 * (goal - q[1, 0])
    torch.testing.assert_close(table.weight.detach(), q)
