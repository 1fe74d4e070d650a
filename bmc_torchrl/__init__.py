"""Adaptive ε-greedy exploration for TorchRL."""

from bmc_torchrl import functional
from bmc_torchrl.exploration import AdaptiveEGreedyModule, OneStepReturns
from bmc_torchrl.likelihoods import GaussianLikelihood, NormalGammaPrior, StudentTLikelihood
from bmc_torchrl.strategies import (
    BMCEpsilon,
    ChangeDetector,
    ConstantEpsilon,
    EpsilonStrategy,
    ExplorationWinsEpsilon,
    GeometricEpsilon,
    LinearEpsilon,
    PowerEpsilon,
    StackedEpsilon,
    VDBEEpsilon,
)

__all__ = [
    "AdaptiveEGreedyModule",
    "BMCEpsilon",
    "ChangeDetector",
    "ConstantEpsilon",
    "EpsilonStrategy",
    "ExplorationWinsEpsilon",
    "GaussianLikelihood",
    "GeometricEpsilon",
    "LinearEpsilon",
    "NormalGammaPrior",
    "OneStepReturns",
    "PowerEpsilon",
    "StackedEpsilon",
    "StudentTLikelihood",
    "VDBEEpsilon",
    "functional",
]
