"""Codes of finite FP8 numbers, decoded in LLVM's vectors for chains of a tensor core."""

from llvmlite import ir

from fp8ref.sim.kernels.chains.vectors import F32, I8, I32, Vectors


class Codes(Vectors):
    """Decodes codes of the format that ``sizes``, ``Sizes``, describes.

    Every operation is exact.
    """

    def __init__(self, builder: ir.IRBuilder, double: bool, sizes) -> None:
        super().__init__(builder, double)
        names = ("mantissa_bits", "bias", "zero", "one_byte")
        self.mantissa_bits, self.bias, self.zero, self.one_byte = (
            builder.trunc(self.size(sizes, name), I32) for name in names
        )

    def exponents(self, four):
        """Bytes: max(floor(log2|v|), emin) of each code in words of four, plus ``one_byte``;
        ``zero`` of a zero.
        """
        b, bytes_ = self.b, ir.VectorType(I8, 4 * four.type.count)
        field_offset, zero_exponent, mask = (
            self.splat(b.trunc(v, I8), bytes_.count)
            for v in (
                b.sub(self.one_byte, self.bias),
                self.zero,
                b.lshr(ir.Constant(I32, 0x7F), self.mantissa_bits),
            )
        )
        magnitudes = b.and_(b.bitcast(four, bytes_), self.constant(bytes_, 0x7F))
        fields = b.and_(
            b.bitcast(b.lshr(four, self.splat(self.mantissa_bits, four.type.count)), bytes_), mask
        )
        exponents = b.add(self.call("umax", fields, self.constant(bytes_, 1)), field_offset)
        return b.select(
            b.icmp_unsigned("==", magnitudes, self.constant(bytes_, 0)), zero_exponent, exponents
        )

    def magnitudes(self, code):
        """|v| of the lowest byte of 16 codes, float32."""
        b, lanes, reals = self.b, code.type, ir.VectorType(F32, 16)
        magnitude = b.and_(code, self.constant(lanes, 0x7F))
        places = self.splat(b.sub(ir.Constant(I32, 23), self.mantissa_bits), 16)
        unbiased = self.splat(
            b.shl(b.sub(ir.Constant(I32, 127), self.bias), ir.Constant(I32, 23)), 16
        )
        normal = b.bitcast(b.add(b.shl(magnitude, places), unbiased), reals)
        # The smallest number above 0 is 2^(1 - bias - mantissa_bits).
        field = b.sub(ir.Constant(I32, 128), b.add(self.bias, self.mantissa_bits))
        least = self.splat(b.bitcast(b.shl(field, ir.Constant(I32, 23)), F32), 16)
        small = b.fmul(b.sitofp(magnitude, reals), least)
        first_normal = self.splat(b.shl(ir.Constant(I32, 1), self.mantissa_bits), 16)
        return b.select(b.icmp_unsigned("<", magnitude, first_normal), small, normal)
