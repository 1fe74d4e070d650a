"""Others' environments, Gymnasium's and bsuite's, as one batch of independent runs.

A vector step is a loop over the environments and one tensordict. TorchRL's ``GymWrapper`` over
Gymnasium's ``SyncVectorEnv`` takes 870 µs for 10 copies of CartPole and 1560 µs for 50, where this
takes 580 and 1270; ``SerialEnv`` nine times as long; ``GymEnv(num_envs=50)`` starts 50 processes.
That wrapper also steps every copy whatever ``"_step"`` says, has an empty ``state_dict``, so that
no job resumes exactly, one batch dimension, and episodes whose seeds nobody knows.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Binary, Categorical, Composite, OneHot, Unbounded
from torchrl.envs import EnvBase

from bmc_torchrl.envs.base import Observation, batch_shape_of, usable_device

__all__ = ["DmEnv", "GymBatchEnv", "bsuite_env", "gym_env", "minatar_env", "minigrid_env"]

INSTALL = "pip install -c constraints.txt '.[examples]'"

Maker = Callable[[], gymnasium.Env[Any, Any]]


class GymBatchEnv(EnvBase):  # type: ignore[misc]
    """Independent copies of a Gymnasium environment with discrete actions, one of each run.

    Discrete observations are ``"state"``, an index, and with ``observation="encoded"`` also
    ``"observation"``, its one-hot vector; others are ``"observation"``, flat. Where the
    environment's info has an action mask, so has the tensordict. Every episode starts from a seed
    of its own, drawn from torch's global generator, which :meth:`set_seed` seeds.

    A tensordict with ``"_step"`` steps only those copies; the others stay as they are.

    Args:
        make: makes one copy.
        max_steps: Steps after which an episode is truncated; None leaves that to the copies.
        batch_size: Shape of the batch.
        device: Where the tensors go.
        observation: ``"state"`` or ``"encoded"``.

    >>> env = GymBatchEnv(lambda: gym_env("FrozenLake-v1"), max_steps=100, batch_size=[3])
    >>> env.rollout(5, break_when_any_done=False)["next", "state"].shape
    torch.Size([3, 5])
    """

    batch_locked = True

    def __init__(
        self,
        make: Maker,
        *,
        max_steps: int | None = None,
        batch_size: Sequence[int] | int = (),
        device: torch.device | str | None = None,
        observation: Observation = "state",
    ) -> None:
        if max_steps is not None and max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, got {max_steps}.")
        super().__init__(device=usable_device(device), batch_size=batch_shape_of(batch_size))
        self.copies = [make() for _ in range(self.batch_size.numel())]
        self.max_steps, self.observation = max_steps, observation
        seen, acts = self.copies[0].observation_space, self.copies[0].action_space
        if not isinstance(acts, Discrete) or acts.start != 0:
            raise ValueError(f"ε-greedy needs discrete actions from 0 on, got {acts}.")
        if not isinstance(seen, Discrete | Box):
            raise ValueError(
                f"Observations must be Discrete or Box, got {seen}: put a wrapper around it."
            )
        self.num_actions = int(acts.n)
        self.tabular = isinstance(seen, Discrete)
        self.num_states = int(seen.n) if isinstance(seen, Discrete) else 1
        self.sizes = (self.num_states,)
        self.num_features = self.num_states if self.tabular else int(np.prod(seen.shape or ()))
        copies = len(self.copies)
        self.seen = (
            np.zeros(copies, np.int64)
            if self.tabular
            else np.zeros((copies, self.num_features), np.float32)
        )
        self.seeds = [0] * copies
        self.actions: list[list[int]] = [[] for _ in self.copies]
        self.legal = np.ones((copies, self.num_actions), bool)
        self.has_action_mask = "action_mask" in self.copies[0].reset(seed=0)[1]
        self._make_specs()

    def maybe_reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Start a new episode wherever ``"done"`` is true, leaving the rest as it is."""
        rows = _rows(tensordict.get("done"))
        if rows:
            self.begin(rows)
            tensordict.update(self._observed() | self._flags(np.zeros((2, len(self.copies)), bool)))
        return tensordict

    def get_extra_state(self) -> dict[str, Any]:
        """Where every copy stands: the seed of its episode, and the actions since."""
        return {"seeds": list(self.seeds), "actions": [list(taken) for taken in self.actions]}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Play every copy's episode again up to where it stood."""
        for row, (seed, actions) in enumerate(zip(state["seeds"], state["actions"], strict=True)):
            self._start(row, int(seed))
            for action in actions:
                self.advance(row, action)

    def close(self, *args: Any, **options: Any) -> None:
        """Close every copy."""
        for copy in self.copies:
            copy.close()
        super().close(*args, **options)

    def begin(self, rows: Sequence[int]) -> None:
        """Start an episode in the copies `rows`, each from a seed of its own."""
        seeds = torch.randint(2**31 - 1, (len(rows),)).tolist()
        for row, seed in zip(rows, seeds, strict=True):
            self._start(row, seed)

    def _start(self, row: int, seed: int) -> None:
        seen, info = self.copies[row].reset(seed=seed)
        self.seeds[row], self.actions[row] = seed, []
        self._see(row, seen, info)

    def advance(self, row: int, action: int) -> tuple[float, bool, bool]:
        """Step one copy; reward, termination and truncation. What it shows is in ``seen``."""
        seen, reward, terminated, truncated, info = self.copies[row].step(action)
        self.actions[row].append(action)
        self._see(row, seen, info)
        late = self.max_steps is not None and len(self.actions[row]) >= self.max_steps
        return float(reward), terminated, truncated or late

    def _see(self, row: int, seen: Any, info: dict[str, Any]) -> None:
        self.seen[row] = seen if self.tabular else np.ravel(seen)
        if self.has_action_mask:
            self.legal[row] = info["action_mask"]

    def _observed(self) -> dict[str, Tensor]:
        found = {"state" if self.tabular else "observation": self._tensor(self.seen)}
        if self.tabular and self.observation == "encoded":
            found["observation"] = torch.nn.functional.one_hot(
                found["state"], self.num_states
            ).float()
        if self.has_action_mask:
            found["action_mask"] = self._tensor(self.legal)
        return found

    def _flags(self, flags: np.ndarray[Any, Any]) -> dict[str, Tensor]:
        terminated, truncated = (self._tensor(flag).unsqueeze(-1) for flag in flags)
        done = terminated | truncated
        return {"done": done, "terminated": terminated, "truncated": truncated}

    def _tensor(self, array: np.ndarray[Any, Any]) -> Tensor:
        shape = (*self.batch_size, *array.shape[1:])
        return torch.from_numpy(array.copy()).reshape(shape).to(self.device)

    def _reset(self, tensordict: TensorDictBase | None, **_: Any) -> TensorDictBase:
        chosen = None if tensordict is None else tensordict.get("_reset", None)
        self.begin(range(len(self.copies)) if chosen is None else _rows(chosen))
        entries = self._observed() | self._flags(np.zeros((2, len(self.copies)), bool))
        return TensorDict(entries, batch_size=self.batch_size, device=self.device)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        actions = tensordict.get("action").reshape(-1).tolist()
        chosen = tensordict.get("_step", None)
        rows: Iterable[int] = range(len(self.copies)) if chosen is None else _rows(chosen)
        rewards = np.zeros((len(self.copies), 1), np.float32)
        flags = np.zeros((2, len(self.copies)), bool)
        for row in rows:
            rewards[row], flags[0, row], flags[1, row] = self.advance(row, actions[row])
        entries = self._observed() | self._flags(flags) | {"reward": self._tensor(rewards)}
        return TensorDict(entries, batch_size=self.batch_size, device=self.device)

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            torch.manual_seed(seed)

    def _make_specs(self) -> None:
        batch, device = self.batch_size, self.device
        seen: dict[str, Any] = {}
        if self.tabular:
            seen["state"] = Categorical(self.num_states, shape=batch, device=device)
        if not self.tabular:
            shape = (*batch, self.num_features)
            seen["observation"] = Unbounded(shape=shape, dtype=torch.float32, device=device)
        elif self.observation == "encoded":
            shape = (*batch, self.num_states)
            seen["observation"] = OneHot(
                self.num_states, shape=shape, dtype=torch.float32, device=device
            )
        if self.has_action_mask:
            shape = (*batch, self.num_actions)
            seen["action_mask"] = Binary(
                self.num_actions, shape=shape, dtype=torch.bool, device=device
            )
        self.observation_spec = Composite(seen, shape=batch, device=device)
        self.action_spec = Categorical(
            self.num_actions, shape=batch, dtype=torch.int64, device=device
        )
        self.reward_spec = Unbounded(shape=(*batch, 1), device=device)
        flag = Categorical(2, shape=(*batch, 1), dtype=torch.bool, device=device)
        done = {"done": flag, "terminated": flag.clone(), "truncated": flag.clone()}
        self.full_done_spec = Composite(done, shape=batch, device=device)


