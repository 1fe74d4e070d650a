"""What a network's loops spend their time on: products of small float32 matrices, and Adam.

Products are LLVM's vectors: a tile of the result stays in registers while it is summed. Matrices of
12 to 100 columns are multiplied one and a half to three times as fast as by a BLAS call, which
checks, copies and may start threads. LLVM turns the vectors into whatever the processor has.

:data:`multiply` and :data:`adam` are for compiled code only, after :func:`compile_kernels`. They
are compiled by themselves and called by address: every function that calls them would otherwise be
compiled with them, and Adam not as vectors. Arrays are flat and given as places (:func:`at`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from bmc_torchrl.lockstep.numba.formulas import Array, at, compiled, inlined
from bmc_torchrl.strategies.compiled import OPTIONS

__all__ = [
    "BETA1",
    "BETA2",
    "adam",
    "compile_kernels",
    "distinct_indices",
    "multiply",
    "transpose",
]

_FLOAT, _INDEX, _SHORT = ir.FloatType(), ir.IntType(64), ir.IntType(32)
_ARRAY = types.CPointer(types.float32)
_FUSED = ("contract",)
_ALIGN = ir.Constant(_SHORT, 4)
_BLOCK = 8
_HAS_512 = binding.get_host_cpu_features().get("avx512f", False)

BETA1, BETA2 = 0.9, 0.999
_NEW1, _KEPT2, _NEW2 = np.float32(1 - BETA1), np.float32(BETA2), np.float32(1 - BETA2)
_ZERO, _ADAM_EPSILON, _TINY = np.float32(0), np.float32(1e-7), np.float32(1e-30)

multiply = types.ExternalFunction(
    "bmc_torchrl_multiply",
    types.void(
        *[types.int64] * 3,
        _ARRAY,
        *[types.int64] * 2,
        _ARRAY,
        types.int64,
        _ARRAY,
        types.int64,
        types.float32,
    ),
)
"""``c[i, j] = max(Σ a[i, k] b[k, j], floor)``, each sum in the order of k; NaN stays NaN.

Args:
    rows (int): of `a` and `c`.
    inner (int): columns of `a`, rows of `b`; at least one.
    columns (int): of `b` and `c`.
    a (float32 array): entry (i, k) at ``i · down + k · along``: a transpose, too.
    down (int): see `a`.
    along (int): see `a`.
    b (float32 array): row k begins at ``k · b_row``.
    b_row (int): see `b`.
    c (float32 array): overwritten; row i begins at ``i · c_row``.
    c_row (int): see `c`.
    floor (float32): 0 for a ReLU, minus infinity for none.
"""

adam = types.ExternalFunction(
    "bmc_torchrl_adam", types.void(types.int64, *[_ARRAY] * 5, types.float32)
)
"""``flat_network.adam``, but that moments below `_TINY` become 0.

They decay where a unit or state is not used any more, and would end as subnormal numbers, which a
processor takes a hundred times as long to multiply. No parameter is changed by it.

Args:
    size (int): of the arrays.
    parameters (float32 array): changed, as are the moments.
    mean (float32 array): first moments.
    square (float32 array): second moments.
    gradient (float32 array): of the loss.
    penalty (float32 array): times its parameter, added to an entry of the gradient.
    rate (float32): η times the bias correction.
