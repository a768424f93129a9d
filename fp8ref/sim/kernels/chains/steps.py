"""A tensor core's step, of all rows of a and a tile of columns, in LLVM's vectors (G-10).

The processor cuts off each product itself. With the rounding mode toward zero, a multiply-add onto
2^(E + p - F), p the fraction bits of the type, keeps of a product what is a multiple of 2^(E - F),
as a step does. Magnitudes of all terms are added to that power, and magnitudes of the negative ones
are taken from its negative: the first sum, and twice the second one, are the result, exactly. So a
product costs two multiply-adds, one of them with a zero where it is positive; to cut it off by
itself takes four operations. What limits such a loop is reading b: two rows of a take a step
together, so that one reading of b's magnitudes serves both. numba's own loops would keep the sums
in memory, not in registers.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from fp8ref.sim.kernels.chains.vectors import F32, I8, I32, I64, LANES, Vectors, pointers

TOWARD_ZERO, TO_NEAREST = 0, 1
"""Rounding modes, as LLVM numbers them."""

MOST_UNITS = 1 << 23
"""Sums below so many units of 2^(E - F) fit a binade from 2^(E + 23 - F): float32 holds them."""

PARTS = 3
"""Numbers kept of one of b: its magnitude, and what a negative product takes, for either sign."""


def zero_and_bias(double: bool) -> tuple[int, int]:
    """(the exponent of a zero, what b's exponents have more than their value).

    A zero's sum with any other exponent, at most 15, is below that of every number of a chain,
    2^(-28 - F): F is 25 at most, and 18 where sums fit a float32. The sum of two zeros and the bias
    is a byte.
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
    function = builder.module.declare_intrinsic(
        "llvm.set.rounding", (), ir.FunctionType(ir.VoidType(), [I32])
    )
    builder.call(function, [mode])


@intrinsic
def step(
    typing_context,
    a,
    a_exponents,
    signs,
    parts,
    b_exponents,
    acc,
    sizes,
    first,
    parts_step,
    acc_row,
    rows,
):
    """Some rows of acc [M, LANES] become the results of a step. The rounding mode is TOWARD_ZERO;
    arrays are flat and contiguous.

    a, parts  float32 if a step's sum is below MOST_UNITS, else float64: magnitudes of a [any rows,
              width]; parts [any steps, LANES / lanes, width, 3, lanes], lanes that of ``Vectors``:
              b's magnitudes, its negative numbers, and its positive ones times -1, other numbers
              being 0.
    a_exponents
              uint32 [any rows, width], four times the byte of an exponent; b_exponents uint8 [any
              steps, width, LANES], with the bias.
    signs     uint32 [any rows]: bit k is the sign of a's number k.
    sizes     ``Sizes``.
    first     the first row of a, of ``rows``; parts_step, the step of parts and b_exponents;
              acc_row, the first row of acc.
    """
    signature = types.void(
        a, a_exponents, signs, parts, b_exponents, acc, sizes, *[types.int64] * 4
    )

    def generate(context, builder, signature, arguments):
        values = pointers(context, builder, signature, arguments)
        Step(builder, parts.dtype == types.float64).write(values[:6], *values[6:])
        return context.get_dummy_value()

    return signature, generate


class Step(Vectors):
    """Writes the loop of ``step`` over rows, for largest exponents and for sums."""

    def __init__(self, builder: ir.IRBuilder, double: bool) -> None:
        super().__init__(builder, double)
        # rows at a time, as many as keep their sums in registers
        self.together = 2 if LANES == 64 else 1

    def write(self, arrays: list, sizes, first, parts_step, acc_row, rows) -> None:
        """``step``, of pointers: arrays are those before sizes."""
        a, a_exponents, signs, parts, b_exponents, acc = arrays
        b = self.b
        width = self.size(sizes, "width")
        fraction_bits, output_bits = (
            b.trunc(self.size(sizes, name), I32) for name in ("fraction_bits", "output_bits")
        )
        fraction, whole = ir.Constant(I32, self.fraction), ir.Constant(self.bits, -1)
        exponent = self.widened(b.sub(fraction, fraction_bits))
        places = self.splat(b.shl(exponent, ir.Constant(self.bits, self.fraction)), self.n)
        mask = self.splat(b.shl(whole, self.widened(b.sub(fraction, output_bits))), self.n)
        numbers = self.times(b.mul(parts_step, width), LANES)  # of b before the step
        parts = b.gep(parts, [self.times(numbers, PARTS)])
        b_exponents = b.gep(b.bitcast(b_exponents, I8.as_pointer()), [numbers])
        acc = b.gep(acc, [self.times(acc_row, LANES)])
        lanes = (ir.Constant(I64, n) for n in (0, LANES, self.lanes))
        with cgutils.for_range_slice(b, *lanes, intp=I64) as (lane, _):
            lane_parts = b.gep(parts, [self.times(b.mul(lane, width), PARTS)])
            columns = lane_parts, b.gep(b_exponents, [lane]), b.gep(acc, [lane])
            self._columns((a, a_exponents, signs), columns, width, (places, mask), first, rows)

    def _columns(self, a_arrays: tuple, columns: tuple, width, cuts: tuple, first, rows) -> None:
        """Sum some columns, beside the search of the next rows' largest exponents. columns: of
        parts, b's exponents and accumulators; cuts: what aligns products, and masks results."""
        (a, a_exponents, signs), (parts, b_exponents, acc) = a_arrays, columns
        places, mask = cuts
        b, last = self.b, self.b.sub(rows, ir.Constant(I64, 1))
        beside = cgutils.alloca_once_value(b, ir.Constant(ir.ArrayType(F32, LANES), [0.0] * LANES))
        beside = b.bitcast(beside, acc.type)  # accumulators of a row behind the last

        def rows_from(index) -> list:
            """Some rows of a; in place of those behind the last, the last."""
            some = [self.plus(index, i) for i in range(self.together)]
            return [b.add(first, b.select(b.icmp_signed("<", i, last), i, last)) for i in some]

        def exponents(some: list) -> list:
            return [b.gep(a_exponents, [b.mul(row, width)]) for row in some]

        none = self.constant(ir.VectorType(I8, self.lanes), 0)
        ahead, zero = self.registers([none] * self.together), ir.Constant(I64, 0)
        begin = exponents(rows_from(zero))
        with cgutils.for_range(b, width) as loop:
            self._largest(ahead, begin, b_exponents, loop.index)
        together = ir.Constant(I64, self.together)
        with cgutils.for_range_slice(b, zero, rows, together, intp=I64) as (index, _):
            line_rows = (self.plus(index, i) for i in range(self.together))
            lines = [b.gep(acc, [self.times(row, LANES)]) for row in line_rows]
            lines[1:] = [
                b.select(b.icmp_signed("<", index, last), line, beside) for line in lines[1:]
            ]
            sums = [
                self._start(line, self._fields(register), places)
                for line, register in zip(lines, ahead, strict=True)
            ]
            some = rows_from(index)
            following = rows_from(b.add(index, together))
            row_operands = [
                (b.gep(a, [b.mul(row, width)]), b.load(b.gep(signs, [row]))) for row in some
            ]
            self._add(row_operands, parts, width, sums, (ahead, exponents(following), b_exponents))
            for line, (magnitudes, negatives) in zip(lines, sums, strict=True):
                for v, pair in enumerate(zip(magnitudes, negatives, strict=True)):
                    x, y = map(b.load, pair)
                    self._store(x, y, mask, b.gep(line, [ir.Constant(I64, v * self.n)]))

    def _largest(self, registers: list, a_exponents: list, b_exponents, k) -> None:
        """Update the largest exponents, one byte each, of each row with product k of each lane."""
        b, bytes_ = self.b, ir.VectorType(I8, self.lanes)
        columns = self.load(b.gep(b_exponents, [self.times(k, LANES)]), 0, bytes_)
        for register, row in zip(registers, a_exponents, strict=True):
            row_exponents = b.bitcast(self.splat(b.load(b.gep(row, [k])), self.lanes // 4), bytes_)
            b.store(self.call("umax", b.load(register), b.add(columns, row_exponents)), register)

    def _fields(self, register) -> list:
        """The exponent field of each lane's largest product, int32 [16]; clears it."""
        b, lanes = self.b, ir.VectorType(I32, 16)
        largest = b.load(register)
        b.store(self.constant(largest.type, 0), register)
        fields = []
        for v in range(0, self.lanes, 16):
            some = ir.Constant(lanes, list(range(v, v + 16)))
            field = b.zext(b.shuffle_vector(largest, largest, some), lanes)
            if (bias := zero_and_bias(self.double)[1]) != 127:
                unbiased = b.sub(field, self.constant(lanes, bias - 127))
                field = self.call("smax", unbiased, self.constant(lanes, 0))
            fields.append(b.shl(field, self.constant(lanes, 23)))
        return fields

    def _start(self, line, fields: list, places) -> tuple[list, list]:
        """Registers: 2^(E + p - F) plus a positive accumulator; minus it, a negative one."""
        b, lanes = self.b, ir.VectorType(I32, 16)
        magnitudes, negatives = [], []
        for v, product_fields in enumerate(fields):
            value = self.load(line, 16 * v, ir.VectorType(F32, 16))
            acc_fields = b.and_(b.bitcast(value, lanes), self.constant(lanes, 0x7F800000))
            for x, field in self._in_kind(value, self.call("smax", product_fields, acc_fields)):
                big = b.bitcast(b.add(field, places), x.type)
                magnitudes.append(b.fadd(big, self.call("fabs", x)))
                negatives.append(b.fsub(self.call("minnum", x, self.constant(x.type, 0.0)), big))
        return self.registers(magnitudes), self.registers(negatives)

    def _in_kind(self, value, field) -> list:
        """(numbers, exponent fields) of 16 lanes: one float32 vector, or two of float64."""
        if not self.double:
            return [(value, field)]
        b, wide, halves = self.b, ir.VectorType(I64, 8), []
        for x, half_fields in zip(self.numbers(value), self.halves(field), strict=True):
            bits = b.shl(b.zext(half_fields, wide), self.constant(wide, 52 - 23))
            halves.append((x, b.add(bits, self.constant(wide, (1023 - 127) << 52))))
        return halves

    def _add(self, row_operands: list, parts, width, sums: list, following: tuple) -> None:
        """Add all products to both sums of each row, (magnitudes, signs) of which are
        ``row_operands``. For a negative number of a other numbers of b give negative products.

        ``following`` are arguments of ``_largest`` for the next rows: their exponents are found
        beside these sums, which alone would wait for each other.
        """
        b, kind = self.b, ir.VectorType(self.real, self.n)
        left = self.registers([signs for _, signs in row_operands])
        with cgutils.for_range(b, width) as loop:
            k_parts = b.gep(parts, [self.times(loop.index, PARTS * self.lanes)])
            some = []
            for (row, _), bits, row_sums in zip(row_operands, left, sums, strict=True):
                negative = b.zext(b.and_(b.load(bits), ir.Constant(I32, 1)), I64)
                b.store(b.lshr(b.load(bits), ir.Constant(I32, 1)), bits)
                factor = self.splat(b.load(b.gep(row, [loop.index])), self.n)
                swapped = b.gep(k_parts, [self.times(negative, self.lanes)])
                some.append((factor, swapped, *row_sums))
            for v in range(self.lanes // self.n):
                magnitude = self.load(k_parts, v * self.n, kind)
                for factor, swapped, magnitudes, negatives in some:
                    total = self.call("fma", factor, magnitude, b.load(magnitudes[v]))
                    b.store(total, magnitudes[v])
                    signed = self.load(swapped, self.lanes + v * self.n, kind)
                    total = self.call("fma", factor, signed, b.load(negatives[v]))
                    b.store(total, negatives[v])
            self._largest(*following, loop.index)

    def _store(self, x, y, mask, line) -> None:
        """Store x = 2^n + A and y = -2^n - N, cut off: A - 2 N = (x + 2 y) + 2^n, each exact."""
        b = self.b
        exponent = self.constant(mask.type, -1 << self.fraction)
        power = b.bitcast(b.and_(b.bitcast(x, mask.type), exponent), x.type)
        total = b.fadd(self.call("fma", y, self.constant(y.type, 2.0), x), power)
        total = b.bitcast(b.and_(b.bitcast(total, mask.type), mask), x.type)
        self.put(b.fptrunc(total, ir.VectorType(F32, self.n)) if self.double else total, line)
