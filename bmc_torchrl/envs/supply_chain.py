"""Supply-chain: one factory, K warehouses, Poisson demand ([GSL19], §5.3, after Kemmer et al.)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from bmc_torchrl.envs.base import BatchedEnv
from bmc_torchrl.envs.factored import ravel_index, unravel_index
from bmc_torchrl.envs.lanes import LaneDomain, Number, Numbers
from bmc_torchrl.envs.poisson import poisson_cdf, poisson_demand
from bmc_torchrl.envs.uniforms import uniform

__all__ = ["SupplyChainEnv", "SupplyNetwork", "supply_chain_action", "supply_chain_step"]


def _each(name: str, values: Sequence[Any], count: int, kind: type) -> tuple[Any, ...]:
    if isinstance(values, int | float):
        raise ValueError(f"{name} must be a sequence; write ({values},) for one value everywhere.")
    values = tuple(kind(value) for value in values)
    if len(values) == 1:
        return values * count
    if len(values) != count:
        raise ValueError(f"{name} needs 1 or {count} values, got {values}; see demand_rate.")
    return values


@dataclass(frozen=True)
class SupplyNetwork:
    r"""A factory and K warehouses, in the paper's notation.

    Location 0 is the factory; locations 1 to K are the warehouses, K being the length of
    ``demand_rate``. Every other sequence holds one value per location or warehouse, or a single
    value for all of them.

    A joint action is the row-major index of (shipment to warehouse 1, …, to warehouse K,
    production), production fastest: with the defaults ``ship = a // 10`` and ``produce = a % 10``.

    Attributes:
        price: :math:`p`, paid per item sold.
        kappa_pr: :math:`\kappa_{pr}`, cost per item produced.
        kappa_st: :math:`\kappa_{st,j}`, cost per item in stock at each location.
        kappa_tr: :math:`\kappa_{tr,j}`, cost per truck to each warehouse.
        zeta: :math:`\zeta_j`, items per truck to each warehouse.
        truck_cost: Which trucks are paid: ``"ceil"``, all that leave, as in the paper; or
            ``"floor"``, full ones only, as in most of the published DQN data.
        capacity: :math:`c_j`, largest stock of each location.
        rho_max: Largest production per step. The paper says 10; its code offers 0 to 9.
        ship_max: Largest shipment per step to each warehouse. The paper says 10; likewise 9.
        demand_rate: Mean of the Poisson demand at each warehouse.
        initial_stocks: Stock of each location at the start of an episode.

    >>> network = SupplyNetwork()
    >>> network.warehouses, network.num_states, network.num_actions
    (1, 2601, 100)
    """

    price: float = 0.5
    kappa_pr: float = 0.1
    kappa_st: Sequence[float] = (0.02,)
    kappa_tr: Sequence[float] = (0.1,)
    zeta: Sequence[int] = (5,)
    truck_cost: Literal["ceil", "floor"] = "ceil"
    capacity: Sequence[int] = (50,)
    rho_max: int = 9
    ship_max: Sequence[int] = (9,)
    demand_rate: Sequence[float] = (2.5,)
    initial_stocks: Sequence[int] = (10, 0)

    def __post_init__(self) -> None:
        if isinstance(self.demand_rate, int | float) or not self.demand_rate:
            raise ValueError(
                f"demand_rate must hold one rate per warehouse, got {self.demand_rate!r}."
            )
        count = len(self.demand_rate)
        per_warehouse = {"kappa_tr": float, "zeta": int, "ship_max": int, "demand_rate": float}
        per_location = {"kappa_st": float, "capacity": int, "initial_stocks": int}
        for name, kind in per_warehouse.items():
            object.__setattr__(self, name, _each(name, getattr(self, name), count, kind))
        for name, kind in per_location.items():
            object.__setattr__(self, name, _each(name, getattr(self, name), count + 1, kind))
        self._check()

    def _check(self) -> None:
        for name in ("kappa_tr", "kappa_st", "ship_max", "demand_rate", "capacity"):
            if min(getattr(self, name)) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}.")
        if min(self.zeta) < 1:
            raise ValueError(f"zeta must be at least one item per truck, got {self.zeta}.")
        if self.truck_cost not in ("ceil", "floor"):
            raise ValueError(f"truck_cost must be 'ceil' or 'floor', got {self.truck_cost!r}.")
        if self.rho_max < 0:
            raise ValueError(f"rho_max must not be negative, got {self.rho_max}.")
        for stock, limit in zip(self.initial_stocks, self.sizes, strict=True):
            if not 0 <= stock < limit:
                raise ValueError(
                    f"initial_stocks must be between 0 and capacity {self.capacity}, "
                    f"got {self.initial_stocks}."
                )

    @property
    def warehouses(self) -> int:
        """K, the number of warehouses."""
        return len(self.demand_rate)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of stock levels of each location."""
        return tuple(limit + 1 for limit in self.capacity)

    @property
    def action_sizes(self) -> tuple[int, ...]:
        """Number of levels of each shipment, then of production."""
        return (*(limit + 1 for limit in self.ship_max), self.rho_max + 1)

    def trucks(self, shipped: Tensor, warehouse: int) -> Tensor:
        """How many trucks are paid for items `shipped` to a warehouse, counted from 0."""
        load = self.zeta[warehouse]
        return (shipped + (load - 1 if self.truck_cost == "ceil" else 0)) // load

    @property
    def num_states(self) -> int:
        """Number of joint stock levels."""
        return math.prod(self.sizes)

    @property
    def start_state(self) -> int:
        """Index of the initial stocks."""
        index = 0
        for stock, size in zip(self.initial_stocks, self.sizes, strict=True):
            index = index * size + stock
        return index

    @property
    def num_actions(self) -> int:
        """Number of joint actions."""
        return math.prod(self.action_sizes)


