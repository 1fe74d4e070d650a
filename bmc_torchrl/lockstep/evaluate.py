"""Greedy test episodes of many networks or tables at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from bmc_torchrl.lockstep.domains import LaneDomain, Noise

__all__ = ["Rollout", "greedy_steps", "greedy_tests"]


class Rollout(NamedTuple):
    """Test episodes under way, each ``[policies, tests]``.

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
        choose: the greedy action ``[policies, tests]`` of ``(policy, state)``.
        policy: whatever `choose` reads, ``[policies, …]``.
        rollout: where the episodes stand.
        noise: for the transitions, ``[steps, policies, tests, n]``.
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
        alive = alive & ~terminated
    return Rollout(state, alive, steps, returns, discount)


def greedy_tests(
    domain: LaneDomain,
    advance: Callable[[Tensor, Rollout, Tensor], Rollout],
    policy: Tensor,
    draws: Noise,
    *,
    unroll: int,
    patience: int = 5,
) -> tuple[Tensor, Tensor]:
    """Steps and discounted return ``[policies, tests]`` of one greedy episode per test.

    Args:
        domain: what is stepped.
        advance: :func:`greedy_steps` as a function of policy, rollout and noise.
        policy: ``[policies, …]``.
        draws: transition ``[max_steps, policies, tests, n]``, reset ``[policies, tests, n]``.
        unroll: steps per call of `advance`; divides the step limit.
        patience: calls between looks at whether all have ended.
    """
    alive = torch.ones(draws.reset.shape[:-1], dtype=torch.bool, device=draws.reset.device)
    zeros = torch.zeros_like(alive, dtype=torch.float32)
    rollout = Rollout(domain.start(draws.reset), alive, zeros, zeros, torch.ones_like(zeros))
    noise = domain.transition_noise(draws.transition)
    for call, start in enumerate(range(0, domain.max_steps, unroll)):
        rollout = advance(policy, rollout, noise[start : start + unroll])
        if call % patience == patience - 1 and not bool(rollout.alive.any()):
            break
    return rollout.steps, rollout.returns
