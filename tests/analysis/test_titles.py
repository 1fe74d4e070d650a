"""Strategies are called by what their entries of a sweep say of them."""

from __future__ import annotations

import pytest
from hydra.utils import instantiate
from jobs import settings

from bmc_torchrl.analysis.titles import FAMILIES, Strategies


def entry(label: str, family: str, **parameters: float) -> dict:
    return {"label": label, "family": family, "parameters": parameters}


def test_the_sweep_is_the_papers_twenty_two_strategies() -> None:
    cfg = settings()
    named = Strategies.of_entries(cfg.sweep.strategies)
    assert len(named) == 22
    assert {strategy.family for strategy in named.values()} == set(FAMILIES)
    for given in cfg.sweep.strategies:
        digits, value = given.label.partition("_")[2], named[given.label].value
        assert digits == ("" if value is None else f"{value:g}".replace(".", ""))
        strategy = instantiate({**cfg.families.get(given.family, {}), **given.parameters})
        first = given.parameters.get("value", 0.5)
        assert float(strategy.eps.max()) == pytest.approx(first, abs=0.003)


def test_a_strategy_is_called_by_its_family_and_what_it_differs_by() -> None:
    named = Strategies.of_entries([entry("b", "geometric", rate=0.95), entry("a", "bmc")])
    assert (named["b"].title, named["b"].short_title) == ("geometric, ρ = 0.95", "ρ = 0.95")
    assert named["a"].title == named["a"].short_title == "ε-BMC"
    assert named.table()["strategy"].tolist() == ["a", "b"]
    assert Strategies.of_table(named.table()) == named


def test_what_is_not_known_or_would_be_called_alike_is_called_by_its_label() -> None:
    given = [entry("mine_fast", "mine", pace=3), entry("v", "vdbe"), entry("linear", "linear")]
    given += [entry("bmc", "bmc", alpha0=1), entry("strong", "bmc", alpha0=9)]
    given += [entry("a", "power", initial=1, power=0.5), entry("b", "power", power=0.5)]
    named = Strategies.of_entries(given)
    assert [strategy.short_title for strategy in named.values()] == list(named)
    assert [strategy.family for strategy in named.values()] == [one["family"] for one in given]
    assert named["other"].title == named["other"].family == "other"


@pytest.mark.parametrize(("wanted", "value"), [(None, 0.2), (["c"], 0.1)])
def test_a_jobs_table_says_what_its_strategies_are(wanted, value: float) -> None:
    one, sweep = entry("c", "constant", value=0.2), [entry("c", "constant", value=0.1)]
    config = {"strategy": one, "strategies": wanted, "sweep": {"strategies": sweep}}
    assert Strategies.of_metadata({"config": config})["c"].value == value


def test_strategies_that_pay_trucks_by_another_rule_are_called_so() -> None:
    network = {"domain": {"env": {"network": {"truck_cost": "floor"}}}}
    entries = [entry("bmc", "bmc"), entry("power_1", "power", power=1)]
    for changes, rule in (({"power": {"truck_cost": "ceil"}}, "ceil"), (None, "floor")):
        config = {**network, "settings": {"by_family": changes}}
        named = Strategies.of_metadata({"strategies": entries, "config": config})
        assert (named["bmc"].truck_cost, named["power_1"].truck_cost) == ("floor", rule)
        assert named["bmc"].title == "ε-BMC"
        assert ("every truck paid" in named["power_1"].title) == (rule == "ceil")
        assert Strategies.of_table(named.table()) == named
