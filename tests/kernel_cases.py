"""What the tests of the numba kernels share: small domains, settings, every strategy."""

import torch

from bmc_torchrl.envs import CartPole, SubgoalGrid, SupplyNetwork
from bmc_torchrl.likelihoods import NormalGammaPrior
from bmc_torchrl.strategies import (
    BMCEpsilon,
    ConstantEpsilon,
    GeometricEpsilon,
    PowerEpsilon,
    StackedEpsilon,
    VDBEEpsilon,
)

COUNT = 20_000
SMALL_NETWORK = SupplyNetwork(
    capacity=(7, 5), rho_max=3, ship_max=(3,), zeta=(2,), initial_stocks=(3, 1), kappa_tr=(0.3,)
)

DOMAINS = {"grid_world": SubgoalGrid(), "cart_pole": CartPole(), "supply_chain": SMALL_NETWORK}

PUBLISHED = {
    "grid_world": {"gamma": 0.99, "learning_rate": 0.7, "table": "normal", "tests": 1},
    "cart_pole": {
        "gamma": 0.95,
        "learning_rate": 0.5,
        "learning_rate_decay": 0.99,
        "learning_rate_floor": 0.01,
        "tests": 2,
        "physics_dtype": torch.float64,
    },
    "supply_chain": {"gamma": 0.95, "learning_rate": 0.6, "table": "normal", "tests": 2},
}


def rows(*columns):
    """The entries of equally long tensors as plain Python numbers, one tuple per entry."""
    return zip(*(column.tolist() for column in columns), strict=True)


def double(*size, random, low=0.0, high=1.0):
    return low + (high - low) * torch.rand(*size, generator=random, dtype=torch.float64)


def strategies(states, actions):
    """Every family, two runs each, with unequal parameters."""
    return StackedEpsilon(
        [
            BMCEpsilon(1.0, 1.01, prior=NormalGammaPrior(b0=5.0), batch_shape=[2]),
            VDBEEpsilon(states, [0.05, 1.0], 1 / actions, batch_shape=[2]),
            GeometricEpsilon(0.5, [0.9, 0.7], batch_shape=[2]),
            PowerEpsilon(0.5, [0.5, 1.5], first_index=0, batch_shape=[2]),
            ConstantEpsilon([0.1, 0.5], batch_shape=[2]),
        ]
    )
