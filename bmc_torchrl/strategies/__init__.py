"""Sources of ε: what decides how much an agent explores."""

from bmc_torchrl.strategies.apex import ApexEpsilon
from bmc_torchrl.strategies.base import EpsilonStrategy
from bmc_torchrl.strategies.bmc import BMCEpsilon, BMCRule
from bmc_torchrl.strategies.changes import ChangeDetector
from bmc_torchrl.strategies.scalar import NoScalarFormError, ScalarForm, ScalarRule
from bmc_torchrl.strategies.schedules import (
    ConstantEpsilon,
    GeometricEpsilon,
    GeometricRule,
    LinearEpsilon,
    PowerEpsilon,
    PowerRule,
)
from bmc_torchrl.strategies.stacked import StackedEpsilon
from bmc_torchrl.strategies.vdbe import VDBEEpsilon, VDBERule
from bmc_torchrl.strategies.whatif import StrategyBank, what_if
from bmc_torchrl.strategies.wins import ExplorationWinsEpsilon

__all__ = [
    "SCALAR_RULES",
    "ApexEpsilon",
    "BMCEpsilon",
    "ChangeDetector",
    "ConstantEpsilon",
    "EpsilonStrategy",
    "ExplorationWinsEpsilon",
    "GeometricEpsilon",
    "LinearEpsilon",
    "NoScalarFormError",
    "PowerEpsilon",
    "ScalarForm",
    "ScalarRule",
    "StackedEpsilon",
    "StrategyBank",
    "VDBEEpsilon",
    "what_if",
]

SCALAR_RULES: tuple[type[ScalarRule], ...] = (
    BMCRule,
    ScalarRule,
    GeometricRule,
    PowerRule,
    VDBERule,
)
"""Rules of the paper's strategies: an engine compiles them together, and any other when needed."""
