"""Cart-pole against Gymnasium, step by step, and its bins against plain Python."""

import math

import gymnasium
import numpy as np
import pytest
import torch

from bmc_torchrl.envs import (
    CartPole,
    CartPoleEnv,
    cart_pole_bins,
    cart_pole_step,
)
from bmc_torchrl.envs.factored import unravel_index

STEPS = 100_000
BOUNDS = (4.8, 0.5, math.radians(24), math.radians(50))
BINS = (3, 3, 6, 3)


@pytest.fixture(scope="module")
def gymnasium_run():
    """States, actions, next states, rewards and terminations of 1e5 steps of CartPole-v1."""
    env = gymnasium.make("CartPole-v1").unwrapped
    generator = np.random.default_rng(0)
    before, after = np.empty((STEPS, 4)), np.empty((STEPS, 4))
    actions, ends, rewards = np.empty(STEPS, int), np.empty(STEPS, bool), np.empty(STEPS)
    env.reset(seed=0)
    for i in range(STEPS):
        before[i] = env.state
        # Pushing against the fall now and then makes long episodes and large speeds.
        actions[i] = generator.integers(2) if generator.random() < 0.4 else int(env.state[2] > 0)
        _, rewards[i], ends[i], _, _ = env.step(int(actions[i]))
        after[i] = env.state
        if ends[i]:
            env.reset()
    return tuple(torch.as_tensor(x) for x in (before, actions, after, rewards, ends))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_every_step_is_gymnasiums(gymnasium_run, dtype, tolerance):
    before, actions, after, _, ends = gymnasium_run
    physics, _, terminated = cart_pole_step(before.to(dtype), actions)
    torch.testing.assert_close(physics.double(), after, atol=tolerance, rtol=tolerance)
    clear = (after[:, 0].abs() - 2.4).abs().minimum((after[:, 2].abs() - math.radians(12)).abs())
    safe = clear > tolerance
    assert safe.float().mean() > 0.999
    assert torch.equal(terminated[safe], ends[safe])


def test_whole_episodes_stay_with_gymnasium(gymnasium_run):
    before, actions, after, _, ends = gymnasium_run
    starts = torch.cat([torch.tensor([0]), ends.nonzero().squeeze(-1)[:-1] + 1])
    lengths = ends.nonzero().squeeze(-1) + 1 - starts
    physics = before[starts]
    for t in range(int(lengths.max())):
        running = t < lengths
        at = (starts + t).clamp(max=STEPS - 1)
        physics, _, terminated = cart_pole_step(physics, actions[at])
        torch.testing.assert_close(physics[running], after[at][running], atol=1e-10, rtol=0)
        assert torch.equal(terminated[running], ends[at][running])


def test_the_falling_step_earns_nothing_unless_asked(gymnasium_run):
    before, actions, _, rewards, ends = gymnasium_run
    assert torch.equal(cart_pole_step(before, actions)[1], (~ends).float())
    gymnasiums = cart_pole_step(before, actions, CartPole(fall_reward=1.0))[1]
    assert torch.equal(gymnasiums.double(), rewards)


def test_the_constants_are_gymnasiums_and_the_papers():
    theirs, model = gymnasium.make("CartPole-v1").unwrapped, CartPole()
    assert model.position_limit == theirs.x_threshold
    assert model.angle_limit == pytest.approx(theirs.theta_threshold_radians, rel=1e-15)
    assert (model.gravity, model.force, model.tau) == (
        theirs.gravity,
        theirs.force_mag,
        theirs.tau,
    )
    assert (model.cart_mass, model.pole_mass) == (theirs.masscart, theirs.masspole)
    assert model.half_length == theirs.length
    assert (model.bins, model.bounds) == (BINS, BOUNDS)
    assert (model.initial_bound, model.step_reward, model.fall_reward) == (0.05, 1.0, 0.0)


@pytest.mark.parametrize("place", [2.39, -2.39, 2.41, -2.41])
def test_an_episode_ends_beyond_the_track(place):
    physics = torch.tensor([place, 0.0, 0.0, 0.0])
    assert cart_pole_step(physics, torch.tensor(1))[2].item() == (abs(place) > 2.4)


def test_every_form_of_the_domain_starts_alike():
    env, draws = CartPoleEnv(dtype=torch.float64), torch.rand(100, 4, dtype=torch.float64)
    lanes = CartPoleEnv(batch_size=[100]).lanes().start(draws, torch.zeros(100, dtype=torch.int64))
    scalars = [env.scalars().start(tuple(row), 0) for row in draws.tolist()]
    torch.testing.assert_close(
        torch.tensor([physics for physics, _ in scalars], dtype=torch.float64), lanes
    )
    assert {state for _, state in scalars} == {0}
    assert lanes.abs().max() <= 0.05


