"""TorchRL learners in a Lightning loop."""

from bmc_torchrl.learners.rules import PublishedDQN, TabularSarsa
from bmc_torchrl.training.algorithm import EpsilonGreedyLearner
from bmc_torchrl.training.callbacks import (
    AtomicCheckpoint,
    EpisodeProgress,
    ForgetOnChange,
    GreedyEvaluation,
    ResultsTable,
    StopAfterPerfectTests,
)
from bmc_torchrl.training.dqn import EpsilonGreedyDQN
from bmc_torchrl.training.metrics import EpisodeMetrics
from bmc_torchrl.training.transitions import TransitionStream
from bmc_torchrl.training.whatif import WhatIf

__all__ = [
    "AtomicCheckpoint",
    "EpisodeMetrics",
    "EpisodeProgress",
    "EpsilonGreedyDQN",
    "EpsilonGreedyLearner",
    "ForgetOnChange",
    "GreedyEvaluation",
    "PublishedDQN",
    "ResultsTable",
    "StopAfterPerfectTests",
    "TabularSarsa",
    "TransitionStream",
    "WhatIf",
]
