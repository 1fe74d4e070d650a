"""A DQN as TorchRL's scripts write it, on CartPole-v1, with the README's diff and without.

As a process, it reports its processor time from its very start, and how much of that was imports.
The script with ``EGreedyModule`` acts with the ε of ``--epsilons``, a file in which the other has
left its own: with the same ε and seed both take the same actions, so that as many episodes end.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import GymEnv, StepCounter, TransformedEnv
from torchrl.modules import MLP, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

if TYPE_CHECKING:
    from bmc_torchrl import AdaptiveEGreedyModule


class Script:
    """Collector, replay, loss and optimiser.

    Args:
        adaptive: with the README's diff, or without.
        frames: per batch.
        updates: per batch.
    """

    def __init__(self, adaptive: bool, frames: int, updates: int) -> None:
        torch.manual_seed(0)
        env = TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True), StepCounter())
        env.set_seed(0)
        network = MLP(4, 2, num_cells=[64, 64], activation_class=torch.nn.ReLU)
        q_actor = QValueActor(network, in_keys=["observation"], spec=env.action_spec)
        self.explore: AdaptiveEGreedyModule | EGreedyModule
        self.learn_epsilon: Callable[[TensorDictBase], object]
        if adaptive:
            from bmc_torchrl import AdaptiveEGreedyModule, OneStepReturns

            self.explore = explore = AdaptiveEGreedyModule(env.action_spec)
            returns = OneStepReturns(q_actor, gamma=0.99)
            self.learn_epsilon = lambda data: explore.update(returns(data))
        else:
            self.explore = annealed = EGreedyModule(env.action_spec, annealing_num_steps=50_000)
            self.learn_epsilon = lambda data: annealed.step(data.numel())
        self.loss = DQNLoss(q_actor, action_space=env.action_spec)
        self.loss.make_value_estimator(gamma=0.99)
        self.target = SoftUpdate(self.loss, tau=0.01)
        self.optimizer = torch.optim.Adam(self.loss.parameters(), lr=1e-3)
        self.replay = TensorDictReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=64)
        self.updates = updates
        collector = Collector(
            env,
            TensorDictSequential(q_actor, self.explore),
            frames_per_batch=frames,
            total_frames=-1,
            auto_register_policy_transforms=False,
        )
        self.batches = iter(collector)

    def batch(self) -> None:
        """Collect, learn ε, learn Q."""
        data = next(self.batches)
        self.actions = data["action"]
        self.learn_epsilon(data)
        self.replay.extend(data.exclude("collector").reshape(-1))
        for _ in range(self.updates):
            self.loss(self.replay.sample())["loss"].backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.target.step()


def main() -> None:
    import common

    parsed = common.arguments(adaptive=int, batches=int, frames=int, updates=int, epsilons=Path)
    if parsed.adaptive:
        from bmc_torchrl import AdaptiveEGreedyModule, OneStepReturns  # noqa: F401, an import
    imports = time.process_time()
    torch.set_num_threads(1)
    script = Script(bool(parsed.adaptive), parsed.frames, parsed.updates)
    given = [] if parsed.adaptive else json.loads(parsed.epsilons.read_text())
    used, actions = [], 0
    for number in range(parsed.batches):
        if given:
            script.explore.eps.fill_(given[number])
        used.append(float(script.explore.eps))
        script.batch()
        actions = zlib.crc32(script.actions.numpy().tobytes(), actions)
    total = time.process_time()
    if parsed.adaptive:
        parsed.epsilons.write_text(json.dumps(used))
    common.report(
        parsed.batches * parsed.frames,
        total,
        without_imports=total - imports,
        actions=actions,
    )


if __name__ == "__main__":
    main()
