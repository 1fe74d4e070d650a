"""The paper's three domains as batched, device-resident TorchRL environments.

``bmc_torchrl.envs.gymnasium_ids`` has the same domains for Gymnasium, imported on request only.
"""

from bmc_torchrl.envs.cart_pole import (
    CartPole,
    CartPoleEnv,
    cart_pole_bins,
    cart_pole_step,
)
from bmc_torchrl.envs.grid_world import (
    SubgoalGrid,
    SubgoalGridEnv,
    subgoal_grid_step,
)
from bmc_torchrl.envs.optimal import Optimum, optimal_grid_values, optimal_supply_chain_values
from bmc_torchrl.envs.supply_chain import (
    SupplyChainEnv,
    SupplyNetwork,
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
    "cart_pole_bins",
    "cart_pole_step",
    "optimal_grid_values",
    "optimal_supply_chain_values",
    "subgoal_grid_step",
    "supply_chain_step",
]
