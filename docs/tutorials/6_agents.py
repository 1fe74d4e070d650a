"""Several agents.

Agents in TorchRL have their keys below a group, such as `("agent", "action")`. The same module
explores for all of them, with a posterior for each or with one that pools their evidence.
"""

# %% [markdown]
# ## Three agents
#
# mpe2's *simple_spread*, through TorchRL's PettingZoo wrapper: three agents are to cover three
# landmarks, and share the reward (`pip install -c constraints.txt '.[examples]'`).

# %%
import matplotlib.pyplot as plt
import torch
from mpe2 import simple_spread_v3
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import PettingZooWrapper
from torchrl.modules import MLP, QValueModule, VDNMixer
from torchrl.objectives import QMixerLoss, SoftUpdate

from bmc_torchrl import AdaptiveEGreedyModule, BMCEpsilon, OneStepReturns

AGENTS, GAMMA = 3, 0.9
torch.manual_seed(0)
env = PettingZooWrapper(
    simple_spread_v3.parallel_env(N=AGENTS, max_cycles=25, continuous_actions=False),
    categorical_actions=True,
    use_mask=False,
    return_state=True,
)
env.set_seed(0)

# %% [markdown]
# ## Q, with keys below `"agent"`
#
# One network for all agents, mixed by VDN: a plain TorchRL set-up.

# %%
VALUE, ACTION, CHOSEN = (("agent", name) for name in ("action_value", "action", "chosen"))
network = MLP(in_features=18, out_features=5, num_cells=[64])
q_actor = TensorDictSequential(
    TensorDictModule(network, [("agent", "observation")], [VALUE]),
    QValueModule("categorical", action_value_key=VALUE, out_keys=[ACTION, VALUE, CHOSEN]),
)
mixer = TensorDictModule(VDNMixer(AGENTS, "cpu"), [CHOSEN], ["chosen_action_value"])
loss_module = QMixerLoss(q_actor, mixer, action_space="categorical", delay_value=True)
loss_module.set_keys(action_value=VALUE, action=ACTION, local_value=CHOSEN)
loss_module.make_value_estimator(gamma=GAMMA)
target = SoftUpdate(loss_module, tau=0.05)
optimiser = torch.optim.Adam(loss_module.parameters(), lr=3e-3)
buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(2_000), batch_size=64)

# %% [markdown]
# ## A posterior for each agent
#
# `batch_shape=[AGENTS]` keeps one each; `batch_shape=[]` would pool their evidence in one, which
# is the choice where agents share Q and are alike. Keys are named where they are not at the root.

# %%
explore = AdaptiveEGreedyModule(
    env.action_spec, BMCEpsilon(alpha0=1.0, beta0=1.01, batch_shape=[AGENTS]), action_key=ACTION
)
returns = OneStepReturns(
    q_actor,
    gamma=GAMMA,
    action_value_key=VALUE,
    reward_key=("agent", "reward"),
    terminated_key=("agent", "terminated"),
)
pooled = BMCEpsilon(alpha0=1.0, beta0=1.01)

# %%
history = []
policy = TensorDictSequential(q_actor, explore)
for data in Collector(env, policy, frames_per_batch=100, total_frames=1_000):
    explore.update(returns(data))
    pooled.update(data)
    team = data.exclude("collector").set(
        ("next", "reward"), data["next", "agent", "reward"].mean(-2)
    )
    buffer.extend(team)
    for _ in range(10):
        loss_module(buffer.sample())["loss"].backward()
        optimiser.step()
        optimiser.zero_grad()
        target.step()
    history.append([*explore.eps.tolist(), float(pooled.eps)])

# %%
plt.figure()
lines = plt.plot([100 * (batch + 1) for batch in range(len(history))], history)
plt.legend(lines, [*(f"agent {number}" for number in range(AGENTS)), "pooled"])
plt.xlabel("frames")
plt.ylabel("ε")

# %% [markdown]
# Three agents bring three transitions a frame: the pooled posterior has three times the evidence
# and falls faster. Neither is right in itself; a pooled ε says "the team's Q can be trusted".
#
# ## Check
#
# Every agent's posterior has learned from each frame, and they differ.

# %%
assert explore.strategy.return_count.tolist() == [1_000.0] * AGENTS
assert float(pooled.return_count) == 3_000
assert len(set(explore.eps.tolist())) == AGENTS
assert float(pooled.eps) < float(explore.eps.min())
print("ε by agent:", [round(value, 4) for value in explore.eps.tolist()])
print(f"pooled: {float(pooled.eps):.4f}")

# %% [markdown]
# QMIX, action masks and turn-based games are in `scripts/examples/`; BenchMARL's algorithms take the
# module by a mixin: [ε-BMC in BenchMARL](../benchmarl.md).