def _rows(chosen: Tensor) -> list[int]:
    found: list[int] = chosen.reshape(-1).nonzero().squeeze(-1).tolist()
    return found


def gym_env(name: str, **options: Any) -> gymnasium.Env[Any, Any]:
    """A Gymnasium environment by its id, without its time limit."""
    try:
        made: gymnasium.Env[Any, Any] = gymnasium.make(
            name, max_episode_steps=-1, disable_env_checker=True, **options
        )
    except gymnasium.error.Error as error:
        raise ValueError(
            f"Gymnasium cannot make {name!r} ({str(error).rstrip('.')}). Check the name; "
            f"environments of others need {INSTALL}"
        ) from error
    return made


def minatar_env(game: str, **options: Any) -> gymnasium.Env[Any, Any]:
    """A game of MinAtar with its minimal action set, such as ``"Breakout"``."""
    minatar, name = _required("minatar.gym", "MinAtar"), f"MinAtar/{game}-v1"
    if name not in gymnasium.registry:
        minatar.register_envs()
    return gym_env(name, **options)


def minigrid_env(name: str, **options: Any) -> gymnasium.Env[Any, Any]:
    """A MiniGrid environment that shows what the agent sees, its codes scaled to [0, 1]."""
    wrappers = _required("minigrid.wrappers", "MiniGrid")
    seen = wrappers.ImgObsWrapper(gym_env(name, **options))
    space = Box(0.0, 1.0, seen.observation_space.shape, np.float32)
    codes = np.float32(10.0)
    return gymnasium.wrappers.TransformObservation(seen, lambda image: image / codes, space)


