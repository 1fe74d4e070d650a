"""The paper's three domains as batched, device-resident TorchRL environments.

``bmc_torchrl.envs.gymnasium_ids`` has the same domains for Gymnasium, imported on request only.
"""

from bmc_torchrl.envs.cart_pole import (
    CartPole,
    CartPoleEnv,
    cart_pole_bin_centers,
    cart_pole_bins,
    cart_pole_step,
)
from bmc_torchrl.envs.factored import (
    active_features,
    index_from_encoding,
    index_from_features,
    one_hot_encoding,
    ravel_index,
    unravel_index,
)
from bmc_torchrl.envs.grid_world import (
    SubgoalGrid,
    SubgoalGridEnv,
    subgoal_grid_step,
    subgoal_grid_table,
)
from bmc_torchrl.envs.optimal import Optimum, optimal_grid_values, optimal_supply_chain_values
from bmc_torchrl.envs.poisson import poisson_cdf, poisson_demand
from bmc_torchrl.envs.supply_chain import (
    SupplyChainEnv,
    SupplyNetwork,
    supply_chain_action,
    supply_chain_step,
)

__all__ = [
    "CartPole",
    "CartPoleEnv",
    "Optimum",
    "SubgoalGrid",
    "SubgoalGridEnv",
    "SupplyChainEnv",
    "SupplyNetwork",
    "active_features",
    "cart_pole_bin_centers",
    "cart_pole_bins",
    "cart_pole_step",
    "index_from_encoding",
    "index_from_features",
    "one_hot_encoding",
    "optimal_grid_values",
    "optimal_supply_chain_values",
    "poisson_cdf",
    "poisson_demand",
    "ravel_index",
    "subgoal_grid_step",
    "subgoal_grid_table",
    "supply_chain_action",
    "supply_chain_step",
    "unravel_index",
]
