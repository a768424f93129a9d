"""One step of a tensor core, of all rows of a and one tile of columns, written in LLVM's vectors (spec G-10).

The processor cuts off each product itself. With the rounding mode toward zero, a multiply-add onto 2^(E + p - F), p the fraction
bits of the type, keeps of a product what is a multiple of 2^(E - F), as a step does. Positive terms are added to that power,
negative ones to its negative, and both sums are added exactly. So a product costs two multiply-adds, one of them with a zero; to cut
it off by itself takes four operations. numba's own loops would keep the sums in memory, not in registers.
"""

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 64 if binding.get_host_cpu_features().get("avx512f") else 32
"""Columns of a tile: as many as keep both sums in registers."""

TOWARD_ZERO, TO_NEAREST = 0, 1
"""Rounding modes, as LLVM numbers them."""

MOST_UNITS = 1 << 23
"""Sums below so many units of 2^(E - F) fit between 2^(E + 23 - F) and its double: a float32 holds them."""

_I8, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
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
        function = builder.module.declare_intrinsic("llvm.set.rounding", (), ir.FunctionType(ir.VoidType(), [_I32]))
        builder.call(function, arguments)
        return context.get_dummy_value()

    return types.void(types.int32), generate


@intrinsic
def step(typing_context, a, of_a, signs, parts, of_b, acc, which, rows, width, fraction_bits, output_bits):
    """acc [rows, LANES] becomes the results of step ``which``. The rounding mode is TOWARD_ZERO; arrays are flat and contiguous.

    a, parts  float32 if a step's sum is below MOST_UNITS, else float64: a [steps, rows, width]; parts [width, 2, LANES]: b's
              positive numbers, and its negative ones, other numbers being 0.
    of_a      uint8 [steps, rows, width], exponents; of_b uint8 [width / 4, LANES, 4], with the bias.
    signs     uint32 [steps, rows]: bit k is the sign of a's number k.
    width     a multiple of 4, at most 32.
    """
    signature = types.void(
        a, of_a, signs, parts, of_b, acc, types.int64, types.int64, types.int64, types.int32, types.int32
    )  # fmt: skip

    def generate(context, builder, signature, arguments):
        arrays = [context.make_array(t)(context, builder, value).data for t, value in zip(signature.args[:6], arguments[:6], strict=True)]
        _Step(builder, parts.dtype == types.float64).write(*arrays, *arguments[6:])
        return context.get_dummy_value()

    return signature, generate


