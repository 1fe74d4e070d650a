"""Grid-world against transitions written by hand."""

import pytest
import torch

from bmc_torchrl.envs import (
    SubgoalGrid,
    SubgoalGridEnv,
    optimal_grid_values,
    subgoal_grid_step,
)
from bmc_torchrl.envs.factored import active_features, one_hot_encoding, unravel_index
from bmc_torchrl.envs.grid_world import subgoal_grid_table

# Rows of the maze from top to bottom; a digit is the turn of the flag in that cell.
MAZE = ["....5", ".2...", ".....", "3...1", "....4"]
LEFT, UP, RIGHT, DOWN = 0, 1, 2, 3
MOVES = {LEFT: (0, -1), UP: (-1, 0), RIGHT: (0, 1), DOWN: (1, 0)}

# A shortest tour worked by hand, one word per flag.
TOUR = "RURRR UULLL LDD RRRDR UUUU"


def index(row, column, stage):
    return (row * 5 + column) * 6 + stage


def walk_by_hand(row, column, stage, action):
    down, right = MOVES[action]
    r, c = row + down, column + right
    if r not in range(5) or c not in range(5):
        return (row, column, stage), -0.2
    mark = MAZE[r][c]
    if mark == "." or int(mark) <= stage:
        return (r, c, stage), -0.1
    if int(mark) == stage + 1:
        return (r, c, stage + 1), -0.1
    return (row, column, stage), -0.2


def test_every_state_and_action_moves_as_written_by_hand():
    next_state, reward, terminated = subgoal_grid_table()
    assert next_state.shape == (150, 4)
    for row in range(5):
        for column in range(5):
            for stage in range(6):
                for action in range(4):
                    expected, gain = walk_by_hand(row, column, stage, action)
                    at = index(row, column, stage), action
                    assert next_state[at] == index(*expected)
                    assert reward[at].item() == pytest.approx(gain, abs=1e-7)
                    assert terminated[at].item() == (expected[2] == 5)


@pytest.mark.parametrize(
    ("cell", "action", "expected", "gain", "ends"),
    [
        ((4, 0, 0), LEFT, (4, 0, 0), -0.2, False),  # outside
        ((4, 0, 0), UP, (4, 0, 0), -0.2, False),  # flag 3 is closed at stage 0
        ((4, 0, 2), UP, (3, 0, 3), -0.1, False),  # flag 3 in its turn
        ((4, 0, 4), UP, (3, 0, 4), -0.1, False),  # flag 3 again
        ((4, 0, 0), RIGHT, (4, 1, 0), -0.1, False),
        ((1, 4, 4), UP, (0, 4, 5), -0.1, True),
        ((1, 4, 3), UP, (1, 4, 3), -0.2, False),  # the last flag before the fourth
    ],
)
def test_listed_moves(cell, action, expected, gain, ends):
    after, reward, terminated = subgoal_grid_step(torch.tensor(index(*cell)), torch.tensor(action))
    assert after == index(*expected)
    assert reward.item() == pytest.approx(gain, abs=1e-7)
    assert terminated.item() is ends


def test_the_environment_walks_the_tour_of_22_steps():
    tour = ["LURD".index(letter) for letter in TOUR.replace(" ", "")]
    env = SubgoalGridEnv()
    tensordict = env.reset()
    rewards = []
    for step, action in enumerate(tour, start=1):
        tensordict = env.step(tensordict.set("action", torch.tensor(action)))["next"]
        rewards.append(tensordict["reward"].item())
        assert tensordict["terminated"].item() == (step == 22)
    assert len(tour) == 22
    assert sum(rewards) == pytest.approx(-2.2, abs=1e-6)


@pytest.mark.parametrize("gamma", [0.9, 0.99, 1.0])
def test_the_optimum_takes_22_steps(gamma):
    optimum = optimal_grid_values(gamma=gamma)
    start = SubgoalGrid().start_state
    state, steps, terminated = torch.tensor(start), 0, torch.tensor(False)
    while not terminated:
        state, _, terminated = subgoal_grid_step(state, optimum.policy[state])
        steps += 1
        assert steps <= 22
    assert steps == 22
    expected = -0.1 * sum(gamma**k for k in range(22))
    assert optimum.values[start].item() == pytest.approx(expected, abs=1e-12)


def test_optimal_values_satisfy_bellman_and_terminal_states_are_worth_nothing():
    optimum = optimal_grid_values(gamma=0.9)
    next_state, reward, terminated = subgoal_grid_table(dtype=torch.float64)
    backup = reward + 0.9 * ~terminated * optimum.values[next_state]
    stage = unravel_index(torch.arange(150), (5, 5, 6))[2]
    torch.testing.assert_close(optimum.action_values[stage < 5], backup[stage < 5])
    assert (optimum.values[stage == 5] == 0).all()


def test_encoding_is_row_column_stage_one_hot():
    state = torch.arange(150).reshape(10, 15)
    sizes = (5, 5, 6)
    encoding = one_hot_encoding(state, sizes)
    features = active_features(state, sizes)
    assert encoding.shape == (10, 15, 16)
    assert torch.equal(encoding.sum(-1), torch.full((10, 15), 3.0))
    assert torch.equal(encoding.gather(-1, features), torch.ones(10, 15, 3))
    assert features[8, 2].tolist() == [122 // 30, 5 + 122 // 6 % 5, 10 + 122 % 6]


def test_another_grid_has_its_own_goals_and_rewards():
    grid = SubgoalGrid(2, 3, start=(0, 0), goals=[(1, 2)], move_reward=-1.0, blocked_reward=-3.0)
    env = SubgoalGridEnv(grid, observation="encoded")
    assert (env.num_states, env.num_features) == (12, 7)
    assert optimal_grid_values(grid, gamma=1.0).values[0].item() == -3.0
    stepped = env.step(env.reset().set("action", torch.tensor(UP)))
    assert stepped["next", "reward"].item() == -3.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"goals": [(5, 0)]}, "outside the 5 × 5 grid"),
        ({"goals": [(0, -1)]}, "outside the 5 × 5 grid"),
        ({"start": (0, 9)}, "start: cell"),
        ({"goals": []}, "at least one"),
        ({"goals": [(4, 0)]}, "distinct"),
        ({"goals": [(1, 1), (1, 1)]}, "distinct"),
        ({"goals": [(1, 1, 1)]}, "row, column"),
        ({"rows": 0}, "rows and columns"),
    ],
)
def test_bad_layouts_are_refused_by_name(arguments, words):
    with pytest.raises(ValueError, match=words):
        SubgoalGrid(**arguments)
