"""TorchRL learners in a Lightning loop."""

from bmc_torchrl.training.callbacks import (
    AtomicCheckpoint,
    EpisodeProgress,
    GreedyEvaluation,
    ResultsTable,
    StopAfterPerfectTests,
)
from bmc_torchrl.training.learner import EpsilonGreedyLearner
from bmc_torchrl.training.rules import LossRule, PublishedDQN, TabularSarsa
from bmc_torchrl.training.stream import TransitionStream

__all__ = [
    "AtomicCheckpoint",
    "EpisodeProgress",
    "EpsilonGreedyLearner",
    "GreedyEvaluation",
    "LossRule",
    "PublishedDQN",
    "ResultsTable",
    "StopAfterPerfectTests",
    "TabularSarsa",
    "TransitionStream",
]
