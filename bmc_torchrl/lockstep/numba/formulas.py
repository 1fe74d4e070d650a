"""The package's formulas for one run, as scalar functions compiled by numba.

Every function restates the tensor function named in its docstring, and tests hold the two equal.
Tables, rewards and returns are float32, ε and what strategies remember float64, as there. Only the
mean over more than `SHORT_ROW` actions differs in its last bit: it comes from a float64 sum kept
per row, because reading the row is what a step would otherwise spend its time on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from bmc_torchrl.strategies.compiled import INNER

__all__ = [
    "SHORT_ROW",
    "Array",
    "Scalar",
    "at",
    "compiled",
    "epsilon_greedy",
    "fill_normal",
    "inlined",
    "learning_rate",
    "mixed",
    "move_value",
    "next_bits",
    "row_argmax",
    "row_mean",
    "uniform",
    "uniform_pair",
]

SHORT_ROW = 8

F = TypeVar("F", bound=Callable[..., Any])
Array = np.ndarray[Any, Any]
Scalar = Any
Bits = Any

compiled = cast(Callable[[F], F], numba.njit(**INNER))
# For what one function calls in one place: its arguments are nothing to compile.
inlined = cast(Callable[[F], F], numba.njit(inline="always", **INNER))
# A maximum may be taken in any order; nothing else here may.
_compiled_unordered = cast(Callable[[F], F], numba.njit(fastmath={"nnan", "nsz"}, **INNER))


@intrinsic  # type: ignore[untyped-decorator]
def at(typing: Any, array: Any, index: Any) -> Any:
    """The place of an entry or row of a contiguous array, or of an entry from another place on.

    It is read and written as an array is, but for its size. A slice, which has size and strides and
    may begin at the end, takes ten times as long to compile.
    """

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        kind, (data, index) = signature.args[0], given
        if isinstance(kind, types.Array):
            array = context.make_array(kind)(context, builder, data)
            for size in cgutils.unpack_tuple(builder, array.shape)[1:]:
                index = builder.mul(index, size)
            data = array.data
        return builder.gep(data, [index])

    return types.CPointer(array.dtype)(array, types.int64), generate


GOLDEN, MIX1, MIX2 = (
    np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_U11, _U16, _U17, _U23, _U27, _U30, _U31, _U40, _U45, _U64 = (
    np.uint64(x) for x in (11, 16, 17, 23, 27, 30, 31, 40, 45, 64)
)
_MASK24, NO_BITS = np.uint64(0xFFFFFF), np.uint64(0)


@compiled
def mixed(z: Bits) -> Bits:
    """The output function of splitmix64 (Steele, Lea & Flood 2014)."""
    z = (z ^ (z >> _U30)) * MIX1
    z = (z ^ (z >> _U27)) * MIX2
    return z ^ (z >> _U31)


@compiled
def next_bits(s: Array) -> Bits:
    """One step of xoshiro256++ (Blackman & Vigna 2019) on its state ``[4]`` uint64."""
    s0, s1, s2, s3 = s[0], s[1], s[2], s[3]
    total = s0 + s3
    result = ((total << _U23) | (total >> (_U64 - _U23))) + s0
    shifted = s1 << _U17
    s2 ^= s0
    s3 ^= s1
    s1 ^= s2
    s0 ^= s3
    s2 ^= shifted
    s[0], s[1], s[2], s[3] = s0, s1, s2, (s3 << _U45) | (s3 >> (_U64 - _U45))
    return result


@compiled
def uniform(bits: Bits) -> Scalar:
    """A float64 on [0, 1) from 53 of 64 bits."""
    return np.int64(bits >> _U11) * 2.0**-53


@compiled
def uniform_pair(bits: Bits) -> tuple[Scalar, Scalar]:
    """Two float32 on [0, 1), of 24 bits each, like torch's."""
    unit = np.float32(2.0**-24)
    first, second = np.int32(bits >> _U40), np.int32((bits >> _U16) & _MASK24)
    return np.float32(first) * unit, np.float32(second) * unit


@compiled
def fill_normal(values: Array, bits: Array, scale: float) -> None:
    """`scale` times standard normal numbers, by Marsaglia's polar method."""
    j = 0
    while j < values.size:
        x, y = 2 * uniform(next_bits(bits)) - 1, 2 * uniform(next_bits(bits)) - 1
        squared = x * x + y * y
        if 0 < squared < 1:
            factor = scale * math.sqrt(-2 * math.log(squared) / squared)
            values[j] = x * factor
            if j + 1 < values.size:
                values[j + 1] = y * factor
            j += 2


@compiled
def epsilon_greedy(greedy: int, epsilon: Scalar, coin: Scalar, which: Scalar, actions: int) -> Any:
    """``epsilon_greedy_action`` of a ``uniform_action``, all in float32."""
    return np.int64(which * np.float32(actions)) if coin < epsilon else np.int64(greedy)


@compiled
def learning_rate(initial: float, decay: float, floor: float, episode: int) -> Scalar:
    """η of an episode, ``max(initial · decay^k, floor)``."""
    return np.float32(max(initial * decay**episode, floor))


@_compiled_unordered
def row_maximum(row: Array, size: int) -> Scalar:
    """The largest of the first `size` of a row."""
    best = row[0]
    for j in range(1, size):
        best = row[j] if row[j] > best else best
    return best


@compiled
def row_argmax(row: Array, size: int) -> Any:
    """The first index of the largest; any index of a row that holds NaN."""
    best, index = row_maximum(row, size), 0
    while index < size - 1 and row[index] != best:
        index += 1
    return index


@compiled
def row_mean(row: Array, row_sum: Scalar) -> Scalar:
    """The mean of a row in float32; `row_sum` is read where the row is long."""
    if row.size > SHORT_ROW:
        return np.float32(row_sum / row.size)
    total = row[0]
    for value in row[1:]:
        total += value
    return total / np.float32(row.size)


@compiled
def move_value(
    table: Array, greedy: Array, row_sum: Array, state: int, action: int, target: Scalar, rate: Any
) -> Scalar:
    """``tabular_update`` of one run, which also keeps each row's greedy action and sum."""
    row = table[state]
    before = row[action]
    after = before + rate * (target - before)
    row[action] = after
    row_sum[state] += np.float64(after) - np.float64(before)
    best = np.int64(greedy[state])
    if action == best:
        if after < before:
            greedy[state] = row_argmax(row, row.size)
    elif after > row[best] or (after == row[best] and action < best):
        greedy[state] = action
    return after - before
