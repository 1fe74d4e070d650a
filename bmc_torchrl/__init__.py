"""Adaptive ε-greedy exploration for TorchRL.

What is asked for is imported then: ``bmc --help`` has no use for torchrl, which takes seconds.
"""

from typing import TYPE_CHECKING

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

_MODULES = ("functional", "likelihoods", "strategies", "actions", "exploration")

if TYPE_CHECKING:
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
else:

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name in _MODULES:
            return import_module(f"{__name__}.{name}")
        for module in map(__getattr__, _MODULES if name in __all__ else ()):
            if name in module.__all__:
                return globals().setdefault(name, getattr(module, name))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
