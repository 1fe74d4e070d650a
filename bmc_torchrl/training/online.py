"""The algorithm's order, one update at a time: returns with Q before learning, learn, update ε."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import NestedKey, TensorDict
from torch import Tensor, nn

from bmc_torchrl.actions import ActionLayout, Choice, Replacement, UniformAction
from bmc_torchrl.exploration import VALUE_KEYS
from bmc_torchrl.functional import (
    bootstrapped_return,
    epsilon_greedy_action,
    greedy_value,
    uniform_action,
    uniform_value,
    values_left,
)
from bmc_torchrl.learners.q_learning import Experience, Learning
from bmc_torchrl.learners.ranks import from_all_ranks, rank, world_size
from bmc_torchrl.strategies import EpsilonStrategy, StrategyBank
from bmc_torchrl.strategies.whatif import diagnosed
from bmc_torchrl.training.episodes import EpisodeLog
from bmc_torchrl.training.interaction import Interaction
from bmc_torchrl.training.transitions import random_state, restore_random_state, seed_everything

__all__ = ["OnlineLearning", "Pending"]


Left = tuple[Tensor, Tensor, Tensor]
"""What :func:`~bmc_torchrl.functional.values_left` gives."""


class Pending(NamedTuple):
    """A transition that the strategy learns from once Q has learned.

    Attributes:
        experience: The transition.
        epsilon: ε that it was taken with, ``[runs]``.
        state: Discrete state that was left, or None.
        greedy: Return of acting greedily from then on, with Q before learning.
        uniform: Return of acting uniformly.
        chosen: Q(s, a) before learning, where the strategy learns from its change.
        left: What Q said of the state that was left, where the strategy learns from it.
    """

    experience: Experience
    epsilon: Tensor
    state: Tensor | None
    greedy: Tensor
    uniform: Tensor
    chosen: Tensor | None
    left: Left | None


class OnlineLearning:
    """Acts, keeps, and lets the strategy learn after Q has learned, for any number of runs.

    :meth:`next_batch` interacts and gives the minibatch of the next update; :meth:`finish` is
    called when Q has learned from it.

    Args:
        network (nn.Module): Observations to action values.
        strategy (EpsilonStrategy): The source of ε.
        learning (Learning): Replay and loss.
        interaction (Interaction): The environments.
        log (EpisodeLog): Where runs stand.
        num_actions (int): How many actions there are.
        replacement (Replacement or None): What replaces an action, a uniform one by default.
        gamma (float): Discount factor.
        mask_terminated (bool): No bootstrap from terminal states in the returns.
        on_policy (bool): Whether the loss needs ε of the next state.
        learning_starts (int): Transitions before the first update.
        frames_per_update (int): Environment steps per update.
        shared_posterior (bool): Learn ε from all ranks' transitions.
    """

    def __init__(
        self,
        network: nn.Module,
        strategy: EpsilonStrategy,
        learning: Learning,
        interaction: Interaction,
        log: EpisodeLog,
        *,
        num_actions: int,
        replacement: Replacement | None = None,
        gamma: float,
        mask_terminated: bool = True,
        on_policy: bool = False,
        learning_starts: int = 1,
        frames_per_update: int = 1,
        shared_posterior: bool = False,
    ) -> None:
        self.network, self.strategy, self.learning = network, strategy, learning
        self.interaction, self.log, self.num_actions = interaction, log, num_actions
        self.layout = ActionLayout((num_actions,), one_hot=False, multiple=False)
        self.replacement = UniformAction() if replacement is None else replacement
        self.replacement.start([log.runs])
        self.gamma, self.mask_terminated, self.on_policy = gamma, mask_terminated, on_policy
        self.learning_starts, self.frames_per_update = learning_starts, frames_per_update
        self.shared_posterior = shared_posterior
        self.in_keys = set(strategy.in_keys)
        self.bank: StrategyBank | None = None
        self.step_hooks: list[Callable[[Tensor], None]] = []
        self.loss = torch.zeros(log.runs)
        self.started = False
        self.vector_steps = 0
        self._resume: dict[str, Any] | None = None
        self._pending: Pending | None = None
        self._nothing = TensorDict({}, [log.runs])
        self._finished: Tensor | None = None
        self.over = False
        self._running = [[0.0] * 4 for _ in range(log.runs)]

    def watch(self, bank: StrategyBank) -> None:
        """Let strategies that do not act learn from the same transitions."""
        self.bank = bank
        self.in_keys |= set(bank.in_keys)

    @property
    def needs_change(self) -> bool:
        """Whether a strategy learns from what learning changes of Q."""
        return "value_change" in self.in_keys

    @property
    def needs_values(self) -> bool:
        """Whether a strategy learns from what Q says of the state being left."""
        return VALUE_KEYS[0] in self.in_keys

    @property
    def learns_epsilon(self) -> bool:
        """Whether a strategy learns from transitions."""
        return self.strategy.needs_update or self.bank is not None

    def start(self) -> None:
        """Begin the first episodes, or go on where a checkpoint stopped."""
        if self.started:
            return
        self.started = True
        if self._resume is None:
            if rank():
                seed_everything(torch.initial_seed() + rank())
            self.interaction.start()
            return
        resume, self._resume = self._resume, None
        self.interaction.load_state_dict(resume["interaction"])
        self.learning.refill(resume["learning"])
        restore_random_state(resume["random"])
        self._running = self.log.running.T.tolist()
        self.look_who_finished()

    def next_batch(self) -> Any:
        """Interact until an update is due, and give its minibatch."""
        self.start()
        for _ in range(self.frames_per_update):
            self.frame()
        while len(self.learning) < self.learning_starts:
            self.frame()
        return self.learning.sample()

    @torch.no_grad()
    def frame(self) -> None:
        """One transition of every run, with its returns before learning."""
        self.finish()
        interaction = self.interaction
        state, value = interaction.state, self.network(interaction.observation)
        epsilon = self.epsilon_at(state)
        action = self.action_from(value, epsilon, interaction.mask, self.coins(value.device))
        left = self.left(value, action, interaction.mask)
        experience = interaction.step(action)
        self.replacement.end(experience.done)
        greedy, uniform = self.returns(experience)
        self.learning.add(experience)
        chosen = self.chosen(value, action) if self.needs_change else None
        self._pending = Pending(experience, epsilon, state, greedy, uniform, chosen, left)

    def epsilon_at(self, state: Tensor | None) -> Tensor:
        """ε of every run, in discrete states where it depends on them."""
        key = self.strategy.state_key
        if key is None:
            epsilon = self.strategy.epsilon(self._nothing)
        else:
            known = {key: self._known(state, key)}
            epsilon = self.strategy.epsilon(TensorDict(known, [self.log.runs]))
        return epsilon.float().expand(self.log.runs)

    def epsilon_after(self) -> Tensor | None:
        """ε of the state just reached, where the target needs it."""
        return self.epsilon_at(self.interaction.state_after) if self.on_policy else None

    def coins(self, device: torch.device) -> Tensor:
        """Uniform numbers that decide the next actions: ``[1 + num_draws, runs]``, coins first."""
        rows = 1 + self.replacement.num_draws(self.layout)
        return torch.rand(rows, self.log.runs, dtype=torch.float32, device=device)

    def action_from(
        self, value: Tensor, epsilon: Tensor, mask: Tensor | None, coins: Tensor
    ) -> Tensor:
        """ε-greedy actions ``[runs]`` from action values and :meth:`coins`."""
        if mask is None and type(self.replacement) is UniformAction:
            random = uniform_action(coins[1], self.num_actions)
            return epsilon_greedy_action(value.argmax(-1), epsilon, coins[0], random)
        legal = value if mask is None else value.masked_fill(~mask, -torch.inf)
        choice = Choice(legal.argmax(-1), epsilon, mask, value)
        action: Tensor = self.replacement(self.layout, choice, coins[0], coins[1:].T)
        return action

    def returns(self, experience: Experience) -> list[Tensor]:
        """The greedy and the uniform model's return of each run, ``[runs]``."""
        value = self.network(experience.after).float()
        ended = experience.terminated if self.mask_terminated else None
        models = greedy_value(value, experience.mask), uniform_value(value, experience.mask)
        return [bootstrapped_return(experience.reward, v, self.gamma, ended) for v in models]

    def left(self, value: Tensor, action: Tensor, mask: Tensor | None) -> Left | None:
        """What Q says of the state being left, ``[runs]`` each; None where nobody asks."""
        return values_left(value.float(), action, mask) if self.needs_values else None

    @torch.no_grad()
    def finish(self) -> None:
        """Let the strategy learn from the last transition, and account for it."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        experience, change = pending.experience, None
        if pending.chosen is not None:
            change = self.value_change(experience, pending.chosen)
        if self.learns_epsilon:
            self.learn_epsilon(
                experience.done,
                pending.state,
                pending.greedy,
                pending.uniform,
                change,
                pending.left,
                self.active,
            )
        self.account(experience, pending.epsilon)

    def value_change(self, experience: Experience, chosen: Tensor) -> Tensor:
        """By how much learning changed Q(s, a), ``[runs]``."""
        return self.chosen(self.network(experience.before), experience.action) - chosen

    def chosen(self, value: Tensor, action: Tensor) -> Tensor:
        """Values of actions, ``[runs]``."""
        return value.gather(-1, action.unsqueeze(-1)).squeeze(-1)

    @property
    def active(self) -> Tensor | None:
        """The runs that still learn, or None if all do."""
        return None if self._finished is None else ~self._finished

    def look_who_finished(self) -> None:
        """Read from the log which runs have finished, and whether all have."""
        finished = None if self.log.endless else self.log.finished
        known = self.interaction.known is not None
        if finished is not None and known and not bool(finished.any()):
            finished = None
        self._finished = finished
        self.over = finished is not None and bool(finished.all())

    def learn_epsilon(
        self,
        done: Tensor,
        state: Tensor | None,
        greedy: Tensor,
        uniform: Tensor,
        change: Tensor | None,
        left: Left | None,
        active: Tensor | None,
    ) -> None:
        """Let strategies learn from a transition, each argument ``[runs]`` or None."""
        entries: dict[Any, Any] = {"greedy_return": greedy, "uniform_return": uniform}
        if ("next", "done") in self.in_keys:
            entries["next"] = {"done": done.unsqueeze(-1)}
        if change is not None:
            entries["value_change"] = change
        if left is not None:
            entries |= zip(VALUE_KEYS, left, strict=True)
        for key in (self.strategy.state_key, *self._bank_state_keys()):
            if key is not None:
                entries[key] = self._known(state, key)
        if active is not None:
            entries["collector"] = {"mask": active}
        transition = TensorDict(entries, [self.log.runs])
        if self.shared_posterior and world_size() > 1:
            parts = [part.to(greedy.device) for part in from_all_ranks(transition.cpu())]
            transition = torch.stack(parts, -1)
        if self.strategy.needs_update:
            self.strategy.update(transition)
        if self.bank is not None:
            self.bank.tell(transition)

    def _bank_state_keys(self) -> Sequence[NestedKey]:
        return () if self.bank is None else self.bank.state_keys

    def _known(self, state: Tensor | None, key: NestedKey) -> Tensor:
        if state is None:
            raise ValueError(
                f"A strategy keeps an ε per state, and the environment has no discrete state at "
                f"{key!r}: pass state_key= to the strategy, or build it without num_states "
                "(num_states=1 for VDBE)."
            )
        return state

    def account(self, experience: Experience, epsilon: Tensor) -> None:
        """Count the step; where the host knows the rewards, tensors are touched at ends only."""
        self.vector_steps += 1
        known = self.interaction.known
        if known is not None:
            rewards, ended = known
            if ended:
                self.write_running()
            used, losses = epsilon.tolist(), self.loss.tolist()
            for totals, *values in zip(self._running, rewards, used, losses, strict=True):
                totals[0] += 1.0
                for place, value in enumerate(values, start=1):
                    totals[place] += value
            for row in ended:
                self._running[row] = [0.0] * 4
            if not ended:
                return
        said = diagnosed(self.strategy, self.bank)
        due = self.log.record(experience.reward, experience.done, epsilon, self.loss, said)
        for hook in self.step_hooks:
            hook(due)
        self.look_who_finished()

    def write_running(self) -> None:
        """Give the log what only the host has counted so far."""
        self.log.running.copy_(torch.tensor(self._running, dtype=torch.float64).T)

    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on exactly from here: environments, replay, random numbers."""
        if self.interaction.known is not None:
            self.write_running()
        return {
            "interaction": self.interaction.state_dict(),
            "learning": self.learning.contents(),
            "random": random_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there when learning starts."""
        self._resume = state
