"""A tile of b for a step of a tensor core: its codes decoded, written in LLVM's vectors (``chain_steps`` takes the step)."""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from fp8ref.sim.kernels.chain_vectors import F32, I8, I32, I64, LANES, Vectors


@intrinsic
def lay_out(typing_context, room, parts, which, width, mantissa_bits, bias, zero, of_one):
    """Fill step ``which`` of parts and of exponents, as ``chain_steps.step`` takes them, from codes of finite numbers.

    room           uint32 [1 + steps, width / 4, LANES]: words of four codes of a column, the first in the lowest byte; and
                   the exponents of each step.
    mantissa_bits, bias   of the format.
    zero, of_one   the bytes of a zero and of 2^0 among the exponents.
    """
    signature = types.void(room, parts, *[types.int64] * 2, *[types.int32] * 4)

    def generate(context, builder, signature, arguments):
        arrays = [context.make_array(t)(context, builder, value).data for t, value in zip(signature.args[:2], arguments[:2], strict=True)]
        _Tile(builder, parts.dtype == types.float64).write(*arrays, *arguments[2:])
        return context.get_dummy_value()

    return signature, generate


class _Tile(Vectors):
    """Writes the loop of ``lay_out`` over four numbers of each column."""

    def write(self, words, parts, which, width, mantissa_bits, bias, zero, of_one) -> None:
        b, self.mantissa_bits = self.b, self.splat(mantissa_bits, 16)
        fraction = b.sub(ir.Constant(I32, 23), mantissa_bits)
        self.places = self.splat(fraction, 16)
        self.unbiased = self.splat(b.shl(b.sub(ir.Constant(I32, 127), bias), ir.Constant(I32, 23)), 16)
        # The smallest number above 0 is 2^(1 - bias - mantissa_bits).
        field = b.sub(ir.Constant(I32, 128), b.add(bias, mantissa_bits))
        self.least = self.splat(b.bitcast(b.shl(field, ir.Constant(I32, 23)), F32), 16)
        self.first_normal = self.splat(b.shl(ir.Constant(I32, 1), mantissa_bits), 16)
        field_mask = self.splat(b.trunc(b.lshr(ir.Constant(I32, 0x7F), mantissa_bits), I8), 64)
        of_field, of_zero = (self.splat(b.trunc(v, I8), 64) for v in (b.sub(of_one, bias), zero))
        numbers = b.mul(b.mul(which, width), ir.Constant(I64, LANES))
        of_step = b.mul(b.udiv(width, ir.Constant(I64, 4)), ir.Constant(I64, LANES))
        parts, of_b = b.gep(parts, [b.mul(numbers, ir.Constant(I64, 2))]), b.gep(words, [b.mul(b.add(which, ir.Constant(I64, 1)), of_step)])
        vectors = b.mul(b.udiv(width, ir.Constant(I64, 4)), ir.Constant(I64, LANES // 16))
        with cgutils.for_range(b, vectors) as loop:
            at = b.mul(loop.index, ir.Constant(I64, 16))
            four = self.load(b.gep(words, [at]), 0, ir.VectorType(I32, 16))
            exponents = self._exponents(four, field_mask, of_field, of_zero)
            b.store(exponents, b.bitcast(b.gep(of_b, [at]), exponents.type.as_pointer()), align=4)
            # Of four lines of LANES words each: the line, and the first of these 16 lanes in it.
            line, lane = b.udiv(at, ir.Constant(I64, LANES)), b.urem(at, ir.Constant(I64, LANES))
            numbers = b.gep(parts, [b.add(b.mul(line, ir.Constant(I64, 8 * LANES)), lane)])
            with cgutils.for_range(b, ir.Constant(I64, 4)) as of_four:
                code = b.lshr(four, self.splat(b.trunc(b.mul(of_four.index, ir.Constant(I64, 8)), I32), 16))
                pair = b.gep(numbers, [b.mul(of_four.index, ir.Constant(I64, 2 * LANES))])
                for part, values in enumerate(self._parts(code)):
                    for h, x in enumerate(values):
                        b.store(x, b.bitcast(b.gep(pair, [ir.Constant(I64, part * LANES + 8 * h)]), x.type.as_pointer()), align=4)

    def _exponents(self, four, field_mask, of_field, of_zero):
        """Bytes: max(floor(log2|v|), emin) of each code, with the bias."""
        b, bytes_ = self.b, ir.VectorType(I8, 64)
        magnitudes = b.and_(b.bitcast(four, bytes_), self.constant(bytes_, 0x7F))
        fields = b.and_(b.bitcast(b.lshr(four, self.mantissa_bits), bytes_), field_mask)
        exponents = b.add(self.call("umax", fields, self.constant(bytes_, 1)), of_field)
        return b.select(b.icmp_unsigned("==", magnitudes, self.constant(bytes_, 0)), of_zero, exponents)

    def _parts(self, code) -> tuple[list, list]:
        """The numbers of the lowest byte of 16 codes in the type of the sums: the positive ones, and the negative ones."""
        b, lanes, reals = self.b, code.type, ir.VectorType(F32, 16)
        magnitude = b.and_(code, self.constant(lanes, 0x7F))
        normal = b.bitcast(b.add(b.shl(magnitude, self.places), self.unbiased), reals)
        small = b.fmul(b.sitofp(magnitude, reals), self.least)
        value = b.select(b.icmp_unsigned("<", magnitude, self.first_normal), small, normal)
        negative, zero = b.icmp_unsigned("!=", b.and_(code, self.constant(lanes, 0x80)), self.constant(lanes, 0)), self.constant(reals, 0.0)
        return self.numbers(b.select(negative, zero, value)), self.numbers(b.select(negative, b.fsub(zero, value), zero))
