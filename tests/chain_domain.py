"""A new domain in one file: three states in a row, a slippery floor, an end on the right."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from bmc_torchrl.envs.base import BatchedEnv
from bmc_torchrl.envs.lanes import LaneDomain

SLIP = 0.25


def chain_step(state: Tensor, action: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Action 1 goes right and 0 left, or the other way with probability `SLIP`."""
    right = (action == 1) ^ (uniform < SLIP)
    after = torch.where(right, state + 1, (state - 1).clamp(min=0)).clamp(max=2)
    return after, torch.where(after == 2, 1.0, -0.125), after == 2


class ChainLanes(LaneDomain):
    draws = 1
    resets = 1

    def start(self, reset: Tensor, episode: Tensor) -> Tensor:
        return (reset.squeeze(-1) < 0.5).long()

    def step(self, state: Tensor, action: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return chain_step(state, action, noise.squeeze(-1))


class ChainScalars(NamedTuple):
    slip: float
    goal: int

    def start(self, u: Any, episode: Any) -> Any:
        return (0.0, 0.0, 0.0, 0.0), 1 if u[0] < 0.5 else 0

    def step(self, p: Any, state: Any, action: Any, u: Any) -> Any:
        right = (action == 1) != (u < self.slip)
        after = min(state + 1, self.goal) if right else max(state - 1, 0)
        return p, after, 1.0 if after == self.goal else -0.125, after == self.goal

    def cell(self, p: Any, state: Any) -> Any:
        return state

    def noisy(self) -> bool:
        return True


class ChainEnv(BatchedEnv):
    def __init__(self, **options: Any) -> None:
        super().__init__(sizes=(3,), num_actions=2, **options)

    def lanes(self) -> ChainLanes:
        return ChainLanes(self)

    def scalars(self) -> ChainScalars:
        return ChainScalars(SLIP, 2)

    def _initial_state(self) -> dict[str, Tensor]:
        return {"state": torch.randint(2, self.batch_size)}

    def _next_state(
        self, tensordict: TensorDictBase, action: Tensor
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        uniform = torch.rand(self.batch_size, dtype=torch.float64)
        state, reward, terminated = chain_step(tensordict.get("state"), action, uniform)
        return {"state": state}, reward, terminated
