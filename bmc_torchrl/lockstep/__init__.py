"""Many runs at once: compiled loops on CPU cores, or one graph per step of all runs."""

from bmc_torchrl.lockstep.torch_dqn import DQNDraws, DQNLockstep
from bmc_torchrl.lockstep.torch_engine import Lockstep
from bmc_torchrl.lockstep.torch_tabular import TabularDraws, TabularLockstep

__all__ = ["DQNDraws", "DQNLockstep", "Lockstep", "TabularDraws", "TabularLockstep"]
