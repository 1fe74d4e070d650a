"""Sources of ε: what decides how much an agent explores."""

from bmc_torchrl.strategies.base import EpsilonStrategy
from bmc_torchrl.strategies.bmc import BMCEpsilon
from bmc_torchrl.strategies.schedules import (
    ConstantEpsilon,
    GeometricEpsilon,
    LinearEpsilon,
    PowerEpsilon,
)
from bmc_torchrl.strategies.stacked import StackedEpsilon
from bmc_torchrl.strategies.vdbe import VDBEEpsilon

__all__ = [
    "BMCEpsilon",
    "ConstantEpsilon",
    "EpsilonStrategy",
    "GeometricEpsilon",
    "LinearEpsilon",
    "PowerEpsilon",
    "StackedEpsilon",
    "VDBEEpsilon",
]