def bin_by_hand(entry, bound, count):
    return min(count - 1, max(0, round((count - 1) * (entry + bound) / (2 * bound))))


def test_bins_at_their_edges():
    for axis, (bound, count) in enumerate(zip(BOUNDS, BINS, strict=True)):
        edges = [bound * (2 * (k + 0.5) / (count - 1) - 1) for k in range(count - 1)]
        for k, edge in enumerate(edges):
            for nudge, expected in ((-1e-6, k), (1e-6, k + 1)):
                physics = torch.zeros(4, dtype=torch.float64)
                physics[axis] = edge + nudge
                digit = unravel_index(cart_pole_bins(physics), BINS)[axis].item()
                assert digit == expected == bin_by_hand(edge + nudge, bound, count)


@pytest.mark.parametrize(
    ("physics", "digits"),
    [
        ((0.0, 0.0, 0.0, 0.0), (1, 1, 2, 1)),  # 2.5 rounds to even
        ((0.0, 0.25, 0.0, 0.0), (1, 2, 2, 1)),  # 1.5 rounds to even
        ((0.0, -0.25, 0.0, 0.0), (1, 0, 2, 1)),  # 0.5 rounds to even
        ((-9.0, -9.0, -9.0, -9.0), (0, 0, 0, 0)),
        ((9.0, 9.0, 9.0, 9.0), (2, 2, 5, 2)),
        ((2.39, 0.0, math.radians(11.9), 0.0), (1, 1, 4, 1)),
        ((-2.39, 0.0, -math.radians(11.9), 0.0), (1, 1, 1, 1)),
    ],
)
def test_listed_cells(physics, digits):
    for dtype in (torch.float32, torch.float64):
        index = cart_pole_bins(torch.tensor(physics, dtype=dtype))
        assert tuple(digit.item() for digit in unravel_index(index, BINS)) == digits


def test_bins_agree_with_plain_python_on_random_states():
    physics = torch.randn(20, 100, 4, dtype=torch.float64, generator=torch.manual_seed(0))
    index = cart_pole_bins(physics)
    assert index.shape == (20, 100)
    for row, got in zip(physics.reshape(-1, 4).tolist(), index.flatten().tolist(), strict=True):
        digits = [bin_by_hand(*entry) for entry in zip(row, BOUNDS, BINS, strict=True)]
        assert got == ((digits[0] * 3 + digits[1]) * 6 + digits[2]) * 3 + digits[3]


def test_episodes_start_uniformly_within_the_bound():
    torch.manual_seed(0)
    physics = CartPoleEnv(batch_size=[20_000]).reset()["physics"]
    assert physics.abs().max() <= 0.05
    assert physics.mean(0).abs().max() < 5 * 0.05 / math.sqrt(3 * 20_000)
    torch.testing.assert_close(physics.var(0), torch.full((4,), 0.05**2 / 3), rtol=0.05, atol=0.0)


def test_a_balanced_cart_is_truncated_at_the_limit():
    env = CartPoleEnv(batch_size=[2], max_steps=3)
    steps = env.rollout(7, break_when_any_done=False)["next"]
    assert steps["truncated"][0, :, 0].tolist() == [False, False, True] * 2 + [False]
    assert not steps["terminated"].any()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"bins": (3, 3, 6)}, "bins"),
        ({"bins": (0, 3, 6, 3)}, "bins"),
        ({"bounds": (1.0, -1.0, 1.0, 1.0)}, "bounds"),
        ({"bounds": (1.0, 0.0, 1.0, 1.0)}, "bounds"),
        ({"bounds": (1.0, 1.0, 1.0)}, "bounds"),
        ({"tau": 0.0}, "tau"),
        ({"cart_mass": 0.0}, "cart_mass"),
        ({"pole_mass": 0.0}, "pole_mass"),
        ({"half_length": math.nan}, "half_length"),
        ({"position_limit": 0.0}, "position_limit"),
        ({"angle_limit": -0.1}, "angle_limit"),
    ],
)
def test_bad_models_are_refused_by_name(arguments, words):
    with pytest.raises(ValueError, match=words):
        CartPole(**arguments)


def test_an_integer_precision_is_refused():
    with pytest.raises(ValueError, match="dtype"):
        CartPoleEnv(dtype=torch.int64)


def test_a_cell_alone_cannot_be_reset_to():
    env = CartPoleEnv(batch_size=[2])
    with pytest.raises(ValueError, match="physics"):
        env.reset(env.reset().exclude("physics"), set_state=True)
