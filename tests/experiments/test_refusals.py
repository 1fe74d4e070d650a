"""A user's mistake is one line with exit status 2, before anything runs or is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import here

MISTAKES = {
    "train gamma=1.5": r"gamma must be a number in [0, 1], got 1.5",
    "train gamma=nan": "gamma must be a number in [0, 1], got nan",
    "train gamma=inf": "gamma must be a number in [0, 1], got inf",
    "train gamma=much": "gamma must be a number in [0, 1], got 'much'",
    "train table.learning_rate=nan": "learner: learning_rate must be in (0, 1], got nan",
    "train table.learning_rate=1e30": "learner: learning_rate must be in (0, 1], got 1e+30",
    "train table.decay=nan": "learner: decay must be in [0, 1], got nan",
    "train experiment=grid_dqn network.learning_rate=nan": "learning_rate must be in (0, 1]",
    "train experiment=cartpole_dqn learner.learning_rate=inf": "learning_rate must be in (0, 1]",
    "train trainer.lockstep_chunk_steps=0": "trainer.lockstep_chunk_steps must be an integer of at",
    "train experiment=taxi_sarsa domain.test_every=0": "domain.test_every must be an integer of at",
    "train strategies=[bmc,vdbe_1,bmc]": "names ['bmc'] twice; name each once",
    "train strategies=bmc": "strategies must be a list, such as strategies=[bmc]; got 'bmc'",
    "train runs=100000000": "runs=100000000 episodes=500 would take at least 7 TB of memory",
    "train runs=1e8": "runs must be an integer of at least 1, got 100000000.0",
    "train episodes=1000000000000": "would take at least 128 TB of memory",
    "train experiment=cartpole_dqn runs=10000000": "of memory, and this machine has",
    "train seed=18446744073709551616": "at most 2**63 - 1, got 18446744073709551616",
    "train resume=no": "resume must be true or false, got 'no'",
    "train families.bmc.alpha0=nan": "alpha0",
    "train families.bmc.alpha0=-1": "alpha0 must be positive",
    "train experiment=nowhere": "Could not find 'experiment/nowhere'",
    "train epsiodes=3": "Could not override 'epsiodes'",
    "train runs": "runs",
    "reproduce workers=0": "workers must be an integer of at least 1, got 0",
    "reproduce runs=0": "runs must be an integer of at least 1, got 0",
    "reproduce runs=100000000000": "of memory, and this machine has",
    "reproduce experiments=[nowhere]": "unknown names ['nowhere']; known: grid_sarsa, cart_sarsa",
    "reproduce experiments=grid_sarsa": "experiments must be a list, such as",
    "reproduce strategies=bmc": "strategies must be a list, such as strategies=[bmc]; got 'bmc'",
    "reproduce episodes=0": "episodes must be an integer of at least 1, got 0",
    "reproduce seed=-1": "seed must be an integer of at least 0, got -1",
    "reproduce hours=-1": "hours must be a number of at least 0, got -1",
    "reproduce batch.grid_sarsa=0": "batch.grid_sarsa must be an integer of at least 1, got 0",
    "reproduce protocol=mine": "protocol must be one of published, paper; got 'mine'",
    "reproduce overrides=['gamma=2']": "gamma must be a number in [0, 1], got 2",
    "reproduce overrides=['families.bmc.alpha0=-1']": "alpha0 must be positive",
    "study finite.runs=1": "finite.runs must be an integer of at least 2, got 1",
    "study parts=[networks]": "unknown names ['networks']; known: development, held_out",
    "study tasks=[lake5]": "unknown names ['lake5']; known: lake4, lake4_dry",
    "study dqn.minutes=-1": "minutes must be a number of at least 0, got -1",
    "sensitivity name=supply_sarsa": "name must be one of grid_sarsa, cart_sarsa; got 'supply_sar",
    "sensitivity runs=0": "runs must be an integer of at least 1, got 0",
    "sensitivity alpha0=[0]": "alpha0 must be positive numbers, got [0]",
    "compare nowhere published.xlsx": "nowhere is no folder",
    "figures nowhere": "nowhere holds no curves.csv",
}


@pytest.mark.parametrize("given", MISTAKES)
def test_a_mistake_is_one_line_and_nothing_is_written(
    given: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = here(tmp_path, *given.split())
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert (status, out) == (2, "")
    assert line.startswith(f"bmc {given.split()[0]}: ")
    assert MISTAKES[given] in line
    assert list(tmp_path.iterdir()) == []
