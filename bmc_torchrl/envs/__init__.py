"""The paper's three domains and any finite MDP as batched, device-resident TorchRL environments.

``bmc_torchrl.envs.gymnasium_ids`` has the same domains for Gymnasium, imported on request only.
"""

from bmc_torchrl.envs.cart_pole import (
    CartPole,
    CartPoleEnv,
    cart_pole_bins,
    cart_pole_step,
)
from bmc_torchrl.envs.finite import FiniteMDP
from bmc_torchrl.envs.grid_world import (
    SubgoalGrid,
    SubgoalGridEnv,
    subgoal_grid_step,
)
from bmc_torchrl.envs.optimal import (
    Optimum,
    optimal_grid_values,
    optimal_supply_chain_values,
    optimal_tabular_values,
    random_tabular_values,
)
from bmc_torchrl.envs.supply_chain import (
    SupplyChainEnv,
    SupplyNetwork,
    supply_chain_step,
)
from bmc_torchrl.envs.tabular import TabularEnv, TabularTask, tabular_step
from bmc_torchrl.envs.tasks import (
    chain,
    cliff_walking,
    deep_sea,
    frozen_lake,
    garnet,
    gymnasium_mdp,
    maze,
    taxi,
    windy_grid,
)

__all__ = [
    "CartPole",
    "CartPoleEnv",
    "FiniteMDP",
    "Optimum",
    "SubgoalGrid",
    "SubgoalGridEnv",
    "SupplyChainEnv",
    "SupplyNetwork",
    "TabularEnv",
    "TabularTask",
    "cart_pole_bins",
    "cart_pole_step",
    "chain",
    "cliff_walking",
    "deep_sea",
    "frozen_lake",
    "garnet",
    "gymnasium_mdp",
    "maze",
    "optimal_grid_values",
    "optimal_supply_chain_values",
    "optimal_tabular_values",
    "random_tabular_values",
    "subgoal_grid_step",
    "supply_chain_step",
    "tabular_step",
    "taxi",
    "windy_grid",
]
