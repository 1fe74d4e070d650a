"""Any strategy's scalar rule as what the loops call, chosen by a number per run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bmc_torchrl.lockstep.numba.domains import implements
from bmc_torchrl.lockstep.numba.formulas import compiled
from bmc_torchrl.strategies.compiled import compiled_rule

__all__ = ["begin_episode", "current_epsilon", "learn_transition"]


def begin_episode(rules: Any, which: int, *row: Any) -> None:
    """:meth:`ScalarRule.begin` of ``rules[which]``."""
    raise NotImplementedError


def current_epsilon(rules: Any, which: int, *row: Any) -> Any:
    """:meth:`ScalarRule.epsilon` of ``rules[which]``."""
    raise NotImplementedError


def learn_transition(rules: Any, which: int, *row: Any) -> None:
    """:meth:`ScalarRule.learn` of ``rules[which]``."""
    raise NotImplementedError


def _chosen(rules: Any, name: str) -> Callable[..., Any]:
    """The functions of a name as one that is also given the number of the rule.

    It is written as text: a function of each rule and the next ones takes a second more to compile.
    """
    scope: dict[str, Any] = {}
    lines = ["def choose(which, *row):"]
    for number, rule in enumerate(rules.types):
        scope[f"of_{number}"] = compiled_rule(getattr(rule.instance_class, name))
        condition = f"if which == {number}: " if number + 1 < len(rules.types) else ""
        lines.append(f"    {condition}return of_{number}(*row)")
    exec("\n".join(lines), scope)
    choose: Callable[..., Any] = compiled(scope["choose"])
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
_implement(learn_transition, "learn")
