"""A tile of b for a tensor core's step (``steps``): its codes decoded, in LLVM's vectors."""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from fp8ref.sim.kernels.chains.codes import Codes
from fp8ref.sim.kernels.chains.steps import PARTS
from fp8ref.sim.kernels.chains.vectors import F32, I32, I64, LANES, pointers


@intrinsic
def lay_out(typing_context, words, exponents, parts, sizes, first, step, which):
    """Fill step ``which`` of parts and exponents, for ``steps.step``, from finite codes.

    words       uint32 [tiles, steps, width / 4, LANES]: four codes of a column, the first in the
                lowest byte.
    exponents   uint8 [any steps, width, LANES].
    sizes       ``Sizes``.
    first, step the first column of a tile, and a step of it.
    """
    signature = types.void(words, exponents, parts, sizes, *[types.int64] * 3)

    def generate(context, builder, signature, arguments):
        values = pointers(context, builder, signature, arguments)
        Tile(builder, parts.dtype == types.float64, values[3]).write(*values)
        return context.get_dummy_value()

    return signature, generate


class Tile(Codes):
    """Writes the loop of ``lay_out`` over four numbers of each column."""

    def write(self, words, exponents, parts, sizes, first, step, which) -> None:
        """``lay_out``, of pointers."""
        b = self.b
        width = self.size(sizes, "width")
        lines = b.udiv(width, ir.Constant(I64, 4))  # of a step, LANES words each
        step_size = self.times(lines, LANES)
        # Tiles before this one have steps * lines words for each of their columns.
        tiles_before = b.mul(b.mul(self.size(sizes, "steps"), lines), first)
        words = b.gep(words, [b.add(tiles_before, b.mul(step, step_size))])
        step_size = self.times(step_size, 4)
        exponents, parts = (
            b.gep(x, [self.times(b.mul(which, step_size), n)])
            for x, n in ((exponents, 1), (parts, PARTS))
        )
        with cgutils.for_range(b, b.udiv(step_size, ir.Constant(I64, 64))) as loop:
            at = self.times(loop.index, 16)
            four = self.load(b.gep(words, [at]), 0, ir.VectorType(I32, 16))
            bytes_ = self.exponents(four)
            # Of four numbers of LANES columns each: the first, and the first of 16 columns.
            line = self.times(b.udiv(at, ir.Constant(I64, LANES)), 4)
            lane, lanes = b.urem(at, ir.Constant(I64, LANES)), ir.Constant(I64, self.lanes)
            for i in range(4):
                k = self.times(self.plus(line, i), LANES)
                every_fourth = ir.Constant(ir.VectorType(I32, 16), list(range(i, 64, 4)))
                k_exponents = b.shuffle_vector(bytes_, bytes_, every_fourth)
                self.put(k_exponents, b.gep(exponents, [b.add(k, lane)]), align=1)
            numbers = b.mul(b.udiv(lane, lanes), self.times(width, PARTS * self.lanes))
            numbers = b.gep(parts, [b.add(numbers, b.urem(lane, lanes))])
            with cgutils.for_range(b, ir.Constant(I64, 4)) as number_loop:
                places = b.trunc(self.times(number_loop.index, 8), I32)
                code, k = b.lshr(four, self.splat(places, 16)), b.add(line, number_loop.index)
                k_parts = b.gep(numbers, [self.times(k, PARTS * self.lanes)])
                for part, values in enumerate(self._parts(code)):
                    for h, x in enumerate(values):
                        at = ir.Constant(I64, part * self.lanes + 8 * h)
                        self.put(x, b.gep(k_parts, [at]))

    def _parts(self, code) -> tuple[list, ...]:
        """The lowest bytes of 16 codes as numbers: magnitudes, negatives, positives times -1."""
        b, lanes, zero = self.b, code.type, self.constant(ir.VectorType(F32, 16), 0.0)
        value = self.magnitudes(code)
        negative = b.icmp_unsigned(
            "!=", b.and_(code, self.constant(lanes, 0x80)), self.constant(lanes, 0)
        )
        below = b.fsub(zero, value)
        return (
            self.numbers(value),
            self.numbers(b.select(negative, below, zero)),
            self.numbers(b.select(negative, zero, below)),
        )
