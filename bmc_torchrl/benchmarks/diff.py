"""The README's diff in a TorchRL DQN script: with ε-BMC against with ``EGreedyModule``.

CartPole-v1, 1,000 frames per batch, 100 updates each. Both scripts run in this process, a batch of
one and a batch of the other, in an order that changes; what counts is the median of the ratios of
neighbours. Before each pair both get the same ε and the same random numbers, so that they take the
same actions: how many episodes end is a part of what a batch costs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import GymEnv, StepCounter, TransformedEnv
from torchrl.modules import MLP, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

from bmc_torchrl import AdaptiveEGreedyModule, OneStepReturns
from bmc_torchrl.benchmarks.timing import EFFORT, cost, seconds

FRAMES, UPDATES, PAIRS = 1000, 100, 40
GOAL = 1.02


class Script:
    """A DQN as TorchRL's scripts write it.

    Args:
        adaptive: with the README's diff, or without.
    """

    def __init__(self, adaptive: bool) -> None:
        torch.manual_seed(0)
        env = TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True), StepCounter())
        env.set_seed(0)
        network = MLP(4, 2, num_cells=[64, 64], activation_class=torch.nn.ReLU)
        q_actor = QValueActor(network, in_keys=["observation"], spec=env.action_spec)
        self.explore: AdaptiveEGreedyModule | EGreedyModule
        self.learn_epsilon: Callable[[TensorDictBase], object]
        if adaptive:
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
        policy = TensorDictSequential(q_actor, self.explore)
        frames = EFFORT.count(FRAMES, least=50)
        collector = Collector(
            env,
            policy,
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
        for _ in range(EFFORT.count(UPDATES, least=5)):
            self.loss(self.replay.sample())["loss"].backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.target.step()


def rows() -> Iterator[dict[str, Any]]:
    """One row: processor time of a batch."""
    torch.set_num_threads(1)
    ours, peer = Script(adaptive=True), Script(adaptive=False)
    warm_up_and_pairs = []
    for number in range(1 + EFFORT.count(PAIRS, least=2)):
        peer.explore.eps.copy_(ours.explore.eps)
        times = _same_batch(*((ours, peer) if number % 2 else (peer, ours)))
        warm_up_and_pairs.append((times[ours], times[peer]))
    _, *pairs = warm_up_and_pairs
    ratio = statistics.median(mine / theirs for mine, theirs in pairs)
    theirs = statistics.median(pair[1] for pair in pairs)
    work = f"TorchRL DQN script, {FRAMES} frames and {UPDATES} updates, the README's diff, seconds"
    yield cost(work, ratio * theirs, theirs, GOAL)


def _same_batch(first: Script, second: Script) -> dict[Script, float]:
    """What a batch takes each, one after the other, from the same random numbers."""
    state, found = torch.get_rng_state(), {}
    for script in (first, second):
        torch.set_rng_state(state)
        found[script] = seconds(script.batch, 1)
    if not first.actions.equal(second.actions):
        raise RuntimeError("The two scripts acted differently: what they take cannot be compared.")
    return found
