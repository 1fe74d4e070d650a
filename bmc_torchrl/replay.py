"""Replay of ``[runs, time]`` data: every run samples its own past."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import Sampler

__all__ = ["RunSampler", "distinct_indices", "run_replay_buffer"]


def distinct_indices(uniform: Tensor, population: int | Tensor) -> Tensor:
    r"""A uniform ordered sample without replacement from ``range(population)``.

    Draw `i` picks position :math:`d_i = \lfloor u_i (n - i) \rfloor` of what draws
    :math:`0 \dots i-1` have left. Undoing these removals, last first, turns positions into indices.

    Args:
        uniform: float64 ``[*batch, count]`` in [0, 1).
        population: :math:`n \ge` `count`, a number or ``[*batch]``.

    Returns:
        int64 ``[*batch, count]``, distinct along the last dimension.

    Examples:
        >>> distinct_indices(torch.tensor([0.0, 0.0, 0.99], dtype=torch.float64), 4)
        tensor([0, 1, 3])
    """
    count = uniform.shape[-1]
    left = population.unsqueeze(-1) if isinstance(population, Tensor) else population
    drawn = torch.arange(count, device=uniform.device)
    position = (uniform * (left - drawn)).long()
    index = position.clone()
    for draw in reversed(range(count - 1)):
        later = index[..., draw + 1 :]
        later += later >= position[..., draw : draw + 1]
    return index


class RunSampler(Sampler):  # type: ignore[misc]
    """Samples ``[runs, batch_size]`` transitions, of each run without replacement.

    For a :class:`~torchrl.data.ReplayBuffer` whose storage is ``[time, runs]``, which is how
    ``ndim=2`` storages keep ``[runs, time]`` data. It draws from the global generator unless the
    buffer has its own, keeps no state, and never waits for the device.

    Examples:
        >>> from tensordict import TensorDict
        >>> storage = LazyTensorStorage(5 * 3, ndim=2)
        >>> replay = ReplayBuffer(storage=storage, sampler=RunSampler(), batch_size=2)
        >>> _ = replay.extend(TensorDict({"state": torch.arange(12).reshape(3, 4)}, [3, 4]))
        >>> replay.sample()["state"] // 4
        tensor([[0, 0],
                [1, 1],
                [2, 2]])
    """

    def sample(self, storage: Any, batch_size: int) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
        """Index pairs (time, run), each ``[runs, batch_size]``."""
        if not self.can_sample(storage, batch_size):
            raise RuntimeError(
                f"Cannot draw batch_size={batch_size} distinct transitions per run: the buffer "
                f"holds {self._sampleable_count(storage, batch_size)}. Sample later, or fewer."
            )
        filled, runs = storage.shape
        uniform = torch.rand(
            runs, batch_size, dtype=torch.float64, device=storage.device, generator=self._rng
        )
        time = distinct_indices(uniform, filled)
        run = torch.arange(runs, device=time.device).unsqueeze(-1).expand_as(time)
        return (time, run), {}

    def can_sample(self, storage: Any, batch_size: int) -> bool:
        """Whether every run holds `batch_size` transitions."""
        return self._sampleable_count(storage, batch_size) >= batch_size

    def _sampleable_count(self, storage: Any, batch_size: int) -> int:
        if storage.ndim != 2:
            raise ValueError(
                f"RunSampler needs a storage with ndim=2 ([time, runs]), not ndim={storage.ndim}."
            )
        return int(storage.shape[0]) if storage.shape is not None else 0

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the sampler keeps no state."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Accept the empty state."""

    def dumps(self, path: str | Path) -> None:
        """Nothing to write."""

    def loads(self, path: str | Path) -> None:
        """Nothing to read."""

    def _empty(self) -> None:
        pass


def run_replay_buffer(
    capacity: int, runs: int, batch_size: int, *, device: torch.device | str = "cpu"
) -> ReplayBuffer:
    """A buffer of the last `capacity` transitions of each run.

    Extend it with ``[runs, time]`` tensordicts (``transition.unsqueeze(-1)`` for one step) holding
    only what the learner reads: the state index rather than its one-hot encoding.

    Examples:
        >>> from tensordict import TensorDict
        >>> replay = run_replay_buffer(capacity=2000, runs=100, batch_size=24)
        >>> for _ in range(24):
        ...     step = TensorDict({"state": torch.randint(150, (100,))}, [100])
        ...     _ = replay.extend(step.unsqueeze(-1))
        >>> replay.sample().batch_size
        torch.Size([100, 24])
    """
    storage = LazyTensorStorage(capacity * runs, ndim=2, device=device)
    return ReplayBuffer(storage=storage, sampler=RunSampler(), batch_size=batch_size)
