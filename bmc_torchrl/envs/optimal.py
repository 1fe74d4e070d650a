"""Exact optima of the finite domains by dynamic programming, on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from bmc_torchrl.envs.factored import ravel_index, unravel_index
from bmc_torchrl.envs.finite import FiniteMDP
from bmc_torchrl.envs.grid_world import PAPER_GRID, SubgoalGrid, subgoal_grid_table
from bmc_torchrl.envs.poisson import poisson_cdf
from bmc_torchrl.envs.supply_chain import PAPER_NETWORK, SupplyNetwork, supply_chain_step

__all__ = [
    "Optimum",
    "optimal_grid_values",
    "optimal_supply_chain_values",
    "optimal_tabular_values",
    "random_tabular_values",
]


class Optimum(NamedTuple):
    """Optimal values and policy, float64 and int64.

    With a finite horizon every field has a leading dimension ``[horizon]``, entry ``t`` being what
    is optimal when ``t`` steps have been taken. Ties go to the first action.
    """

    values: Tensor
    """Value of each state, ``[states]``."""
    action_values: Tensor
    """Value of each action, ``[states, actions]``; a finite horizon keeps those of step 0 only."""
    policy: Tensor
    """Best action of each state, ``[states]``."""


def optimal_grid_values(
    grid: SubgoalGrid = PAPER_GRID,
    gamma: float = 0.99,
    *,
    device: torch.device | str | None = None,
) -> Optimum:
    """Optimum of the grid-world with no step limit; terminal states are worth 0.

    Args:
        grid: The layout.
        gamma: Discount factor; 1 is allowed as every move costs something.
        device: Where to compute.

    >>> round(optimal_grid_values(gamma=1.0).values[SubgoalGrid().start_state].item(), 4)
    -2.2
    """
    _check_gamma(gamma, upper_allowed=True)
    next_state, reward, terminated = subgoal_grid_table(grid, device, dtype=torch.float64)
    alive = gamma * (~terminated).double()
    values = reward.new_zeros(grid.num_states)
    # A shortest path visits no state twice, so this many sweeps reach the fixed point.
    for _ in range(grid.num_states):
        action_values = reward + alive * values[next_state]
        values = action_values.amax(-1)
    final_stage = torch.arange(grid.num_states, device=device) % grid.sizes[-1] == len(grid.goals)
    action_values = action_values.masked_fill(final_stage.unsqueeze(-1), 0.0)
    return Optimum(action_values.amax(-1), action_values, action_values.argmax(-1))


def optimal_supply_chain_values(
    network: SupplyNetwork = PAPER_NETWORK,
    gamma: float = 0.95,
    *,
    horizon: int | None = None,
    tolerance: float = 1e-9,
    device: torch.device | str | None = None,
) -> Optimum:
    """Optimum of the supply-chain: value iteration, or backward induction over ``horizon`` steps.

    Sales are at most the stock, so all demand above it counts as one event and no Poisson mass is
    cut off beyond the 2⁻⁵⁴ of :func:`~bmc_torchrl.envs.poisson.poisson_cdf`.

    Args:
        network: The constants; its whole state space must fit in memory.
        gamma: Discount factor.
        horizon: Number of steps left at the start, e.g. 200; ``None`` for an endless episode.
        tolerance: Largest error of any value for an endless episode.
        device: Where to compute.

    Returns:
        The optimum; with a horizon, its values and policy are ``[horizon, states]``.

    >>> small = SupplyNetwork(capacity=(6,), rho_max=2, ship_max=(2,), initial_stocks=(2, 0))
    >>> optimal_supply_chain_values(small, horizon=3).policy.shape
    torch.Size([3, 49])
    """
    _check_gamma(gamma, upper_allowed=horizon is not None)
    _check_horizon(horizon)
    model = _SupplyModel(network, device)
    start = torch.zeros(network.num_states, dtype=torch.float64, device=device)
    return _optimum(
        lambda values: model.action_values(values, gamma), start, gamma, horizon, tolerance
    )


def optimal_tabular_values(
    mdp: FiniteMDP, gamma: float, *, horizon: int | None = None, tolerance: float = 1e-9
) -> Optimum:
    """Optimum of any finite MDP: value iteration, or backward induction over ``horizon`` steps.

    Args:
        mdp: The tables.
        gamma: Discount factor; 1 is allowed with a horizon.
        horizon: Number of steps left at the start; ``None`` for no limit.
        tolerance: Largest error of any value where there is no limit.

    Returns:
        The optimum; with a horizon, its values and policy are ``[horizon, states]``.

    >>> one_step = FiniteMDP([[[0], [0]]], [[[1.0], [1.0]]], [[[2.0], [3.0]]], True, start=0)
    >>> optimal_tabular_values(one_step, 0.9).values
    tensor([3.], dtype=torch.float64)
    """
    _check_gamma(gamma, upper_allowed=horizon is not None)
    _check_horizon(horizon)
    start = torch.zeros(mdp.num_states, dtype=torch.float64)
    return _optimum(_tabular_backup(mdp, gamma), start, gamma, horizon, tolerance)


def random_tabular_values(
    mdp: FiniteMDP, gamma: float, *, horizon: int | None = None, tolerance: float = 1e-9
) -> Tensor:
    """Value of each state, float64 ``[states]``, if all actions are uniformly random.

    The arguments are those of :func:`optimal_tabular_values`.

    >>> one_step = FiniteMDP([[[0], [0]]], [[[1.0], [1.0]]], [[[2.0], [3.0]]], True, start=0)
    >>> random_tabular_values(one_step, 0.9)
    tensor([2.5000], dtype=torch.float64)
    """
    _check_gamma(gamma, upper_allowed=horizon is not None)
    _check_horizon(horizon)
    backup = _tabular_backup(mdp, gamma)
    values = torch.zeros(mdp.num_states, dtype=torch.float64)
    if horizon is not None:
        for _ in range(horizon):
            values = backup(values).mean(-1)
        return values
    error = float("inf")
    while error > tolerance:
        following = backup(values).mean(-1)
        error = gamma / (1 - gamma) * float((following - values).abs().max())
        values = following
    return values


def _tabular_backup(mdp: FiniteMDP, gamma: float) -> Callable[[Tensor], Tensor]:
    """Expected reward plus discounted value ``[states, actions]``, as a function of values."""
    reward = (mdp.probabilities * mdp.rewards).sum(-1)
    weight = gamma * mdp.probabilities * ~mdp.terminated
    return lambda values: reward + (weight * values[mdp.successors]).sum(-1)


def _optimum(
    action_values_of: Callable[[Tensor], Tensor],
    values: Tensor,
    gamma: float,
    horizon: int | None,
    tolerance: float,
) -> Optimum:
    """Backward induction over `horizon` steps, or value iteration until it is accurate enough."""
    if horizon is not None:
        return _backward_induction(action_values_of, values, horizon)
    error = float("inf")
    while error > tolerance:
        action_values = action_values_of(values)
        # The distance to the fixed point is at most γ / (1 − γ) times the last change.
        error = gamma / (1 - gamma) * float((action_values.amax(-1) - values).abs().max())
        values = action_values.amax(-1)
    return Optimum(values, action_values, action_values.argmax(-1))


def _backward_induction(
    action_values_of: Callable[[Tensor], Tensor], values: Tensor, horizon: int
) -> Optimum:
    steps = []
    for _ in range(horizon):
        action_values = action_values_of(values)
        values = action_values.amax(-1)
        steps.append((values, action_values.argmax(-1)))
    all_values, policies = zip(*reversed(steps), strict=True)
    return Optimum(torch.stack(all_values), action_values, torch.stack(policies))


class _SupplyModel:
    """Expected one-step backups, by splitting a step into selling and then moving stock.

    After the sale, nothing is random: a step from stock w with s sold is a step from stock w − s
    with no demand, plus (price − storage cost) · s.
    """

    def __init__(self, network: SupplyNetwork, device: torch.device | str | None) -> None:
        self.sizes = network.sizes
        states = torch.arange(network.num_states, device=device).unsqueeze(-1)
        actions = torch.arange(network.num_actions, device=device)
        stocks = torch.stack(unravel_index(states, self.sizes), -1)
        no_demand = torch.zeros(network.warehouses, dtype=torch.int64, device=device)
        next_stocks, self.reward, _ = supply_chain_step(
            stocks, actions, no_demand, network, dtype=torch.float64
        )
        self.next_state = ravel_index(next_stocks.unbind(-1), self.sizes)
        self.left_over = [
            _left_over_probabilities(rate, size, device)
            for rate, size in zip(network.demand_rate, self.sizes[1:], strict=True)
        ]
        self.revenue = self._revenue(network, stocks.squeeze(1))

    def _revenue(self, network: SupplyNetwork, stocks: Tensor) -> Tensor:
        total = torch.zeros(network.num_states, 1, dtype=torch.float64, device=stocks.device)
        for j, chances in enumerate(self.left_over, start=1):
            levels = torch.arange(len(chances), dtype=torch.float64, device=stocks.device)
            sales = levels - chances @ levels
            margin = network.price - network.kappa_st[j]
            total = total + margin * sales[stocks[:, j]].unsqueeze(-1)
        return total

    def action_values(self, values: Tensor, gamma: float) -> Tensor:
        """Expected reward plus discounted value, ``[states, actions]``."""
        after_sale = (self.reward + gamma * values[self.next_state]).reshape(*self.sizes, -1)
        for axis, chances in enumerate(self.left_over, start=1):
            after_sale = torch.tensordot(chances, after_sale, ([1], [axis])).movedim(0, axis)
        return self.revenue + after_sale.reshape(len(values), -1)


def _left_over_probabilities(rate: float, levels: int, device: torch.device | str | None) -> Tensor:
    """Chance that stock ``row`` becomes ``column`` by selling, ``[levels, levels]``."""
    cdf = poisson_cdf(rate, device)
    cdf = torch.cat([cdf.new_zeros(1), cdf, cdf.new_ones(levels)])
    level = torch.arange(levels, device=device)
    sold = level.unsqueeze(-1) - level
    chance = (cdf[sold.clamp(min=0) + 1] - cdf[sold.clamp(min=0)]) * (sold >= 0)
    chance[:, 0] = 1.0 - cdf[level]
    return chance


def _check_horizon(horizon: int | None) -> None:
    if horizon is not None and horizon < 1:
        raise ValueError(
            f"horizon must be at least 1, or None for an endless episode; got {horizon}."
        )


def _check_gamma(gamma: float, *, upper_allowed: bool) -> None:
    if not (0 <= gamma < 1 or (upper_allowed and gamma == 1)):
        allowed = "[0, 1]" if upper_allowed else "[0, 1): an endless sum must be discounted"
        raise ValueError(f"gamma must be in {allowed}; got {gamma}.")
