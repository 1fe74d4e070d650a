"""Returns, draws, moments and schedules of `functional.py`, against NumPy and by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torchrl.data import Categorical
from torchrl.modules import EGreedyModule

from bmc_torchrl import functional as fn

modest = settings(deadline=None, max_examples=40, derandomize=True)


def tensor(value):
    return torch.tensor(value, dtype=torch.float64)


def values_of(shape, low=-100, high=100):
    return arrays(np.float64, shape, elements=st.floats(low, high)).map(torch.from_numpy)


@st.composite
def masked_values(draw):
    """Rewards [4], action values [4, actions], and a mask with a legal action in every row."""
    actions = draw(st.integers(1, 6))
    mask = torch.from_numpy(draw(arrays(np.bool_, (4, actions))))
    legal = torch.tensor(draw(st.lists(st.integers(0, actions - 1), min_size=4, max_size=4)))
    mask = mask.scatter(-1, legal.unsqueeze(-1), True)
    return draw(values_of((4,))), draw(values_of((4, actions))), mask


@modest
@given(masked_values(), st.floats(0, 1))
def test_returns_are_the_reward_and_the_discounted_maximum_or_mean(case, gamma):
    reward, values, mask = case
    greedy = fn.greedy_return(reward, values, gamma, action_mask=mask)
    uniform = fn.uniform_return(reward, values, gamma, action_mask=mask)
    for i in range(4):
        legal = [v for v, m in zip(values[i].tolist(), mask[i].tolist(), strict=True) if m]
        r = reward[i].item()
        assert greedy[i].item() == pytest.approx(r + gamma * max(legal), abs=1e-12)
        mean = math.fsum(legal) / len(legal)
        assert uniform[i].item() == pytest.approx(r + gamma * mean, abs=1e-12)
    assert bool((uniform <= greedy + 1e-12).all())


@modest
@given(masked_values(), st.floats(0, 1))
def test_full_mask_and_no_mask_agree(case, gamma):
    reward, values, _ = case
    full = torch.ones_like(values, dtype=torch.bool)
    for one_step_return in (fn.greedy_return, fn.uniform_return):
        torch.testing.assert_close(
            one_step_return(reward, values, gamma),
            one_step_return(reward, values, gamma, action_mask=full),
            rtol=0,
            atol=1e-12,
        )


@modest
@given(masked_values(), st.floats(0, 1))
def test_terminal_transition_has_no_gap(case, gamma):
    reward, values, mask = case
    ended = torch.tensor([True, False, True, False])
    for returns in (fn.greedy_return, fn.uniform_return):
        bootstrapped = returns(reward, values, gamma, terminated=ended, action_mask=mask)
        free = returns(reward, values, gamma, action_mask=mask)
        assert torch.equal(bootstrapped[ended], reward[ended])
        assert torch.equal(bootstrapped[~ended], free[~ended])
        assert torch.equal(
            returns(reward, values * torch.inf, gamma, terminated=ended)[ended], reward[ended]
        )


@modest
@given(masked_values(), st.floats(0, 1), st.floats(0, 1))
def test_mixture_return_is_expected_sarsas(case, gamma, epsilon):
    """Eq. (5): the decomposition equals Σ π(a|s′) Q(s′, a) with the ε-greedy π of Eq. (4)."""
    reward, values, mask = case
    expected = []
    for r, row, legal in zip(reward.tolist(), values.tolist(), mask.tolist(), strict=True):
        choices = [value for value, allowed in zip(row, legal, strict=True) if allowed]
        policy = [epsilon / len(choices)] * len(choices)
        policy[choices.index(max(choices))] += 1 - epsilon
        expected.append(r + gamma * sum(p * v for p, v in zip(policy, choices, strict=True)))
    greedy = fn.greedy_return(reward, values, gamma, action_mask=mask)
    uniform = fn.uniform_return(reward, values, gamma, action_mask=mask)
    mixture = fn.mixture_return(greedy, uniform, tensor(epsilon))
    torch.testing.assert_close(mixture, tensor(expected), rtol=0, atol=1e-11)


@pytest.mark.parametrize("actions", [1, 2, 3, 7, 10, 100])
def test_every_legal_action_owns_an_equal_share_of_the_draws(actions):
    torch.manual_seed(actions)
    mask = torch.rand(20, actions) < 0.5
    mask[:, actions // 2] = True
    for row in mask:
        legal = row.nonzero().flatten()
        repeats = 50
        draws = (torch.arange(legal.numel() * repeats, dtype=torch.float64) + 0.5) / (
            legal.numel() * repeats
        )
        chosen = fn.legal_action_at(draws, row.expand(draws.numel(), -1))
        assert torch.equal(chosen.bincount(minlength=actions), row * repeats)


LARGEST_DRAW = {torch.float32: 1 - 2**-24, torch.float64: 1 - 2**-53}


@pytest.mark.parametrize("dtype", LARGEST_DRAW)
def test_extreme_draws_stay_legal(dtype):
    for actions in [*range(1, 300), 1000, 4097, 65_537]:
        for draw, position in ((0.0, 0), (LARGEST_DRAW[dtype], actions - 1)):
            uniform = torch.tensor(draw, dtype=dtype)
            mask = torch.ones(actions, dtype=torch.bool)
            assert fn.legal_action_at(uniform, mask) == position
            padded = torch.nn.functional.pad(mask, (2, 3))
            assert fn.legal_action_at(uniform, padded) == position + 2
            assert fn.uniform_action(uniform, actions) == position


def test_row_without_a_legal_action_gives_index_zero():
    assert fn.legal_action_at(torch.tensor(0.7), torch.zeros(4, dtype=torch.bool)) == 0


def test_coin_decides_between_the_greedy_and_the_drawn_action():
    coin, drawn = tensor([0.2, 0.3, 0.29]), torch.tensor([4, 4, 0])
    chosen = fn.epsilon_greedy_action(torch.tensor([1, 1, 1]), tensor(0.3), coin, drawn)
    assert chosen.tolist() == [4, 1, 0]


streams = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=30)


def moments_of(observations):
    moments = fn.Moments(*torch.zeros(3, dtype=torch.float64))
    for x in observations:
        moments = fn.welford_update(moments, tensor(x))
    return moments


@modest
@given(streams, st.floats(-1e4, 1e4))
def test_welford_is_numpys_mean_and_variance(observations, offset):
    observations = [x + offset for x in observations]
    moments = moments_of(observations)
    assert moments.num == len(observations)
    assert moments.mean.item() == pytest.approx(np.mean(observations), rel=1e-12, abs=1e-10)
    assert moments.variance.item() == pytest.approx(
        np.var(observations, ddof=1), rel=1e-9, abs=1e-9
    )


def test_welford_does_not_cancel_far_from_zero():
    deviations = np.random.default_rng(0).standard_normal(1000)
    variance = moments_of(1e8 + deviations).variance.item()
    assert variance == pytest.approx(np.var(deviations, ddof=1), rel=1e-7)


@pytest.mark.parametrize("observations", [[], [5.0]])
def test_variance_is_zero_before_the_second_observation(observations):
    assert moments_of(observations).variance == 0


@modest
@given(
    epsilon=st.floats(0, 1),
    change=st.floats(-50, 50),
    sigma=st.floats(0.1, 100),
    delta=st.floats(0, 1),
)
def test_vdbe_is_tokics_boltzmann_form(epsilon, change, sigma, delta):
    decay = math.exp(-abs(change) / sigma)
    expected = delta * (1 - decay) / (1 + decay) + (1 - delta) * epsilon
    result = fn.vdbe_epsilon(tensor(epsilon), tensor(change), sigma, delta).item()
    assert result == pytest.approx(expected, rel=1e-13, abs=1e-15)
    assert 0 <= result <= 1


def test_vdbe_of_an_enormous_change_is_one():
    assert fn.vdbe_epsilon(tensor(0.5), tensor(-1e300), 0.01, 1.0) == 1


def test_schedules_by_hand():
    episodes, half = torch.arange(5), tensor(0.5)
    geometric = fn.geometric_decay(half, tensor(0.9), episodes)
    assert geometric.tolist() == pytest.approx([0.5, 0.45, 0.405, 0.3645, 0.32805])
    power = fn.power_decay(half, tensor(1.5), episodes)
    assert power.tolist() == pytest.approx([0.5 * k**-1.5 for k in (1, 2, 3, 4, 5)])
    published = fn.power_decay(half, tensor(1.5), episodes, first_index=0)
    assert published.tolist() == pytest.approx([0.5 * k**-1.5 for k in (1, 1, 2, 3, 4)])


def test_linear_schedule_is_torchrls():
    module = EGreedyModule(Categorical(3), eps_init=0.9, eps_end=0.05, annealing_num_steps=40)
    for frames in range(60):
        epsilon = fn.linear_decay(tensor(0.9), tensor(0.05), tensor(float(frames)), 40)
        assert epsilon.item() == pytest.approx(module.eps.item(), abs=1e-5)
        module.step(1)
