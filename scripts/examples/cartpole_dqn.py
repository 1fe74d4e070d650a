"""ε-BMC swapped into a short TorchRL DQN: python scripts/examples/cartpole_dqn.py [frames]."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from rich.progress import track
from tensordict.nn import TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import GymEnv, StepCounter, TransformedEnv
from torchrl.modules import MLP, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

from bmc_torchrl import AdaptiveEGreedyModule, OneStepReturns

DIFF = """\
- explore = EGreedyModule(env.action_spec, eps_init=1.0, eps_end=0.05, annealing_num_steps=5_000)
+ explore = AdaptiveEGreedyModule(env.action_spec)
+ returns = OneStepReturns(q_actor, gamma=0.99)
...
-     explore.step(data.numel())
+     explore.update(returns(data))"""


def train(frames: int, frames_per_batch: int = 50) -> list[dict[str, float]]:
    torch.manual_seed(0)
    env = TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True), StepCounter())
    env.set_seed(0)
    network = MLP(in_features=4, out_features=2, num_cells=[64, 64], activation_class=nn.ReLU)
    q_actor = QValueActor(network, in_keys=["observation"], spec=env.action_spec)
    explore = AdaptiveEGreedyModule(env.action_spec)
    returns = OneStepReturns(q_actor, gamma=0.99)
    policy = TensorDictSequential(q_actor, explore)
    loss_module = DQNLoss(q_actor, action_space=env.action_spec, double_dqn=True)
    loss_module.make_value_estimator(gamma=0.99)
    target = SoftUpdate(loss_module, tau=0.01)
    optimiser = torch.optim.Adam(loss_module.parameters(), lr=1e-3)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=64)
    collector = Collector(
        env,
        policy,
        frames_per_batch=frames_per_batch,
        total_frames=frames,
        auto_register_policy_transforms=False,
    )
    history = []
    for data in track(collector, "training", total=frames // frames_per_batch):
        explore.update(returns(data))
        buffer.extend(data.exclude("collector").reshape(-1))
        for _ in range(frames_per_batch // 2):
            loss = loss_module(buffer.sample())["loss"]
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            target.step()
        finished = data["next", "step_count"][data["next", "done"]].float()
        strategy = explore.strategy
        history.append(
            {
                "alpha": float(strategy.alpha),
                "beta": float(strategy.beta),
                "epsilon": float(explore.eps),
                "steps": float(finished.mean()) if finished.numel() else float("nan"),
            }
        )
    collector.shutdown()
    return history


def draw(history: list[dict[str, float]], frames_per_batch: int = 50) -> plt.Figure:
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 6), sharex=True, layout="constrained")
    frame = torch.arange(1, len(history) + 1) * frames_per_batch
    alpha, beta, epsilon, steps = (
        torch.tensor([row[name] for row in history], dtype=torch.float64)
        for name in ("alpha", "beta", "epsilon", "steps")
    )
    grid = torch.linspace(0.0005, 0.9995, 400, dtype=torch.float64)
    density = torch.distributions.Beta(alpha[:, None], beta[:, None]).log_prob(grid).exp()
    density /= density.amax(-1, keepdim=True)
    top.pcolormesh(frame, grid, density.T, cmap="Blues", shading="nearest", rasterized=True)
    top.plot(frame, epsilon, color="#D55E00", label="ε, the posterior's mean")
    top.set(ylabel="ε", ylim=(0, 0.8), title="Beta posterior over ε (shaded), ε-BMC on CartPole-v1")
    top.legend()
    seen = ~steps.isnan()
    bottom.plot(frame[seen], steps[seen], color="#0072B2", marker=".", linewidth=0.8)
    bottom.set(xlabel="frames", ylabel="steps per training episode")
    return figure


def main() -> None:
    frames = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    print(f"What changes in a TorchRL DQN script:\n\n{DIFF}\n")
    history = train(frames)
    out = Path("outputs/cartpole_dqn")
    out.mkdir(parents=True, exist_ok=True)
    draw(history).savefig(out / "epsilon.png", dpi=150)
    first, last = history[0]["epsilon"], history[-1]["epsilon"]
    print(f"ε went from {first:.3f} to {last:.4f} in {frames} frames, with no schedule.")
    print(f"Figure: {out / 'epsilon.png'}")


if __name__ == "__main__":
    main()
