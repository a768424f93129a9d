"""32-bit operations for kernels: bit casts, shifts and truncation that numba would widen to 64
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
def truncate(typing_context, value):
    """The integer part of a float32 as int32; |value| < 2^31, or the result is undefined."""

    def generate(context, builder, signature, arguments):
        return builder.fptosi(arguments[0], ir.IntType(32))

    return types.int32(types.float32), generate


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
    """Let LLVM use vectors of 512 bits in this function where the processor has them; it prefers 256 on most."""

    def generate(context, builder, signature, arguments):
        # llvmlite's own add() knows names alone; attributes with a value are written as they are.
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def prefer_small_code(typing_context):
    """Do not let LLVM copy loops of this function for special cases, which takes longer to compile. For loops that are vectors already."""

    def generate(context, builder, signature, arguments):
        builder.function.attributes.add("optsize")
        return context.get_dummy_value()

    return types.void(), generate
