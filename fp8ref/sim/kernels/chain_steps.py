"""One step of a tensor core, of all rows of a and one tile of columns, written in LLVM's vectors (spec G-10).

The processor cuts off each product itself. With the rounding mode toward zero, a multiply-add onto 2^(E + p - F), p the fraction
bits of the type, keeps of a product what is a multiple of 2^(E - F), as a step does. Positive terms are added to that power,
negative ones to its negative, and both sums are added exactly. So a product costs two multiply-adds, one of them with a zero; to cut
it off by itself takes four operations. numba's own loops would keep the sums in memory, not in registers.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from fp8ref.sim.kernels.chain_vectors import F32, I8, I32, I64, LANES, Vectors

TOWARD_ZERO, TO_NEAREST = 0, 1
"""Rounding modes, as LLVM numbers them."""

MOST_UNITS = 1 << 23
"""Sums below so many units of 2^(E - F) fit between 2^(E + 23 - F) and its double: a float32 holds them."""

_FOUR = 4  # products of one pass


def zero_and_bias(double: bool) -> tuple[int, int]:
    """(the exponent of a zero, what b's exponents have more than their value).

    A zero's sum with any other exponent, at most 15, is below that of every number of a chain, 2^(-28 - F): F is 25 at most,
    and 18 where sums fit a float32. The sum of two zeros and the bias is a byte.
    """
    return (-69, 138) if double else (-63, 127)


@intrinsic
def set_rounding(typing_context, mode):
    """Set this thread's rounding mode. A kernel sets it back to TO_NEAREST before it returns."""

    def generate(context, builder, signature, arguments):
        write_rounding(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(types.int32), generate


def write_rounding(builder: ir.IRBuilder, mode) -> None:
    """``set_rounding`` to an int32."""
    function = builder.module.declare_intrinsic("llvm.set.rounding", (), ir.FunctionType(ir.VoidType(), [I32]))
    builder.call(function, [mode])


@intrinsic
def step(typing_context, a, of_a, signs, parts, of_b, acc, sizes, first, of_parts, of_acc, rows):
    """Some rows of acc [M, LANES] become the results of a step. The rounding mode is TOWARD_ZERO; arrays are flat and contiguous.

    a, parts  float32 if a step's sum is below MOST_UNITS, else float64: a [any rows, width]; parts [any steps, width, 2, LANES]:
              b's positive numbers, and its negative ones, other numbers being 0.
    of_a      uint8 [any rows, width], exponents; of_b uint8 [any steps, width / 4, LANES, 4], with the bias.
    signs     uint32 [any rows]: bit k is the sign of a's number k.
    sizes     ``Sizes``.
    first     the first row of a, of ``rows``; of_parts, the step of parts and of_b; of_acc, the first row of acc.
    """
    signature = types.void(a, of_a, signs, parts, of_b, acc, sizes, *[types.int64] * 4)

    def generate(context, builder, signature, arguments):
        arrays = [context.make_array(t)(context, builder, value).data for t, value in zip(signature.args[:7], arguments[:7], strict=True)]
        Step(builder, parts.dtype == types.float64).write(*arrays, *arguments[7:])
        return context.get_dummy_value()

    return signature, generate


class Step(Vectors):
    """Writes the loop of ``step`` over rows, and those within: for the largest exponent, and for the sums."""

    def write(self, a, of_a, signs, parts, of_b, acc, sizes, first, of_parts, of_acc, rows) -> None:
        """``step``, of pointers."""
        b = self.b
        width = self.size(sizes, "width")
        fraction_bits, output_bits = (b.trunc(self.size(sizes, name), I32) for name in ("fraction_bits", "output_bits"))
        numbers = b.mul(b.mul(of_parts, width), ir.Constant(I64, LANES))  # of b before the step
        parts = b.gep(parts, [b.mul(numbers, ir.Constant(I64, 2))])
        of_b = b.gep(b.bitcast(of_b, I8.as_pointer()), [numbers])
        of_a = b.bitcast(of_a, I8.as_pointer())
        acc = b.gep(acc, [b.mul(of_acc, ir.Constant(I64, LANES))])
        fraction = ir.Constant(I32, self.fraction)
        places = self.splat(b.shl(self.widened(b.sub(fraction, fraction_bits)), ir.Constant(self.bits, self.fraction)), self.n)
        mask = self.splat(b.shl(ir.Constant(self.bits, -1), self.widened(b.sub(fraction, output_bits))), self.n)
        ahead = self.registers([ir.Constant(ir.VectorType(I8, 64), [0] * 64)] * (LANES // 16))
        with cgutils.for_range(b, b.udiv(width, ir.Constant(I64, _FOUR))) as loop:
            self._largest(ahead, b.gep(of_a, [b.mul(first, width)]), of_b, loop.index)
        last = b.sub(rows, ir.Constant(I64, 1))
        with cgutils.for_range(b, rows) as loop:
            row = b.add(first, loop.index)
            line = b.gep(acc, [b.mul(loop.index, ir.Constant(I64, LANES))])
            up, down = self._start(line, self._fields(ahead), places)
            following = b.add(row, b.zext(b.icmp_unsigned("<", loop.index, last), I64))  # the last row has its own again
            a_row, of_following = b.gep(a, [b.mul(row, width)]), b.gep(of_a, [b.mul(following, width)])
            up, down = self._add(a_row, b.load(b.gep(signs, [row])), parts, width, up, down, (ahead, of_following, of_b))
            for v, (x, y) in enumerate(zip(up, down, strict=True)):
                total = b.bitcast(b.and_(b.bitcast(b.fadd(x, y), mask.type), mask), x.type)
                result = b.fptrunc(total, ir.VectorType(F32, self.n)) if self.double else total
                at = b.bitcast(b.gep(line, [ir.Constant(I64, v * self.n)]), result.type.as_pointer())
                b.store(result, at, align=4)

    def _largest(self, registers: list, of_a, of_b, which) -> None:
        """Include four products of each lane in the largest exponents: byte b of a lane is of products b, b + 4, ..."""
        b, bytes_ = self.b, ir.VectorType(I8, 64)
        four = b.load(b.bitcast(b.gep(of_a, [b.mul(which, ir.Constant(I64, _FOUR))]), I32.as_pointer()), align=4)
        of_row = b.bitcast(self.splat(four, 16), bytes_)
        columns = b.gep(of_b, [b.mul(which, ir.Constant(I64, _FOUR * LANES))])
        for v, register in enumerate(registers):
            products = b.add(self.load(columns, 64 * v, bytes_), of_row)
            b.store(self.call("umax", b.load(register), products), register)

    def _fields(self, registers: list) -> list:
        """The exponent field of the largest product of each lane: vectors of 16 int32, as the bits of a float32. Clears the registers."""
        b, bytes_, lanes = self.b, ir.VectorType(I8, 64), ir.VectorType(I32, 16)
        fields = []
        for register in registers:
            four = b.load(register)
            b.store(self.constant(bytes_, 0), register)
            for shift in (16, 8):  # the largest of the four bytes of a lane
                shifted = b.lshr(b.bitcast(four, lanes), self.constant(lanes, shift))
                four = self.call("umax", four, b.bitcast(shifted, bytes_))
            field = b.bitcast(four, lanes)
            if (bias := zero_and_bias(self.double)[1]) != 127:
                field = b.sub(b.and_(field, self.constant(lanes, 255)), self.constant(lanes, bias - 127))
                field = self.call("smax", field, self.constant(lanes, 0))
            fields.append(b.and_(b.shl(field, self.constant(lanes, 23)), self.constant(lanes, 0x7F800000)))
        return fields

    def _start(self, line, fields: list, places) -> tuple[list, list]:
        """(2^(E + p - F) and a positive accumulator, the negative of that power and a negative accumulator)."""
        b, lanes = self.b, ir.VectorType(I32, 16)
        ups, downs = [], []
        for v, of_products in enumerate(fields):
            value = self.load(line, 16 * v, ir.VectorType(F32, 16))
            of_acc = b.and_(b.bitcast(value, lanes), self.constant(lanes, 0x7F800000))
            for x, field in self._in_kind(value, self.call("smax", of_products, of_acc)):
                big = b.bitcast(b.add(field, places), x.type)
                zero = self.constant(x.type, 0.0)
                ups.append(b.fadd(big, self.call("maxnum", x, zero)))
                downs.append(b.fsub(self.call("minnum", x, zero), big))
        return ups, downs

    def _in_kind(self, value, field) -> list:
        """(numbers, exponent fields) of 16 lanes in the type of the sums: one vector of float32, or two of float64."""
        if not self.double:
            return [(value, field)]
        b, wide, halves = self.b, ir.VectorType(I64, 8), []
        for x, of_half in zip(self.numbers(value), self.halves(field), strict=True):
            bits = b.shl(b.zext(of_half, wide), self.constant(wide, 52 - 23))
            halves.append((x, b.add(bits, self.constant(wide, (1023 - 127) << 52))))
        return halves

    def _add(self, a, signs, parts, width, up: list, down: list, following: tuple) -> tuple[list, list]:
        """Both sums with all products. For a negative number of a the two parts of b change places.

        ``following`` are arguments of ``_largest`` for the next row: its exponents are found beside these sums, which alone
        would wait for each other.
        """
        b, kind = self.b, ir.VectorType(self.real, self.n)
        ups, downs, left = self.registers(up), self.registers(down), self.registers([signs])[0]
        with cgutils.for_range(b, b.udiv(width, ir.Constant(I64, _FOUR))) as loop:
            x, y, bits = [b.load(r) for r in ups], [b.load(r) for r in downs], b.load(left)
            for i in range(_FOUR):
                k = b.add(b.mul(loop.index, ir.Constant(I64, _FOUR)), ir.Constant(I64, i))
                factor = self.splat(b.load(b.gep(a, [k])), self.n)
                negative = b.and_(b.lshr(bits, ir.Constant(I32, i)), ir.Constant(I32, 1))
                swap = b.mul(b.zext(negative, I64), ir.Constant(I64, LANES))
                both = b.gep(parts, [b.mul(k, ir.Constant(I64, 2 * LANES))])
                of_up, of_down = b.gep(both, [swap]), b.gep(both, [b.sub(ir.Constant(I64, LANES), swap)])
                for v in range(len(up)):
                    x[v] = self.call("fma", factor, self.load(of_up, v * self.n, kind), x[v])
                    y[v] = self.call("fma", factor, self.load(of_down, v * self.n, kind), y[v])
            self._largest(*following, loop.index)
            b.store(b.lshr(bits, ir.Constant(I32, _FOUR)), left)
            for register, value in zip(ups + downs, x + y, strict=True):
                b.store(value, register)
        return [b.load(r) for r in ups], [b.load(r) for r in downs]
