"""How experiments, metrics and strategies are called in print."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import pandas as pd

from bmc_torchrl.analysis.scoring import measure

__all__ = ["FAMILIES", "METRIC_TITLES", "TRUCK_RULES", "Strategies", "Strategy", "experiment_title"]

METRIC_TITLES = {
    "auc": "AUC",
    "first_100": "first 100",
    "last_50": "last 50",
    "epsilon_10": "ε at 10",
    "epsilon_100": "ε at 100",
    "epsilon_last": "ε at last",
}

_LEARNERS = {
    "sarsa": "expected SARSA",
    "dqn": "DQN",
    "dqn_floor": "DQN, one truck-cost rule",
}

TRUCK_RULES = {"ceil": "every truck paid", "floor": "full trucks paid"}
"""Printed name of a truck-cost rule."""


def experiment_title(experiment: str) -> str:
    """Printed name of an experiment.

    Example:
        >>> experiment_title("cart_dqn")
        'cart-pole, DQN'
    """
    learner = experiment.partition("_")[2]
    return f"{measure(experiment).domain}, {_LEARNERS.get(learner, learner)}"


FAMILIES = {
    "bmc": "ε-BMC",
    "constant": "constant",
    "geometric": "geometric",
    "power": "power",
    "vdbe": "VDBE",
}
"""Printed name of a family."""

_PARAMETERS = {
    "constant": ("value", "c"),
    "geometric": ("rate", "ρ"),
    "power": ("power", "β"),
    "vdbe": ("sigma", "σ"),
}


@dataclass(frozen=True)
class Strategy:
    """How a strategy is called in print, and beside which others it is drawn.

    Attributes:
        family: Strategies of one family are drawn together.
        title: Printed name.
        parameter: Symbol of what it differs by from the others of its family, if known.
        value: Of that parameter; a family is drawn in its order.
        truck_cost: By which rule it paid trucks, where there are any: it is ranked among those that
            paid by the same.
    """

    family: str
    title: str
    parameter: str | None = None
    value: float | None = None
    truck_cost: str | None = None

    @property
    def short_title(self) -> str:
        """Printed name among others of its family."""
        return f"{self.parameter} = {self.value:g}" if self.parameter else self.title


class Strategies(dict[str, Strategy]):
    """Strategies by label; one that is not described is called by its label.

    Example:
        >>> Strategies()["mine_fast"]
        Strategy(family='mine_fast', title='mine_fast', parameter=None, value=None, truck_cost=None)
    """

    def __missing__(self, label: str) -> Strategy:
        return Strategy(family=label, title=label)

    @classmethod
    def of_entries(cls, entries: Iterable[Mapping[str, Any]]) -> Strategies:
        """What a sweep's entries (label, family, parameters) say of their strategies.

        Strategies that would be called alike, and those of an unknown family, keep their labels.

        Example:
            >>> entry = {"label": "geom_095", "family": "geometric", "parameters": {"rate": 0.95}}
            >>> Strategies.of_entries([entry])["geom_095"].title
            'geometric, ρ = 0.95'
        """
        found = cls({entry["label"]: _strategy(entry) for entry in entries})
        titles = Counter(strategy.title for strategy in found.values())
        for label, strategy in found.items():
            if titles[strategy.title] > 1:
                found[label] = Strategy(strategy.family, label)
        return found

    @classmethod
    def of_metadata(cls, metadata: Mapping[str, Any]) -> Strategies:
        """What a table's metadata say of its strategies, be it a sweep's or a job's."""
        config = metadata.get("config", {})
        if "strategies" in metadata:
            return cls.of_entries(metadata["strategies"])._paying(config)
        several = config.get("strategies") is not None
        return cls.of_entries(config["sweep"]["strategies"] if several else [config["strategy"]])

    def _paying(self, config: Mapping[str, Any]) -> Strategies:
        """The same with their truck-cost rules; those of another rule than most are called so."""
        env = config.get("domain", {}).get("env", {}) if isinstance(config, Mapping) else {}
        rule = env.get("network", {}).get("truck_cost")
        if rule is None:
            return self
        changes = config["settings"].get("by_family") or {}
        found = Strategies()
        for label, strategy in self.items():
            own = changes.get(strategy.family, {}).get("truck_cost", rule)
            title = strategy.title if own == rule else f"{strategy.title} ({TRUCK_RULES[own]})"
            found[label] = replace(strategy, title=title, truck_cost=own)
        return found

    @classmethod
    def of_table(cls, table: pd.DataFrame) -> Strategies:
        """Read back what :meth:`table` gave."""
        table = table.reindex(columns=["strategy", *Strategy.__annotations__])
        rows = table.astype(object).where(table.notna(), None).to_dict("records")
        return cls({row.pop("strategy"): Strategy(**row) for row in rows})

    def table(self) -> pd.DataFrame:
        """As ``strategies.csv`` has them: strategy, family, title and the rest."""
        table = pd.DataFrame([{"strategy": key, **asdict(self[key])} for key in sorted(self)])
        return table if table["truck_cost"].any() else table.drop(columns="truck_cost")


def _strategy(entry: Mapping[str, Any]) -> Strategy:
    family, title = entry["family"], FAMILIES.get(entry["family"], entry["label"])
    key, symbol = _PARAMETERS.get(family, (None, None))
    if key is None:
        return Strategy(family, title)
    if key not in entry["parameters"]:
        return Strategy(family, entry["label"])
    value = float(entry["parameters"][key])
    return Strategy(family, f"{title}, {symbol} = {value:g}", symbol, value)
