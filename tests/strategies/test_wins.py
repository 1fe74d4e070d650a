"""ε from what exploring wins: scalar arithmetic, properties, and one rule on every path."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.modules import QValueModule
from wins_cases import KEYS, collected

from bmc_torchrl import ExplorationWinsEpsilon, OneStepReturns, functional
from bmc_torchrl.strategies import walks, wins

modest = settings(deadline=None, max_examples=60, derandomize=True)
values = st.floats(-1e3, 1e3, allow_subnormal=False)


def scalar_reference(steps, alpha, corrected=True):
    """The research note's lines, one transition at a time."""
    beta = drift = 0.0
    for greedy, uniform, q, m, greedily in steps:
        epsilon = alpha / (alpha + beta)
        returned = (1 - epsilon) * greedy + epsilon * uniform
        if greedily:
            drift = max(0.0, returned - q) if corrected else 0.0
        elif q < m:
            returned -= drift
            weight = (returned - q) ** 2 / ((returned - q) ** 2 + (m - q) ** 2)
            if returned > m:
                alpha += weight
            else:
                beta += weight
    return alpha, beta, drift


def spoiled(data, random):
    where = torch.rand(data.shape, generator=random)
    data["chosen_value"][where < 0.05] = torch.nan
    data["greedy_return"][where > 0.95] = torch.inf
    return data


@pytest.mark.parametrize("corrected", [True, False])
def test_it_is_the_rule_of_the_note_in_scalar_arithmetic(corrected, random):
    data = collected((3,), random, 200)
    strategy = ExplorationWinsEpsilon(7.0, drift_corrected=corrected, batch_shape=[3])
    strategy.update(data)
    for run in range(3):
        steps = zip(*(data[key][run].tolist() for key in KEYS), strict=True)
        alpha, beta, drift = scalar_reference(steps, 7.0, corrected)
        found = (strategy.alpha[run], strategy.beta[run], strategy.drift[run])
        assert [float(x) for x in found] == pytest.approx([alpha, beta, drift], rel=1e-12)
    assert (strategy.beta > 1).all()
    assert (strategy.alpha > 8).all()


@pytest.mark.parametrize("shape", [(), (4,), (2, 3)])
@pytest.mark.parametrize("corrected", [True, False])
def test_tensors_the_operator_and_single_steps_agree(shape, corrected, monkeypatch, random):
    build = lambda: ExplorationWinsEpsilon(  # noqa: E731
        5.0, drift_corrected=corrected, batch_shape=shape
    )
    data = spoiled(collected(shape, random), random)
    taken = torch.rand(data.shape, generator=random) < 0.8
    by_operator, by_tensors, by_steps = build(), build(), build()
    by_operator.update(data, taken)
    for time in range(data.shape[-1]):
        by_steps.update(data[..., time], taken[..., time])
    monkeypatch.setattr(wins, "can_walk", lambda column: False)
    by_tensors.update(data, taken)
    for key, value in by_tensors.state_dict().items():
        assert torch.equal(by_steps.state_dict()[key], value)
        torch.testing.assert_close(by_operator.state_dict()[key], value, rtol=1e-13, atol=1e-13)
    assert (by_tensors.skipped["nonfinite"] > 0).all()
    assert (by_tensors.skipped["foreign"] > 0).all()


def test_the_operator_passes_the_checks_of_torch_and_maps_over_more_runs(random):
    rand = lambda *size: torch.rand(size, generator=random, dtype=torch.float64)  # noqa: E731
    taken, greedily = rand(5, 3) < 0.8, rand(5, 3) < 0.5
    numbers = [rand(5, 3) for _ in range(4)]
    arguments = (torch.ones(3, 1).double(), 1 + rand(3, 9), taken, *numbers, greedily)
    torch.library.opcheck(walks.wins_walk, arguments)
    memory = 1 + rand(7, 3, 9)
    walk = lambda m: walks.wins_walk(arguments[0], m, *arguments[2:])  # noqa: E731
    expected = torch.stack([walk(m) for m in memory])
    torch.testing.assert_close(torch.vmap(walk)(memory), expected, rtol=0, atol=0)