"""


class _Vectors:
    """Loads and stores of `lanes` floats at places of flat arrays."""

    def __init__(self, builder: Any, lanes: int) -> None:
        self.builder, self.lanes = builder, lanes
        self.type = ir.VectorType(_FLOAT, lanes)
        self.zero = ir.Constant(self.type, [0.0] * lanes)

    def place(self, array: Any, at: Any) -> Any:
        """The address of the vector that begins at an entry."""
        return self.builder.bitcast(self.builder.gep(array, [at]), self.type.as_pointer())

    def load(self, array: Any, at: Any, mask: Any = None) -> Any:
        if mask is None:
            return self.builder.load(self.place(array, at), align=4)
        return self._masked("load", self.type, self.place(array, at), _ALIGN, mask, self.zero)

    def store(self, value: Any, array: Any, at: Any, mask: Any = None) -> None:
        if mask is None:
            self.builder.store(value, self.place(array, at), align=4)
        else:
            self._masked("store", ir.VoidType(), value, self.place(array, at), _ALIGN, mask)

    def store_first(self, stores: list[Any], count: Any, mask: Any) -> None:
        """Store the first `count` lanes of each; AMD's take long for a mask, so there by halves."""
        builder = self.builder
        if _HAS_512:
            for value, array, at in stores:
                self.store(value, array, at, mask)
            return
        whole = builder.icmp_signed(">=", count, _index(self.lanes))
        with builder.if_else(whole) as (then, otherwise):
            with then:
                for value, array, at in stores:
                    self.store(value, array, at)
            with otherwise:
                self._store_halves(stores, count)

    def _store_halves(self, stores: list[Any], count: Any) -> None:
        """Store half of the lanes if `count` has so many, then likewise of those that are left."""
        if self.lanes == 1:
            return
        builder, half = self.builder, _Vectors(self.builder, self.lanes // 2)
        taken = builder.and_(count, _index(half.lanes))
        enough = builder.icmp_signed("!=", taken, _index(0))
        lower, upper = list(range(half.lanes)), list(range(half.lanes, self.lanes))
        halves = [
            (self.shuffle(value, value, lower), self.shuffle(value, value, upper), array, at)
            for value, array, at in stores
        ]
        with builder.if_then(enough):
            for low, _, array, at in halves:
                half.store(low, array, at)
        left = [
            (builder.select(enough, high, low), array, builder.add(at, taken))
            for low, high, array, at in halves
        ]
        half._store_halves(left, count)

    def _masked(self, what: str, returned: Any, *given: Any) -> Any:
        kind = ir.FunctionType(returned, [value.type for value in given])
        name = f"llvm.masked.{what}.v{self.lanes}f32.p0"
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(function, given)

    def first(self, count: Any) -> Any:
        """A mask of the first `count` lanes."""
        # As wide as what it masks: of other widths a mask is made anew for every load.
        numbers = ir.VectorType(_SHORT, self.lanes)
        count = self.splat(self.builder.trunc(count, _SHORT), numbers)
        return self.builder.icmp_signed("<", ir.Constant(numbers, list(range(self.lanes))), count)

    def splat(self, entry: Any, kind: Any = None) -> Any:
        """A number in every lane, of floats or of another kind."""
        empty = ir.Constant(kind or self.type, ir.Undefined)
        first = self.builder.insert_element(empty, entry, ir.Constant(_SHORT, 0))
        return self.shuffle(first, empty, [0] * self.lanes)

    def shuffle(self, first: Any, second: Any, lanes: list[int]) -> Any:
        mask = ir.Constant(ir.VectorType(_SHORT, len(lanes)), lanes)
        return self.builder.shuffle_vector(first, second, mask)

    def times(self, number: Any, count: int) -> Any:
        return self.builder.mul(number, _index(count))


def _index(number: int) -> Any:
    return ir.Constant(_INDEX, number)


def _opaque(builder: Any, number: Any) -> Any:
    """The number, as one of which LLVM knows nothing.

    Of an offset that it knows, it makes an address for every row, and has no registers for them.
    """
    return builder.asm(ir.FunctionType(_INDEX, [_INDEX]), "", "=r,0", [number], False)


def _tile(rows: int, vectors: int, lanes: int) -> Any:
    """A function that computes up to `rows` times `vectors` · `lanes` entries of a product.

    The last vector may be cut short. Where there are fewer rows, the last is computed several
    times: all of them at once take no longer than one, which would wait for every sum.
    """

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        left, inner, columns, a, at_a, down, along, b, at_b, b_row, c, at_c, c_row, floor = given
        vector = _Vectors(builder, lanes)
        rest = builder.sub(columns, _index((vectors - 1) * lanes))
        cut = vector.first(rest)
        masks = [None] * (vectors - 1) + [cut]
        a, b, c = builder.gep(a, [at_a]), builder.gep(b, [at_b]), builder.gep(c, [at_c])
        lines, targets = [a], [c]
        for row in range(1, rows):
            there = builder.icmp_signed("<", _index(row), left)
            for places, step in ((lines, down), (targets, c_row)):
                step = builder.select(there, step, _index(0))
                places.append(builder.gep(places[-1], [step]))
        cells = [(row, column) for row in range(rows) for column in range(vectors)]
        before, loop = builder.block, builder.append_basic_block("inner")
        builder.branch(loop)
        builder.position_at_end(loop)
        step, sums = builder.phi(_INDEX), {cell: builder.phi(vector.type) for cell in cells}
        to_a, to_b = _opaque(builder, builder.mul(step, along)), builder.mul(step, b_row)
        right = [
            vector.load(b, builder.add(to_b, _index(v * lanes)), mask)
            for v, mask in enumerate(masks)
        ]
        added = {}
        for row in range(rows):
            left = vector.splat(builder.load(builder.gep(lines[row], [to_a]), align=4))
            for v in range(vectors):
                product = builder.fmul(left, right[v], flags=_FUSED)
                added[row, v] = builder.fadd(sums[row, v], product, flags=_FUSED)
        following = builder.add(step, _index(1))
        for phi, start, later in [
            (step, _index(0), following),
            *((sums[cell], vector.zero, added[cell]) for cell in cells),
        ]:
            phi.add_incoming(start, before)
            phi.add_incoming(later, loop)
        after = builder.append_basic_block("sums")
        builder.cbranch(builder.icmp_signed("<", following, inner), loop, after)
        builder.position_at_end(after)
        least = vector.splat(floor)
        last = []
        for row, v in cells:
            value = added[row, v]
            value = builder.select(builder.fcmp_ordered("<", value, least), least, value)
            if v < vectors - 1:
                vector.store(value, targets[row], _index(v * lanes))
            else:
                last.append((value, targets[row], _index(v * lanes)))
        vector.store_first(last, rest, cut)
        return context.get_dummy_value()

    @intrinsic  # type: ignore[untyped-decorator]
    def tile(
        typing: Any, left: Any, inner: Any, columns: Any, a: Any, at_a: Any, down: Any, along: Any,
        b: Any, at_b: Any, b_row: Any, c: Any, at_c: Any, c_row: Any, floor: Any,
    ) -> Any:  # fmt: skip
        operands = left, inner, columns, a, at_a, down, along, b, at_b, b_row, c, at_c, c_row, floor
        return types.void(*operands), generate

    return tile


def _strip(high: int, vectors: int, lanes: int) -> Callable[..., None]:
    """A function that computes some columns of a product, `high` rows at a time, few at the end."""
    tile, low = _tile(high, vectors, lanes), _tile(_LOW, vectors, lanes)

    @inlined
    def strip(
        rows: int, inner: int, columns: int, a: Any, down: int, along: int,
        b: Any, b_row: int, c: Any, c_row: int, floor: float, j: int,
    ) -> None:  # fmt: skip
        for i in range(0, rows, high):
            if rows - i > _LOW:
                tile(
                    rows - i, inner, columns, a, i * down, down, along, b, j, b_row,
                    c, i * c_row + j, c_row, floor,
                )  # fmt: skip
            else:
                low(
                    rows - i, inner, columns, a, i * down, down, along, b, j, b_row,
                    c, i * c_row + j, c_row, floor,
                )  # fmt: skip

    return strip


_LANES, _HIGH = (16, 8) if _HAS_512 else (8, 6)
_LOW = 4
_double, _single = _strip(_HIGH, 2, _LANES), _strip(8, 1, _LANES)


def _multiply(
    rows: int, inner: int, columns: int, a: Any, down: int, along: int,
    b: Any, b_row: int, c: Any, c_row: int, floor: float,
) -> None:  # fmt: skip
    j: Any = np.int64(0)  # Of a literal's type the strips would be compiled once more.
    while columns - j > _LANES:
        left = columns - j if columns - j < 2 * _LANES else 2 * _LANES
        _double(rows, inner, left, a, down, along, b, b_row, c, c_row, floor, j)
        j += left
    if j < columns:
        _single(rows, inner, columns - j, a, down, along, b, b_row, c, c_row, floor, j)


def _adam(
    size: int, parameters: Any, mean: Any, square: Any, gradient: Any, penalty: Any, rate: Any
) -> None:
    for j in range(size):
        slope = gradient[j] + penalty[j] * parameters[j]
        first = mean[j] + _NEW1 * (slope - mean[j])
        second = _KEPT2 * square[j] + _NEW2 * slope * slope
        first = _ZERO if abs(first) < _TINY else first
        second = _ZERO if second < _TINY else second
        mean[j] = first
        square[j] = second
        parameters[j] = parameters[j] - rate * first / (np.sqrt(second) + _ADAM_EPSILON)


@functools.cache
def compile_kernels() -> None:
    """Make :data:`multiply` and :data:`adam` known to what is compiled from now on; cached."""
    for kernel, function in ((multiply, _multiply), (adam, _adam)):
        made = numba.cfunc(kernel.sig, cache=True, **OPTIONS)(function)
        binding.add_symbol(kernel.symbol, made.address)


@intrinsic  # type: ignore[untyped-decorator]
def _transpose_block(typing: Any, a: Any, a_row: Any, b: Any, b_row: Any) -> Any:
    """A block of `_BLOCK` rows and columns, by halves."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        vector = _Vectors(builder, _BLOCK)
        source, a_row, target, b_row = given
        rows = [vector.load(source, vector.times(a_row, row)) for row in range(_BLOCK)]
        size = _BLOCK // 2
        while size:
            upper = [x if not x & size else x - size + _BLOCK for x in range(_BLOCK)]
            lower = [x + size if not x & size else x + _BLOCK for x in range(_BLOCK)]
            for row in range(_BLOCK):
                if not row & size:
                    pair = rows[row], rows[row + size]
                    rows[row] = vector.shuffle(*pair, upper)
                    rows[row + size] = vector.shuffle(*pair, lower)
            size //= 2
        for row, values in enumerate(rows):
            vector.store(values, target, vector.times(b_row, row))
        return context.get_dummy_value()

    return types.void(a, a_row, b, b_row), generate


@compiled
def transpose(a: Array, b: Array, rows: int, columns: int, b_row: int) -> None:
    """The rows of `a` become columns of `b`, whose rows begin `b_row` entries apart."""
    if rows < _BLOCK or columns < _BLOCK:
        for i in range(rows):
            for j in range(columns):
                b[j * b_row + i] = a[i * columns + j]
        return
    for block in range(0, rows, _BLOCK):
        i = block if block < rows - _BLOCK else rows - _BLOCK
        for beside in range(0, columns, _BLOCK):
            j = beside if beside < columns - _BLOCK else columns - _BLOCK
            _transpose_block(at(a, i * columns + j), columns, at(b, j * b_row + i), b_row)


@intrinsic  # type: ignore[untyped-decorator]
def _shift(typing: Any, positions: Any, rows: Any, first: Any, count: Any) -> Any:
    """`_LANES` of the rows of :func:`distinct_indices`, in a register, from `first` on."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        positions, rows, first, count = given
        vector, numbers = _Vectors(builder, _LANES), ir.VectorType(_SHORT, _LANES)
        bits = _FLOAT.as_pointer()
        rest = builder.sub(count, first)
        cut = vector.first(rest)
        start = vector.load(builder.bitcast(positions, bits), first, cut)
        shifted = cgutils.alloca_once_value(builder, builder.bitcast(start, numbers))
        enough = builder.icmp_signed("<", rest, _index(_LANES))
        last = builder.add(first, builder.select(enough, rest, _index(_LANES)))
        draws = builder.sub(last, _index(1))
        with cgutils.for_range(builder, draws) as loop:
            draw = builder.sub(builder.sub(draws, _index(1)), loop.index)
            removed = builder.load(builder.gep(positions, [draw]))
            row = builder.load(shifted)
            passed = builder.icmp_signed(">=", row, vector.splat(removed, numbers))
            drawn_later = builder.not_(
                vector.first(builder.sub(builder.add(draw, _index(1)), first))
            )
            passed = builder.and_(passed, drawn_later)
            builder.store(builder.add(row, builder.zext(passed, numbers)), shifted)
        found = builder.bitcast(builder.load(shifted), vector.type)
        vector.store_first([(found, builder.bitcast(rows, bits), first)], rest, cut)
        return context.get_dummy_value()

    return types.void(positions, rows, first, count), generate


@compiled
def distinct_indices(positions: Array, rows: Array, count: int) -> None:
    """``learners.replay.distinct_indices``, from positions among what is left; int32 arrays."""
    for first in range(0, count, _LANES):
        _shift(positions, rows, first, count)
