"""Two-state environments whose action values are known on paper."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Binary, Categorical, Composite, UnboundedContinuous
from torchrl.envs import EnvBase


def loop_step(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Action 0 stays, action 1 moves; staying in state 1 earns 1; nothing ever ends."""
    reward = (state * (1 - action)).float()
    return (state + action) % 2, reward, torch.zeros_like(state, dtype=torch.bool)


def exit_step(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Every action ends the episode in state 1 and earns its own number."""
    return torch.ones_like(state), action.float(), torch.ones_like(state, dtype=torch.bool)


# γ = 1/2. V(1) = 1 + V(1)/2 = 2, V(0) = V(1)/2 = 1.
LOOP_OPTIMAL = torch.tensor([[0.5, 1.0], [2.0, 0.5]])
# γ = ε = 1/2, greedy actions as above: V(0) = ¾·V(1)/2 + ¼·V(0)/2 and
# V(1) = ¾·(1 + V(1)/2) + ¼·V(0)/2 give V(0) = 9/16, V(1) = 21/16.
LOOP_HALF_GREEDY = torch.tensor([[9 / 32, 21 / 32], [53 / 32, 9 / 32]])


class ProbeEnv(EnvBase):
    """A batch of two-state environments starting in state 0, moved by one of the steps above."""

    def __init__(self, step=loop_step, batch_size: Sequence[int] = ()) -> None:
        super().__init__(batch_size=torch.Size(batch_size))
        self.probe_step = step
        shape = self.batch_size
        self.observation_spec = Composite(state=Categorical(2, shape=shape), shape=shape)
        self.action_spec = Categorical(2, shape=shape)
        self.reward_spec = UnboundedContinuous(shape=(*shape, 1))
        flag = Binary(1, shape=(*shape, 1), dtype=torch.bool)
        self.full_done_spec = Composite(
            done=flag, terminated=flag.clone(), truncated=flag.clone(), shape=shape
        )

    def _reset(self, tensordict: TensorDictBase | None, **kwargs: object) -> TensorDictBase:
        state = torch.zeros(self.batch_size, dtype=torch.int64)
        return self.full_done_spec.zero().update({"state": state})

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        state, reward, ended = self.probe_step(tensordict["state"], tensordict["action"])
        result = self.full_done_spec.zero()
        result["state"], result["reward"] = state, reward.unsqueeze(-1)
        result["done"] = result["terminated"] = ended.unsqueeze(-1)
        return result

    def _set_seed(self, seed: int | None) -> None:
        torch.manual_seed(seed)


def every_transition(step, runs: Sequence[int] = ()) -> TensorDict:
    """All four (state, action) pairs of a probe and what follows, ``[*runs, 4]``."""
    state, action = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]]).unbind(-1)
    next_state, reward, ended = step(state, action)
    ended = ended.unsqueeze(-1)
    following = {"state": next_state, "reward": reward.unsqueeze(-1)}
    following |= {"done": ended, "terminated": ended}
    transitions = TensorDict({"state": state, "action": action, "next": following}, [4])
    return transitions.expand(*runs, 4).contiguous()
