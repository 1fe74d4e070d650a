"""Any strategy's scalar rule as what the loops call, chosen by a number per run."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from bmc_torchrl.lockstep.numba.domains import implements
from bmc_torchrl.lockstep.numba.formulas import compiled

__all__ = ["begin_episode", "compiled_rule", "current_epsilon", "learn_transition"]


def begin_episode(rules: Any, which: int, *row: Any) -> None:
    """:meth:`ScalarRule.begin` of ``rules[which]``."""
    raise NotImplementedError


def current_epsilon(rules: Any, which: int, *row: Any) -> Any:
    """:meth:`ScalarRule.epsilon` of ``rules[which]``."""
    raise NotImplementedError


def learn_transition(rules: Any, which: int, *row: Any) -> None:
    """:meth:`ScalarRule.learn` of ``rules[which]``."""
    raise NotImplementedError


@functools.cache
def compiled_rule(function: Any) -> Any:
    """A function of a rule, compiled with the plain functions that it calls.

    >>> import numpy as np
    >>> from bmc_torchrl.strategies.bmc import BMCRule
    >>> memory = np.array([0.0, 1.0, 3.0])
    >>> compiled_rule(BMCRule.begin)(memory, memory, 0)
    >>> memory[0].item()
    0.25
    """
    scope = dict(function.__globals__)
    for name in function.__code__.co_names:
        if isinstance(scope.get(name), types.FunctionType):
            scope[name] = compiled_rule(scope[name])
    return compiled(types.FunctionType(function.__code__, scope, function.__name__))


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
_implement(learn_transition, "learn")
