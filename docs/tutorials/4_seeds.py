"""Many seeds at once.

One run is an anecdote. Every strategy takes a batch of runs, `batch_shape=[runs]`, with a posterior
for each, and every environment here is a batch of tensors: a hundred seeds are one loop.
"""

# %% [markdown]
# ## A hundred runs of CliffWalking
#
# `runs=` gives each run a table of its own, `batch_shape=` an ε of its own. With SGD and no replay
# this is tabular expected SARSA, in the same Lightning module as a DQN.

# %%
import lightning as L
import matplotlib.pyplot as plt
import torch

from bmc_torchrl import BMCEpsilon, ConstantEpsilon, StackedEpsilon
from bmc_torchrl.envs import TabularEnv, cliff_walking
from bmc_torchrl.learners.values import QTable
from bmc_torchrl.training import EpsilonGreedyDQN

RUNS, EPISODES = 100, 20
env = TabularEnv(cliff_walking(), batch_size=[RUNS], max_steps=60)
L.seed_everything(0, verbose=False)

# %% [markdown]
# Several strategies can share the batch: fifty runs with ε-BMC, fifty with ε = 0.1.

# %%
half = RUNS // 2
strategy = StackedEpsilon(
    [
        BMCEpsilon(3.0, 3.01, batch_shape=[half]),
        ConstantEpsilon(0.1, batch_shape=[half]),
    ]
)
module = EpsilonGreedyDQN(
    env,
    QTable(env.num_states, env.num_actions, runs=RUNS, initializer="uniform"),
    strategy,
    gamma=0.95,
    loss="expected_sarsa",
    loss_function="l2",
    batch_size=1,
    buffer_size=None,
    target_tau=None,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.15),
    runs=RUNS,
    episodes=EPISODES,
    observation_key="state",
    chunk_steps=50,
)
trainer = L.Trainer(
    max_steps=2_500,
    logger=False,
    accelerator="cpu",
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module)

# %% [markdown]
# ## Means, and how far to trust them
#
# Every run is a row. Intervals are over runs, and an ε that falls in some runs and not in others
# is seen as such.

# %%
log = module.log_of_episodes
whole = int(log.done.min())
returns = log.train_returns[:, :whole]
figure, (left, right) = plt.subplots(1, 2)
for name, own in (("ε-BMC", slice(0, half)), ("ε = 0.1", slice(half, RUNS))):
    mean = returns[own].mean(0)
    error = returns[own].std(0) / half**0.5
    left.plot(mean, label=name)
    left.fill_between(range(whole), mean - error, mean + error, alpha=0.3)
left.set(xlabel="episode", ylabel="return while training")
left.legend()
right.plot(log.epsilons[:half, :whole].T, color="C0", alpha=0.2, linewidth=1)
right.set(xlabel="episode", ylabel="ε of each run")

# %% [markdown]
# ## Check
#
# Runs are independent: each of the fifty has its own ε, which fell in every one. What is possible
# is known: `optimal_return` is −13, `random_return` what random actions earn.

# %%
print(f"{whole} episodes of {RUNS} runs")
print(
    f"ε of the fifty: {float(strategy.eps[:half].min()):.3f} to {float(strategy.eps[:half].max()):.3f}"
)
print(f"optimum {env.optimal_return(gamma=1.0):.1f}, random {env.random_return(gamma=1.0):.0f}")
assert whole == EPISODES
assert len(set(strategy.eps[:half].tolist())) == half
assert (strategy.eps[:half] < 0.4).all()
assert (strategy.eps[half:] == 0.1).all()

# %% [markdown]
# ## Thousands of runs
#
# `bmc train experiment=cliff_sarsa runs=100` does this from the command line, with tables, figures
# and greedy tests; `bmc reproduce` ran 22 strategies × 100 runs of the paper's experiments so. They
# use compiled engines, one run per core or all runs in one batch on a GPU: see
# [Architecture](../architecture.md). A run depends on its seed and its index alone.
