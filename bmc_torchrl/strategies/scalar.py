"""A strategy for one run, as plain functions of numbers that an engine compiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["NoScalarFormError", "ScalarForm", "ScalarRule"]

Row = Any
Number = Any


class NoScalarFormError(ValueError):
    """A strategy that cannot be written as functions of numbers; the message says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason} The numba engine does not have it: use engine=torchrl.")


class ScalarRule(NamedTuple):
    """How ε of one run begins an episode, is read and learns; this one never changes it.

    A subclass overrides what differs. Its functions are compiled by numba as they are: they may
    use their arguments, ``math``, and the numbers and functions of their own file. A row is a
    run's row of what :class:`ScalarForm` has, and is written in place. All numbers are float64.

    Examples:
        >>> class Halving(ScalarRule):
        ...     @staticmethod
        ...     def learn(parameters, memory, local, state, greedy, uniform, change):
        ...         memory[0] /= 2
        >>> memory = [0.5]
        >>> Halving.learn([], memory, [], 0, 1.0, 0.0, 0.1)
        >>> Halving.epsilon(memory, [], 0)
        0.25
    """

    @staticmethod
    def begin(parameters: Row, memory: Row, episode: Number) -> None:
        """Prepare for an episode.

        Args:
            parameters (row): what never changes.
            memory (row): what may.
            episode (int): how many episodes the engine has finished.
        """

    @staticmethod
    def epsilon(memory: Row, local: Row, state: Number) -> Number:
        """ε to act with; asked twice a step, so that what is costly belongs in `memory`.

        Args:
            memory (row): what the run remembers.
            local (row): what it remembers of each state.
            state (int): the current one.

        Returns:
            A number between 0 and 1.
        """
        return memory[0]

    @staticmethod
    def look(memory: Row, chosen: Number, promised: Number, greedily: Number) -> None:
        """See what Q said of the state being left, before it learned; :meth:`learn` follows.

        Args:
            memory (row): what may change.
            chosen (float): the value of the action taken.
            promised (float): that of the greedy action.
            greedily (bool): whether they are the same action.
        """

    @staticmethod
    def learn(
        parameters: Row,
        memory: Row,
        local: Row,
        state: Number,
        greedy: Number,
        uniform: Number,
        change: Number,
    ) -> None:
        """Learn from a transition.

        Args:
            parameters (row): what never changes.
            memory (row): what may.
            local (row): what may, of each state.
            state (int): the state being left.
            greedy (float): the greedy return.
            uniform (float): the uniform return.
            change (float): what learning changed of the value.
        """


class ScalarForm(NamedTuple):
    """A strategy's rule, and what its runs have; entries are numbers or ``[runs]``.

    Args:
        rule (type of ScalarRule): what is done with the rest.
        parameters (sequence of float or Tensor): what never changes, in the rule's order.
        memory (sequence of float or Tensor): what the rule may change, in its order.
        local (Tensor, optional): likewise, one number per state, ``[runs, states]``.

    Examples:
        >>> ScalarForm(ScalarRule, memory=[0.1]).rule.__name__
        'ScalarRule'
    """

    rule: type[ScalarRule]
    parameters: Sequence[float | Tensor] = ()
    memory: Sequence[float | Tensor] = ()
    local: Tensor | None = None
