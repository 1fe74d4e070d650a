"""Many runs in lockstep, compiled: the same functions as ``training``, one graph per step."""

from bmc_torchrl.lockstep.dqn import DQNDraws, DQNLockstep
from bmc_torchrl.lockstep.engine import Lockstep
from bmc_torchrl.lockstep.tabular import TabularDraws, TabularLockstep

__all__ = ["DQNDraws", "DQNLockstep", "Lockstep", "TabularDraws", "TabularLockstep"]
