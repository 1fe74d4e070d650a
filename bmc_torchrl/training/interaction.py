"""Environments as a training step sees them: an action in, what followed out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import gymnasium
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torch.nn.functional import one_hot
from torchrl.data import OneHot
from torchrl.envs import EnvBase

from bmc_torchrl.envs.gymnasium_batch import GymBatchEnv
from bmc_torchrl.learners.q_learning import Experience

__all__ = ["GymnasiumRuns", "Interaction", "TorchRLRuns", "as_env", "interaction_with"]

EnvSource = Any
"""A TorchRL or Gymnasium environment, or a function without arguments that makes one."""


class Interaction(ABC):
    """The current observations of all runs, and how to act on them.

    Attributes:
        observation: What the runs see now, ``[runs, …]``.
        mask: Their legal actions, ``[runs, actions]``, or None.
        state: Their discrete states, int64 ``[runs]``, or None.
        state_after: The states that the last step led to, before any reset.
    """

    observation: Tensor
    mask: Tensor | None = None
    state: Tensor | None = None
    state_after: Tensor | None = None
    known: tuple[Sequence[float], Sequence[int]] | None = None
    """Rewards and rows that ended in the last step, where the host knows them anyway."""

    @abstractmethod
    def start(self) -> None:
        """Begin an episode in every run."""

    @abstractmethod
    def step(self, action: Tensor) -> Experience:
        """Act in every run; where an episode ends, the next one begins."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on exactly from here."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""


