"""Any domain's scalar form as what the loops call, chosen by the class of its constants."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numba.extending import overload

from bmc_torchrl.envs.lanes import Numbers
from bmc_torchrl.lockstep.numba.formulas import Array, F, Scalar, compiled
from bmc_torchrl.strategies.compiled import INNER

__all__ = ["domain_start", "domain_step"]

_JIT = {name: value for name, value in INNER.items() if name != "nogil"}
implements = cast(Callable[[Any], Callable[[F], F]], lambda stub: overload(stub, jit_options=_JIT))


def domain_step(m: Any, p: Numbers, state: Scalar, action: Scalar, u: Scalar) -> Any:
    """Numbers, state, reward and termination after one step; by the class of `m`."""
    raise NotImplementedError


def domain_start(m: Any, p: Array, u: Numbers, episode: Scalar) -> Any:
    """State of a new `episode`, its numbers written to `p` ``[4]``; by the class of `m`."""
    raise NotImplementedError


@functools.cache
def _function(m: Any, name: str) -> Any:
    return compiled(getattr(m.instance_class, name))


@implements(domain_step)
def _domain_step(m: Any, p: Any, state: Any, action: Any, u: Any) -> Any:
    step, cell = _function(m, "step"), _function(m, "cell")

    def move(m: Any, p: Any, state: Any, action: Any, u: Any) -> Any:
        p, state, reward, terminated = step(m, p, state, action, u)
        return p, np.int64(cell(m, p, state)), np.float32(reward), terminated

    return move


@implements(domain_start)
def _domain_start(m: Any, p: Any, u: Any, episode: Any) -> Any:
    start, cell = _function(m, "start"), _function(m, "cell")

    def begin(m: Any, p: Any, u: Any, episode: Any) -> Any:
        (p[0], p[1], p[2], p[3]), state = start(m, u, episode)
        return np.int64(cell(m, (p[0], p[1], p[2], p[3]), np.int64(state)))

    return begin
