"""TorchRL's own parts on CartPole-v1 as its reference scripts join them, of our own writing."""

from __future__ import annotations

import warnings

import common
import torch
from tensordict.nn import TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import GymEnv, StepCounter, TransformedEnv
from torchrl.modules import MLP, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, HardUpdate

warnings.simplefilter("ignore")


class Agent:
    """Collector, replay, loss and optimiser, one frame per batch."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        env = TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True), StepCounter())
        env.set_seed(seed)
        width = common.HIDDEN
        actor = QValueActor(
            MLP(
                in_features=4,
                out_features=2,
                num_cells=[width, width],
                activation_class=torch.nn.ReLU,
            ),
            spec=env.action_spec,
            in_keys=["observation"],
        )
        self.explore = EGreedyModule(env.action_spec, annealing_num_steps=10_000)
        policy = TensorDictSequential(actor, self.explore)
        self.collector = Collector(env, policy, frames_per_batch=1, total_frames=-1)
        self.frames = iter(self.collector)
        self.replay = TensorDictReplayBuffer(
            storage=LazyTensorStorage(common.CAPACITY), batch_size=common.BATCH
        )
        self.loss = DQNLoss(actor, delay_value=True, action_space=env.action_spec)
        self.loss.make_value_estimator(gamma=common.GAMMA)
        self.update = HardUpdate(self.loss, value_network_update_interval=common.TARGET_INTERVAL)
        self.optimizer = torch.optim.Adam(self.loss.parameters(), lr=common.RATE)

    def advance(self, steps: int) -> None:
        """Take `steps` steps, learning after each."""
        for _ in range(steps):
            data = next(self.frames).reshape(-1)
            self.explore.step(1)
            self.replay.extend(data)
            if len(self.replay) < common.LEARNING_STARTS:
                continue
            loss = self.loss(self.replay.sample())["loss"]
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.update.step()


if __name__ == "__main__":
    parsed = common.arguments()
    torch.set_num_threads(1)
    common.measure(Agent(parsed.seed).advance, parsed, chunk=50)
