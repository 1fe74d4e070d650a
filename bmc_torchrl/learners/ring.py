"""Replay as a ring of tensors: no key look-ups, no host, one row per vector step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["Minibatch", "Priorities", "RingReplay"]


class Priorities(NamedTuple):
    """Proportional prioritised replay (Schaul et al. 2016).

    Attributes:
        alpha: How much priorities matter; 0 is uniform.
        beta: How much the importance weights correct for that; 1 is fully.
    """

    alpha: float = 0.6
    beta: float = 0.4


class Minibatch(NamedTuple):
    """Sampled transitions, each ``[*runs, batch]`` with what follows.

    Attributes:
        before: Observations.
        action: Actions taken, int64.
        reward: Sum of the discounted rewards until `after`.
        after: Observations after.
        terminated: Whether the episode ended there.
        discount: Of the value of `after`.
        mask: Legal actions of `after`, or None.
        weight: Importance weights, or None.
        rows: Where the transitions are in the ring.
    """

    before: Tensor
    action: Tensor
    reward: Tensor
    after: Tensor
    terminated: Tensor
    discount: Tensor | float
    mask: Tensor | None
    weight: Tensor | None
    rows: Tensor


class RingReplay(nn.Module):
    """The last `capacity` transitions of each run.

    Buffers are made when the first transition says what they must hold. They follow the module to
    its device and are left out of ``state_dict``: :meth:`contents` and :meth:`refill` carry them.

    Args:
        capacity (int): Transitions kept, per run.
        runs (int or None): Runs, each of which samples its own past; None for one run without a
            run dimension.
        gamma (float): Discount factor of n-step returns.
        n_steps (int): Steps that a sampled transition spans, fewer where its episode ends.
        priorities (Priorities or None): Sample surprising transitions more often.

    Examples:
        >>> ring = RingReplay(capacity=4, runs=None, gamma=0.9)
        >>> for number in range(6):
        ...     ring.add({
        ...         "before": torch.tensor([number]), "action": torch.tensor([0]),
        ...         "reward": torch.ones(1), "after": torch.tensor([number + 1]),
        ...         "terminated": torch.zeros(1, dtype=torch.bool),
        ...         "done": torch.zeros(1, dtype=torch.bool),
        ...     })
        >>> sorted(ring.sample(torch.tensor([0.0, 0.3, 0.6, 0.9])).before.tolist())
        [2, 3, 4, 5]
    """

    def __init__(
        self,
        capacity: int,
        runs: int | None,
        gamma: float,
        *,
        n_steps: int = 1,
        priorities: Priorities | None = None,
    ) -> None:
        super().__init__()
        if n_steps < 1 or capacity < n_steps:
            raise ValueError(
                f"n_steps must be from 1 to capacity={capacity}, got {n_steps}: raise the capacity "
                "or span fewer steps."
            )
        self.capacity, self.runs, self.gamma, self.n_steps = capacity, runs, gamma, n_steps
        self.priorities = priorities
        self.added = 0
        self.names: list[str] = []
        self.time: Tensor
        self.priority: Tensor
        self.largest: Tensor
        self.register_buffer("time", torch.zeros(1, dtype=torch.int64), persistent=False)

    def __len__(self) -> int:
        """Transitions of each run that can be sampled."""
        return max(min(self.added, self.capacity) - self.n_steps + 1, 0)

    def prepare(self, columns: Mapping[str, Tensor]) -> None:
        """Make the buffers that transitions like `columns` need, the first time."""
        if self.names:
            return
        for name, column in columns.items():
            if name == "done" and self.n_steps == 1:
                continue
            shape = (self.capacity, *self._row(column).shape[1:])
            empty = torch.zeros(shape, dtype=column.dtype, device=column.device)
            self.register_buffer(f"column_{name}", empty, persistent=False)
            self.names.append(name)
        self.time = self.time.to(column.device)
        if self.priorities is not None:
            shape = (self.capacity,) if self.runs is None else (self.capacity, self.runs)
            zeros = torch.zeros(shape, device=column.device)
            self.register_buffer("priority", zeros, persistent=False)
            self.register_buffer(
                "largest", torch.ones(shape[1:] or (1,)).to(zeros), persistent=False
            )

    def _column(self, name: str) -> Tensor:
        column = self._buffers[f"column_{name}"]
        assert column is not None
        return column

    def _row(self, column: Tensor) -> Tensor:
        return column if self.runs is None else column.unsqueeze(0)

    def add(self, columns: Mapping[str, Tensor]) -> None:
        """Keep one transition of each run, columns ``[runs, …]`` (``[1, …]`` for one run)."""
        self.prepare(columns)
        self.write(columns)
        self.added += 1

    def write(self, columns: Mapping[str, Tensor]) -> None:
        """The part of :meth:`add` that a graph can hold."""
        cursor = self.time % self.capacity
        for name in self.names:
            self._column(name).index_copy_(0, cursor, self._row(columns[name]))
        if self.priorities is not None:
            largest = self.largest if self.runs is None else self.largest.unsqueeze(0)
            self.priority.index_copy_(0, cursor, largest)
        self.time += 1

    def sample(self, draws: Tensor) -> Minibatch:
        """Transitions at `draws`, uniform on [0, 1), ``[*runs, batch]``; with replacement."""
        weight: Tensor | None = None
        if self.priorities is None:
            late = self.n_steps - 1
            held = self.time.clamp(max=self.capacity)
            age = (draws * (held - late if late else held)).long()
            rows = (self.time - (1 + late) - age) % self.capacity
        else:
            rows, weight = self._by_priority(draws, self.priorities)
        return self._transitions(rows, weight)

    def _by_priority(self, draws: Tensor, how: Priorities) -> tuple[Tensor, Tensor]:
        """Rows in proportion to their priorities, those without n following steps left out."""
        order = torch.arange(self.capacity, device=draws.device)
        age = (self.time - 1 - order) % self.capacity
        known = (age >= self.n_steps - 1) & (age < self.time)
        mass = torch.where(known.view(-1, *[1] * (self.priority.ndim - 1)), self.priority, 0.0)
        # The time dimension last, as the draws have it.
        mass = mass.movedim(0, -1).double().contiguous()
        total = mass.cumsum(-1)
        rows = torch.searchsorted(total, draws.double() * total[..., -1:], right=True)
        rows = rows.clamp(max=self.capacity - 1)
        chosen = mass.gather(-1, rows)
        least = torch.where(mass > 0, mass, torch.inf).amin(-1, keepdim=True)
        return rows, (chosen / least).pow(-how.beta).float()

    def surprise(self, rows: Tensor, error: Tensor) -> None:
        """Set the priorities of sampled `rows` to the size of their TD `error`."""
        if self.priorities is None:
            return
        priority = (error.abs() + 1e-8) ** self.priorities.alpha
        if self.runs is None:
            self.priority.index_put_((rows,), priority)
        else:
            run = torch.arange(self.runs, device=rows.device).unsqueeze(-1)
            self.priority.index_put_((rows, run.expand_as(rows)), priority)
        self.largest.copy_(torch.maximum(self.largest, priority.amax(-1)))

    def _transitions(self, rows: Tensor, weight: Tensor | None) -> Minibatch:
        at = self._places(rows)
        reward, terminated = self._at("reward", at), self._at("terminated", at)
        after = self._at("after", at)
        mask = self._at("mask", at) if "mask" in self.names else None
        before, action = self._at("before", at), self._at("action", at)
        discount: Tensor | float = self.gamma
        alive = ~self._at("done", at) if self.n_steps > 1 else None
        for step in range(1, self.n_steps):
            assert alive is not None
            later = self._places((rows + step) % self.capacity)
            reward = reward + torch.where(alive, discount * self._at("reward", later), 0.0)
            terminated = torch.where(alive, self._at("terminated", later), terminated)
            shape = (*alive.shape, *[1] * (after.ndim - alive.ndim))
            after = torch.where(alive.reshape(shape), self._at("after", later), after)
            if mask is not None:
                mask = torch.where(alive.unsqueeze(-1), self._at("mask", later), mask)
            discount = torch.where(alive, discount * self.gamma, discount)
            alive = alive & ~self._at("done", later)
        return Minibatch(before, action, reward, after, terminated, discount, mask, weight, rows)

    def _places(self, rows: Tensor) -> Tensor:
        """Where `rows` ``[*runs, batch]`` are among all runs' transitions."""
        if self.runs is None:
            return rows
        return rows * self.runs + torch.arange(self.runs, device=rows.device).unsqueeze(-1)

    def _at(self, name: str, places: Tensor) -> Tensor:
        column = self._column(name)
        if self.runs is None:
            return column.index_select(0, places)
        found = column.flatten(0, 1).index_select(0, places.view(-1))
        return found.view(*places.shape, *found.shape[1:])

    def contents(self) -> dict[str, Tensor]:
        """Everything it holds, by name; empty before the first transition."""
        held = min(self.added, self.capacity)
        found = {name: self.get_buffer(f"column_{name}")[:held] for name in self.names}
        found["time"] = self.time
        if self.names and self.priorities is not None:
            found |= {"priority": self.priority, "largest": self.largest}
        return {name: tensor.clone() for name, tensor in found.items()}

    def refill(self, contents: Mapping[str, Tensor]) -> None:
        """Hold what :meth:`contents` gave."""
        contents = dict(contents)
        time = contents.pop("time")
        kept = {name: contents.pop(name) for name in ("priority", "largest") if name in contents}
        device = self.time.device
        if contents:
            like = {name: column[0] for name, column in contents.items()}
            if self.runs is None:
                like = {name: column.unsqueeze(0) for name, column in like.items()}
            self.prepare({name: column.to(device) for name, column in like.items()})
        for name, column in contents.items():
            self.get_buffer(f"column_{name}")[: len(column)] = column.to(device)
        for name, column in kept.items():
            self.get_buffer(name).copy_(column)
        self.time.copy_(time)
        self.added = int(time)
