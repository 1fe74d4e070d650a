"""Read the posterior, and mend an ε that does not move or falls too early.

ε is one number; α, β and the evidence say why it is what it is. This tutorial records transitions
once, reads the posterior, and asks what other priors would have made of the same data.
"""

# %% [markdown]
# ## A recording
#
# 1,500 steps of CliffWalking with a table and expected SARSA, in a plain loop. The
# environment runs four copies side by side; their transitions are evidence for one posterior.

# %%
from itertools import pairwise

import matplotlib.pyplot as plt
import torch
from tensordict.nn import TensorDictSequential
from torchrl.modules import QValueActor

from bmc_torchrl import (
    AdaptiveEGreedyModule,
    BMCEpsilon,
    NormalGammaPrior,
    OneStepReturns,
    what_if,
)
from bmc_torchrl.analysis.whatif import Counterfactual
from bmc_torchrl.envs import TabularEnv, cliff_walking
from bmc_torchrl.learners.values import QTable

torch.manual_seed(0)
env = TabularEnv(cliff_walking(), batch_size=[4], max_steps=100)
table = QTable(env.num_states, env.num_actions)
q_actor = QValueActor(table, in_keys=["state"], action_space="categorical")
explore = AdaptiveEGreedyModule(env.action_spec, BMCEpsilon(alpha0=10.0, beta0=10.01))
policy, returns = TensorDictSequential(q_actor, explore), OneStepReturns(q_actor, gamma=0.95)

recorded, epsilon, state = [], [], env.reset()
with torch.no_grad():
    for _ in range(1_500):
        step, state = env.step_and_maybe_reset(policy(state))
        transition = returns(step)
        target = (1 - explore.eps) * step["greedy_return"] + explore.eps * step["uniform_return"]
        chosen = step["state"], step["action"]
        table.weight[chosen] += 0.3 * (target.float() - table.weight[chosen])
        explore.update(transition)
        recorded.append(transition.clone())
        epsilon.append(float(explore.eps))
data = torch.stack(recorded, -1)
data.names = [None, "time"]

# %% [markdown]
# ## What the numbers say
#
# - **ε = α / (α + β)** is how much "uniform" is still believed.
# - **α + β**, the strength, is how sure the posterior is. It never falls, so early evidence counts
#   most and ε moves ever more slowly.
# - **log evidence** is the sum of log e^U − log e^Q over all transitions: how clearly returns have
#   spoken for "greedy". Per transition it is the number to look at when ε stands still.
# - **return_variance** is the scale on which a gap between the two returns counts as large.

# %%
strategy = explore.strategy
low, high = strategy.credible_interval(0.95)
print(f"ε = {float(strategy.eps):.4f}, with 95 % between {float(low):.4f} and {float(high):.4f}")
print(f"α = {float(strategy.alpha):.2f}, β = {float(strategy.beta):.2f}")
evidence = float(strategy.log_evidence / strategy.return_count)
print(f"evidence per transition: {evidence:.2g}, of {int(strategy.return_count)} transitions")
gap = data["greedy_return"] - data["uniform_return"]
print(f"gap between the returns: {float(gap[:, :100].mean()):.2f} at first, "
      f"{float(gap[:, -100:].mean()):.2f} at last")  # fmt: skip

# %% [markdown]
# ## What if
#
# `what_if` lets other strategies learn from the recording. It is counterfactual: none of them
# acted, and with another ε other transitions would have been seen. It shows which prior moves, not
# which one earns more.

# %%
priors = {f"α₀ = {alpha0}": BMCEpsilon(alpha0, alpha0 + 0.01) for alpha0 in (1, 10, 1000)}
priors["without a unit"] = BMCEpsilon(10, 10.01, prior=NormalGammaPrior(b0=None))
shown = what_if(data, priors, every=10)
plt.figure()
for label in priors:
    plt.plot(shown["step"], shown[label], label=label)
plt.xlabel("steps of each environment")
plt.ylabel("ε that it would have shown")
plt.legend()

# %% [markdown]
# The same comparison in words, as `bmc train … whatif=bank` and the Lightning callback `WhatIf`
# end with. First for the strong prior, whose ε does not move:

# %%
others = {label: shown[label].tolist() for label in priors}
finished = data["next", "done"].squeeze(-1).sum(0).cumsum(0)[shown["step"][1:] - 1]
for acting in ("α₀ = 1000", "α₀ = 1"):
    rest = {label: values for label, values in others.items() if label != acting}
    told = Counterfactual(acting, [0, *finished.tolist()], others[acting], rest)
    print(told.advice()[0])

# %% [markdown]
# ## What to do
#
# | what you see | why | what to do |
# |---|---|---|
# | ε stays, gap ≈ 0 | all actions are worth the same to Q: no reward yet | that is the method; explore longer (`explore="zeta"`), or begin with a schedule |
# | ε stays, gap clear, evidence per transition tiny | prior too strong, or rewards small against b₀ | smaller α₀, β₀; smaller `b0`; or `NormalGammaPrior(b0=None)` |
# | ε = ½ exactly, for ever | α₀ = β₀ | β₀ = α₀ + 0.01 |
# | ε is gone within a few episodes | prior too weak for rewards this large | larger α₀; larger `b0`, or None |
# | ε is gone, and the task has changed | ε-BMC does not unlearn | `strategy.forget(0.5)`, `ForgetOnChange` |
# | `skipped` grows | Q diverges, or frames are not this policy's | look at `strategy.skipped`, by cause |
#
# ## Check
#
# Rewards in cents instead of euros: the paper's prior sees other evidence, the one without a unit
# the same, bit for bit (for a factor that is a power of two).

# %%
cents = data.clone()
for key in ("greedy_return", "uniform_return"):
    cents[key] = data[key] / 128
again = what_if(cents, priors, every=10)
assert torch.equal(again["without a unit"], shown["without a unit"])
assert again["α₀ = 10"][-1] > shown["α₀ = 10"][-1] + 0.1
assert all(after <= before for before, after in pairwise(epsilon))
print(f"α₀ = 10 with rewards / 128: ε = {float(again['α₀ = 10'][-1]):.3f} "
      f"instead of {float(shown['α₀ = 10'][-1]):.3f}")  # fmt: skip
