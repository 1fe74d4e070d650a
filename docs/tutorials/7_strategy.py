"""A strategy of your own in 30 lines, through the contract suite.

A strategy says what ε is and learns from transitions. Written to one small contract, it works with
every layout of actions, in batches, through time and in checkpoints; one suite of tests says so.
"""

# %% [markdown]
# ## The idea
#
# Explore while acting greedily promises no more than acting uniformly: ε = ½ / (1 + g), g being a
# running mean of the gap between the two returns. Unlike ε-BMC's it may rise again. Whether that is
# any good is another question; this is about how little it takes.
#
# What the contract asks:
#
# - memory is buffers of shape `batch_shape`, written in place;
# - `in_keys` names what is read; `read` looks at a transition, and is all that can fail;
# - `learn` is all that changes. `update`, which users call, does one after the other.
#
# `self.steps` puts any transition, with time, environments or agents, as `[steps, *batch_shape]`;
# `self.mark_like` says which frames this policy took.

# %%
import runpy
import sys
from itertools import product
from pathlib import Path

import torch
from tensordict import TensorDict
from torchrl.data import Categorical

import bmc_torchrl
from bmc_torchrl import AdaptiveEGreedyModule, EpsilonStrategy


class GapEpsilon(EpsilonStrategy):
    """ε falls as greedy returns rise above uniform ones, and rises as they come together."""

    in_keys = ["greedy_return", "uniform_return"]  # noqa: RUF012

    def __init__(self, rate=0.05, *, batch_shape=()):
        super().__init__(batch_shape)
        self.rate = rate
        self.register_buffer("gap", torch.zeros(self.batch_shape, dtype=torch.float64))

    @property
    def eps(self):
        return 0.5 / (1 + self.gap)

    def read(self, transition, taken):
        greedy, uniform = (transition[key] for key in self.in_keys)
        gap = greedy.double() - uniform.double()
        learns = self.mark_like(taken, gap)
        return self.steps(transition, gap), self.steps(transition, learns)

    def learn(self, gaps, learns):
        for gap, own in zip(gaps, learns, strict=True):
            self.gap.copy_(torch.where(own, torch.lerp(self.gap, gap, self.rate), self.gap))


# %% [markdown]
# ## In its place

# %%
explore = AdaptiveEGreedyModule(Categorical(4), GapEpsilon())
data = TensorDict({"greedy_return": torch.ones(50), "uniform_return": torch.zeros(50)}, [50])
explore.update(data)
print(explore.strategy)
assert abs(float(explore.eps) - 0.5 / (2 - 0.95**50)) < 1e-12

# %% [markdown]
# ## Through the suite
#
# In a clone, one line in `tests/contracts.py` is enough, and `pytest -k gap` runs every test that
# every strategy passes. Here the same functions are called by hand: acting in every layout of
# actions, masks and agents; walking time as stepping through it; runs in a batch as each alone;
# saving, copying and pickling; half precision; buffers that stay where they are.

# %%
tests = Path(bmc_torchrl.__file__).parents[1] / "tests"
sys.path.insert(0, str(tests))
import contracts  # noqa: E402

contracts.FACTORIES["gap"] = lambda shape: GapEpsilon(batch_shape=shape)
suite = runpy.run_path(str(tests / "strategies/test_strategies.py"))

passed = 0
for shape in ((), contracts.RUNS):
    for layout in product((False, True), repeat=3):
        suite["test_every_strategy_acts_with_its_epsilon"]("gap", shape, *layout)
        passed += 1
    for fact in (
        "test_walking_time_is_stepping_through_it",
        "test_state_survives_saving_copying_and_pickling",
        "test_buffers_stay_where_they_are",
        "test_updates_inside_the_module_are_those_of_the_strategy",
    ):
        suite[fact]("gap", shape)
        passed += 1
    suite["test_casting_keeps_the_precision_of_the_memory"]("gap", shape, lambda m: m.half())
    passed += 1
suite["test_a_batch_of_runs_is_each_run_alone"]("gap")
suite["test_every_strategy_declares_what_it_reads"]("gap")
print(f"{passed + 2} checks passed")

# %% [markdown]
# ## Check
#
# The suite is not easily pleased. Forget to look at a key, or write a buffer anew instead of in
# place, and it says so:

# %%


class Careless(GapEpsilon):
    """A new tensor at every update: checkpoints and workers would keep the old one."""

    def learn(self, gaps, learns):
        self.gap = gaps.mean(0)


contracts.FACTORIES["gap"] = lambda shape: Careless(batch_shape=shape)
noticed = False
try:
    suite["test_buffers_stay_where_they_are"]("gap", ())
except AssertionError:
    noticed = True
del contracts.FACTORIES["gap"]
assert noticed
print("caught: buffers must stay where they are")

# %% [markdown]
# For the numba engine a strategy also has `scalars()`, its rule on plain numbers; to take part in
# `bmc train`, a file in `configs/strategy/`. [Contributing](../../CONTRIBUTING.md) has the list.
