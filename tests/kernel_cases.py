"""What the tests of the numba kernels share: small domains, settings, every strategy."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numba
import torch

from bmc_torchrl.envs import CartPoleEnv, SubgoalGridEnv, SupplyChainEnv, SupplyNetwork
from bmc_torchrl.learners.settings import ExpectedSarsaSettings, RunSettings
from bmc_torchrl.likelihoods import NormalGammaPrior
from bmc_torchrl.strategies import (
    BMCEpsilon,
    ConstantEpsilon,
    GeometricEpsilon,
    LinearEpsilon,
    PowerEpsilon,
    StackedEpsilon,
    VDBEEpsilon,
)
from bmc_torchrl.strategies.compiled import OPTIONS

COUNT = 20_000
SMALL_NETWORK = SupplyNetwork(
    capacity=(7, 5), rho_max=3, ship_max=(3,), zeta=(2,), initial_stocks=(3, 1), kappa_tr=(0.3,)
)

DOMAINS = {
    "grid_world": SubgoalGridEnv,
    "cart_pole": partial(CartPoleEnv, dtype=torch.float64),
    "supply_chain": partial(SupplyChainEnv, SMALL_NETWORK),
}
RUN = RunSettings(gamma=0.95, episodes=12, tests=2, next_action="before", seed=3)
RUNS = {
    "grid_world": replace(RUN, gamma=0.99, tests=1),
    "cart_pole": RUN,
    "supply_chain": RUN,
}
LEARNERS = {
    "grid_world": ExpectedSarsaSettings(learning_rate=0.7, initializer="normal"),
    "cart_pole": ExpectedSarsaSettings(learning_rate=0.5, decay=0.99, floor=0.01),
    "supply_chain": ExpectedSarsaSettings(learning_rate=0.6, initializer="normal"),
}


def called(function):
    """A function that compiled ones call, as one that Python calls."""
    return numba.njit(**OPTIONS)(getattr(function, "py_func", function))


def scalars(env):
    """The compiled functions of a domain, bound to its constants."""
    m = env.scalars()
    return SimpleNamespace(
        step=partial(called(type(m).step), m), cell=partial(called(type(m).cell), m)
    )


def rows(*columns):
    """The entries of equally long tensors as plain Python numbers, one tuple per entry."""
    return zip(*(column.tolist() for column in columns), strict=True)


def double(*size, random, low=0.0, high=1.0):
    return low + (high - low) * torch.rand(*size, generator=random, dtype=torch.float64)


def strategies(states, actions):
    """Every family, two runs each, with unequal parameters, in a nested stack."""
    return StackedEpsilon(
        [
            BMCEpsilon(1.0, 1.01, prior=NormalGammaPrior(b0=5.0), batch_shape=[2]),
            VDBEEpsilon(states, [0.05, 1.0], 1 / actions, batch_shape=[2]),
            GeometricEpsilon(0.5, [0.9, 0.7], batch_shape=[2]),
            PowerEpsilon(0.5, [0.5, 1.5], first_index=0, batch_shape=[2]),
            StackedEpsilon(
                [
                    ConstantEpsilon([0.1, 0.5], batch_shape=[2]),
                    LinearEpsilon(1.0, [0.1, 0.2], num_frames=100, batch_shape=[2]),
                ]
            ),
        ]
    )
