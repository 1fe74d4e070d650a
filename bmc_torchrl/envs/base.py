"""What the domains share: a batched, stateless environment that resets without branching."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.nn.functional import embedding
from torchrl.data import Categorical, Composite, MultiOneHot, OneHot, Unbounded
from torchrl.envs import EnvBase

from bmc_torchrl.envs.factored import one_hot_encoding
from bmc_torchrl.envs.lanes import LaneDomain, ScalarDomain

__all__ = ["BatchedEnv", "Observation", "batch_shape_of", "usable_device"]

Observation = Literal["state", "encoded"]

_LARGEST_TABLE = 2**22
_NO_ENGINE = (
    "{0} cannot be run in lockstep: define {0}.{1}, or use the TorchRL path (engine=torchrl)."
)


class BatchedEnv(EnvBase):  # type: ignore[misc]
    """A batch of independent copies of one domain, stepped as plain tensors on one device.

    The whole state travels in the tensordict (keys ``"state"``, ``"step_count"`` and whatever
    :meth:`_hidden_spec` adds), so nothing is kept between calls: a rollout continues from any
    stored tensordict, and ``reset(tensordict, set_state=True)`` starts from the states it holds.
    Finished copies are reset by :func:`torch.where`: no host synchronisation, no graph break.

    Randomness comes from torch's *global* generator, which :meth:`set_seed` seeds.

    Args:
        sizes: Number of values of each digit of the discrete state.
        num_actions: Number of actions.
        observation: ``"state"`` for the index alone, ``"encoded"`` to add ``"observation"``.
        batch_size: Shape of the batch; ``()`` is a single environment.
        device: Where all tensors live.
        max_steps: Steps after which an episode is truncated; ``None`` for no limit.
        one_hot_actions: Actions are one-hot vectors instead of indices.
    """

    batch_locked = True
    _supports_set_state = True
    physics_dtype: torch.dtype = torch.float32
    """Precision of what a state holds beyond its index."""

    def __init__(
        self,
        *,
        sizes: Sequence[int],
        num_actions: int,
        observation: Observation = "state",
        batch_size: Sequence[int] | int = (),
        device: torch.device | str | None = None,
        max_steps: int | None = 200,
        one_hot_actions: bool = False,
    ) -> None:
        if observation not in ("state", "encoded"):
            raise ValueError(f'observation must be "state" or "encoded", got {observation!r}.')
        if max_steps is not None and max_steps < 1:
            raise ValueError(
                f"max_steps must be at least 1, or None for no limit; got {max_steps}."
            )
        super().__init__(device=usable_device(device), batch_size=batch_shape_of(batch_size))
        self.sizes = tuple(sizes)
        self.num_states = math.prod(self.sizes)
        self.num_actions = num_actions
        self.observation = observation
        self.max_steps = max_steps
        self.one_hot_actions = one_hot_actions
        self._make_specs()
        small = self.num_states * self.num_features <= _LARGEST_TABLE
        codes = self._code_table() if observation == "encoded" and small else None
        self.register_buffer("_codes", codes, persistent=False)

    @property
    def num_features(self) -> int:
        """Length of the one-hot encoding of the discrete state."""
        return sum(self.sizes)

    @property
    def step_limit(self) -> int:
        """``max_steps``, for engines that cannot do without."""
        if self.max_steps is None:
            raise ValueError("The lockstep engine needs a step limit: build env with max_steps=….")
        return self.max_steps

    def lanes(self) -> LaneDomain:
        """This domain as the torch engines step it."""
        raise TypeError(_NO_ENGINE.format(type(self).__name__, "lanes()"))

    def scalars(self) -> ScalarDomain:
        """This domain as numba compiles it."""
        raise TypeError(_NO_ENGINE.format(type(self).__name__, "scalars()"))

    def picture(self, current: TensorDictBase, steps: int) -> Any:
        """RGB array of one environment, batch size ``[]``, after `steps` steps; None for none."""
        return None

    def maybe_reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Start a new episode wherever ``"done"`` is true, leaving the rest as it is."""
        done = tensordict.get("done")
        state = {}
        for key, fresh in self._new_episode(tensordict, 1).items():
            mask = done.reshape((*self.batch_size, *[1] * (fresh.ndim - len(self.batch_size))))
            state[key] = torch.where(mask, fresh, tensordict.get(key))
        step_count = tensordict.get("step_count").masked_fill(done, 0)
        return tensordict.update(
            {**self._observe(state), "step_count": step_count, **self._flags()}
        )

    def _initial_state(self) -> dict[str, Tensor]:
        """State of a new episode for the whole batch."""
        raise NotImplementedError

    def _new_episode(self, tensordict: TensorDictBase | None, later: int) -> dict[str, Tensor]:
        """State of the episode `later` than that of `tensordict`; for most domains any other's."""
        return self._initial_state()

    def _next_state(
        self, tensordict: TensorDictBase, action: Tensor
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Next state, reward ``[*batch]`` and termination ``[*batch]``."""
        raise NotImplementedError

    def _code_table(self) -> Tensor | None:
        """Encoding of every state, ``[states, features]``: a look-up is faster than encoding."""
        return one_hot_encoding(torch.arange(self.num_states, device=self.device), self.sizes)

    def _hidden_spec(self) -> dict[str, Any]:
        """Specs of state entries beyond the index ``"state"``."""
        return {}

    def _observation_spec(self) -> Any:
        """Spec of the encoded observation."""
        shape = (*self.batch_size, self.num_features)
        return MultiOneHot(self.sizes, shape=shape, dtype=torch.float32, device=self.device)

    def _observe(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """State entries, with what the learner sees added."""
        if self.observation == "encoded":
            index, codes = state["state"], self._codes
            seen = one_hot_encoding(index, self.sizes) if codes is None else embedding(index, codes)
            return {**state, "observation": seen}
        return state

    def _flags(self) -> dict[str, Tensor]:
        shape = (*self.batch_size, 1)
        return {
            key: torch.zeros(shape, dtype=torch.bool, device=self.device)
            for key in ("done", "terminated", "truncated")
        }

    def _reset(
        self, tensordict: TensorDictBase | None, set_state: bool = False, **_: Any
    ) -> TensorDictBase:
        if set_state and tensordict is not None:
            state = self._given_state(tensordict)
        else:
            partial = tensordict is not None and tensordict.get("_reset", None) is not None
            state = self._new_episode(tensordict, int(partial))
        count = torch.zeros(*self.batch_size, 1, dtype=torch.int64, device=self.device)
        entries = {**self._observe(state), "step_count": count, **self._flags()}
        return TensorDict(entries, batch_size=self.batch_size, device=self.device)

    def _resolve_set_state(
        self, set_state: bool | None, tensordict: TensorDictBase | None, select_reset_only: bool
    ) -> bool | None:
        # As TorchRL 0.15 will have it. In 0.14 an unspecified ``set_state`` keeps the old state, so
        # a partial reset, whose tensordict always carries one, would reset nothing.
        resolved: bool | None = super()._resolve_set_state(
            bool(set_state), tensordict, select_reset_only
        )
        return resolved

    def _given_state(self, tensordict: TensorDictBase) -> dict[str, Tensor]:
        state = tensordict.get("state")
        if bool(((state < 0) | (state >= self.num_states)).any()):
            raise ValueError(
                f'"state" must be in [0, {self.num_states}) to reset to it, got {state}.'
            )
        return {"state": state}

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        state, reward, terminated = self._next_state(tensordict, self._action_index(tensordict))
        terminated = terminated.unsqueeze(-1)
        step_count = tensordict.get("step_count") + 1
        truncated = torch.zeros_like(terminated)
        if self.max_steps is not None:
            truncated = (step_count >= self.max_steps) & ~terminated
        entries = {
            **self._observe(state),
            "step_count": step_count,
            "reward": reward.unsqueeze(-1),
            "done": terminated | truncated,
            "terminated": terminated,
            "truncated": truncated,
        }
        return TensorDict(entries, batch_size=self.batch_size, device=self.device)

    def _action_index(self, tensordict: TensorDictBase) -> Tensor:
        action: Tensor = tensordict.get("action")
        return action.to(torch.int64).argmax(-1) if self.one_hot_actions else action

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            torch.manual_seed(seed)

    def _make_specs(self) -> None:
        batch, device = self.batch_size, self.device
        index = Categorical(self.num_states, shape=batch, dtype=torch.int64, device=device)
        count = Unbounded(shape=(*batch, 1), dtype=torch.int64, device=device)
        flag = Categorical(2, shape=(*batch, 1), dtype=torch.bool, device=device)
        state = {"state": index, "step_count": count, **self._hidden_spec()}
        self.state_spec = Composite(state, shape=batch, device=device)
        seen = {"observation": self._observation_spec()} if self.observation == "encoded" else {}
        self.observation_spec = Composite({**state, **seen}, shape=batch, device=device).clone()
        self.action_spec = (
            OneHot(self.num_actions, shape=(*batch, self.num_actions), device=device)
            if self.one_hot_actions
            else Categorical(self.num_actions, shape=batch, dtype=torch.int64, device=device)
        )
        self.reward_spec = Unbounded(shape=(*batch, 1), device=device)
        done = {"done": flag, "terminated": flag.clone(), "truncated": flag.clone()}
        self.full_done_spec = Composite(done, shape=batch, device=device)


def batch_shape_of(batch_size: Sequence[int] | int) -> torch.Size:
    """`batch_size` as a shape, checked."""
    shape = torch.Size([batch_size] if isinstance(batch_size, int) else batch_size)
    if any(size < 1 for size in shape):
        raise ValueError(
            f"batch_size must hold positive sizes, got {list(shape)}; use () for one environment."
        )
    return shape


def usable_device(device: torch.device | str | None) -> torch.device:
    """The device that tensors made for `device` are on."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device={str(device)!r} cannot be used here ({error}).") from error