PAPER_NETWORK = SupplyNetwork()


def supply_chain_action(
    action: Tensor, network: SupplyNetwork = PAPER_NETWORK
) -> tuple[Tensor, ...]:
    """Shipment asked for each warehouse, then production asked, each int64 ``[*batch]``.

    >>> supply_chain_action(torch.tensor(37))
    (tensor(3), tensor(7))
    """
    return unravel_index(action, network.action_sizes)


def supply_chain_step(
    stocks: Tensor,
    action: Tensor,
    demand: Tensor,
    network: SupplyNetwork = PAPER_NETWORK,
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """One period of every network of a batch.

    Demand is served from the old warehouse stocks and the rest is lost. Then warehouses are served
    in order: each gets at most what was asked, what the factory still has and the room it has left
    after selling. Then the factory produces at most what was asked and the room it has left.
    Storage is paid on the old stocks.

    Args:
        stocks: Stock of the factory and of each warehouse, int64 ``[*batch, 1 + K]``.
        action: Joint action, int64 ``[*batch]``; see :class:`SupplyNetwork`.
        demand: Demand at each warehouse, int64 ``[*batch, K]``.
        network: The constants.
        dtype: Precision of the reward.

    Returns:
        Next stocks int64 ``[*batch, 1 + K]``, reward ``[*batch]`` and termination bool
        ``[*batch]``, always false.

    >>> supply_chain_step(torch.tensor([10, 4]), torch.tensor(67), torch.tensor([3]))[:2]
    (tensor([11,  7]), tensor(0.3200))
    """
    factory, *shelves = stocks.unbind(-1)
    *ship, produce = supply_chain_action(action, network)
    reward = -network.kappa_st[0] * factory.to(dtype)
    after = []
    for j, (shelf, asked, wanted) in enumerate(zip(shelves, ship, demand.unbind(-1), strict=True)):
        sold = torch.minimum(wanted, shelf)
        room = network.capacity[j + 1] - shelf + sold
        shipped = torch.minimum(torch.minimum(asked, factory), room)
        trucks = network.trucks(shipped, j)
        reward = reward + network.price * sold.to(dtype) - network.kappa_st[j + 1] * shelf.to(dtype)
        reward = reward - network.kappa_tr[j] * trucks.to(dtype)
        factory = factory - shipped
        after.append(shelf - sold + shipped)
    produced = torch.minimum(produce, network.capacity[0] - factory)
    reward = reward - network.kappa_pr * produced.to(dtype)
    next_stocks = torch.stack([factory + produced, *after], -1)
    return next_stocks, reward, torch.zeros_like(factory, dtype=torch.bool)


class SupplyChainLanes(LaneDomain):
    """Lanes whose state is the row-major index of the stocks."""

    unroll = 2

    def __init__(self, env: SupplyChainEnv) -> None:
        super().__init__(env)
        self.env, self.network = env, env.network
        self.draws = env.network.warehouses
        self.shortest_episode = self.max_steps

    def transition_noise(self, uniform: Tensor) -> Tensor:
        return self.env.demand(uniform)

    def start(self, reset: Tensor, episode: Tensor) -> Tensor:
        return torch.full(reset.shape[:-1], self.network.start_state, device=reset.device)

    def step(self, state: Tensor, action: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        stocks = torch.stack(unravel_index(state, self.sizes), -1)
        stocks, reward, terminated = supply_chain_step(stocks, action, noise, self.network)
        return ravel_index(stocks.unbind(-1), self.sizes), reward, terminated


GUIDE_SIZE = 1024
_MOST = int(np.iinfo(np.int16).max)


class SupplyChainScalars(NamedTuple):
    """One run with one warehouse: :func:`supply_chain_step`, stocks by state, orders by action.

    `guide` says where in `cdf` to look for a uniform: :func:`poisson_demand` in a step or two.
    """

    factory: Any
    shelf: Any
    ship: Any
    produce: Any
    truck_cost: Any
    factory_capacity: int
    shelf_capacity: int
    factory_cost: Number
    shelf_cost: Number
    price: Number
    produce_cost: Number
    cdf: Any
    guide: Any
    start_state: int

    def start(self, u: Numbers, episode: Number) -> tuple[Numbers, Number]:
        return (0.0, 0.0, 0.0, 0.0), self.start_state

    def step(self, p: Numbers, state: Number, action: Number, u: Number) -> tuple[Any, ...]:
        demand = np.int64(self.guide[np.int64(u * GUIDE_SIZE)])
        while self.cdf[demand] <= u:
            demand += 1
        factory, shelf = np.int64(self.factory[state]), np.int64(self.shelf[state])
        sold = min(demand, shelf)
        left = shelf - sold
        shipped = min(min(np.int64(self.ship[action]), factory), self.shelf_capacity - left)
        kept = factory - shipped
        produced = min(np.int64(self.produce[action]), self.factory_capacity - kept)
        reward = -self.factory_cost * np.float32(factory) + self.price * np.float32(sold)
        reward = reward - self.shelf_cost * np.float32(shelf) - self.truck_cost[shipped]
        reward = reward - self.produce_cost * np.float32(produced)
        after = (kept + produced) * (self.shelf_capacity + 1) + left + shipped
        return p, after, reward, False

    def cell(self, p: Numbers, state: Number) -> Number:
        return state

    def noisy(self) -> bool:
        return True


class SupplyChainEnv(BatchedEnv):
    """The supply-chain as a batch of environments; see :class:`SupplyNetwork` for its rules.

    Observations: ``"state"`` int64 ``[*batch]``, the row-major index of the stocks, and with
    ``observation="encoded"`` also ``"observation"`` float32 ``[*batch, sum(capacity + 1)]``: every
    stock one-hot. Episodes never end by themselves. Each step draws one float64 uniform per
    warehouse.

    Args:
        network: Prices, costs, limits and demand; the paper's by default.
        **options: ``observation``, ``batch_size``, ``device``, ``max_steps`` and
            ``one_hot_actions``, as in :class:`~bmc_torchrl.envs.base.BatchedEnv`.

    >>> env = SupplyChainEnv(SupplyNetwork(demand_rate=(1.0, 2.0), initial_stocks=(5, 0, 0)))
    >>> env.stocks(env.reset()["state"])
    tensor([5, 0, 0])
    """

    def __init__(self, network: SupplyNetwork = PAPER_NETWORK, **options: Any) -> None:
        super().__init__(sizes=network.sizes, num_actions=network.num_actions, **options)
        self.network = network
        for j, rate in enumerate(network.demand_rate):
            self.register_buffer(
                f"demand_cdf_{j}", poisson_cdf(rate, self.device), persistent=False
            )

    def stocks(self, state: Tensor) -> Tensor:
        """Stock of every location, int64 ``[*batch, 1 + K]``."""
        return torch.stack(unravel_index(state, self.sizes), -1)

    def state(self, stocks: Tensor) -> Tensor:
        """State index ``[*batch]`` of stocks ``[*batch, 1 + K]``."""
        return ravel_index(stocks.unbind(-1), self.sizes)

    def demand(self, uniform: Tensor) -> Tensor:
        """Demand ``[*batch, K]`` at float64 uniforms ``[*batch, K]``."""
        columns = [
            poisson_demand(column.contiguous(), getattr(self, f"demand_cdf_{j}"))
            for j, column in enumerate(uniform.unbind(-1))
        ]
        return torch.stack(columns, -1)

    def lanes(self) -> SupplyChainLanes:
        """See :class:`~bmc_torchrl.envs.lanes.LaneDomain`."""
        return SupplyChainLanes(self)

    def scalars(self) -> SupplyChainScalars:
        """See :class:`~bmc_torchrl.envs.lanes.ScalarDomain`."""
        network = self.network
        if network.warehouses != 1 or max(network.num_actions, *network.capacity) > _MOST:
            raise ValueError(
                f"The numba engine has one warehouse and counts stocks and actions to {_MOST}, the "
                f"network has {network.warehouses}, capacity {network.capacity} and "
                f"{network.num_actions} actions: use engine=torchrl."
            )
        factory, shelf = unravel_index(torch.arange(network.num_states), network.sizes)
        ship, produce = supply_chain_action(torch.arange(network.num_actions), network)
        cdf = poisson_cdf(network.demand_rate[0])
        grid = torch.arange(GUIDE_SIZE, dtype=torch.float64) / GUIDE_SIZE
        trucks = network.trucks(torch.arange(network.ship_max[0] + 1), 0)
        return SupplyChainScalars(
            factory=_short(factory),
            shelf=_short(shelf),
            ship=_short(ship),
            produce=_short(produce),
            truck_cost=(network.kappa_tr[0] * trucks.float()).numpy(),
            factory_capacity=network.capacity[0],
            shelf_capacity=network.capacity[1],
            factory_cost=np.float32(network.kappa_st[0]),
            shelf_cost=np.float32(network.kappa_st[1]),
            price=np.float32(network.price),
            produce_cost=np.float32(network.kappa_pr),
            cdf=cdf.numpy(),
            guide=_short(torch.searchsorted(cdf, grid, right=True)),
            start_state=network.start_state,
        )

    def picture(self, current: TensorDictBase, steps: int) -> Any:
        """The factory and the warehouses with their stocks."""
        from bmc_torchrl.envs.rendering import draw_supply_chain  # Pillow is an extra.

        return draw_supply_chain(self.network, self.stocks(current["state"]).tolist(), steps=steps)

    def _initial_state(self) -> dict[str, Tensor]:
        start = torch.full(self.batch_size, self.network.start_state, device=self.device)
        return {"state": start}

    def _next_state(
        self, tensordict: TensorDictBase, action: Tensor
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        shape = (*self.batch_size, self.network.warehouses)
        demand = self.demand(uniform(shape, torch.float64, self.device))
        stocks = self.stocks(tensordict.get("state"))
        stocks, reward, terminated = supply_chain_step(stocks, action, demand, self.network)
        return {"state": self.state(stocks)}, reward, terminated


def _short(values: Tensor) -> Any:
    return values.numpy().astype(np.int16)
