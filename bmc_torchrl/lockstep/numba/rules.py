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


def _chosen(rules: Any, name: str) -> Callable[..., Any]:
    """The functions of a name as one that is also given the number of the rule."""
    *before, last = (compiled_rule(getattr(rule.instance_class, name)) for rule in rules.types)

    @compiled
    def choose(which: int, *row: Any) -> Any:
        return last(*row)

    for number, function in reversed(list(enumerate(before))):
        choose = _either(number, function, choose)
    return choose


def _either(number: int, function: Any, other: Any) -> Callable[..., Any]:
    @compiled
    def choose(which: int, *row: Any) -> Any:
        if which == number:
            return function(*row)
        return other(which, *row)

    return choose


def _implement(stub: Callable[..., Any], name: str) -> None:
    @implements(stub)
    def typed(rules: Any, which: Any, *row: Any) -> Any:
        function = _chosen(rules, name)

        def call(rules: Any, which: Any, *row: Any) -> Any:
            return function(which, *row)

        return call


_implement(begin_episode, "begin")
_implement(current_epsilon, "epsilon")
_implement(look_at_values, "look")
_implement(learn_transition, "learn")
