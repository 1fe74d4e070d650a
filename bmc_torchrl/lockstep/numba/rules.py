"""Any strategy's scalar rule as what the loops call, chosen by a number per run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bmc_torchrl.lockstep.numba.domains import implements
from bmc_torchrl.lockstep.numba.formulas import compiled
from bmc_torchrl.strategies.compiled import compiled_rule

__all__ = ["begin_episode", "current_epsilon", "learn_transition", "look_at_values"]


def begin_episode(rules: Any, which: int, *row: Any) -> None:
    """:meth:`ScalarRule.begin` of ``rules[which]``."""
    raise NotImplementedError


def current_epsilon(rules: Any, which: int, *row: Any) -> Any:
    """:meth:`ScalarRule.epsilon` of ``rules[which]``."""
    raise NotImplementedError


def look_at_values(rules: Any, which: int, *row: Any) -> None:
    """:meth:`ScalarRule.look` of ``rules[which]``."""
    raise NotImplementedError


def learn_transition(rules: Any, which: int, *row: Any) -> None:
    """:meth:`ScalarRule.learn` of ``rules[which]``."""
    raise NotImplementedError


def _chosen(functions: list[Any], first: int = 0) -> Callable[..., Any]:
    """Functions as one that is also given the number of one of them, from `first` on.

    Four at a time: a compiled function for every two takes a second longer to compile.
    """
    padded = [*functions, *functions[-1:] * 3]
    one, two, three, last = padded[:4]

    @compiled
    def choose(which: int, *row: Any) -> Any:
        if which == first:
            return one(*row)
        if which == first + 1:
            return two(*row)
        if which == first + 2:
            return three(*row)
        return last(*row)

    if len(functions) <= 4:
        return choose
    rest = _chosen(functions[4:], first + 4)

    @compiled
    def choose_or_go_on(which: int, *row: Any) -> Any:
        if which < first + 4:
            return choose(which, *row)
        return rest(which, *row)

    return choose_or_go_on


def _implement(stub: Callable[..., Any], name: str) -> None:
    @implements(stub)
    def typed(rules: Any, which: Any, *row: Any) -> Any:
        kinds = (rule.instance_class for rule in rules.types)
        function = _chosen([compiled_rule(getattr(kind, name)) for kind in kinds])

        def call(rules: Any, which: Any, *row: Any) -> Any:
            return function(which, *row)

        return call


_implement(begin_episode, "begin")
_implement(current_epsilon, "epsilon")
_implement(look_at_values, "look")
_implement(learn_transition, "learn")
