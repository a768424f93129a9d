"""Rows of a for steps of a tensor core: codes decoded, written in LLVM's vectors."""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from fp8ref.sim.kernels.chains.codes import Codes
from fp8ref.sim.kernels.chains.vectors import I8, I16, I32, pointers


@intrinsic
def decode(typing_context, codes, numbers, exponents, signs, sizes):
    """Fill magnitudes and exponents of finite codes, and bits of their signs, the first lowest.

    codes      uint8 [16 n], flat as all of them; numbers float32 or float64; exponents uint32, four
               times a byte; signs uint16 [n].
    sizes      ``Sizes``.
    """
    signature = types.void(codes, numbers, exponents, signs, sizes)

    def generate(context, builder, signature, arguments):
        *arrays, sizes = pointers(context, builder, signature, arguments)
        count = context.make_array(signs)(context, builder, arguments[3]).nitems
        _Rows(builder, numbers.dtype == types.float64, sizes).write(*arrays, count)
        return context.get_dummy_value()

    return signature, generate


class _Rows(Codes):
    """Writes the loop of ``decode`` over 16 codes."""

    def write(self, codes, numbers, exponents, signs, count) -> None:
        b, lanes, bytes_ = self.b, ir.VectorType(I32, 16), ir.VectorType(I8, 16)
        with cgutils.for_range(b, count) as loop:
            at = self.times(loop.index, 16)
            some = self.load(b.gep(codes, [at]), 0, bytes_)
            exponent_words = b.zext(self.exponents(b.bitcast(some, ir.VectorType(I32, 4))), lanes)
            for places in (8, 16):
                moved = b.shl(exponent_words, self.constant(lanes, places))
                exponent_words = b.or_(exponent_words, moved)
            self.put(exponent_words, b.gep(exponents, [at]))
            negative = b.bitcast(b.icmp_signed("<", some, self.constant(bytes_, 0)), I16)
            b.store(negative, b.gep(signs, [loop.index]), align=2)
            for h, x in enumerate(self.numbers(self.magnitudes(b.zext(some, lanes)))):
                self.put(x, b.gep(numbers, [self.plus(at, 8 * h)]))
