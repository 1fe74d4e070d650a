"""Any finite Markov decision process as tables: what each action may lead to, and how often."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["FiniteMDP"]

SUM_TOLERANCE = 1e-6
"""How far from 1 probabilities may add up, float32 tables being welcome."""


@dataclass(frozen=True, eq=False)
class FiniteMDP:
    """Outcomes of every action in every state, and where episodes start.

    An action has up to K outcomes, each with a next state, a probability, a reward, and whether it
    ends the episode: memory grows with K, not with the number of states squared. Unused places
    have the probability 0. :meth:`from_tables` and :meth:`from_outcomes` make one from the usual
    forms; probabilities are normalised.

    Attributes:
        successors: Next states, int64 ``[states, actions, K]``.
        probabilities: Of the outcomes, float64 ``[states, actions, K]``.
        rewards: float64 ``[states, actions, K]``, or anything that broadcasts to it.
        terminated: Whether the episode ends, bool ``[states, actions, K]``, or what broadcasts.
        start: Distribution of the first state, float64 ``[states]``, or that state's index.

    >>> walk = FiniteMDP([[[1]], [[1]]], [[[1.0]], [[1.0]]], -1.0, [[[True]], [[True]]], start=0)
    >>> walk.num_states, walk.num_actions, walk.num_outcomes, walk.shortest_episode
    (2, 1, 1, 1)
    """

    successors: Tensor
    probabilities: Tensor
    rewards: Tensor
    terminated: Tensor
    start: Tensor

    def __post_init__(self) -> None:
        successors = _tensor("successors", self.successors)
        probabilities = _tensor("probabilities", self.probabilities, torch.float64)
        if successors.ndim != 3 or not successors.numel():
            raise ValueError(
                "successors must have the shape [states, actions, outcomes], got "
                f"{list(successors.shape)}."
            )
        states = len(successors)
        if successors.dtype.is_floating_point or successors.dtype == torch.bool:
            raise ValueError(f"successors must be integers, got {successors.dtype}.")
        if bool(((successors < 0) | (successors >= states)).any()):
            raise ValueError(
                f"successors must be states in [0, {states}), one row of the tables each; got "
                f"{int(successors.min())} to {int(successors.max())}."
            )
        if probabilities.shape != successors.shape:
            raise ValueError(
                f"probabilities must have the shape {list(successors.shape)} of successors, got "
                f"{list(probabilities.shape)}."
            )
        terminated = _tensor("terminated", self.terminated)
        if terminated.dtype != torch.bool:
            raise ValueError(f"terminated must be true or false, got {terminated.dtype}.")
        rewards = _finite("rewards", _tensor("rewards", self.rewards, torch.float64))
        fields = {
            "successors": successors.long(),
            "probabilities": _distributions("probabilities", probabilities, "outcomes"),
            "rewards": _broadcast("rewards", rewards, successors.shape),
            "terminated": _broadcast("terminated", terminated, successors.shape),
            "start": _start(self.start, states),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_tables(
        cls, transitions: Any, rewards: Any, terminal: Any = None, start: Any = 0
    ) -> FiniteMDP:
        """An MDP from dense tables.

        Args:
            transitions: Probability of each next state, ``[states, actions, states]``.
            rewards: ``[states, actions]``, or ``[states, actions, states]`` by next state.
            terminal: States that end the episode when they are entered, bool ``[states]``; None
                for none. What their own rows say is not read.
            start: First state, or the distribution of it ``[states]``.

        >>> to_the_end = [[[0.5, 0.5]], [[0.0, 0.0]]]
        >>> FiniteMDP.from_tables(to_the_end, [[-1.0], [0.0]], [False, True]).successors.tolist()
        [[[0, 1]], [[1, 0]]]
        """
        chances = _tensor("transitions", transitions, torch.float64)
        if chances.ndim != 3 or chances.shape[0] != chances.shape[2] or not chances.numel():
            raise ValueError(
                "transitions must have the shape [states, actions, states], got "
                f"{list(chances.shape)}; FiniteMDP itself takes fewer outcomes than states."
            )
        states, actions, _ = chances.shape
        ends = _terminal(terminal, states)
        gains = _tensor("rewards", rewards, torch.float64)
        if tuple(gains.shape) not in ((states, actions), (states, actions, states)):
            raise ValueError(
                f"rewards must have the shape [states, actions] = {[states, actions]}, or "
                f"{[states, actions, states]} by next state; got {list(gains.shape)}."
            )
        _finite("rewards", gains)
        chances = torch.where(ends.view(-1, 1, 1), torch.eye(states).double().unsqueeze(1), chances)
        chances = _distributions("transitions", chances, "next states")
        first = _start(start, states)
        if bool((first > 0)[ends].any()):
            state = int(((first > 0) & ends).nonzero()[0])
            raise ValueError(
                f"start may not be a terminal state, got {state}: no episode could take a step."
            )
        gains = gains if gains.ndim == 3 else gains.unsqueeze(-1).expand_as(chances)
        gains = torch.where(ends.view(-1, 1, 1), 0.0, gains)
        # The possible next states of each row come first, in their order.
        most = int((chances > 0).sum(-1).max())
        successors = (chances == 0).byte().sort(stable=True).indices[..., :most]
        return cls(
            successors,
            chances.gather(-1, successors),
            gains.gather(-1, successors),
            ends[successors],
            first,
        )

    @classmethod
    def from_outcomes(cls, outcomes: Mapping[int, Any] | Sequence[Any], start: Any) -> FiniteMDP:
        """An MDP from Gymnasium's ``P``.

        Args:
            outcomes: ``outcomes[state][action]`` is a list of (probability, next state, reward,
                terminated).
            start: First state, or the distribution of it ``[states]``.

        >>> leave, stay = [(0.5, 0, 0.0, False), (0.5, 1, 1.0, True)], [(1.0, 1, 0.0, True)]
        >>> FiniteMDP.from_outcomes({0: {0: leave}, 1: {0: stay}}, start=0).probabilities.tolist()
        [[[0.5, 0.5]], [[1.0, 0.0]]]
        """
        states = range(len(outcomes))
        try:
            rows = [[list(outcomes[s][a]) for a in range(len(outcomes[s]))] for s in states]
            most = max(len(row) for actions in rows for row in actions)
            unused = (0.0, 0, 0.0, False)
            table = [[row + [unused] * (most - len(row)) for row in actions] for actions in rows]
            columns = [
                torch.tensor([[[cast(x[i]) for x in row] for row in actions] for actions in table])
                for i, cast in enumerate((float, int, float, bool))
            ]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(
                "outcomes[state][action] must be a list of (probability, next state, reward, "
                f"terminated) for all states and as many actions in each; got {error!r}."
            ) from error
        probabilities, successors, rewards, terminated = columns
        return cls(successors, probabilities.double(), rewards.double(), terminated, start)

    @property
    def num_states(self) -> int:
        """Number of states."""
        return self.successors.shape[0]

    @property
    def num_actions(self) -> int:
        """Number of actions, the same in all states."""
        return self.successors.shape[1]

    @property
    def num_outcomes(self) -> int:
        """K, the most outcomes that an action has."""
        return self.successors.shape[2]

    @property
    def shortest_episode(self) -> int | None:
        """Fewest steps in which an episode can end, None where none ends."""
        possible = self.probabilities > 0
        reached = seen = self.start > 0
        steps = 0
        while bool(reached.any()):
            steps += 1
            if bool((self.terminated & possible)[reached].any()):
                return steps
            following = torch.zeros_like(seen)
            following[self.successors[reached][possible[reached]]] = True
            reached, seen = following & ~seen, following | seen
        return None


def _tensor(name: str, value: Any, dtype: torch.dtype | None = None) -> Tensor:
    try:
        return torch.as_tensor(value, dtype=dtype, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} must be an array of numbers, got {value!r} ({error}).") from error


def _finite(name: str, values: Tensor) -> Tensor:
    wrong = (~values.isfinite()).nonzero().tolist()
    if wrong:
        raise ValueError(f"{name} must be finite, got {values[tuple(wrong[0])]} at {wrong[0]}.")
    return values


def _broadcast(name: str, values: Tensor, shape: Sequence[int]) -> Tensor:
    try:
        return values.expand(*shape).contiguous()
    except RuntimeError as error:
        raise ValueError(
            f"{name} must have the shape {list(shape)} of successors, got {list(values.shape)}."
        ) from error


def _distributions(name: str, values: Tensor, along: str) -> Tensor:
    wrong = (~(values.isfinite() & (values >= 0))).nonzero().tolist()
    if wrong:
        raise ValueError(
            f"{name} must be probabilities, finite and not negative; got "
            f"{values[tuple(wrong[0])]} at {wrong[0]}."
        )
    total = values.sum(-1, keepdim=True)
    off = ((total - 1).abs() > SUM_TOLERANCE).squeeze(-1).nonzero().tolist()
    if off:
        where = f" at {off[0]}" if off[0] else ""
        raise ValueError(
            f"{name} must sum to 1 over {along}, got {float(total[tuple(off[0])]):.6g}{where}: "
            "divide by the sum, or add what is missing."
        )
    return values / total


def _terminal(terminal: Any, states: int) -> Tensor:
    if terminal is None:
        return torch.zeros(states, dtype=torch.bool)
    ends = _tensor("terminal", terminal)
    if ends.dtype != torch.bool or tuple(ends.shape) != (states,):
        raise ValueError(
            f"terminal must be true or false for each state, bool [{states}]; got {ends.dtype} "
            f"{list(ends.shape)}."
        )
    return ends


def _start(start: Any, states: int) -> Tensor:
    first = _tensor("start", start)
    if first.ndim == 0 and not first.dtype.is_floating_point and 0 <= int(first) < states:
        return (torch.arange(states) == first).double()
    if tuple(first.shape) != (states,):
        raise ValueError(
            f"start must be a state in [0, {states}) or a distribution [{states}] over them, got "
            f"{start!r}."
        )
    return _distributions("start", first.double(), "states")
