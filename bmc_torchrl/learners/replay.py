"""Replay of ``[runs, time]`` data, every run sampling its own past; and of surprising data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import PrioritizedSampler, Sampler
from torchrl.data.replay_buffers.utils import unravel_index

__all__ = ["ProportionalSampler", "RunSampler", "distinct_indices", "run_replay_buffer"]


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


class ProportionalSampler(PrioritizedSampler):  # type: ignore[misc]
    r"""Proportional prioritised replay (Schaul et al. 2016) on plain tensors.

    Transition :math:`i` is drawn with probability :math:`P(i) = p_i^\alpha / \sum_j p_j^\alpha` and
    weighs :math:`(N P(i))^{-\beta}`, relative to the greatest weight in the buffer. Everything else
    is TorchRL's ``PrioritizedSampler``, whose compiled trees load only beside the torch that they
    were built for. A sample costs one cumulative sum of the priorities, on their device, and is
    drawn by torch's generator.

    Args:
        max_capacity: of the buffer's storage.
        alpha: how much priorities matter; 0 is uniform.
        beta: how much the weights correct for that; 1 is fully.
        eps: added to every priority, so that none is zero.
        device: where the priorities are; by default on a GPU if the storage is.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import TensorDictReplayBuffer
        >>> sampler = ProportionalSampler(3, alpha=1.0, beta=1.0)
        >>> storage = LazyTensorStorage(3)
        >>> replay = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=4)
        >>> index = replay.extend(TensorDict({"state": torch.arange(3)}, [3]))
        >>> replay.update_priority(index, torch.tensor([0.0, 5.0, 0.0]))
        >>> replay.sample()["state"]
        tensor([1, 1, 1, 1])
    """

    reduction = "max"
    dtype = torch.float32
    _max_priority_within_buffer = False

    # TorchRL's constructor would warn that its trees are missing.
    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        device: torch.device | str | None = None,
    ) -> None:
        if min(alpha, beta) < 0:
            raise ValueError(f"alpha and beta must not be negative, got {alpha} and {beta}.")
        self._max_capacity, self._eps = max_capacity, eps
        self._alpha, self._beta = alpha, beta
        self._device = None if device is None else torch.device(device)
        self._init()

    def _init(self) -> None:
        priorities = torch.zeros(self._max_capacity, dtype=self.dtype, device=self._device)
        # What TorchRL writes to both of its trees; 0 is an entry that was never written.
        self._sum_tree = self._min_tree = priorities
        self._max_priority = None

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[str, Tensor]]:
        """Indices drawn in proportion to the priorities, and their ``"priority_weight"``."""
        self._maybe_init_from_storage(storage)
        size = len(storage)
        if size == 0:
            raise RuntimeError("Cannot sample from an empty storage.")
        priorities = self._sum_tree[:size]
        total = priorities.cumsum(0, dtype=torch.float64)
        mass = torch.rand(batch_size, dtype=torch.float64, device=total.device, generator=self._rng)
        index = torch.searchsorted(total, mass * total[-1], right=True).clamp_(max=size - 1)
        weight = (priorities[index] / priorities.min()) ** -self.beta
        where = unravel_index(index, storage.shape) if storage.ndim > 1 else index
        return where, {"priority_weight": weight}