class _Step:
    """Writes the loop of ``step`` over rows, and those within: for the largest exponent, and for the sums."""

    def __init__(self, builder: ir.IRBuilder, double: bool) -> None:
        self.b = builder
        self.bits, self.fraction, self.n = (_I64, 52, 8) if double else (_I32, 23, 16)
        self.real = ir.DoubleType() if double else _F32
        self.double = double

    def write(self, a, of_a, signs, parts, of_b, acc, which, rows, width, fraction_bits, output_bits) -> None:
        b, first = self.b, self.b.mul(which, rows)
        of_a, of_b = b.bitcast(of_a, _I8.as_pointer()), b.bitcast(of_b, _I8.as_pointer())
        fraction = ir.Constant(_I32, self.fraction)
        places = self._splat(b.shl(self._widened(b.sub(fraction, fraction_bits)), ir.Constant(self.bits, self.fraction)), self.n)
        mask = self._splat(b.shl(ir.Constant(self.bits, -1), self._widened(b.sub(fraction, output_bits))), self.n)
        with cgutils.for_range(b, rows) as loop:
            row = b.add(first, loop.index)
            start = b.mul(row, width)
            line = b.gep(acc, [b.mul(loop.index, ir.Constant(_I64, LANES))])
            exponents = self._largest(b.gep(of_a, [start]), of_b, width)
            up, down = self._start(line, exponents, places)
            up, down = self._add(b.gep(a, [start]), b.load(b.gep(signs, [row])), parts, width, up, down)
            for v, (x, y) in enumerate(zip(up, down, strict=True)):
                total = b.bitcast(b.and_(b.bitcast(b.fadd(x, y), mask.type), mask), x.type)
                result = b.fptrunc(total, ir.VectorType(_F32, self.n)) if self.double else total
                at = b.bitcast(b.gep(line, [ir.Constant(_I64, v * self.n)]), result.type.as_pointer())
                b.store(result, at, align=4)

    def _largest(self, of_a, of_b, width) -> list:
        """The exponent field of the largest product of each lane: vectors of 16 int32, as the bits of a float32."""
        b, bytes_, lanes = self.b, ir.VectorType(_I8, 64), ir.VectorType(_I32, 16)
        found = self._registers([ir.Constant(bytes_, [0] * 64)] * (LANES // 16))
        with cgutils.for_range(b, b.udiv(width, ir.Constant(_I64, 4))) as loop:
            four = b.load(b.bitcast(b.gep(of_a, [b.mul(loop.index, ir.Constant(_I64, 4))]), _I32.as_pointer()), align=4)
            of_row = b.bitcast(self._splat(four, 16), bytes_)
            columns = b.gep(of_b, [b.mul(loop.index, ir.Constant(_I64, 4 * LANES))])
            for v, register in enumerate(found):
                products = b.add(self._load(columns, 64 * v, bytes_), of_row)
                b.store(self._call("umax", b.load(register), products), register)
        fields = []
        for register in found:
            four = b.load(register)
            for shift in (16, 8):  # the largest of the four bytes of a lane
                shifted = b.lshr(b.bitcast(four, lanes), self._constant(lanes, shift))
                four = self._call("umax", four, b.bitcast(shifted, bytes_))
            field = b.bitcast(four, lanes)
            if (bias := zero_and_bias(self.double)[1]) != 127:
                field = b.sub(b.and_(field, self._constant(lanes, 255)), self._constant(lanes, bias - 127))
                field = self._call("smax", field, self._constant(lanes, 0))
            fields.append(b.and_(b.shl(field, self._constant(lanes, 23)), self._constant(lanes, 0x7F800000)))
        return fields

    def _start(self, line, fields: list, places) -> tuple[list, list]:
        """(2^(E + p - F) and a positive accumulator, the negative of that power and a negative accumulator)."""
        b, lanes = self.b, ir.VectorType(_I32, 16)
        ups, downs = [], []
        for v, of_products in enumerate(fields):
            value = self._load(line, 16 * v, ir.VectorType(_F32, 16))
            of_acc = b.and_(b.bitcast(value, lanes), self._constant(lanes, 0x7F800000))
            for x, field in self._halves(value, self._call("smax", of_products, of_acc)):
                big = b.bitcast(b.add(field, places), x.type)
                zero = self._constant(x.type, 0.0)
                ups.append(b.fadd(big, self._call("maxnum", x, zero)))
                downs.append(b.fsub(self._call("minnum", x, zero), big))
        return ups, downs

    def _halves(self, value, field) -> list:
        """(numbers, exponent fields) of 16 lanes in the type of the sums: one vector of float32, or two of float64."""
        if not self.double:
            return [(value, field)]
        b, wide, halves = self.b, ir.VectorType(_I64, 8), []
        for begin in (0, 8):
            chosen = ir.Constant(ir.VectorType(_I32, 8), list(range(begin, begin + 8)))
            x = b.fpext(b.shuffle_vector(value, value, chosen), ir.VectorType(self.real, 8))
            bits = b.shl(b.zext(b.shuffle_vector(field, field, chosen), wide), self._constant(wide, 52 - 23))
            halves.append((x, b.add(bits, self._constant(wide, (1023 - 127) << 52))))
        return halves

    def _add(self, a, signs, parts, width, up: list, down: list) -> tuple[list, list]:
        """Both sums with all products. For a negative number of a the two parts of b change places."""
        b, kind = self.b, ir.VectorType(self.real, self.n)
        ups, downs, left = self._registers(up), self._registers(down), self._registers([signs])[0]
        with cgutils.for_range(b, b.udiv(width, ir.Constant(_I64, _FOUR))) as loop:
            x, y, bits = [b.load(r) for r in ups], [b.load(r) for r in downs], b.load(left)
            for i in range(_FOUR):
                k = b.add(b.mul(loop.index, ir.Constant(_I64, _FOUR)), ir.Constant(_I64, i))
                factor = self._splat(b.load(b.gep(a, [k])), self.n)
                negative = b.and_(b.lshr(bits, ir.Constant(_I32, i)), ir.Constant(_I32, 1))
                swap = b.mul(b.zext(negative, _I64), ir.Constant(_I64, LANES))
                both = b.gep(parts, [b.mul(k, ir.Constant(_I64, 2 * LANES))])
                of_up, of_down = b.gep(both, [swap]), b.gep(both, [b.sub(ir.Constant(_I64, LANES), swap)])
                for v in range(len(up)):
                    x[v] = self._call("fma", factor, self._load(of_up, v * self.n, kind), x[v])
                    y[v] = self._call("fma", factor, self._load(of_down, v * self.n, kind), y[v])
            b.store(b.lshr(bits, ir.Constant(_I32, _FOUR)), left)
            for register, value in zip(ups + downs, x + y, strict=True):
                b.store(value, register)
        return [b.load(r) for r in ups], [b.load(r) for r in downs]

    def _registers(self, values: list) -> list:
        """Variables with these values, which LLVM keeps in registers."""
        made = [cgutils.alloca_once(self.b, value.type) for value in values]
        for register, value in zip(made, values, strict=True):
            self.b.store(value, register)
        return made

    def _widened(self, value):
        """An int32 as long as a number of the sums."""
        return self.b.zext(value, _I64) if self.double else value

    def _splat(self, value, n: int):
        """A vector of n times the value."""
        one = self.b.insert_element(ir.Constant(ir.VectorType(value.type, n), ir.Undefined), value, ir.Constant(_I32, 0))
        return self.b.shuffle_vector(one, one, ir.Constant(ir.VectorType(_I32, n), [0] * n))

    def _constant(self, kind: ir.VectorType, value):
        return ir.Constant(kind, [value] * kind.count)

    def _load(self, pointer, offset: int, kind: ir.VectorType):
        at = self.b.gep(pointer, [ir.Constant(_I64, offset)])
        return self.b.load(self.b.bitcast(at, kind.as_pointer()), align=1 if kind.element is _I8 else 4)

    def _call(self, name: str, *values):
        """An operation of LLVM on vectors of one type."""
        kind = values[0].type
        element = {"float": "f32", "double": "f64"}.get(str(kind.element), str(kind.element))
        function = ir.FunctionType(kind, [kind] * len(values))
        return self.b.call(cgutils.get_or_insert_function(self.b.module, function, f"llvm.{name}.v{kind.count}{element}"), values)
