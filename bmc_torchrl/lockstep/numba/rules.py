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

    Five at a time, which is one compiled function for the paper's strategies.
    """
    *padded, last = [*functions[:5], *functions[-1:] * 5][:5]
    one, two, three, four = padded

    def choose(rules: Any, which: Any, *row: Any) -> Any:
        if which == first:
            return one(*row)
        if which == first + 1:
            return two(*row)
        if which == first + 2:
            return three(*row)
        if which == first + 3:
            return four(*row)
        return last(*row)

    if len(functions) <= 5:
        return choose
    these, others = compiled(choose), compiled(_chosen(functions[5:], first + 5))

    def choose_or_go_on(rules: Any, which: Any, *row: Any) -> Any:
        if which < first + 5:
            return these(rules, which, *row)
        return others(rules, which, *row)

    return choose_or_go_on


def _implement(stub: Callable[..., Any], name: str) -> None:
    @implements(stub)
    def typed(rules: Any, which: Any, *row: Any) -> Any:
        kinds = (rule.instance_class for rule in rules.types)
        return _chosen([compiled_rule(getattr(kind, name)) for kind in kinds])


_implement(begin_episode, "begin")
_implement(current_epsilon, "epsilon")
_implement(look_at_values, "look")
_implement(learn_transition, "learn")
