"""Adaptive ε-greedy exploration for TorchRL."""

from bmc_torchrl import functional
from bmc_torchrl.actions import RepeatedAction, Replacement, SoftmaxAction, UniformAction
from bmc_torchrl.exploration import AdaptiveEGreedyModule, OneStepReturns
from bmc_torchrl.likelihoods import GaussianLikelihood, NormalGammaPrior, StudentTLikelihood
from bmc_torchrl.strategies import (
    ApexEpsilon,
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
    what_if,
)

__all__ = [
    "AdaptiveEGreedyModule",
    "ApexEpsilon",
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
    "RepeatedAction",
    "Replacement",
    "SoftmaxAction",
    "StackedEpsilon",
    "StudentTLikelihood",
    "UniformAction",
    "VDBEEpsilon",
    "functional",
    "what_if",
]
