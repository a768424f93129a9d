"""The loops of chains over tiles of columns, blocks of steps and blocks of rows, written for LLVM:
numba takes a quarter of a second longer to compile the same loops of Python.

For each tile of columns, and each block of steps: these steps of b are laid out (``tiles``), and
some rows after others take them (``steps``). A block of rows touches only the second cache.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from fp8ref.sim.kernels.chains.results import Results
from fp8ref.sim.kernels.chains.steps import TO_NEAREST, TOWARD_ZERO, Step, write_rounding
from fp8ref.sim.kernels.chains.tiles import Tile
from fp8ref.sim.kernels.chains.vectors import I8, I32, I64, LANES, Vectors, pointers

CHAIN_END, SPLIT_END, RESULT = 1, 2, 4
"""What follows a step: the accumulator joins the part's sum and is cleared; that sum joins the
result too, and is cleared; or the accumulator, which began from the result, is the result. The last
step of all has the second or the third."""

ROWS = 256
"""Rows that take a block of steps before others do. 64 to 1,024 are at most a tenth slower."""


@intrinsic
def take_chains(
    typing_context, a, a_exponents, signs, b, ends, b_exponents, parts, acc, out, sizes
):
    """Columns of out [M, N] become the chains of a and b, or these are added to them: flat arrays.

    a, a_exponents, signs
                    [steps, M, width] and [steps, M], as ``rows.decode`` fills them.
    b               uint32 [tiles, steps, width / 4, LANES], as ``tiles.lay_out`` takes it.
    ends            uint8 [steps], at least one: what follows each step.
    b_exponents, parts
                    room for the exponents and parts of a block of steps of a tile of b.
    acc             float32 [2, M, LANES], zeros; zeros afterwards, but for the accumulators of
                    chains that end with RESULT.
    sizes           ``Sizes``.
    """
    signature = types.void(a, a_exponents, signs, b, ends, b_exponents, parts, acc, out, sizes)

    def generate(context, builder, signature, arguments):
        arrays = pointers(context, builder, signature, arguments)
        _Chains(builder, parts.dtype == types.float64).write(*arrays)
        return context.get_dummy_value()

    return signature, generate


class _Chains(Vectors):
    """Writes ``take_chains``."""

    def write(
        self, a, a_exponents, signs, words, ends, b_exponents, parts, acc, out, sizes
    ) -> None:
        b, zero = self.b, ir.Constant(I64, 0)
        steps, most, m = (self.size(sizes, name) for name in ("steps", "most", "m"))
        last = b.load(b.gep(ends, [b.sub(steps, ir.Constant(I64, 1))]))
        going_on = b.icmp_unsigned("==", last, ir.Constant(I8, RESULT))
        columns = self.size(sizes, "begin"), self.size(sizes, "end")
        with cgutils.for_range_slice(b, *columns, ir.Constant(I64, LANES), intp=I64) as (first, _):
            results = Results(b, out, acc, sizes, first)
            with b.if_then(going_on):
                results.take(zero, m)
            with cgutils.for_range_slice(b, zero, steps, most, intp=I64) as (start, _):
                count = self._at_most(most, b.sub(steps, start))
                with cgutils.for_range(b, count) as loop:
                    tile, which = Tile(b, self.double, sizes), loop.index
                    step = b.add(start, which)
                    tile.write(words, b_exponents, parts, sizes, first, step, which)
                some = ir.Constant(I64, ROWS)
                with cgutils.for_range_slice(b, zero, m, some, intp=I64) as (row, _):
                    rows = self._at_most(some, b.sub(m, row))
                    self._rounding(TOWARD_ZERO)
                    with cgutils.for_range(b, count) as loop:
                        step = b.add(start, loop.index)
                        step_row = b.add(b.mul(step, m), row)
                        arrays = [a, a_exponents, signs, parts, b_exponents, acc]
                        one = Step(b, self.double)
                        one.write(arrays, sizes, step_row, loop.index, row, rows)
                        self._end(results, b.load(b.gep(ends, [step])), row, rows)
                    self._rounding(TO_NEAREST)

    def _end(self, results: Results, step_end, row, rows) -> None:
        """What runs after a step."""
        b, nothing = self.b, ir.Constant(I8, 0)
        with b.if_then(b.icmp_unsigned("!=", step_end, nothing), likely=False):
            self._rounding(TO_NEAREST)
            gives = b.icmp_unsigned("==", step_end, ir.Constant(I8, RESULT))
            with b.if_else(gives) as (then, otherwise):
                with then:
                    results.give(row, rows)
                with otherwise:
                    split = b.and_(step_end, ir.Constant(I8, SPLIT_END))
                    results.end(row, rows, b.icmp_unsigned("!=", split, nothing))
            self._rounding(TOWARD_ZERO)

    def _rounding(self, mode: int) -> None:
        write_rounding(self.b, ir.Constant(I32, mode))

    def _at_most(self, limit, value):
        return self.b.select(self.b.icmp_signed("<", value, limit), value, limit)
