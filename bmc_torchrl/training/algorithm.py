"""The algorithm, once: returns with Q before learning, learn, update the strategy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from torch import Tensor
from torchrl.envs.utils import ExplorationType, set_exploration_type

from bmc_torchrl.exploration import AdaptiveEGreedyModule, OneStepReturns
from bmc_torchrl.learners.ranks import from_all_ranks, of_this_rank, world_size
from bmc_torchrl.learners.rules import ACTIVE_KEY, LearningRule
from bmc_torchrl.strategies import StrategyBank
from bmc_torchrl.strategies.base import epsilon_used
from bmc_torchrl.training.run_records import ChunkedLearner

__all__ = ["EpsilonGreedyLearner", "NextAction"]


class EpsilonGreedyLearner(ChunkedLearner):
    """Value-based learning with an ε-greedy policy whose ε adapts, for any number of runs.

    One ``training_step`` is a chunk of vector steps; Lightning's ``global_step`` counts chunks.
    Nothing leaves the device within a chunk.

    Args:
        q_actor: writes ``action_value`` and the greedy ``action``.
        explore: the exploration module with its strategy.
        returns: writes the two models' returns.
        rule: how Q learns.
        runs: number of runs, the batch size of every transition.
        episodes: training episodes of each run.
        next_action: when the next action is drawn: ``"after"`` learning, as in Algorithm 1, or
            ``"before"``, as in the published data of expected SARSA.
        shared_posterior: with several ranks, let every rank's strategy learn from all ranks'
            transitions, in rank order; otherwise each rank keeps its own.
        test_every: episodes between two tests.
        compile: compile the learning and the strategy's update, with these options of
            ``torch.compile``.
    """

    def __init__(
        self,
        q_actor: TensorDictModuleBase,
        explore: AdaptiveEGreedyModule,
        returns: OneStepReturns,
        rule: LearningRule,
        *,
        runs: int,
        episodes: int,
        next_action: Literal["before", "after"] = "after",
        shared_posterior: bool = False,
        test_every: int = 1,
        compile: bool | dict[str, Any] = False,
    ) -> None:
        super().__init__(
            explore.strategy,
            runs=runs,
            episodes=episodes,
            test_every=test_every,
        )
        if next_action not in ("before", "after"):
            raise ValueError(f"next_action must be 'before' or 'after', got {next_action!r}.")
        if next_action == "before" and not rule.on_policy:
            raise ValueError(
                "next_action='before' is for on-policy rules such as TabularSarsa, not "
                f"{type(rule).__name__}; use 'after', as the experiments named …_dqn do."
            )
        if next_action == "before" and explore.explore.remembers:
            raise ValueError(
                "explore='zeta' holds actions from step to step, and next_action='before' draws "
                "some that are not taken; use 'after', as protocol=paper does."
            )
        self.q_actor, self.explore, self.returns, self.rule = q_actor, explore, returns, rule
        self.shared_posterior = shared_posterior
        self.needs_change = "value_change" in explore.strategy.in_keys
        acting = TensorDictSequential(q_actor, explore)
        self.next_action = NextAction(acting, runs) if next_action == "before" else None
        self.policy = acting if self.next_action is None else self.next_action
        self.step_hooks: list[Any] = []
        self._update_strategy = explore.update
        if compile:
            options = compile if isinstance(compile, dict) else {}
            rule.compile_learning(**options)
            self._update_strategy = torch.compile(explore.update, **options)
        # Gradients are averaged by the rule, and posteriors are not broadcast over each other.
        self._ddp_params_and_buffers_to_ignore = [
            name
            for name in (*dict(self.named_parameters()), *dict(self.named_buffers()))
            if name != "clock"
        ]

    def training_step(self, chunk: Iterator[TensorDictBase], index: int) -> None:
        """Learn from a chunk of vector steps."""
        with _single_precision():
            for transition in chunk:
                self.step(transition)
                self.vector_steps += 1
        self.count_chunk()

    @torch.no_grad()
    def step(self, transition: TensorDictBase) -> None:
        """The algorithm on one vector step ``[runs]``."""
        log = self.log_of_episodes
        transition.set(ACTIVE_KEY, ~log.finished)
        if self.next_action is not None:
            self.next_action.commit(transition)
        elif self.rule.on_policy:
            epsilon = self.explore.strategy.epsilon(transition.get("next"))
            transition.set(("next", "epsilon"), epsilon.to(torch.get_default_dtype()))
        self._learn(transition, log.done)
        logged = ("next", "epsilon") if self.rule.on_policy else "epsilon"
        due = log.record(
            transition.get(("next", "reward")).squeeze(-1),
            transition.get(("next", "done")).squeeze(-1),
            epsilon_used(transition.get(logged)),
            transition.get("loss"),
            self.diagnostics(),
        )
        for hook in self.step_hooks:
            hook(due)

    def _learn(self, transition: TensorDictBase, episodes: Tensor) -> None:
        self.returns(transition)
        with torch.enable_grad():
            self.rule.learn(transition, episodes, self.needs_change)
        gathered = self._gathered(transition)
        self._update_strategy(gathered)
        if self.bank is not None:
            self.bank.update(gathered, self.explore.taken(gathered))

    def watch(self, bank: StrategyBank) -> None:
        """See :class:`~bmc_torchrl.training.run_records.RecordedLearner`."""
        super().watch(bank)
        self.needs_change |= "value_change" in bank.in_keys

    def _gathered(self, transition: TensorDictBase) -> TensorDictBase:
        """The transitions of all ranks, if the posterior is shared."""
        if not self.shared_posterior or world_size() == 1:
            return transition
        others = () if self.bank is None else self.bank.in_keys
        keys = (*self.explore.strategy.in_keys, *others, self.explore.epsilon_key, ACTIVE_KEY)
        kept = transition.select(*keys, strict=False)
        gathered = [part.to(transition.device) for part in from_all_ranks(kept.cpu())]
        result: TensorDictBase = torch.stack(gathered, -1)
        return result

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save what every rank has of its own: posterior, replay, episodes."""
        if world_size() > 1:
            checkpoint["ranks"] = from_all_ranks(checkpoint["state_dict"])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Give this rank its own back."""
        checkpoint["state_dict"] = of_this_rank(checkpoint.pop("ranks", [checkpoint["state_dict"]]))


@contextmanager
def _single_precision() -> Iterator[None]:
    """Undo what ``precision="bf16-true"`` does to random numbers: 256 of them are too few for ε."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class NextAction(TensorDictModuleBase):  # type: ignore[misc]
    """A policy whose action was drawn before the last update, except at the start of an episode.

    The published expected SARSA draws a′ with the Q and ε of before it learns from the transition
    that led to s′ (docs/protocol.md §3).
    """

    def __init__(self, acting: TensorDictSequential, runs: int) -> None:
        super().__init__()
        self.acting = acting
        self.in_keys, self.out_keys = acting.in_keys, acting.out_keys
        self.action: Tensor
        self.epsilon: Tensor
        self.first: Tensor
        self.register_buffer("action", torch.zeros(runs, dtype=torch.int64))
        self.register_buffer("epsilon", torch.zeros(runs))
        self.register_buffer("first", torch.ones(runs, dtype=torch.bool))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The committed action, or a fresh one where an episode starts."""
        tensordict = self.acting(tensordict)
        for key, committed in (("action", self.action), ("epsilon", self.epsilon)):
            fresh = tensordict.get(key)
            tensordict.set(key, torch.where(self.first.reshape(fresh.shape), fresh, committed))
        return tensordict

    def commit(self, transition: TensorDictBase) -> None:
        """Draw the action of the next step, and record ε of the next state."""
        following = transition.get("next").select(*self.in_keys, strict=False)
        with set_exploration_type(ExplorationType.RANDOM):
            drawn = self.acting(following)
        self.action.copy_(drawn.get("action"))
        self.epsilon.copy_(drawn.get("epsilon"))
        self.first.copy_(transition.get(("next", "done")).squeeze(-1))
        transition.set(("next", "epsilon"), epsilon_used(drawn.get("epsilon")))
