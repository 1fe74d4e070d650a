"""Greedy test episodes: policies take turns in a fixed number of slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bmc_torchrl.envs.lanes import LaneDomain

__all__ = ["GreedyTests", "Outcome", "Rollout", "greedy_steps"]


class Rollout(NamedTuple):
    """Test episodes under way, each ``[slots, tests]``.

    Attributes:
        state: of the domain.
        alive: whether the episode has not ended.
        steps: taken so far, float32.
        returns: discounted, float32.
        discount: of the next reward, float32.
    """

    state: Tensor
    alive: Tensor
    steps: Tensor
    returns: Tensor
    discount: Tensor


class Outcome(NamedTuple):
    """Mean steps and mean discounted return of one policy's tests; whether all hit the limit."""

    lane: int
    episode: int
    steps: float
    returns: float
    perfect: bool


def greedy_steps(
    domain: LaneDomain,
    choose: Callable[[Tensor, Tensor], Tensor],
    policy: Tensor,
    rollout: Rollout,
    noise: Tensor,
    gamma: float,
) -> Rollout:
    """Some steps of every test episode.

    Args:
        domain: what is stepped.
        choose: the greedy action ``[slots, tests]`` of ``(policy, state)``.
        policy: whatever `choose` reads, ``[slots, …]``.
        rollout: where the episodes stand.
        noise: for the transitions, ``[steps, slots, tests, n]``.
        gamma: discount factor.
    """
    state, alive, steps, returns, discount = rollout
    for now in noise.unbind(0):
        following, reward, terminated = domain.step(state, choose(policy, state), now)
        mask = alive.reshape(*alive.shape, *[1] * (state.ndim - alive.ndim))
        state = torch.where(mask, following, state)
        running = alive.float()
        steps = steps + running
        returns = returns + running * discount * reward
        discount = discount * gamma
        alive = alive & ~terminated & (steps < domain.max_steps)
    return Rollout(state, alive, steps, returns, discount)


class GreedyTests:
    """Tests of queued policies, `slots` at a time; a slot takes the next policy once it is free.

    Args:
        domain: what is stepped.
        advance: :func:`greedy_steps` as a function of policy, rollout and noise.
        slots: policies tested together.
        tests: episodes per policy.
        policy: one policy, for its shape and dtype.
        generator: of all draws.
        unroll: steps per call of `advance`.
        patience: calls of `advance` between looks at what has ended.
    """

    def __init__(
        self,
        domain: LaneDomain,
        advance: Callable[[Tensor, Rollout, Tensor], Rollout],
        *,
        slots: int,
        tests: int,
        policy: Tensor,
        generator: torch.Generator,
        unroll: int,
        patience: int = 10,
    ) -> None:
        self.domain, self.advance, self.generator = domain, advance, generator
        self.shape, self.unroll, self.patience = (slots, tests), unroll, patience
        device = domain.device
        self.policy = torch.zeros(slots, *policy.shape, dtype=policy.dtype, device=device)
        zeros = [torch.zeros(self.shape, device=device) for _ in range(3)]
        reset = torch.zeros(*self.shape, domain.resets, device=device)
        alive = torch.zeros(self.shape, dtype=torch.bool, device=device)
        first = torch.zeros(self.shape, dtype=torch.int64, device=device)
        self.rollout = Rollout(domain.start(reset, first), alive, *zeros)
        self.owners: list[tuple[int, int] | None] = [None] * slots
        self.queued: list[tuple[int, int]] = []
        self.waiting: list[Tensor] = []

    @property
    def pending(self) -> int:
        """How many policies wait or are being tested."""
        return len(self.queued) + len(self.owners) - self.owners.count(None)

    def add(self, owners: Sequence[tuple[int, int]], policies: Tensor) -> None:
        """Queue `policies` ``[n, …]`` of (lane, episode) `owners`."""
        self.queued += owners
        self.waiting.append(policies)

    def run(self, *, drain: bool) -> list[Outcome]:
        """Test while every slot has work, or with `drain` until there is none left."""
        outcomes: list[Outcome] = []
        while self.pending >= (1 if drain else len(self.owners)):
            self._fill()
            shape = (self.unroll * self.patience, *self.shape)
            uniform = self.domain.draw_transition(shape, self.generator)
            noise = self.domain.transition_noise(uniform)
            for now in torch.split(noise, self.unroll):
                self.rollout = self.advance(self.policy, self.rollout, now)
            outcomes += self._collect()
        return outcomes

    def _fill(self) -> None:
        free = [slot for slot, owner in enumerate(self.owners) if owner is None]
        free = free[: len(self.queued)]
        if not free:
            return
        policies = torch.cat(self.waiting)
        self.waiting = [policies[len(free) :]]
        slots = torch.tensor(free, device=policies.device)
        self.policy[slots] = policies[: len(free)]
        reset = self.domain.draw_reset((len(free), self.shape[1]), self.generator)
        episodes = [[episode] for _, episode in self.queued[: len(free)]]
        start = self.domain.start(reset, torch.tensor(episodes, device=policies.device))
        fresh: tuple[Any, ...] = (start, True, 0.0, 0.0, 1.0)
        for tensor, value in zip(self.rollout, fresh, strict=True):
            tensor[slots] = value
        queue = iter(self.queued)
        for slot in free:
            self.owners[slot] = next(queue)
        self.queued = list(queue)

    def _collect(self) -> list[Outcome]:
        rollout, limit = self.rollout, self.domain.max_steps
        ended = (~rollout.alive).all(-1).tolist()
        perfect = (rollout.steps >= limit).all(-1).tolist()
        steps, returns = (x.double().mean(-1).tolist() for x in (rollout.steps, rollout.returns))
        outcomes = []
        for slot, owner in enumerate(self.owners):
            if owner is not None and ended[slot]:
                outcomes.append(Outcome(*owner, steps[slot], returns[slot], perfect[slot]))
                self.owners[slot] = None
        # A policy's tests may be overtaken by those of its lane's next episode.
        return sorted(outcomes, key=lambda outcome: outcome[:2])

    def state_dict(self) -> dict[str, Any]:
        """Slots and queue, as tensors."""
        owners = [owner if owner is not None else (-1, -1) for owner in self.owners]
        return {
            "policy": self.policy.clone(),
            "rollout": [tensor.clone() for tensor in self.rollout],
            "owners": torch.tensor(owners),
            "queued": torch.tensor(self.queued, dtype=torch.int64).reshape(-1, 2),
            "waiting": torch.cat([self.policy[:0], *self.waiting]),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where :meth:`state_dict` was taken."""
        self.policy.copy_(state["policy"])
        self.rollout = Rollout(*(tensor.to(self.domain.device) for tensor in state["rollout"]))
        owners = [(int(lane), int(episode)) for lane, episode in state["owners"]]
        self.owners = [None if owner[0] < 0 else owner for owner in owners]
        self.queued = [(int(lane), int(episode)) for lane, episode in state["queued"]]
        self.waiting = [state["waiting"].to(self.domain.device)]
