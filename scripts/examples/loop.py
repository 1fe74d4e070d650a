"""The loop that the examples share: collect, learn about ε, learn Q, in this order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.envs import EnvBase
from torchrl.objectives import LossModule, SoftUpdate

from bmc_torchrl import AdaptiveEGreedyModule, OneStepReturns


def flat(data: TensorDictBase) -> TensorDictBase:
    return data.reshape(-1)


def learning(
    env: EnvBase,
    q_actor: TensorDictModuleBase,
    explore: AdaptiveEGreedyModule,
    returns: OneStepReturns,
    loss_module: LossModule,
    *,
    frames: int,
    frames_per_batch: int = 160,
    updates: int = 10,
    batch_size: int = 128,
    learning_rate: float = 3e-3,
    tau: float = 0.05,
    store: Callable[[TensorDictBase], TensorDictBase] = flat,
    sampler: Sampler | None = None,
) -> Iterator[TensorDictBase]:
    """Each batch of the collector, after ε and Q have learned from it.

    ε learns from the collector's own one-step transitions; `store` then says what the replay buffer
    gets of them.
    """
    target = SoftUpdate(loss_module, tau=tau)
    optimiser = torch.optim.Adam(loss_module.parameters(), lr=learning_rate)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(frames), sampler=sampler, batch_size=batch_size
    )
    collector = Collector(
        env,
        TensorDictSequential(q_actor, explore),
        frames_per_batch=frames_per_batch,
        total_frames=frames,
        auto_register_policy_transforms=False,
    )
    for data in collector:
        explore.update(returns(data))
        buffer.extend(store(data))
        for _ in range(updates):
            batch = buffer.sample()
            loss_module(batch)["loss"].backward()
            optimiser.step()
            optimiser.zero_grad()
            target.step()
            buffer.update_tensordict_priority(batch)
        yield data
    collector.shutdown()
