"""Many runs in lockstep, compiled: the same functions as ``training``, one graph per step."""

from bmc_torchrl.lockstep.torch_dqn import DQNDraws, DQNLockstep
from bmc_torchrl.lockstep.torch_engine import Lockstep
from bmc_torchrl.lockstep.torch_tabular import TabularDraws, TabularLockstep

__all__ = ["DQNDraws", "DQNLockstep", "Lockstep", "TabularDraws", "TabularLockstep"]
