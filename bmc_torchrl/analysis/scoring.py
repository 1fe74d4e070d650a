"""What is measured in each experiment, and how experiments and strategies are called in print."""

from __future__ import annotations

from dataclasses import dataclass

from bmc_torchrl.errors import ResultsError

EXPERIMENTS = (
    "grid_sarsa",
    "grid_dqn",
    "cart_sarsa",
    "cart_dqn",
    "supply_sarsa",
    "supply_dqn",
)

PUBLISHED_BMC_RANKS = {
    "grid_sarsa": 3,
    "grid_dqn": 4,
    "cart_sarsa": 1,
    "cart_dqn": 3,
    "supply_sarsa": 9,
    "supply_dqn": 2,
}
"""BMC's rank by AUC among the 22 strategies in the authors' data."""

FAMILIES = {
    "bmc": "ε-BMC",
    "fixed": "constant",
    "geom": "geometric",
    "power": "power",
    "vdbe": "VDBE",
}
"""Printed name of a family, by the prefix of its labels."""

METRIC_TITLES = {
    "auc": "AUC",
    "first_100": "first 100",
    "last_50": "last 50",
    "epsilon_10": "ε at 10",
    "epsilon_100": "ε at 100",
    "epsilon_last": "ε at last",
}

_PARAMETERS = {"fixed": "c", "geom": "ρ", "power": "β", "vdbe": "σ"}
_LEARNERS = {"sarsa": "expected SARSA", "dqn": "DQN"}


@dataclass(frozen=True)
class Measure:
    """The column that a domain is judged by.

    Attributes:
        domain: Printed name of the domain.
        column: Column of the results table.
        label: What the column means, for an axis.
        lower_is_better: Whether small values are good.
        optimum: Best value that a policy can reach, if it is known.

    Example:
        >>> measure("grid_dqn").column, measure("supply_sarsa").column
        ('steps', 'return')
    """

    domain: str
    column: str
    label: str
    lower_is_better: bool
    optimum: float | None


# The supply-chain's optimum is envs.optimal's value of the start (10, 0), 200 steps to go.
MEASURES = {
    "grid": Measure("grid-world", "steps", "steps to the final goal", True, 22.0),
    "cart": Measure("cart-pole", "steps", "steps balanced", False, 200.0),
    "supply": Measure("supply-chain", "return", "discounted return", False, 13.57),
    "frozen4": Measure("FrozenLake 4×4", "return", "goals reached", False, None),
    "frozen8": Measure("FrozenLake 8×8", "return", "goals reached", False, None),
    "cliff": Measure("CliffWalking", "return", "return", False, -13.0),
    "taxi": Measure("Taxi", "return", "return", False, None),
    "cartpole": Measure("CartPole-v1", "return", "return", False, 500.0),
    "acrobot": Measure("Acrobot", "return", "return", False, None),
    "lander": Measure("LunarLander", "return", "return", False, None),
    "breakout": Measure("MinAtar Breakout", "return", "return", False, None),
    "deepsea": Measure("bsuite deep sea", "return", "return", False, 0.99),
    "swingup": Measure("bsuite cart-pole swing-up", "return", "return", False, None),
    "empty": Measure("MiniGrid Empty", "return", "return", False, None),
    "doorkey": Measure("MiniGrid DoorKey", "return", "return", False, None),
}


def measure(experiment: str) -> Measure:
    """The measure of an experiment, by the domain its name starts with."""
    domain = experiment.split("_")[0]
    if domain not in MEASURES:
        raise ResultsError(
            f"experiment {experiment!r} belongs to no known domain; its name must start with one "
            f"of {', '.join(MEASURES)} (for example {', '.join(EXPERIMENTS[:2])})"
        )
    return MEASURES[domain]


def experiment_title(experiment: str) -> str:
    """Printed name of an experiment.

    Example:
        >>> experiment_title("cart_dqn")
        'cart-pole, DQN'
    """
    learner = experiment.partition("_")[2]
    return f"{measure(experiment).domain}, {_LEARNERS.get(learner, learner)}"


def family(strategy: str) -> str:
    """Family of a strategy: its label up to the first underscore."""
    return strategy.partition("_")[0]


def parameter(strategy: str) -> float | None:
    """Value in a label: its digits with the point after the first; VDBE's whole σ have none.

    Example:
        >>> [parameter(s) for s in ("vdbe_001", "vdbe_10", "geom_0975", "power_15", "bmc")]
        [0.01, 10.0, 0.975, 1.5, None]
    """
    prefix, _, digits = strategy.partition("_")
    if not digits.isdigit():
        return None
    whole = prefix == "vdbe" and not digits.startswith("0")
    return float(digits if whole else f"{digits[0]}.{digits[1:]}")


def strategy_title(strategy: str, *, with_family: bool = True) -> str:
    """Printed name of a strategy; a label of an unknown family is printed as it is.

    Example:
        >>> strategy_title("geom_095"), strategy_title("bmc")
        ('geometric, ρ = 0.95', 'ε-BMC')
    """
    prefix, value = family(strategy), parameter(strategy)
    if prefix == strategy:
        return FAMILIES.get(prefix, strategy)
    if prefix not in _PARAMETERS or value is None:
        return strategy
    text = f"{_PARAMETERS[prefix]} = {value:g}"
    return f"{FAMILIES[prefix]}, {text}" if with_family else text
