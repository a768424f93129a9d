"""A tensor core's step, chain and GEMM in Python integers (spec G-10 to G-12): what the tests
trust. Scalars only, no floats.

Operands are FP8 codes and the bits of float32s. Every finite number is an integer, in units of
2^-160, so that nothing is rounded but where a line says so. ``Unit`` also spells models that are
*not* the hardware's, for tests to show that their data tell them apart.
"""

from typing import NamedTuple

NAN, INF, SIGN = 0x7FFFFFFF, 0x7F800000, 0x80000000
ONE = 1 << 160
MANTISSA_AND_BIAS = {"e4m3fn": (3, 7), "e5m2": (2, 15)}


class Unit(NamedTuple):
    width: int
    fraction: int
    output: int
    normalized: bool = (
        False  # products, and subnormal factors, aligned by the exponents of their values
    )
    factors: bool = False  # subnormal factors by the exponents of their values, products not
    flushed: bool = False  # subnormal factors are zeros
    nearest: bool = False  # terms rounded to nearest even where they should be cut off
    floor: bool = False  # terms rounded towards minus infinity
    zeros_count: bool = False  # zero factors take part, as if their exponent were emin
    output_rounding: str = "toward_zero"
    late: bool = False  # the accumulator is not aligned: it is added in float32 after the products


HOPPER, ADA, BLACKWELL = Unit(32, 13, 13), Unit(16, 13, 13), Unit(32, 25, 23)


def is_nan(code: int, fmt: str) -> bool:
    return code & 0x7F > (0x7C if fmt == "e5m2" else 0x7E)


def is_inf(code: int, fmt: str) -> bool:
    return fmt == "e5m2" and code & 0x7F == 0x7C


def fp8(code: int, fmt: str) -> int:
    """The value of a finite code."""
    mantissa, bias = MANTISSA_AND_BIAS[fmt]
    field, low = (code & 0x7F) >> mantissa, code & ((1 << mantissa) - 1)
    magnitude = (ONE >> bias + mantissa) * (
        low << 1 if field == 0 else (1 << mantissa) + low << field
    )
    return -magnitude if code & 0x80 else magnitude


def float32(bits: int) -> int:
    """The value of a finite float32."""
    field, low = bits >> 23 & 0xFF, bits & 0x7FFFFF
    magnitude = (ONE >> 150) * (low << 1 if field == 0 else (1 << 23) + low << field)
    return -magnitude if bits & SIGN else magnitude


def exponent(value: int, least: int) -> int:
    """floor(log2 |value|), at least ``least``."""
    return max(abs(value).bit_length() - ONE.bit_length(), least)


def multiple(value: int, quantum: int, unit: Unit | None = None) -> int:
    """value as a whole number of quanta, cut off towards zero."""
    if unit is not None and unit.floor:
        return value // quantum
    if unit is not None and unit.nearest:
        return nearest_even(value, quantum)
    return -(-value // quantum) if value < 0 else value // quantum


def nearest_even(value: int, quantum: int) -> int:
    whole, rest = divmod(value, quantum)
    return whole + (2 * rest > quantum or (2 * rest == quantum and whole % 2 == 1))


def pack(value: int, bits: int = 23, rounding: str = "toward_zero") -> int:
    """The float32 with this many fraction bits that value is rounded to; zero is +0, and from 2^128
    on infinity.
    """
    quantum = (ONE << exponent(value, -126) + 126) >> 126 + bits
    rounded = {
        "toward_zero": multiple,
        "toward_negative": int.__floordiv__,
        "nearest_even": nearest_even,
    }
    value = quantum * rounded[rounding](value, quantum)
    e = exponent(value, -126)
    significand = abs(value) * (1 << 23 + 126) // (ONE << e + 126)
    # a normal number's hidden bit adds one to the exponent field
    magnitude = INF if e > 127 else (e + 126 << 23) + significand
    return (SIGN if value < 0 else 0) + magnitude


def add(x: int, y: int) -> int:
    """The float32 sum of two finite float32s, to nearest even."""
    return pack(float32(x) + float32(y), rounding="nearest_even")


def step(a: list[int], b: list[int], c: int, fmts: tuple[str, str], unit: Unit) -> int:
    """c + the products of codes a and b, once through the unit's adder."""
    fmt_a, fmt_b = fmts
    biases = [MANTISSA_AND_BIAS[fmt][1] for fmt in fmts]
    pairs = list(zip(a, b, strict=True))
    signs = [(x ^ y) >> 7 for x, y in pairs if is_inf(x, fmt_a) or is_inf(y, fmt_b)]
    if c & ~SIGN == INF:
        signs.append(c >> 31)
    no_number = c & ~SIGN > INF or any(is_nan(x, fmt_a) or is_nan(y, fmt_b) for x, y in pairs)
    inf_times_zero = any(
        (is_inf(x, fmt_a) and y & 0x7F == 0) or (is_inf(y, fmt_b) and x & 0x7F == 0)
        for x, y in pairs
    )
    if no_number or inf_times_zero or len(set(signs)) == 2:
        return NAN
    if signs:
        return INF + SIGN * signs[0]

    values = [(fp8(x, fmt_a), fp8(y, fmt_b)) for x, y in pairs]
    if unit.flushed:
        values = [
            tuple(
                v if abs(v) * 2 ** (bias - 1) >= ONE else 0
                for v, bias in zip(pair, biases, strict=True)
            )
            for pair in values
        ]
    terms = [x * y // ONE for x, y in values]  # exact: a product is a multiple of 2^-32
    emin_a, emin_b = (-1000, -1000) if unit.factors else (1 - bias for bias in biases)
    if unit.normalized:
        exponents = [exponent(term, -1000) for term in terms if term]
    else:
        exponents = [
            exponent(x, emin_a) + exponent(y, emin_b)
            for x, y in values
            if unit.zeros_count or (x and y)
        ]
    accumulator = float32(c)
    if accumulator and not unit.late:
        terms, exponents = [*terms, accumulator], [*exponents, exponent(accumulator, -126)]
    largest = max(exponents, default=-126)
    quantum = (ONE << largest + 126) >> 126 + unit.fraction
    total = quantum * sum(multiple(term, quantum, unit) for term in terms)
    result = pack(total, unit.output, unit.output_rounding)
    return add(result, c) if unit.late else result


def chain(a: list[int], b: list[int], c: int, fmts: tuple[str, str], unit: Unit) -> int:
    """Steps over all of K, each from the result of the one before. 32 of K are an instruction."""
    for k in range(0, len(a), unit.width):
        c = step(a[k : k + unit.width], b[k : k + unit.width], c, fmts, unit)
    return c


def dot(
    a: list[int],
    b: list[int],
    fmts: tuple[str, str],
    unit: Unit,
    *,
    promotion: int | None = None,
    split_k: int = 1,
    tile: int = 128,
    interleaved: bool = False,
) -> int:
    """One output of a GEMM over finite codes: every chain from 0, their results added in float32,
    and those of the parts of K.
    """
    tiles = [(a[k : k + tile], b[k : k + tile]) for k in range(0, len(a), tile)]
    each = -(-len(tiles) // split_k)
    total = 0
    for i in range(split_k):
        own = tiles[i::split_k] if interleaved else tiles[i * each : (i + 1) * each]
        if not own:
            continue
        left, right = ([code for owned in own for code in owned[side]] for side in (0, 1))
        length = promotion or len(left)
        part = 0
        for k in range(0, len(left), length):
            part = add(part, chain(left[k : k + length], right[k : k + length], 0, fmts, unit))
        total = add(total, part)
    return total
