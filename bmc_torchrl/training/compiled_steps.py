"""Whole DQN updates as two compiled calls, with the optimiser's own step between them."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad

from bmc_torchrl.learners.q_learning import Experience, QLearning
from bmc_torchrl.learners.ranks import world_size
from bmc_torchrl.lockstep.compiling import CompiledOnce
from bmc_torchrl.training.online import OnlineLearning

__all__ = ["CompiledSteps"]


class CompiledSteps:
    """The updates of an :class:`OnlineLearning`, compiled.

    On a CPU the calls between small operations are most of a DQN's time. Between two steps of the
    environment there are three calls here: keep the transition, sample, and differentiate the
    loss; the optimiser's own step; move the target network and ε, and choose the next action.
    Draws are made outside, so that the numbers are those of the eager path.

    Args:
        online (OnlineLearning): With plain-tensor learning, on one device.
        runs (int or None): Whether parameters have a leading dimension of runs.
        max_grad_norm (float or None): Gradient clipping, each run by itself.
    """

    def __init__(
        self, online: OnlineLearning, runs: int | None, max_grad_norm: float | None = None
    ) -> None:
        if not isinstance(online.learning, QLearning) or world_size() > 1:
            raise ValueError(
                "compile=True learns on plain tensors and one device: leave loss= a name, and "
                "replay_buffer=, collector= and several devices out, or use compile=False."
            )
        if online.frames_per_update > 1:
            raise ValueError("compile=True has one frame per update: use frames_per_update=1.")
        self.online, self.learning = online, online.learning
        self.runs, self.max_grad_norm = runs, max_grad_norm
        self.parameters = dict(online.network.named_parameters())
        self.gradients = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.action: Tensor | None = None
        self.value: Tensor
        self.epsilon: Tensor
        options: dict[str, Any] = {"enabled": True, "announce": _say}
        self.learn = CompiledOnce(self._learn, "the DQN update", **options)
        self.reflect = CompiledOnce(self._reflect, "ε and the next action", **options)

    @torch.no_grad()
    def update(self, optimizer: Any) -> None:
        """Step the environments, learn with `optimizer`, then let ε learn and choose to act."""
        online, interaction = self.online, self.online.interaction
        online.start()
        while len(self.learning) < online.learning_starts - 1:
            online.frame()
        online.finish()
        if self.action is None:
            self._look()
        assert self.action is not None
        state, epsilon, value = interaction.state, self.epsilon, self.value
        experience = interaction.step(self.action)
        self.learning.ring.prepare(experience.columns())
        draws = self.learning.draws()
        greedy, uniform, loss, rows, error = self.learn(experience, draws, online.epsilon_after())
        self.learning.ring.added += 1
        for name, parameter in self.parameters.items():
            parameter.grad = self.gradients[name]
        optimizer.step()
        share = torch.tensor(self.learning.due_share(), device=draws.device)
        act = torch.rand(2, len(self.action), dtype=torch.float32, device=draws.device)
        seen = (interaction.observation, interaction.mask, interaction.state)
        self.action, self.value, self.epsilon = self.reflect(
            experience,
            state,
            greedy,
            uniform,
            value,
            rows,
            error,
            share,
            act,
            online.active(),
            *seen,
        )
        online.loss = loss
        online.account(experience, epsilon)

    def _look(self) -> None:
        """The first action, eagerly."""
        online, interaction = self.online, self.online.interaction
        self.value = online.network(interaction.observation)
        self.epsilon = online.epsilon_at(interaction.state)
        draws = torch.rand(2, len(self.value), dtype=torch.float32, device=self.value.device)
        self.action = online.action_from(self.value, self.epsilon, interaction.mask, draws)

    def _learn(
        self, experience: Experience, draws: Tensor, epsilon_after: Tensor | None
    ) -> tuple[Tensor, ...]:
        online, learning = self.online, self.learning
        greedy, uniform = online.returns(experience)
        learning.ring.write(experience.columns())
        batch = learning.ring.sample(draws)

        def objective(parameters: dict[str, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            loss, error = learning.loss(
                batch, epsilon_after, lambda x: functional_call(online.network, parameters, (x,))
            )
            return loss.sum(), (loss, error)

        detached = {name: p.detach() for name, p in self.parameters.items()}
        gradients, (loss, error) = grad(objective, has_aux=True)(detached)
        scale: Tensor | float = 1.0
        if self.max_grad_norm is not None:
            squares = [self._per_run(g).square().sum(-1) for g in gradients.values()]
            norm = torch.stack(squares).sum(0).sqrt()
            scale = (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0).unsqueeze(-1)
        for name, gradient in self.gradients.items():
            scaled = self._per_run(gradients[name]) * scale
            gradient.copy_(scaled.reshape(gradient.shape))
        return greedy, uniform, loss.reshape(-1), batch.rows, error

    def _per_run(self, gradient: Tensor) -> Tensor:
        return gradient.reshape(1 if self.runs is None else self.runs, -1)

    def _reflect(
        self,
        experience: Experience,
        state: Tensor | None,
        greedy: Tensor,
        uniform: Tensor,
        value: Tensor,
        rows: Tensor,
        error: Tensor,
        share: Tensor,
        act: Tensor,
        active: Tensor | None,
        observation: Tensor,
        mask: Tensor | None,
        state_now: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        online, learning = self.online, self.learning
        learning.ring.surprise(rows, error)
        if learning.target_tau is not None:
            learning.move_target(share)
        change = None
        if online.needs_change:
            chosen = value.gather(-1, experience.action.unsqueeze(-1)).squeeze(-1)
            change = online.value_change(experience, chosen)
        online.learn_epsilon(experience.done, state, greedy, uniform, change, active)
        value_now = online.network(observation)
        epsilon = online.epsilon_at(state_now)
        return online.action_from(value_now, epsilon, mask, act), value_now, epsilon


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
