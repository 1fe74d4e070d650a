"""Schedules, VDBE and stacks of strategies, by hand."""

import math

import pytest
import torch
from contracts import RUNS, Plain, action_spec, exploring, observed, stacked, transitions
from torchrl.modules import EGreedyModule

from bmc_torchrl import (
    BMCEpsilon,
    ConstantEpsilon,
    EpsilonStrategy,
    GeometricEpsilon,
    LinearEpsilon,
    PowerEpsilon,
    StackedEpsilon,
    VDBEEpsilon,
)


def test_constant_epsilon_never_moves():
    strategy = ConstantEpsilon([0.1, 0.9], batch_shape=[2])
    strategy.update(transitions((2, 9)))
    strategy.step(100)
    assert strategy.eps.tolist() == [0.1, 0.9]


@pytest.mark.parametrize(
    ("make", "formula"),
    [
        (lambda s: GeometricEpsilon(0.5, 0.9, batch_shape=s), lambda k: 0.5 * 0.9**k),
        (lambda s: PowerEpsilon(0.5, 1.5, batch_shape=s), lambda k: 0.5 * (k + 1) ** -1.5),
        (
            lambda s: PowerEpsilon(0.5, 1.5, first_index=0, batch_shape=s),
            lambda k: 0.5 * max(k, 1) ** -1.5,
        ),
    ],
    ids=["geometric", "power", "power-published"],
)
def test_schedules_count_finished_episodes_per_run(make, formula):
    strategy = make(RUNS)
    data = transitions((*RUNS, 20))
    strategy.update(data)
    ended = data["next", "done"].sum((1, 2)).tolist()
    assert len(set(ended)) > 1
    assert strategy.eps.tolist() == pytest.approx([formula(k) for k in ended])


@pytest.mark.parametrize("frames", [1, 37, 100, 250])
def test_linear_epsilon_is_torchrls_own(frames):
    theirs = EGreedyModule(action_spec(False), 0.9, 0.2, annealing_num_steps=100)
    theirs.step(frames)
    by_step = LinearEpsilon(0.9, 0.2, 100, count_by="step")
    by_step.step(frames)
    by_step.update(transitions((frames,)))
    by_update = LinearEpsilon(0.9, 0.2, 100)
    by_update.update(transitions((frames,)))
    by_update.step(frames)
    for ours in (by_step, by_update):
        assert float(ours.eps) == pytest.approx(float(theirs.eps), abs=1e-5)


def test_vdbe_moves_the_state_being_left():
    strategy = VDBEEpsilon(3, sigma=2.0, delta=0.25, initial=0.5)
    step = transitions(()).set("state", torch.tensor(1)).set("value_change", torch.tensor(-1.0))
    strategy.update(step)
    ratio = math.exp(-0.5)
    moved = 0.25 * (1 - ratio) / (1 + ratio) + 0.75 * 0.5
    assert strategy.epsilons.tolist() == pytest.approx([0.5, moved, 0.5])
    assert float(strategy.eps) == pytest.approx((1 + moved) / 3)
    assert float(strategy.epsilon(step)) == pytest.approx(moved)


def test_a_stack_is_its_members_side_by_side():
    stack, members = stacked((6,)), stacked((6,)).strategies
    data = transitions((6, 10))
    stack.update(data)
    start = 0
    for member in members:
        runs = slice(start, start + member.batch_shape[0])
        member.update(data[runs])
        assert torch.equal(stack.eps[runs], member.eps)
        assert torch.equal(stack.epsilon(data[:, 0])[runs], member.epsilon(data[runs, 0]))
        start = runs.stop
    assert start == 6


def test_a_stack_passes_frames_on():
    stack = StackedEpsilon(
        [
            LinearEpsilon(1.0, 0.0, 10, count_by="step", batch_shape=[1]),
            ConstantEpsilon(0.5, batch_shape=[1]),
        ]
    )
    stack.step(4)
    assert stack.eps.tolist() == pytest.approx([0.6, 0.5])
    assert not stack.needs_update


class Halving(EpsilonStrategy):
    """What a user writes: ε, what it reads, and how it learns."""

    in_keys = ["value_change"]  # noqa: RUF012

    def __init__(self, shape):
        super().__init__(shape)
        self.register_buffer("value", torch.ones(shape, dtype=torch.float64))

    @property
    def eps(self):
        return self.value

    def read(self, transition, taken):
        change = self.entry(transition, "value_change", self.value)
        return (self.steps(transition, self.mark_like(taken, change)),)

    def learn(self, counted):
        self.value /= 2.0 ** counted.sum(0)


def test_a_users_own_strategy_works_alone_and_stacked():
    alone = exploring(Halving(RUNS))
    stack = exploring(
        StackedEpsilon([Halving([1]), Plain([1]), ConstantEpsilon(0.4, batch_shape=[2])])
    )
    for explore in (alone, stack):
        explore.update(transitions(RUNS))
        explore.update(transitions((*RUNS, 3)))
        with pytest.raises(KeyError, match=r"Halving needs the key \W+value_change"):
            explore.update(transitions(RUNS).exclude("value_change"))
    assert alone.eps.tolist() == [1 / 16] * 4
    assert stack.eps.tolist() == [1 / 16, 0.3, 0.4, 0.4]
    torch.testing.assert_close(stack(observed(RUNS))["epsilon"], stack.eps.float())
    assert stack.strategy.in_keys == alone.strategy.in_keys == ["value_change"]
    assert (alone.strategy.needs_update, Plain().needs_update) == (True, False)


def test_a_strategy_without_buffers_follows_the_others_of_its_stack():
    stack = StackedEpsilon([Plain([1]), ConstantEpsilon(0.4, batch_shape=[1])]).to("meta")
    assert stack.eps.device == stack.epsilon(observed([2])).device == torch.device("meta")


def test_bounds_of_schedules_are_allowed_themselves():
    assert LinearEpsilon(0.5, 0.5, num_frames=1).eps == 0.5
    assert PowerEpsilon(1.0, 0.0).eps == GeometricEpsilon(1.0, 1.0).eps == ConstantEpsilon(1.0).eps
    assert GeometricEpsilon(0.0, 0.0).eps == ConstantEpsilon(0.0).eps == 0
    assert VDBEEpsilon(1, 1e-9, 1e-9, initial=0.0).eps == 0
    assert VDBEEpsilon(1, 1.0, 1.0, initial=1.0).eps == 1


def test_engines_of_rules_say_what_they_skipped_and_that_they_mask_nothing():
    said = VDBEEpsilon.scalar_diagnostics(torch.tensor([[2.0, 9.0], [3.0, 9.0]]))
    found = {name: value.tolist() for name, value in said.items()}
    assert found == {
        "skipped/mask": [0.0, 0.0],
        "skipped/foreign": [0.0, 0.0],
        "skipped/nonfinite": [2.0, 3.0],
    }
    columns = torch.tensor([0.25, 1.0, 3.0, 3.0, 2.0, 8.0, -0.5, 4.0, 99.0])
    said = {name: float(x) for name, x in BMCEpsilon.scalar_diagnostics(columns).items()}
    assert said == {
        "posterior/alpha": 1.0,
        "posterior/beta": 3.0,
        "posterior/return_variance": 4.0,
        "posterior/strength": 4.0,
        "posterior/log_evidence": -0.5,
        "skipped/mask": 0.0,
        "skipped/foreign": 0.0,
        "skipped/nonfinite": 4.0,
    }
