"""Swap ε-BMC into a TorchRL DQN.

You have a DQN script with `EGreedyModule`. Three lines change, and ε is learned from the data that
the script collects anyway. Everything else stays: network, loss, replay buffer, collector.
"""

# %% [markdown]
# ## The script as it is
#
# A DQN on CartPole, short enough to read. Nothing here is ours.

# %%
from itertools import pairwise

import matplotlib.pyplot as plt
import torch
from tensordict.nn import TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import GymEnv, StepCounter, TransformedEnv
from torchrl.modules import MLP, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

from bmc_torchrl import AdaptiveEGreedyModule, OneStepReturns

torch.manual_seed(0)
env = TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True), StepCounter())
env.set_seed(0)
network = MLP(in_features=4, out_features=2, num_cells=[64, 64])
q_actor = QValueActor(network, in_keys=["observation"], spec=env.action_spec)
loss_module = DQNLoss(q_actor, action_space=env.action_spec)
loss_module.make_value_estimator(gamma=0.99)
target = SoftUpdate(loss_module, tau=0.05)
optimiser = torch.optim.Adam(loss_module.parameters(), lr=5e-3)
buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=64)

annealed = EGreedyModule(env.action_spec, eps_init=1.0, eps_end=0.05, annealing_num_steps=3_000)

# %% [markdown]
# ## Lines one and two: the module, and the returns it learns from
#
# `OneStepReturns` writes two numbers beside each transition: what it would return if the agent
# then acted greedily, and if it acted uniformly. It must see Q as it was *before* learning from the
# transition.

# %%
explore = AdaptiveEGreedyModule(env.action_spec)
returns = OneStepReturns(q_actor, gamma=0.99)
policy = TensorDictSequential(q_actor, explore)

# %% [markdown]
# ## Line three: `update` where `.step(frames)` was

# %%
collector = Collector(env, policy, frames_per_batch=50, total_frames=3_000)
history = []
for data in collector:
    explore.update(returns(data))  # was: annealed.step(data.numel())
    annealed.step(data.numel())  # only for the figure
    buffer.extend(data.exclude("collector"))
    for _ in range(15):
        loss_module(buffer.sample())["loss"].backward()
        optimiser.step()
        optimiser.zero_grad()
        target.step()
    history.append((float(explore.eps), float(annealed.eps)))
collector.shutdown()

# %% [markdown]
# ## What came of it
#
# ε stays near ½ while the network finds both actions alike, and falls when their values come apart.
# No horizon was given: a schedule would have needed one.

# %%
adapted, scheduled = zip(*history, strict=True)
frames = [50 * (batch + 1) for batch in range(len(history))]
plt.figure()
plt.plot(frames, adapted, label="ε-BMC")
plt.plot(frames, scheduled, "--", label="the schedule it replaces")
plt.xlabel("frames")
plt.ylabel("ε")
plt.legend()

# %% [markdown]
# ## Check
#
# Every transition remembers the ε that it was taken with, ε never rises (Theorem 1), and the
# posterior has learned from each frame.

# %%
assert data["epsilon"].shape == (50,)
assert all(after <= before for before, after in pairwise(adapted))
assert float(explore.strategy.return_count) == 3_000
print(f"ε went from {1 / 2.01:.3f} to {adapted[-1]:.4f} in 3,000 frames")
print(explore.strategy)

# %% [markdown]
# Forgot `update`? `explore.step(n)` warns once and says so. Frames that a collector draws at random
# (`init_random_frames`) are marked and left out of the posterior: they are not the policy's.
