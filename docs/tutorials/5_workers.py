"""Several workers and devices.

Workers collect, one learner decides ε. Which of TorchRL's collectors you use decides where the
posterior is, and how ε gets to the workers.
"""

# %% [markdown]
# ## What goes where
#
# | collector | who acts | what you do |
# |---|---|---|
# | `Collector(ParallelEnv(n, make_env), …)` | the learner, for all environments | nothing |
# | `MultiSyncCollector([make_env] * n, …)` | each worker; it waits while the learner learns | nothing: memory is shared |
# | `MultiAsyncCollector(…)` | each worker, at any time | share ε alone: `scripts/examples/workers_multi_async.py` |
# | `RayCollector(…)` | actors elsewhere | `collector.update_policy_weights_()` after each update |
#
# Here two processes with `MultiSyncCollector`. Functions that start processes are called under
# `if __name__ == "__main__":`, as Python demands of a script.

# %%
import torch
from tensordict.nn import TensorDictSequential
from torchrl.collectors import MultiSyncCollector
from torchrl.envs import GymEnv
from torchrl.modules import MLP, QValueActor

from bmc_torchrl import AdaptiveEGreedyModule, ApexEpsilon, BMCEpsilon, OneStepReturns


def make_env():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
spec = make_env().action_spec
network = MLP(in_features=4, out_features=2, num_cells=[64], device=device)
q_actor = QValueActor(network, in_keys=["observation"], spec=spec.to(device))
explore = AdaptiveEGreedyModule(spec, BMCEpsilon(alpha0=1.0, beta0=1.01), device=device)
returns = OneStepReturns(q_actor, gamma=0.99)

# %% [markdown]
# ## Two workers, one posterior
#
# A batch is `[workers, time]`. `update` walks it step by step, and by worker within a step, so that
# eight workers are no faster a way to a wrong ε than one. What the collector yields is where the
# policy is: on a GPU the batch is walked there, by one kernel.


# %%
def collect(batches: int) -> list[tuple[float, float]]:
    policy = TensorDictSequential(q_actor, explore)
    collector = MultiSyncCollector(
        [make_env, make_env], policy, frames_per_batch=100, total_frames=100 * batches,
        auto_register_policy_transforms=False,
    )  # fmt: skip
    seen = []
    for data in collector:
        seen.append((float(data["epsilon"].max()), float(explore.eps)))
        explore.update(returns(data))
        with torch.no_grad():  # In place of learning: action 1 becomes worth more.
            network[-1].bias[1] += 1.0
    collector.shutdown()
    return seen


if __name__ == "__main__":
    history = collect(batches=4)
    for acted_with, decided in history:
        print(f"workers acted with ε = {acted_with:.6f}; the learner had decided {decided:.6f}")

# %% [markdown]
# ## A ladder instead
#
# Ape-X gives every worker an ε of its own, once and for all. Each worker builds its policy by
# index: `policy_factory=[functools.partial(make_policy, worker) for worker in range(8)]`.

# %%
ladder = [float(ApexEpsilon(worker=worker, workers=8).eps) for worker in range(8)]
print("ε of eight workers:", [round(value, 4) for value in ladder])

# %% [markdown]
# ## Devices and checkpoints
#
# What a strategy remembers is buffers: `.to(device)` moves it, `state_dict()` has all of it, and a
# checkpoint written on a GPU loads on a CPU. Posteriors stay float64, whatever `.half()` is called
# on. In Lightning, `L.Trainer(devices=2, strategy="ddp")` keeps a posterior per rank, and
# `EpsilonGreedyDQN(shared_posterior=True)` one that learns from all ranks' data.
#
# ## Check
#
# Every batch was taken with the ε that the update before had left, to float32, in which it is
# recorded; and the posterior comes back from its `state_dict`.

# %%
if __name__ == "__main__":
    assert all(abs(acted - decided) < 1e-6 for acted, decided in history)
    assert history[-1][1] < history[0][1]
    assert float(explore.strategy.return_count) == 400
    again = AdaptiveEGreedyModule(spec, BMCEpsilon())
    again.load_state_dict(explore.state_dict())
    assert torch.equal(again.eps, explore.eps.cpu())
    assert again.half().strategy.alpha.dtype == torch.float64
