import importlib

import numpy as np
import pandas as pd
import pytest
import torch

from bmc_torchrl import AdaptiveEGreedyModule
from bmc_torchrl.benchmarks import command as benchmark
from bmc_torchrl.benchmarks import diff, processes, timing


@pytest.mark.parametrize("section", benchmark.SECTIONS)
def test_every_section_has_rows(section):
    assert callable(importlib.import_module(f"bmc_torchrl.benchmarks.{section}").rows)


def test_a_peer_that_cannot_run_gives_a_row_that_says_so():
    def broken():
        raise processes.UnavailableError("requirements-x.txt could not be installed (pip)")

    found = processes.in_turns({"ours": lambda: 2.0, "x": broken})
    row = timing.speed("work, against x", found["ours"], found["x"], 3.0)
    assert row["met"] is None
    assert "could not be installed" in row["work"]
    table = benchmark.show(pd.DataFrame([{"section": "single", **row}]))
    assert table.row_count == 1


@pytest.mark.parametrize(("ours", "goal", "met"), [(3.0, 2.0, True), (3.0, 4.0, False)])
def test_a_speed_is_met_from_above_and_a_cost_from_below(ours, goal, met):
    assert timing.speed("", ours, 1.0, goal)["met"] is met
    assert timing.cost("", ours, 1.0, goal)["met"] is not met


@pytest.mark.slow
def test_the_diffs_scripts_are_compared_where_they_act_alike_only(monkeypatch):
    monkeypatch.setattr(timing.EFFORT, "share", 0.05)
    monkeypatch.setattr(timing.EFFORT, "repeats", 1)
    whole, without_imports, batch = diff.rows()
    assert whole["peer"] > without_imports["peer"] > batch["peer"] > 0
    monkeypatch.setattr(AdaptiveEGreedyModule, "eps", torch.tensor(0.9))
    with pytest.raises(RuntimeError, match="acted differently"):
        diff._batch()
    asked = iter(range(9))
    monkeypatch.setattr(diff, "ask", lambda *arguments: {"actions": next(asked)})
    with pytest.raises(RuntimeError, match="acted differently"):
        list(diff._whole_scripts())


@pytest.mark.slow
def test_the_bare_loops_do_the_work_of_the_engine():
    from bmc_torchrl.benchmarks import tabular
    from bmc_torchrl.benchmarks.peers import numba_loops as bare
    from bmc_torchrl.benchmarks.workloads import engine

    runs, steps = 200, 2000
    tables = np.zeros((runs, bare.CART_STATES, 2), np.float32)
    _, episodes = bare.cart_pole(tables, np.zeros(tables.shape[:2], np.int16), steps, 0, 1)
    ours = engine("cart_sarsa", runs, tests=0)
    ours.advance(steps)
    assert episodes == pytest.approx(int(ours.episodes_done.sum()), rel=0.05)
    taken = tabular._bare("supply-chain", 4, 400, 10)
    assert taken.tested == 4 * 2 * 10 * 200
