"""What a quantizer to e2m1fn returns: codes, one a byte or two, or values; and scales."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8ref.conformance.cast.outputs import FLOATS
from fp8ref.conformance.inputs import dtypes, fp4_inputs
from fp8ref.conformance.kit.subject import ConformanceError, Subject
from fp8ref.conformance.quantizer import outputs
from fp8ref.formats import E4M3FN, E8M0FNU
from fp8ref.sim.quantize import cast, scaling
from fp8ref.sim.quantize.packing import unpack
from fp8ref.sim.quantize.scaling import Quantized

PACKINGS = ("low first", "high first")
"""How two codes share a byte: the first one in its low half (F-5), or in its high half."""

CALLS = 16
"""Calls of which the mean code of stochastic rounding is taken."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """What one call returned.

    bytes    uint8 [M, K], or [M, K / 2] of pairs; None if values were returned.
    values   float32 [M, K], of dtype; None if codes were returned.
    scales   by name or place: the arrays that it may be, float32; of bytes, e4m3fn or e8m0fnu.
    """

    bytes: np.ndarray | None
    values: np.ndarray | None
    dtype: str
    scales: Mapping[str, tuple[np.ndarray, ...]]

    @property
    def packings(self) -> tuple[str, ...]:
        """The ways in which codes may be packed."""
        return (
            ("one a byte",)
            if self.bytes is None or self.bytes.shape[-1] == fp4_inputs.SHAPE[-1]
            else PACKINGS
        )

    def codes(self, packing: str) -> np.ndarray | None:
        """uint8 [M, K] under a packing; None of values."""
        if self.bytes is None or packing == "one a byte":
            return self.bytes
        pairs = (
            self.bytes
            if packing == "low first"
            else self.bytes << np.uint8(4) | self.bytes >> np.uint8(4)
        )
        return unpack(pairs)

    def rounded(self, values: np.ndarray) -> np.ndarray:
        """Values as they are in its dtype."""
        return dtypes.rounded(values, self.dtype)


def ask(subject: Subject, x: np.ndarray, source: str) -> Output:
    """The output for x.

    Raises:   ConformanceError: as Subject.ask, and where no part of it is codes or values.
    """
    parts = outputs.parts_of(subject.ask(x, source))
    arrays = {
        name: named_array
        for name, part in parts.items()
        if (named_array := outputs.array_of(part)) is not None
    }
    halves = (*x.shape[:-1], x.shape[-1] // 2)
    main = [
        n
        for n, (a, d) in arrays.items()
        if a.shape == x.shape and (d in ("uint8", "float4_e2m1fn") or d in FLOATS)
    ]
    main += [
        n
        for n, (a, d) in arrays.items()
        if a.shape == halves and d in ("uint8", "float4_e2m1fn_x2")
    ]
    if not main:
        description = (
            ", ".join(f"{dtype} {list(a.shape)}" for a, dtype in arrays.values()) or "no array"
        )
        raise ConformanceError(
            f"{subject.name} gives {description}; a quantizer to e2m1fn gives codes (uint8 "
            f"{list(x.shape)}, or pairs {list(halves)}) or values of x's shape, alone or with "
            "scales. Return (codes, scale)."
        )
    tensor, dtype = arrays.pop(main[0])
    if dtype not in FLOATS and tensor.shape == x.shape and tensor.max(initial=0) > 15:
        raise ConformanceError(
            f"{subject.name} gives a code {tensor.max()}; codes of e2m1fn are at most 15, one a "
            "byte."
        )
    codes = None if dtype in FLOATS else tensor
    values = tensor.astype(np.float32) if dtype in FLOATS else None
    return Output(
        bytes=codes,
        values=values,
        dtype=dtype,
        scales={n: _scales(a, d) for n, (a, d) in arrays.items()},
    )


def _scales(a: np.ndarray, dtype: str) -> tuple[np.ndarray, ...]:
    if dtype in FLOATS:
        with np.errstate(over="ignore"):
            return (a.astype(np.float32),)
    formats = {
        "float8_e4m3fn": (E4M3FN,),
        "float8_e8m0fnu": (E8M0FNU,),
        "uint8": (E8M0FNU, E4M3FN),
    }.get(dtype, ())
    return tuple(cast.decode(a, fmt) for fmt in formats)


def repeats(subject: Subject, x: np.ndarray, answer: Output, source: str) -> bool:
    """Whether a second call gives the same."""
    again = ask(subject, x, source)
    pairs = ((answer.bytes, again.bytes), (answer.values, again.values))
    return all(
        np.array_equal(a, b, equal_nan=True) for a, b in pairs if a is not None and b is not None
    )


def codes_of_nan(subject: Subject, source: str) -> str:
    """The codes or values that NaN and -NaN become, in words."""
    x = np.ones(fp4_inputs.SHAPE, np.float32)
    x[0, 0], x[0, 1] = np.nan, -np.float32(np.nan)
    try:
        output = ask(subject, x, source)
    except ConformanceError:
        return "refused"
    got = output.codes(output.packings[0])
    shown = output.values if got is None else got
    assert shown is not None
    return ", ".join(str(v) for v in shown[0, :2])


def known_scales(x: np.ndarray, q: Quantized) -> dict[str, np.ndarray]:
    """All that a quantizer may return as a scale, by name."""
    tensor = np.float32(1) if q.tensor_scale_inv is None else q.tensor_scale_inv
    scales: dict[str, Any] = {
        "scale": q.scale,
        "scale_inv": q.scale_inv,
        "amax": scaling.amax(x, q.granularity, axis=q.axis),
    }
    if q.tensor_scale_inv is not None:
        scales |= {
            "scale_inv * tensor_scale_inv": tensor * q.scale_inv,
            "tensor_scale_inv": tensor,
            "tensor_amax": scaling.amax(x),
        }
    with np.errstate(all="ignore"):
        scales |= {"tensor_scale": np.float32(1) / tensor} if q.tensor_scale_inv is not None else {}
    return scales


def name_scales(x: np.ndarray, answer: Output, q: Quantized) -> dict[str, str | None]:
    """What each returned array is; None for one that is none of the scales."""
    scales = known_scales(x, q)
    return {
        name: next((k for k, v in scales.items() if any(_same(a, v, q) for a in arrays)), None)
        for name, arrays in answer.scales.items()
    }


def wrong_scale(
    x: np.ndarray, answer: Output, q: Quantized, names: Mapping[str, str | None]
) -> str | None:
    """The name of a returned array that is not what its name says for this tensor; None if all
    are.
    """
    scales = known_scales(x, q)
    for name, arrays in answer.scales.items():
        scale_name = names[name]
        if scale_name is None or not any(_same(a, scales[scale_name], q) for a in arrays):
            return name
    return None


def _same(array: np.ndarray, expected: np.ndarray, q: Quantized) -> bool:
    """Whether both hold the same numbers: in any shape, or with each row of a square repeated."""
    array, expected = np.asarray(array), np.asarray(expected)
    if array.size == expected.size:
        return any(
            np.array_equal(v.ravel(), expected.ravel(), equal_nan=True) for v in (array, array.T)
        )
    rows = (
        np.repeat(expected, q.codes.shape[0] // max(1, expected.shape[0]), axis=0)
        if expected.ndim == 2
        else expected
    )
    return array.size == rows.size and np.array_equal(array.ravel(), rows.ravel(), equal_nan=True)


@dataclass(frozen=True, kw_only=True)
class Bias:
    """Of stochastic rounding: the mean of what is added to the magnitude, in standard deviations of
    a fair one's.
    """

    deviations: float

    @property
    def fair(self) -> bool:
        """Whether it is within 6: a fair one is not, once in 5e8."""
        return abs(self.deviations) <= 6

    @property
    def text(self) -> str:
        """In words."""
        return (
            f"the mean of {CALLS} calls is {self.deviations:.1f} standard deviations from an "
            "unbiased one"
        )


def bias(subject: Subject, x: np.ndarray, floor: Quantized, source: str, packing: str) -> Bias:
    """How far the codes' mean is from that of stochastic rounding, whose rate of rounding up is the
    fraction (C-2).

    floor     x rounded toward zero. Each rounding up is a trial of its own, of variance p (1 - p).
    """
    with np.errstate(all="ignore"):
        scaled = np.minimum(
            np.abs(x * scaling.spread(floor.scale, x.shape, floor.blocks)), floor.fmt.max
        ).astype(np.float64)
    lower = (floor.codes & 7).astype(np.int64)
    numbers = cast.decode(np.append(np.arange(8), 7).astype(np.uint8), floor.fmt).astype(np.float64)
    spacing = np.where(numbers[lower + 1] > numbers[lower], numbers[lower + 1] - numbers[lower], 1)
    p = (scaled - numbers[lower]) / spacing
    ups = 0
    for _ in range(CALLS):
        answer = ask(subject, x, source)
        got = answer.codes(packing)
        if got is None:
            raise ConformanceError(
                f"{subject.name} does not repeat itself. Of stochastic rounding return codes, "
                "not values."
            )
        ups += int(((got & 7).astype(np.int64) - lower).sum())
    # cvt.rs of NVIDIA's takes 8 bits of the fraction: its rate is up to 2^-9 off at ties of these
    # bits, on average none.
    return Bias(
        deviations=float(
            (ups - CALLS * p.sum()) / math.sqrt(CALLS * max(float((p * (1 - p)).sum()), 1e-9))
        )
    )
