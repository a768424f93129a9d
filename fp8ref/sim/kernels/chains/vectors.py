"""LLVM's vectors, as the kernels of tensor core steps write them, and shared numbers."""

from typing import NamedTuple

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils

LANES = 64 if binding.get_host_cpu_features().get("avx512f") else 32
"""Columns of a tile: as many as keep float32 sums in registers."""

I8 = ir.IntType(8)  # 8 bits, of either sign
I16 = ir.IntType(16)  # 16 bits, of either sign
I32 = ir.IntType(32)  # 32 bits, of either sign
I64 = ir.IntType(64)  # 64 bits, of either sign
F32 = ir.FloatType()  # LLVM's float32


class Sizes(NamedTuple):
    """What chains' kernels know of arrays, one int64 array: many arguments compile slowly."""

    begin: int = 0  # the columns of the result: from a multiple of LANES on
    end: int = 0
    steps: int = 0
    most: int = 0  # steps of a tile of b that are laid out together
    m: int = 0  # rows and columns of the result
    n: int = 0
    width: int = 0  # of the unit; a multiple of 4, at most 32
    fraction_bits: int = 0
    output_bits: int = 0
    mantissa_bits: int = 0  # of the format that is decoded
    bias: int = 0
    zero: int = 0  # the bytes of a zero and of 2^0 among its exponents
    one_byte: int = 0


class Vectors:
    """What a builder lacks.

    Sums are float32, 16 a vector, or with ``double`` float64, 8 a vector.
    """

    def __init__(self, builder: ir.IRBuilder, double: bool) -> None:
        self.b = builder
        self.bits, self.fraction, self.n = (I64, 52, 8) if double else (I32, 23, 16)
        self.real = ir.DoubleType() if double else F32
        self.double = double
        self.lanes = LANES // 2 if double else LANES  # columns that are summed at a time

    def size(self, sizes, name: str):
        """One of ``Sizes``, int64."""
        return self.b.load(self.b.gep(sizes, [ir.Constant(I64, Sizes._fields.index(name))]))

    def times(self, value, n: int):
        """An int64 times a number."""
        return self.b.mul(value, ir.Constant(I64, n))

    def plus(self, value, n: int):
        """An int64 plus a number."""
        return self.b.add(value, ir.Constant(I64, n))

    def put(self, value, pointer, align: int = 4) -> None:
        """Store a vector where a pointer to its elements points."""
        self.b.store(value, self.b.bitcast(pointer, value.type.as_pointer()), align=align)

    def registers(self, values: list) -> list:
        """Variables with these values, which LLVM keeps in registers."""
        registers = [cgutils.alloca_once(self.b, value.type) for value in values]
        for register, value in zip(registers, values, strict=True):
            self.b.store(value, register)
        return registers

    def widened(self, value):
        """An int32 as long as a number of the sums."""
        return self.b.zext(value, I64) if self.double else value

    def splat(self, value, n: int):
        """A vector of n times the value."""
        element = self.b.insert_element(
            ir.Constant(ir.VectorType(value.type, n), ir.Undefined), value, ir.Constant(I32, 0)
        )
        return self.b.shuffle_vector(element, element, ir.Constant(ir.VectorType(I32, n), [0] * n))

    def constant(self, kind: ir.VectorType, value):
        """A vector of this type, of one value."""
        return ir.Constant(kind, [value] * kind.count)

    def load(self, pointer, offset: int, kind: ir.VectorType):
        """A vector from memory, ``offset`` elements after the pointer; element-aligned."""
        at = self.b.gep(pointer, [ir.Constant(I64, offset)])
        align = 1 if kind.element is I8 else 4
        return self.b.load(self.b.bitcast(at, kind.as_pointer()), align=align)

    def call(self, name: str, *values):
        """An operation of LLVM on vectors of one type."""
        kind = values[0].type
        element = {"float": "f32", "double": "f64"}.get(str(kind.element), str(kind.element))
        return self.intrinsic(f"{name}.v{kind.count}{element}", kind, *values)

    def intrinsic(self, name: str, result: ir.Type, *values):
        """A call of one of LLVM's functions."""
        function = ir.FunctionType(result, [value.type for value in values])
        declared = cgutils.get_or_insert_function(self.b.module, function, f"llvm.{name}")
        return self.b.call(declared, values)

    def halves(self, value) -> list:
        """Both halves of a vector of 16."""
        lanes = ir.VectorType(I32, 8)
        chosen = (ir.Constant(lanes, list(range(begin, begin + 8))) for begin in (0, 8))
        return [self.b.shuffle_vector(value, value, half_lanes) for half_lanes in chosen]

    def numbers(self, value) -> list:
        """16 float32 numbers in the type of the sums: one vector, or two of float64."""
        if not self.double:
            return [value]
        return [self.b.fpext(half, ir.VectorType(self.real, 8)) for half in self.halves(value)]


def pointers(context, builder: ir.IRBuilder, signature, arguments) -> list:
    """The pointers of an intrinsic's arrays, and its other arguments as they are."""
    return [
        context.make_array(t)(context, builder, value).data if isinstance(t, types.Array) else value
        for t, value in zip(signature.args, arguments, strict=True)
    ]
