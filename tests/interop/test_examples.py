"""The examples run as a reader would run them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_readmes_diff_runs_in_a_torchrl_dqn(tmp_path):
    script = ROOT / "scripts/examples/cartpole_dqn.py"
    done = subprocess.run(
        [sys.executable, script, "400"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "+     explore.update(returns(data))" in done.stdout
    assert "ε went from 0.49" in done.stdout
    assert (tmp_path / "outputs/cartpole_dqn/epsilon.png").stat().st_size > 10_000