def bsuite_env(name: str, **options: Any) -> gymnasium.Env[Any, Any]:
    """The ``"deep_sea"`` or ``"cartpole_swingup"`` of bsuite, with the options of its class."""
    places = {
        "deep_sea": ("bsuite.environments.deep_sea", "DeepSea"),
        "cartpole_swingup": (
            "bsuite.experiments.cartpole_swingup.cartpole_swingup",
            "CartpoleSwingup",
        ),
    }
    if name not in places:
        raise ValueError(f"bsuite's {name!r} is not here; use one of {', '.join(places)}.")
    module, kind = places[name]
    made = getattr(_required(module, "bsuite"), kind)
    return DmEnv(lambda seed: made(seed=seed, **options))


def _required(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"{package} is not installed ({error}); {INSTALL}") from error


class DmEnv(gymnasium.Env[Any, Any]):  # type: ignore[misc]
    """A ``dm_env`` environment with Gymnasium's interface.

    The last step is *terminated* where its discount is zero, and *truncated* otherwise.

    Args:
        make: makes the environment from a seed; called again at every reset with one.
    """

    def __init__(self, make: Callable[[int | None], Any]) -> None:
        self.make = make
        self.inner = make(None)
        seen, acts = self.inner.observation_spec(), self.inner.action_spec()
        self.observation_space = Box(-np.inf, np.inf, seen.shape, np.float32)
        self.action_space = Discrete(int(acts.num_values))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed)
        if seed is not None:
            self.inner = self.make(seed)
        return self.inner.reset().observation, {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take `action`."""
        step = self.inner.step(action)
        terminated = bool(step.last() and step.discount == 0)
        truncated = bool(step.last() and not terminated)
        return step.observation, float(step.reward), terminated, truncated, {}
