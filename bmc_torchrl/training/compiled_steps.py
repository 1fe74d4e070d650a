"""Whole DQN updates as one compiled call between two steps of the environment."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, optim
from torch.func import functional_call, grad
from torch.optim import Optimizer

from bmc_torchrl.learners.q_learning import Experience, QLearning
from bmc_torchrl.learners.ranks import world_size
from bmc_torchrl.lockstep.compiling import CompiledOnce
from bmc_torchrl.training.online import OnlineLearning
from bmc_torchrl.training.optimizers import CountedOptimizer, clip_each_run

__all__ = ["CompiledSteps"]

TRACED = (optim.Adam, optim.AdamW, optim.RMSprop, optim.SGD)
"""Optimisers whose step can be part of the graph."""


class Seen(NamedTuple):
    """A step of the environments, as the graph reads it.

    Attributes:
        experience: The transition.
        value: Action values that the action was chosen by.
        mask_left: Legal actions then, or None.
        state: Discrete states that were left, or None.
        reached: Discrete states that it led to, before any reset, or None.
        observation: What is seen now.
        mask: Legal actions now, or None.
        state_now: Discrete states now, or None.
        active: The runs that still learn, or None if all always do.
        draws: Uniform numbers that choose the minibatch.
        coins: Uniform numbers that choose the next action.
    """

    experience: Experience
    value: Tensor
    mask_left: Tensor | None
    state: Tensor | None
    reached: Tensor | None
    observation: Tensor
    mask: Tensor | None
    state_now: Tensor | None
    active: Tensor | None
    draws: Tensor
    coins: Tensor


class Acting(NamedTuple):
    """What the graph decides to do next, ``[runs]``.

    Attributes:
        action: Actions to take.
        value: Action values that they were chosen by, ``[runs, actions]``.
        epsilon: ε that they were chosen with.
    """

    action: Tensor
    value: Tensor
    epsilon: Tensor


class CompiledSteps:
    """The updates of an :class:`OnlineLearning`, compiled.

    On a CPU the calls between small operations are most of a DQN's time. Here there is one between
    two steps of the environment: keep the transition, sample, differentiate the loss, step the
    optimiser, move the target network and ε, and choose the next action. Where the optimiser's step
    cannot be in a graph, or others must see it, it stands between two. Draws are made outside, so
    that the numbers are those of the eager path.

    Args:
        online (OnlineLearning): With plain-tensor learning, on one device.
        runs (int or None): Whether parameters have a leading dimension of runs.
        max_grad_norm (float or None): Gradient clipping, each run by itself.
        scheduled (bool): Whether the learning rate changes all the time, and so is no constant.
    """

    def __init__(
        self,
        online: OnlineLearning,
        runs: int | None,
        max_grad_norm: float | None = None,
        scheduled: bool = False,
    ) -> None:
        if not isinstance(online.learning, QLearning) or world_size() > 1:
            raise ValueError(
                "compile=True learns on plain tensors and one device: leave loss= a name, and "
                "replay_buffer=, collector= and several devices out, or use compile=False."
            )
        if online.frames_per_update > 1:
            raise ValueError("compile=True has one frame per update: use frames_per_update=1.")
        self.online, self.learning = online, online.learning
        self.runs, self.max_grad_norm, self.scheduled = runs, max_grad_norm, scheduled
        self.parameters = dict(online.network.named_parameters())
        self.gradients = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.everyone = torch.ones(online.log.runs, dtype=torch.bool)
        self.acting: Acting | None = None
        self.traced: Optimizer | None = None
        self.traced_settings: list[dict[str, Any]] = []
        self.graphs: list[CompiledOnce] = []

    @torch.no_grad()
    def update(self, optimizer: LightningOptimizer | CountedOptimizer) -> None:
        """Step the environments, learn with `optimizer`, then let ε learn and choose to act."""
        online, interaction, learning = self.online, self.online.interaction, self.learning
        online.start()
        while len(learning) < online.learning_starts - 1:
            online.frame()
        online.finish()
        if online.bank is not None:
            online.bank.settle()
        if self.acting is None:
            self.acting = self._act(interaction.observation, interaction.mask, interaction.state)
        acting, state, mask_left = self.acting, interaction.state, interaction.mask
        experience = interaction.step(acting.action)
        learning.ring.prepare(experience.columns())
        draws = learning.draws()
        # Until an episode ends these are one tensor with another argument, and a graph without
        # guards that was compiled then would take the one for the other for ever.
        seen = Seen(
            experience=experience._replace(done=experience.done.clone()),
            value=acting.value,
            mask_left=mask_left,
            state=state,
            reached=interaction.state_after,
            observation=interaction.observation.clone(),
            mask=_copy(interaction.mask),
            state_now=_copy(interaction.state),
            active=self._active(),
            draws=draws,
            coins=online.coins(learning.ring.time.device),
        )
        self._compile_for(optimizer)
        if self.traced is None:
            learn, reflect = self.graphs
            learned = learn(seen)
            optimizer.step()
            self.acting = reflect(seen, *learned)
            online.loss = learned[0]
        else:
            assert isinstance(optimizer, CountedOptimizer)
            online.loss, self.acting = optimizer.counted(self.graphs[0], seen)
        learning.ring.added += 1
        share = learning.due_share()
        if share and learning.target_interval > 1:
            learning.move_target(share)
        online.account(experience, acting.epsilon)

    def state_dict(self) -> dict[str, Tensor]:
        """The action that was chosen and not yet taken."""
        return {} if self.acting is None else self.acting._asdict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take it."""
        self.acting = Acting(**state) if state else None

    def _compile_for(self, optimizer: LightningOptimizer | CountedOptimizer) -> None:
        """The graphs that `optimizer` needs; what it is set to becomes part of its own graph."""
        if self.graphs and self.traced is None:
            return
        inner = optimizer.optimizer
        settings = [{k: v for k, v in g.items() if k != "params"} for g in inner.param_groups]
        if self.graphs and self.traced is inner and self.traced_settings == settings:
            return
        options: dict[str, Any] = {"enabled": True, "told": sys.stderr, "guarded": False}
        for name, parameter in self.parameters.items():
            parameter.grad = self.gradients[name]
        known = type(inner) in TRACED and not any(group.get("fused") for group in settings)
        changed = self.traced is inner
        if known and not (self.scheduled or changed) and isinstance(optimizer, CountedOptimizer):
            self.traced, self.traced_settings = inner, settings
            self.graphs = [CompiledOnce(self._whole, "the DQN update", **options)]
        else:
            self.traced = None
            self.graphs = [
                CompiledOnce(self._learn, "the DQN update", **options),
                CompiledOnce(self._reflect, "ε and the next action", **options),
            ]

    def _active(self) -> Tensor | None:
        """Of one kind from the first to the last step, as a graph needs it."""
        if self.online.log.endless:
            return None
        active = self.online.active
        if active is None:
            self.everyone = active = self.everyone.to(self.online.log.done.device)
        return active

    def _act(
        self,
        observation: Tensor,
        mask: Tensor | None,
        state: Tensor | None,
        coins: Tensor | None = None,
    ) -> Acting:
        online = self.online
        value, epsilon = online.network(observation), online.epsilon_at(state)
        coins = online.coins(self.learning.ring.time.device) if coins is None else coins
        return Acting(online.action_from(value, epsilon, mask, coins), value, epsilon)

    def _whole(self, seen: Seen) -> tuple[Tensor, Acting]:
        assert self.traced is not None
        loss, *learned = self._learn(seen)
        unwrapped_step(self.traced)
        return loss, self._reflect(seen, loss, *learned)

    def _learn(self, seen: Seen) -> tuple[Any, ...]:
        online, learning, experience = self.online, self.learning, seen.experience
        greedy, uniform = online.returns(experience)
        learning.ring.write(experience.columns())
        batch = learning.ring.sample(seen.draws)
        epsilon = online.epsilon_at(seen.reached) if online.on_policy else None

        def objective(parameters: dict[str, Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
            loss, error = learning.loss(
                batch, epsilon, lambda x: functional_call(online.network, parameters, (x,))
            )
            return loss.sum(), (loss,) if error is None else (loss, error)

        detached = {name: p.detach() for name, p in self.parameters.items()}
        gradients, (loss, *error) = grad(objective, has_aux=True)(detached)
        for name, gradient in self.gradients.items():
            gradient.copy_(gradients[name])
        if self.max_grad_norm is not None:
            clip_each_run(self.gradients.values(), self.max_grad_norm, self.runs or 1)
        return loss.reshape(-1), greedy, uniform, batch.rows, *error

    def _reflect(
        self,
        seen: Seen,
        loss: Tensor,
        greedy: Tensor,
        uniform: Tensor,
        rows: Tensor,
        error: Tensor | None = None,
    ) -> Acting:
        online, learning, experience = self.online, self.learning, seen.experience
        if error is not None:
            learning.ring.surprise(rows, error)
        if learning.target_tau is not None and learning.target_interval == 1:
            learning.move_target(learning.target_tau)
        change = None
        if online.needs_change:
            chosen = online.chosen(seen.value, experience.action)
            change = online.value_change(experience, chosen)
        if online.learns_epsilon:
            left = online.left(seen.value, experience.action, seen.mask_left)
            online.learn_epsilon(
                experience.done, seen.state, greedy, uniform, change, left, seen.active
            )
        online.replacement.end(experience.done)
        return self._act(seen.observation, seen.mask, seen.state_now, seen.coins)


def _copy(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.clone()


def unwrapped_step(optimizer: Optimizer) -> None:
    """``optimizer.step()`` without the wrappers around it, which would break a graph."""
    step: Any = type(optimizer).step
    while hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    step(optimizer)
