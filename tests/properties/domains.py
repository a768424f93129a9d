"""The domains that properties are stated on, as hypothesis strategies, and how a property is run.

Arrays are drawn as bytes: uniform in their bits, where hypothesis favors small integers and simple
floats, and many times faster than its arrays of elements. A failing example shrinks towards zero
bytes.
"""

import functools
from collections.abc import Callable

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fp8ref.conformance.inputs import cast_inputs
from fp8ref.formats import Format

F32 = np.float32


def for_all(examples: int = 50, **strategies) -> Callable:
    """The property holds for all values of the strategies.

    ``caught`` runs it under a planted fault, without shrinking.
    """
    options = {
        "deadline": None,
        "derandomize": True,
        "suppress_health_check": [HealthCheck.too_slow],
    }

    def decorate(test: Callable) -> Callable:
        whole = settings(**options, max_examples=examples)(given(**strategies)(test))
        # It stops at its first failure: more examples cost nothing, and do not depend on
        # hypothesis's order of them.
        hunt = settings(
            **options,
            max_examples=4 * examples,
            phases=[Phase.generate],
            report_multiple_bugs=False,
        )
        whole.unshrunk = hunt(given(**strategies)(test))
        return whole

    return decorate


def caught(test: Callable, **arguments) -> bool:
    """Whether the property fails, as it must where a fault was planted."""
    try:
        test.unshrunk(**arguments)
    except AssertionError:
        return True
    return False


def bits(shape: int | tuple[int, ...]) -> st.SearchStrategy:
    """uint32, uniform."""
    size = 4 * int(np.prod(shape))
    return st.binary(min_size=size, max_size=size).map(
        lambda b: np.frombuffer(b, np.uint32).reshape(shape)
    )


def among(values: np.ndarray, shape: int | tuple[int, ...]) -> st.SearchStrategy:
    """Elements of values, each about as likely as any other."""
    kind = np.dtype(np.uint8 if len(values) <= 256 else np.uint16)
    size = kind.itemsize * int(np.prod(shape))
    return st.binary(min_size=size, max_size=size).map(
        lambda b: values[(np.frombuffer(b, kind).astype(np.intp) % len(values)).reshape(shape)]
    )


def any_float32(shape: int | tuple[int, ...]) -> st.SearchStrategy:
    """Every float32 bit pattern, NaNs and infinities included."""
    return bits(shape).map(lambda b: b.view(F32))


@functools.cache
def numbers(fmt: Format, shape: int | tuple[int, ...] = 32) -> st.SearchStrategy:
    """All float32 but NaN: of all bits; around the range of fmt; numbers of fmt, ties, powers of
    two and their neighbors.
    """
    low, high = fmt.emin - fmt.mantissa_bits - 2, int(np.log2(fmt.max)) + 1
    return st.one_of(
        any_float32(shape).map(_without_nan),
        _exponents(shape, low, high),
        among(landmarks(fmt), shape),
    )


@functools.cache
def of_magnitude(low: float, high: float, shape: int | tuple[int, ...] = 32) -> st.SearchStrategy:
    """float32 of both signs with low <= |x| <= high, uniform in their bits."""
    first, last = (int(F32(v).view(np.uint32)) for v in (low, high))
    assert low == F32(low)
    assert high == F32(high)

    def within(b: np.ndarray) -> np.ndarray:
        magnitude = first + (b & np.uint32(0x7FFFFFFF)) % np.uint32(last - first + 1)
        return (magnitude.astype(np.uint32) | b & np.uint32(0x80000000)).view(F32)

    return bits(shape).map(within)


@st.composite
def tensors(draw, shape: tuple[int, ...], low: int = -39, high: int = 127) -> np.ndarray:
    """Finite float32 with 2^low <= amax < 2^(high + 1): exponents at most 20 apart, some zeros,
    sometimes few mantissa bits.

    2^-39 is the least power of two above torchao's eps of 1e-12.
    """
    top = draw(st.one_of(st.integers(low, high), st.sampled_from([low, high, 0])))
    b = draw(bits(shape))
    apart = (b >> np.uint32(23)) & np.uint32(0xFF)
    exponent = np.maximum(
        top + 127 - (apart % np.uint32(draw(st.integers(1, 20)))).astype(np.int64), 1
    )
    exponent.flat[draw(st.integers(0, b.size - 1))] = top + 127
    mantissa = b & np.uint32(draw(st.sampled_from([0x807FFFFF, 0x80780000])))
    x = (mantissa | exponent.astype(np.uint32) << np.uint32(23)).view(F32)
    return np.where((apart > 240) & (exponent != top + 127), F32(0), x)


def landmarks(fmt: Format) -> np.ndarray:
    """What a cast to fmt turns on, NaN apart."""
    powers = np.ldexp(F32(1), np.arange(-149, 128)).astype(F32)
    around = [powers, *(np.nextafter(powers, F32(side)) for side in (-np.inf, np.inf))]
    marks = np.concatenate(
        [cast_inputs.edges(fmt), *around, *(-a for a in around), [F32(0), F32(-0.0)]]
    ).astype(F32)
    return marks[~np.isnan(marks)]


def spread_out(seed: int, shape: tuple[int, int]) -> np.ndarray:
    """float32 of any size that hypothesis would be slow to draw: a wide spread of exponents from a
    seed.
    """
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 12, shape)).astype(F32)


def _exponents(shape: int | tuple[int, ...], low: int, high: int) -> st.SearchStrategy:
    def within(b: np.ndarray) -> np.ndarray:
        exponent = np.uint32(low + 127) + ((b >> np.uint32(23)) & np.uint32(0xFF)) % np.uint32(
            high - low + 1
        )
        return (b & np.uint32(0x807FFFFF) | exponent << np.uint32(23)).view(F32)

    return bits(shape).map(within)


def _without_nan(x: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(x), F32(1), x)
