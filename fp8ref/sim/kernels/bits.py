"""32-bit operations for kernels: bit casts and shifts that numba would widen to 64
bits, halving a vector's lanes."""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


@intrinsic
def as_float(typing_context, bits):
    """The float32 with these bits."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def as_bits(typing_context, value):
    """The bits of a float32."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic
def shift_right(typing_context, value, places):
    """value >> places in 32 bits; places < 32, or the result is undefined."""

    def generate(context, builder, signature, arguments):
        return builder.lshr(arguments[0], arguments[1])

    return types.uint32(types.uint32, types.uint32), generate


@intrinsic
def as_bits64(typing_context, value):
    """The bits of a float64."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(64))

    return types.int64(types.float64), generate


@intrinsic
def as_float64(typing_context, bits):
    """The float64 with these bits."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.DoubleType())

    return types.float64(types.int64), generate


@intrinsic
def prefer_wide_vectors(typing_context):
    """Let LLVM use vectors of 512 bits where the CPU has them; its default is 256."""

    def generate(context, builder, signature, arguments):
        # llvmlite's own add() knows names alone; attributes with a value are written as they are.
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.void(), generate


AT_A_TIME, AHEAD = 256, 1024
"""Numbers that a kernel takes before it calls ``fetch_ahead`` again, and how far that is ahead of
them. A processor fetches lines ahead by itself, but not past a page of 1,024 numbers."""


@intrinsic
def fetch_ahead(typing_context, array, begin, size):
    """Ask for the lines of a contiguous array of 32-bit numbers from the flat index begin + AHEAD
    on, AT_A_TIME numbers. Past its end that does nothing. ``size`` numbers are read next: of fewer
    than AT_A_TIME, only those ask that come first in a block of as many."""

    def generate(context, builder, signature, arguments):
        i8, i32, i64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        ask = builder.module.declare_intrinsic(
            "llvm.prefetch",
            (i8.as_pointer(),),
            ir.FunctionType(ir.VoidType(), [i8.as_pointer(), i32, i32, i32]),
        )
        with builder.if_then(
            builder.icmp_unsigned(
                "<", builder.and_(arguments[1], ir.Constant(i64, AT_A_TIME - 1)), arguments[2]
            )
        ):
            first = builder.gep(data, [arguments[1]])
            for numbers in range(AHEAD, AHEAD + AT_A_TIME, 16):  # a line holds 16
                line = builder.bitcast(
                    builder.gep(first, [ir.Constant(i64, numbers)]), i8.as_pointer()
                )
                # to read; to keep in all caches; data
                builder.call(ask, [line, *(ir.Constant(i32, v) for v in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), generate


@intrinsic
def prefer_small_code(typing_context):
    """Do not let LLVM copy loops of this function for special cases, which takes longer to compile.

    For loops that are vectors already.
    """

    def generate(context, builder, signature, arguments):
        builder.function.attributes.add("optsize")
        return context.get_dummy_value()

    return types.void(), generate
