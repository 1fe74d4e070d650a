"""Products of small float32 matrices for compiled loops, as LLVM's vectors.

A tile of the result stays in registers while it is summed. Matrices of 12 to 100 columns are
multiplied one and a half to three times as fast as by a BLAS call, which checks, copies and may
start threads. LLVM turns the vectors into whatever the processor has. Matrices are flat arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from bmc_torchrl.lockstep.numba.formulas import Array, compiled

__all__ = ["AS_IT_IS", "RECTIFIED", "WHERE_POSITIVE", "multiply", "transpose"]

AS_IT_IS, RECTIFIED, WHERE_POSITIVE = range(3)
"""What :func:`multiply` does with each sum."""

_FLOAT, _INDEX = ir.FloatType(), ir.IntType(64)
_FUSED = ("contract",)
_BLOCK = 8


class _Vectors:
    """Loads and stores of `lanes` floats at places of flat arrays."""

    def __init__(self, context: Any, builder: Any, lanes: int) -> None:
        self.context, self.builder, self.lanes = context, builder, lanes
        self.type = ir.VectorType(_FLOAT, lanes)

    def array(self, kind: Any, value: Any, start: Any) -> Any:
        """The address of an entry of an array."""
        data = self.context.make_array(kind)(self.context, self.builder, value).data
        return self.builder.gep(data, [start])

    def place(self, array: Any, at: Any) -> Any:
        """The address of the vector that begins at an entry."""
        return self.builder.bitcast(self.builder.gep(array, [at]), self.type.as_pointer())

    def load(self, array: Any, at: Any) -> Any:
        return self.builder.load(self.place(array, at), align=4)

    def store(self, value: Any, array: Any, at: Any) -> None:
        self.builder.store(value, self.place(array, at), align=4)

    def splat(self, array: Any, at: Any) -> Any:
        """One entry in every lane."""
        entry = self.builder.load(self.builder.gep(array, [at]), align=4)
        empty = ir.Constant(self.type, ir.Undefined)
        first = self.builder.insert_element(empty, entry, ir.Constant(ir.IntType(32), 0))
        return self.shuffle(first, empty, [0] * self.lanes)

    def shuffle(self, first: Any, second: Any, lanes: list[int]) -> Any:
        mask = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes)
        return self.builder.shuffle_vector(first, second, mask)

    def times(self, number: Any, count: int) -> Any:
        return self.builder.mul(number, _index(count))


def _index(number: int) -> Any:
    return ir.Constant(_INDEX, number)


def _tile(rows: int, vectors: int, lanes: int) -> Any:
    """A function that computes `rows` times `vectors` · `lanes` entries of a product."""

    def tile(
        typing: Any,
        a: Any, at_a: Any, down: Any, along: Any,
        b: Any, at_b: Any, b_row: Any,
        c: Any, at_c: Any, c_row: Any,
        mask: Any, at_mask: Any, mask_row: Any,
        kind: Any, inner: Any,
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            vector, kinds = _Vectors(context, builder, lanes), signature.args
            a, b, c, mask = (vector.array(kinds[n], *given[n : n + 2]) for n in (0, 4, 7, 10))
            _, _, down, along, _, _, b_row, _, _, c_row, _, _, mask_row, kind, inner = given
            zero = ir.Constant(vector.type, [0.0] * lanes)
            cells = [(row, column) for row in range(rows) for column in range(vectors)]
            before, loop = builder.block, builder.append_basic_block("inner")
            builder.branch(loop)
            builder.position_at_end(loop)
            step, sums = builder.phi(_INDEX), {cell: builder.phi(vector.type) for cell in cells}
            to_a, to_b = builder.mul(step, along), builder.mul(step, b_row)
            right = [vector.load(b, builder.add(to_b, _index(v * lanes))) for v in range(vectors)]
            left = [
                vector.splat(a, builder.add(to_a, vector.times(down, row))) for row in range(rows)
            ]
            added = {
                (row, v): builder.fadd(
                    sums[row, v], builder.fmul(left[row], right[v], flags=_FUSED), flags=_FUSED
                )
                for row, v in cells
            }
            following = builder.add(step, _index(1))
            for phi, start, later in [
                (step, _index(0), following),
                *((sums[cell], zero, added[cell]) for cell in cells),
            ]:
                phi.add_incoming(start, before)
                phi.add_incoming(later, loop)
            after = builder.append_basic_block("sums")
            builder.cbranch(builder.icmp_signed("<", following, inner), loop, after)
            builder.position_at_end(after)

            def write(finished: Callable[[Any, int, int], Any]) -> None:
                for row, v in cells:
                    at = builder.add(vector.times(c_row, row), _index(v * lanes))
                    vector.store(finished(added[row, v], row, v), c, at)

            def rectified(value: Any, row: int, v: int) -> Any:
                return builder.select(builder.fcmp_ordered("<", value, zero), zero, value)

            def where_positive(value: Any, row: int, v: int) -> Any:
                at = builder.add(vector.times(mask_row, row), _index(v * lanes))
                positive = builder.fcmp_ordered(">", vector.load(mask, at), zero)
                return builder.select(positive, value, zero)

            with builder.if_else(builder.icmp_signed("==", kind, _index(AS_IT_IS))) as cases:
                with cases[0]:
                    write(lambda value, row, v: value)
                with (
                    cases[1],
                    builder.if_else(builder.icmp_signed("==", kind, _index(RECTIFIED))) as others,
                ):
                    with others[0]:
                        write(rectified)
                    with others[1]:
                        write(where_positive)
            return context.get_dummy_value()

        operands = a, at_a, down, along, b, at_b, b_row, c, at_c, c_row, mask, at_mask, mask_row
        return types.void(*operands, kind, inner), generate

    return intrinsic(tile)


def _strip(high: int, vectors: int, lanes: int) -> Callable[..., None]:
    """A function that computes some columns of a product, `high` rows at a time.

    The last rows are taken together with some that have been computed already.
    """
    many, one = _tile(high, vectors, lanes), _tile(1, vectors, lanes)

    @compiled
    def strip(
        rows: int,
        inner: int,
        columns: int,
        a: Array,
        down: int,
        along: int,
        b: Array,
        c: Array,
        c_row: int,
        mask: Array,
        mask_row: int,
        kind: int,
        j: int,
    ) -> None:
        i = 0
        while rows >= high and i < rows:
            i = min(i, rows - high)
            at_c, at_mask = i * c_row + j, i * mask_row + j
            many(
                a, i * down, down, along, b, j, columns,
                c, at_c, c_row, mask, at_mask, mask_row, kind, inner,
            )  # fmt: skip
            i += high
        for k in range(i, rows):
            at_c, at_mask = k * c_row + j, k * mask_row + j
            one(
                a, k * down, down, along, b, j, columns,
                c, at_c, c_row, mask, at_mask, mask_row, kind, inner,
            )  # fmt: skip

    return strip


_wide, _narrow = _strip(4, 2, 8), _strip(8, 1, 8)
_half, _quarter, _single = _strip(8, 1, 4), _strip(8, 1, 2), _strip(8, 1, 1)


@compiled
def multiply(
    rows: int,
    inner: int,
    columns: int,
    a: Array,
    down: int,
    along: int,
    b: Array,
    c: Array,
    c_row: int,
    mask: Array,
    mask_row: int,
    kind: int,
) -> None:
    """``c[i, j] = Σ a[i, k] b[k, j]``, each sum in the order of k.

    Args:
        rows: of `a` and `c`.
        inner: columns of `a`, rows of `b`; at least one.
        columns: of `b` and `c`.
        a: entry (i, k) at ``i · down + k · along``, so that it may be a transpose.
        down: see `a`.
        along: see `a`.
        b: its rows follow one another.
        c: overwritten; row i begins at ``i · c_row``.
        c_row: see `c`.
        mask: like `c`; read if `kind` is `WHERE_POSITIVE`.
        mask_row: see `mask`.
        kind: `AS_IT_IS`; `RECTIFIED`: negative sums become 0; `WHERE_POSITIVE`: sums become 0
            where `mask` is not positive.
    """
    j = 0
    while columns >= 16 and j + 8 < columns:
        j = min(j, columns - 16)
        _wide(rows, inner, columns, a, down, along, b, c, c_row, mask, mask_row, kind, j)
        j += 16
    while columns >= 8 and j < columns:
        j = min(j, columns - 8)
        _narrow(rows, inner, columns, a, down, along, b, c, c_row, mask, mask_row, kind, j)
        j += 8
    while columns >= 4 and j < columns:
        j = min(j, columns - 4)
        _half(rows, inner, columns, a, down, along, b, c, c_row, mask, mask_row, kind, j)
        j += 4
    while columns >= 2 and j < columns:
        j = min(j, columns - 2)
        _quarter(rows, inner, columns, a, down, along, b, c, c_row, mask, mask_row, kind, j)
        j += 2
    if j < columns:
        _single(rows, inner, columns, a, down, along, b, c, c_row, mask, mask_row, kind, j)


@intrinsic  # type: ignore[untyped-decorator]
def _transpose_block(
    typing: Any, a: Any, at_a: Any, a_row: Any, b: Any, at_b: Any, b_row: Any
) -> Any:
    """A block of `_BLOCK` rows and columns, by halves."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        vector, kinds = _Vectors(context, builder, _BLOCK), signature.args
        source, target = (vector.array(kinds[n], *given[n : n + 2]) for n in (0, 3))
        rows = [vector.load(source, vector.times(given[2], row)) for row in range(_BLOCK)]
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
            vector.store(values, target, vector.times(given[5], row))
        return context.get_dummy_value()

    return types.void(a, at_a, a_row, b, at_b, b_row), generate


@compiled
def transpose(a: Array, b: Array, rows: int, columns: int) -> None:
    """`b`, overwritten, becomes the transpose of `a`, which has `rows` and `columns`."""
    if rows < _BLOCK or columns < _BLOCK:
        for i in range(rows):
            for j in range(columns):
                b[j * rows + i] = a[i * columns + j]
        return
    for block in range(0, rows, _BLOCK):
        i = min(block, rows - _BLOCK)
        for beside in range(0, columns, _BLOCK):
            j = min(beside, columns - _BLOCK)
            _transpose_block(a, i * columns + j, columns, b, j * rows + i, rows)