@modest
@given(observed=values, chosen=values, promised=values, drift=st.floats(0, 1e3))
def test_a_win_and_a_loss_are_weights_of_which_one_is_zero(observed, chosen, promised, drift):
    numbers = [torch.tensor(x, dtype=torch.float64) for x in (observed, chosen, promised, drift)]
    won, lost = (float(x) for x in functional.exploratory_win(*numbers))
    assert 0 <= won <= 1
    assert 0 <= lost <= 1
    assert won * lost == 0
    if promised <= chosen:
        assert won == lost == 0
    more_drift = functional.exploratory_win(*numbers[:3], numbers[3] + 1)
    assert float(more_drift[0]) <= won, "drift never makes a win"
    if won:
        assert won > 0.5, "a win is a larger surprise than the lead"
    for power in (-40, -3, 5, 60):
        scaled = functional.exploratory_win(*(x * 2.0**power for x in numbers))
        assert [float(x) for x in scaled] == [won, lost]


def test_epsilon_begins_at_1_and_falls_with_losses_and_rises_with_wins():
    strategy = ExplorationWinsEpsilon(10.0)
    one, no = torch.ones(()), torch.zeros((), dtype=torch.bool)
    step = lambda returned: TensorDict(  # noqa: E731
        dict(zip(KEYS, (returned * one, returned * one, one, 2 * one, no), strict=True))
    )
    seen = [float(strategy.eps)]
    for returned in (1.0, 0.0, 0.0, 5.0):
        strategy.update(step(returned))
        seen.append(float(strategy.eps))
    # A known loss is no evidence; two losses of ½ each; a win of 16/17.
    win = 10 + 16 / 17
    assert seen == pytest.approx([1, 1, 10 / 10.5, 10 / 11, win / (win + 1)])
    low, high = strategy.credible_interval()
    assert low < strategy.eps < high
    assert ExplorationWinsEpsilon().credible_interval() == (1, 1)


@pytest.mark.parametrize("space", ["categorical", "one_hot"])
@pytest.mark.parametrize("masked", [False, True])
def test_returns_write_the_values_of_the_state_being_left(space, masked, random):
    mask_key = "action_mask" if masked else None
    q_actor = TensorDictSequential(
        TensorDictModule(nn.Identity(), ["observation"], ["action_value"]),
        QValueModule(action_space=space, action_mask_key=mask_key),
    )
    returns = OneStepReturns(q_actor, gamma=0.5, values=True)
    value = torch.randn(6, 4, generator=random)
    mask = torch.ones(6, 4, dtype=torch.bool)
    if masked:
        mask[torch.arange(6), value.argmax(-1)] = False
    legal = value.masked_fill(~mask, -torch.inf)
    action = legal.argmax(-1)
    action[::2] = legal.argsort(-1, descending=True)[::2, 1]
    transition = TensorDict(
        {
            "observation": value,
            "action_mask": mask,
            "action": action if space == "categorical" else nn.functional.one_hot(action, 4),
            "next": {
                "observation": value,
                "action_mask": mask,
                "reward": torch.zeros(6, 1),
                "terminated": torch.zeros(6, 1, dtype=torch.bool),
            },
        },
        [6],
    )
    returns(transition)
    assert torch.equal(transition["chosen_value"], value.gather(-1, action[:, None]).squeeze(-1))
    assert torch.equal(transition["promised_value"], legal.amax(-1))
    assert transition["acted_greedily"].tolist() == [False, True] * 3
    ExplorationWinsEpsilon(batch_shape=[6]).update(transition.select(*returns.out_keys))


def test_missing_values_are_asked_for_by_name():
    data = collected((), torch.Generator()).exclude("chosen_value")
    with pytest.raises(KeyError, match=r"'chosen_value'.*values=True"):
        ExplorationWinsEpsilon().update(data)
