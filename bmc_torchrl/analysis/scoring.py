"""How an experiment is judged: the column that counts, which values are good, the optimum."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bmc_torchrl.errors import ResultsError

__all__ = [
    "EXPERIMENTS",
    "MEASURES",
    "PUBLISHED_BMC_RANKS",
    "Measure",
    "measure",
    "reduction",
]

PUBLISHED_BMC_RANKS = {
    "grid_sarsa": 3,
    "grid_dqn": 4,
    "cart_sarsa": 1,
    "cart_dqn": 3,
    "supply_sarsa": 9,
    "supply_dqn": 2,
}
"""BMC's rank by AUC among the 22 strategies in the authors' data."""

EXPERIMENTS = tuple(PUBLISHED_BMC_RANKS)

PUBLISHED_RUNS = 100
PUBLISHED_STRATEGIES = 22
PUBLISHED_EPISODES = {
    "grid_sarsa": 500,
    "grid_dqn": 500,
    "cart_sarsa": 500,
    "cart_dqn": 300,
    "supply_sarsa": 1000,
    "supply_dqn": 500,
    "supply_dqn_floor": 500,
}


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


# The supply-chain's optima are envs.optimal's values of the start (10, 0), 200 steps to go.
TRUCK_OPTIMA = {"ceil": 13.57, "floor": 14.95}
"""By what is paid: every truck that leaves, or full ones only."""

MEASURES = {
    "grid": Measure("grid-world", "steps", "steps to the final goal", True, 22.0),
    "cart": Measure("cart-pole", "steps", "steps balanced", False, 200.0),
    "supply": Measure("supply-chain", "return", "discounted return", False, TRUCK_OPTIMA["ceil"]),
    "frozen4": Measure("FrozenLake 4×4", "return", "goals reached", False, None),
    "frozen8": Measure("FrozenLake 8×8", "return", "goals reached", False, None),
    "cliff": Measure("CliffWalking", "return", "return", False, -13.0),
    "taxi": Measure("Taxi", "return", "return", False, None),
    "lake": Measure("finite MDP of Gymnasium", "return", "discounted return", False, None),
    "chain": Measure("chain", "return", "discounted return", False, None),
    "sea": Measure("deep sea", "return", "discounted return", False, None),
    "garnet": Measure("Garnet", "return", "discounted return", False, None),
    "maze": Measure("maze", "steps", "steps to the goal", True, 14.0),
    "switch": Measure("maze that changes", "steps", "steps to the goal", True, None),
    "windy": Measure("windy grid-world", "steps", "steps to the goal", True, 15.0),
    "cartpole": Measure("CartPole-v1", "return", "return", False, None),
    "acrobot": Measure("Acrobot", "return", "return", False, None),
    "lander": Measure("LunarLander", "return", "return", False, None),
    "breakout": Measure("MinAtar Breakout", "return", "return", False, None),
    "deepsea": Measure("bsuite deep sea", "return", "return", False, 0.99),
    "swingup": Measure("bsuite cart-pole swing-up", "return", "return", False, None),
    "empty": Measure("MiniGrid Empty", "return", "return", False, None),
    "doorkey": Measure("MiniGrid DoorKey", "return", "return", False, None),
}


def measure(experiment: str, truck_cost: str | None = None) -> Measure:
    """The measure of an experiment, by the domain its name starts with.

    Args:
        experiment: Name such as ``grid_sarsa``.
        truck_cost: By which rule trucks are paid, where there are any; the optimum depends on it.
    """
    domain = experiment.split("_")[0]
    if domain not in MEASURES:
        raise ResultsError(
            f"experiment {experiment!r} belongs to no known domain; its name must start with one "
            f"of {', '.join(MEASURES)} (for example {', '.join(EXPERIMENTS[:2])})"
        )
    found = MEASURES[domain]
    return found if truck_cost is None else replace(found, optimum=TRUCK_OPTIMA[truck_cost])


def reduction(experiment: str, *, runs: int, episodes: int, strategies: int) -> str:
    """What results have less of than the published ones; empty where they have as much.

    Example:
        >>> reduction("grid_dqn", runs=5, episodes=500, strategies=9)
        'reduced: 5 of 100 runs, 9 of 22 strategies'
    """
    full = {
        "runs": (runs, PUBLISHED_RUNS),
        "episodes": (episodes, PUBLISHED_EPISODES.get(experiment, 0)),
        "strategies": (strategies, PUBLISHED_STRATEGIES),
    }
    less = [f"{has} of {most} {name}" for name, (has, most) in full.items() if has < most]
    return f"reduced: {', '.join(less)}" if less and experiment in PUBLISHED_EPISODES else ""
