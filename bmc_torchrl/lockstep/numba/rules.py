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

    Eight at a time: each function less is compiled in a twentieth of a second less.
    """
    rest = functions[-1] if len(functions) <= 8 else compiled(_chosen(functions[7:], first + 7))
    more = len(functions) > 8
    one, two, three, four, five, six, seven = (*functions[:7], *functions[-1:] * 7)[:7]

    def choose(rules: Any, which: Any, *row: Any) -> Any:
        if which == first:
            return one(*row)
        if which == first + 1:
            return two(*row)
        if which == first + 2:
            return three(*row)
        if which == first + 3:
            return four(*row)
        if which == first + 4:
            return five(*row)
        if which == first + 5:
            return six(*row)
        if which == first + 6:
            return seven(*row)
        return rest(rules, which, *row) if more else rest(*row)

    return choose


def _implement(stub: Callable[..., Any], name: str) -> None:
    @implements(stub)
    def typed(rules: Any, which: Any, *row: Any) -> Any:
        kinds = (rule.instance_class for rule in rules.types)
        return _chosen([compiled_rule(getattr(kind, name)) for kind in kinds])


_implement(begin_episode, "begin")
_implement(current_epsilon, "epsilon")
_implement(look_at_values, "look")
_implement(learn_transition, "learn")
