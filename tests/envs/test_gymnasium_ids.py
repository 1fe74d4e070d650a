"""Gymnasium ids: the same domains, one episode at a time, with pictures."""

import subprocess
import sys
import warnings

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

from bmc_torchrl.envs import SupplyNetwork, frozen_lake, garnet, subgoal_grid_step
from bmc_torchrl.envs.grid_world import SubgoalGrid
from bmc_torchrl.envs.gymnasium_ids import (
    GRID_ID,
    SUPPLY_CHAIN_ID,
    TABULAR_ID,
    SubgoalGridGym,
    SupplyChainGym,
)
from bmc_torchrl.envs.rendering import draw_grid, draw_supply_chain

IDS = [GRID_ID, SUPPLY_CHAIN_ID]


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize("observation", ["state", "encoded"])
def test_gymnasiums_own_check_passes(name, observation):
    env = gymnasium.make(name, observation=observation, render_mode="rgb_array")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped)


@pytest.mark.parametrize("name", IDS)
def test_episodes_are_truncated_after_200_steps(name):
    env = gymnasium.make(name)
    env.reset(seed=0)
    flags = [env.step(0)[2:4] for _ in range(200)]
    assert flags == [(False, False)] * 199 + [(False, True)]


@pytest.mark.parametrize("observation", ["state", "encoded"])
def test_a_finite_mdp_passes_gymnasiums_check_and_is_truncated_too(observation):
    env = gymnasium.make(TABULAR_ID, mdp=frozen_lake(), observation=observation)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped)
    env = gymnasium.make(TABULAR_ID, mdp=garnet(5, 2, 2, seed=0))
    env.reset(seed=0)
    flags = [env.step(0)[2:4] for _ in range(200)]
    assert flags == [(False, False)] * 199 + [(False, True)]


@pytest.mark.slow
def test_one_call_imports_registers_and_makes():
    code = f"import gymnasium; gymnasium.make('bmc_torchrl.envs.gymnasium_ids:{GRID_ID}').reset()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_grid_moves_as_the_pure_function():
    env = gymnasium.make(GRID_ID)
    state, _ = env.reset(seed=0)
    for action in np.random.default_rng(0).integers(4, size=150):
        expected, gain, ends = subgoal_grid_step(torch.tensor(state), torch.tensor(action))
        state, reward, terminated, _, _ = env.step(action)
        assert (state, reward, terminated) == (expected.item(), gain.item(), ends.item())
        if terminated:
            break


def test_supply_chain_reports_flows_that_explain_the_reward():
    env = gymnasium.make(SUPPLY_CHAIN_ID)
    state, _ = env.reset(seed=1)
    for action in np.random.default_rng(1).integers(100, size=150):
        old = divmod(int(state), 51)
        state, reward, _, _, info = env.step(action)
        new = divmod(int(state), 51)
        (sold,), (shipped,), produced = info["sold"], info["shipped"], info["produced"]
        assert new == (old[0] - shipped + produced, old[1] - sold + shipped)
        trucks = -(-shipped // 5)
        gain = 0.5 * sold - 0.1 * produced - 0.02 * sum(old) - 0.1 * trucks
        assert reward == pytest.approx(gain, abs=1e-6)


@pytest.mark.parametrize("name", IDS)
def test_actions_outside_the_space_are_refused(name):
    env = gymnasium.make(name, disable_env_checker=True)
    env.reset()
    with pytest.raises(ValueError, match="action must be in"):
        env.step(1000)


@pytest.mark.parametrize("domain", [SubgoalGridGym, SupplyChainGym])
@pytest.mark.parametrize("argument", ["observation", "render_mode"])
def test_bad_arguments_are_refused_by_name(domain, argument):
    with pytest.raises(ValueError, match=f"{argument} must be"):
        domain(**{argument: "nonsense"})


def test_the_agent_is_drawn_in_its_cell_only():
    blue = np.array([0x1F, 0x6F, 0xB5])
    picture = draw_grid(SubgoalGrid(), 2, 3, 0)
    rows, columns = np.nonzero((picture == blue).all(-1))
    assert {(r - 8) // 72 for r in rows} == {2}
    assert {(c - 8) // 72 for c in columns} == {3}


@pytest.mark.parametrize(("stage", "grey", "green"), [(0, 0, 1), (2, 2, 1), (5, 5, 0)])
def test_flags_change_colour_when_reached(stage, grey, green):
    picture = draw_grid(SubgoalGrid(), 2, 2, stage)
    corners = [picture[8 + r * 72 + 12, 8 + c * 72 + 26] for r, c in SubgoalGrid().goals]
    found = [tuple(corner) for corner in corners]
    assert found.count((0xB4, 0xBC, 0xC4)) == grey
    assert found.count((0x2F, 0x9E, 0x44)) == green


def test_fuller_stocks_are_drawn_taller():
    blue = np.array([0x7F, 0xB2, 0xDD])
    heights = []
    for stock in (0, 10, 25, 50):
        picture = draw_supply_chain(SupplyNetwork(), (stock, 0))
        heights.append(np.nonzero((picture == blue).all(-1).any(1))[0].size)
    assert heights[0] == 0
    assert heights == sorted(set(heights))
    assert heights[3] / heights[2] == pytest.approx(2, rel=0.1)


@pytest.mark.parametrize(("shipped", "trucks"), [(0, 0), (5, 1), (6, 2)])
def test_one_truck_is_drawn_per_load(shipped, trucks):
    orange = np.array([0xE8, 0x79, 0x3A])
    picture = draw_supply_chain(SupplyNetwork(), (10, 0), shipped=(shipped,))
    columns = (picture == orange).all(-1).any(0).astype(int)
    assert (np.diff(columns, prepend=0) == 1).sum() == trucks