class GymnasiumRuns(Interaction):
    """Gymnasium environments stepped directly, without a tensordict between.

    Args:
        env (GymBatchEnv): The copies, one of each run.
    """

    known: tuple[Sequence[float], Sequence[int]] = ((), ())

    def __init__(self, env: GymBatchEnv) -> None:
        self.env, self.device = env, env.device
        self.rows = list(range(env.batch_size.numel()))

    def start(self) -> None:
        """See :class:`Interaction`."""
        self.env.begin(self.rows)
        self._look()

    def _look(self) -> None:
        self.observation, self.mask = self._seen()
        self.state = self.observation if self.env.tabular else None

    def _seen(self) -> tuple[Tensor, Tensor | None]:
        seen = torch.from_numpy(self.env.seen.copy()).to(self.device)
        if not self.env.has_action_mask:
            return seen, None
        return seen, torch.from_numpy(self.env.legal.copy()).to(self.device)

    def step(self, action: Tensor) -> Experience:
        """See :class:`Interaction`."""
        before, env = self.observation, self.env
        taken = [
            env.advance(row, chosen) for row, chosen in zip(self.rows, action.tolist(), strict=True)
        ]
        after, mask = self._seen()
        self.observation, self.mask = after, mask
        self.state = self.state_after = after if env.tabular else None
        ended = [
            row for row, (_, terminated, truncated) in enumerate(taken) if terminated or truncated
        ]
        if ended:
            env.begin(ended)
            self._look()
        rewards, terminations, truncations = zip(*taken, strict=True)
        self.known = rewards, ended
        reward = torch.tensor(rewards, dtype=torch.float32, device=self.device)
        terminated = torch.tensor(terminations, device=self.device)
        done = terminated
        if any(truncations):
            done = terminated | torch.tensor(truncations, device=self.device)
        return Experience(before, action, reward, after, terminated, done, mask)

    def state_dict(self) -> dict[str, Any]:
        """See :class:`Interaction`."""
        return {"env": self.env.get_extra_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :class:`Interaction`."""
        self.env.set_extra_state(state["env"])
        self._look()


class TorchRLRuns(Interaction):
    """A TorchRL environment of batch size ``[runs]``, or ``[]`` for one run.

    To resume exactly, its state must be in its tensordicts or its ``state_dict``, as that of the
    package's own environments is; others begin a new episode.

    Args:
        env (EnvBase): The environment, with categorical actions.
        observation_key (NestedKey): What the Q-network reads.
        mask_key (NestedKey or None): Where legal actions are.
        state_key (NestedKey): Where the discrete state is, if there is one.
    """

    def __init__(
        self,
        env: EnvBase,
        observation_key: NestedKey,
        mask_key: NestedKey | None = None,
        state_key: NestedKey = "state",
    ) -> None:
        self.env, self.key, self.mask_key = env, observation_key, mask_key
        self.state_key = state_key
        self.single, self.one_hot = not env.batch_size, isinstance(env.action_spec, OneHot)
        self.actions = int(env.action_spec.space.n)
        self.current: TensorDictBase

    def start(self) -> None:
        """See :class:`Interaction`."""
        self._look(self.env.reset())

    def _look(self, current: TensorDictBase) -> None:
        self.current = current
        self.observation = self._entry(current, self.key)
        self.mask = None if self.mask_key is None else self._entry(current, self.mask_key)
        self.state = self._state(current)

    def _state(self, data: TensorDictBase) -> Tensor | None:
        known = data.get(self.state_key, None) is not None
        return self._entry(data, self.state_key) if known else None

    def _entry(self, data: TensorDictBase, key: NestedKey) -> Tensor:
        value: Tensor = data.get(key)
        return value.unsqueeze(0) if self.single else value

    def step(self, action: Tensor) -> Experience:
        """See :class:`Interaction`."""
        before = self.observation
        chosen = one_hot(action, self.actions) if self.one_hot else action
        self.current.set("action", chosen.squeeze(0) if self.single else chosen)
        stepped, following = self.env.step_and_maybe_reset(self.current)
        after = stepped.get("next")
        reward, terminated, done = (
            self._entry(after, key).squeeze(-1) for key in ("reward", "terminated", "done")
        )
        mask = None if self.mask_key is None else self._entry(after, self.mask_key)
        seen, self.state_after = self._entry(after, self.key), self._state(after)
        self._look(following)
        return Experience(before, action, reward.float(), seen, terminated, done, mask)

    def state_dict(self) -> dict[str, Any]:
        """See :class:`Interaction`."""
        carried = self.current.exclude("next").clone().cpu().to_dict()
        return {"current": carried, "env": dict(self.env.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :class:`Interaction`."""
        self.env.load_state_dict(state["env"])
        carried = TensorDict.from_dict(
            state["current"], batch_size=self.env.batch_size, device=self.env.device
        )
        self._look(carried)


def as_env(source: EnvSource, batch: tuple[int, ...], device: torch.device | str) -> EnvBase:
    """An environment of batch size `batch` from a TorchRL or Gymnasium one, or what makes one.

    Gymnasium environments are copied once per element of the batch; a TorchRL environment has the
    batch size it has.
    """
    if isinstance(source, EnvBase):
        return source
    if isinstance(source, gymnasium.Env):
        if batch not in ((), (1,)):
            raise TypeError(
                "env is one Gymnasium environment and several copies are needed: pass a function "
                "that makes one, such as lambda: gymnasium.make('CartPole-v1')."
            )
        made: EnvBase | gymnasium.Env[Any, Any] = source
    elif callable(source):
        made = source()
    else:
        raise TypeError(
            f"env must be a TorchRL or Gymnasium environment or a function that makes one, got "
            f"{source!r}."
        )
    if isinstance(made, EnvBase):
        return made
    copies = iter([made])

    def make() -> gymnasium.Env[Any, Any]:
        again = next(copies, None)
        return again if again is not None else source()

    return GymBatchEnv(make, max_steps=None, batch_size=batch or (1,), device=device)


def interaction_with(
    env: EnvBase, observation_key: NestedKey, state_key: NestedKey | None = None
) -> Interaction:
    """How to step `env`: Gymnasium's directly, others by TorchRL's interface."""
    if isinstance(env, GymBatchEnv):
        return GymnasiumRuns(env)
    masked = env.observation_spec.get("action_mask", None) is not None
    mask_key = "action_mask" if masked else None
    return TorchRLRuns(env, observation_key, mask_key, state_key or "state")
