"""Identify a cast to e2m1fn: its rounding, zeros, infinities and NaN, and how pairs of codes are
packed.

``identify_cast`` comes here for a format of 4 bits, whose numbers are so few that all of them,
their midpoints and what is next to these are asked at once.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from fp8ref.conformance.cast.outputs import FLOATS
from fp8ref.conformance.inputs import cast_inputs, dtypes
from fp8ref.conformance.kit import subject as subjects
from fp8ref.conformance.kit.finding import (
    Counterexample,
    Finding,
    Outcome,
    bits_of,
    other_devices,
    show,
)
from fp8ref.conformance.kit.subject import ConformanceError, Subject
from fp8ref.formats import Format
from fp8ref.sim.quantize import cast
from fp8ref.sim.quantize.packing import unpack

NAN_CODES = {"saturating": (7, 7), "ml_dtypes": (8, 0), "torchao_f4": (3, 11)}
"""What NaN and -NaN become, by the name of a cast: that of C-9 and PTX; ml_dtypes 0.6; torchao
0.18's f32_to_f4_unpacked. The three are one on numbers."""

CALLS = 256
"""Calls of which the rate of stochastic rounding is taken."""

_LARGEST = 7
"""The code of the largest number; that of its negative is 8 more."""


_REPEATING: tuple[cast.Rounding, ...] = ("nearest_even", "nearest_away", "toward_zero", "to_odd")


def identify_fp4_cast(
    function: Callable[..., Any],
    fmt: Format,
    *,
    name: str | None,
    expect: str | None,
    framework: str | None,
    device: str,
) -> Outcome:
    """Identify a cast to e2m1fn.

    function   x [n], float32 or bfloat16 -> codes uint8 [n], pairs [n / 2] (F-5), or values [n].
    expect     a name of NAN_CODES.

    Raises:    ValueError: an unknown name; ConformanceError: not a valid cast.
    """
    if expect is not None and expect not in NAN_CODES:
        raise ValueError(
            f"a cast to {fmt} is expected to be one of {', '.join(NAN_CODES)}; got {expect!r}."
        )
    name = name or subjects.name_of(function)
    subject = subjects.wrap(name, function, framework=framework, device=device, shape=(16,))
    source = subjects.first_dtype(subject)
    x = dtypes.rounded(cast_inputs.identifying(fmt, source), source)
    x = np.concatenate([x, np.zeros(x.size % 2, np.float32)])
    number = ~np.isnan(x)
    got, packing = _codes(subject, x, source, fmt)
    codes_by_mode = {mode: cast.encode_plain(x, fmt, rounding=mode) for mode in _REPEATING}
    wrong = {mode: (got != codes) & number for mode, codes in codes_by_mode.items()}
    nearest = min(wrong, key=lambda mode: int(wrong[mode].sum()))
    repeats = np.array_equal(got, _codes(subject, x, source, fmt)[0])
    unlike = []
    if not repeats:
        unlike = _unlike_stochastic(subject, x[number], source, fmt)
    elif wrong[nearest].any():
        i = int(np.argmax(wrong[nearest]))
        unlike = [_counterexample(x, got, codes_by_mode[nearest], i, source, fmt, "C-2")]
    rounding: str = nearest if repeats else "stochastic"
    pair = tuple(
        int(v)
        for v in _codes(subject, np.array([np.nan, -np.nan] * 8, np.float32), source, fmt)[0][:2]
    )
    names = (
        [n for n, codes in NAN_CODES.items() if codes == pair]
        if rounding in ("nearest_even", "stochastic") and not unlike
        else []
    )
    findings = [
        Finding(
            what="rounding",
            value=rounding,
            evidence=f"{x.size} numbers of {fmt}, midpoints, neighbors and infinities",
        ),
        Finding(what="packing", value=packing, evidence="the shape of its output"),
        Finding(
            what="NaN",
            value=f"{pair[0]}, {pair[1]}",
            evidence="the codes of NaN and -NaN, where no code is NaN (C-9)",
        ),
    ]
    differences = list(unlike)
    if expect is not None and not unlike and expect not in names:
        same = rounding in ("nearest_even", "stochastic")
        differences = [
            Counterexample(
                input="NaN" if same else "a tie",
                bits=(),
                dtype=source,
                got=f"codes {pair}" if same else f"rounding {rounding}",
                expected=f"codes {NAN_CODES[expect]}" if same else "nearest_even",
                clause="C-9" if same else "C-2",
            )
        ]
    return Outcome(
        name=name,
        kind="cast",
        fmt=fmt,
        framework=subject.framework,
        findings=findings,
        identified=not unlike,
        named=bool(names),
        found={
            "format": None if unlike else fmt.name,
            "rounding": rounding,
            "packing": packing,
            "nan_code": pair[0],
            "is": names,
        },
        summary=f"a cast to {fmt}, {rounding}, NaN to code {pair[0]}"
        + (f": {names[0]}" if names else "")
        if not unlike
        else f"no known cast to {fmt}; the nearest rounds {rounding}",
        unlike=unlike,
        expected=expect,
        differences=differences if expect is not None else [],
        limits=["other dtypes, shapes and strides", *other_devices(subject.framework, device)],
    )


def _codes(subject: Subject, x: np.ndarray, source: str, fmt: Format) -> tuple[np.ndarray, str]:
    """(codes uint8 [n], how they are packed) for x."""
    output = subjects.read_array(subject.ask(x, source))
    if output is None or output[0].shape not in (x.shape, (x.size // 2,)):
        description = "no array" if output is None else f"{output[1]} {list(output[0].shape)}"
        raise ConformanceError(
            f"{subject.name} gives {description}; a cast to {fmt} of [{x.size}] gives uint8 "
            f"[{x.size}], pairs [{x.size // 2}], or values."
        )
    array, dtype = output
    if dtype in FLOATS:
        codes = cast.encode_plain(array.astype(np.float32), fmt)
        if not np.array_equal(cast.decode(codes, fmt), array):
            raise ConformanceError(
                f"{subject.name} gives values that are none of {fmt}. Return codes, or values "
                f"of {fmt}."
            )
        return codes, "values"
    if array.shape == x.shape:
        if array.max(initial=0) > 15:
            raise ConformanceError(
                f"{subject.name} gives a code {array.max()}; codes of {fmt} are at most 15."
            )
        return array, "one a byte"
    swapped = array << np.uint8(4) | array >> np.uint8(4)
    expected = cast.encode_plain(x, fmt)
    agree = [int((unpack(pairs) == expected).sum()) for pairs in (array, swapped)]
    return (unpack(array), "low first") if agree[0] >= agree[1] else (unpack(swapped), "high first")


def _unlike_stochastic(
    subject: Subject, x: np.ndarray, source: str, fmt: Format
) -> list[Counterexample]:
    """What shows that it does not round stochastically: a number that becomes none of the two
    beside it, else one that is not rounded away from zero as often as its fraction says, to 6
    standard deviations.

    The fractions are nine from 0 to 0.5, and three between each two neighbors. 1/512 is one that 8
    random bits do not tell from 0 or 1/256: 128 of the 2^16 choices, 11 a standard deviation.
    """
    fractions = np.concatenate(
        [np.arange(1, 9) / 16, [1 / 512], np.tile([0.25, 0.5, 0.75], 2 * (_LARGEST - 1))]
    )
    toward_zero = np.concatenate(
        [np.zeros(9, np.uint8), np.repeat(np.r_[0 : _LARGEST - 1, 8 : 8 + _LARGEST - 1], 3)]
    ).astype(np.uint8)
    lower, upper = (
        cast.decode(codes, fmt).astype(np.float64)
        for codes in (toward_zero, toward_zero + np.uint8(1))
    )
    numbers = (lower + fractions * (upper - lower)).astype(np.float32)  # no dtype here rounds them
    times = np.array([256] * 9 + [32] * (len(numbers) - 9))
    inputs = np.concatenate([np.repeat(numbers, times), x])
    inputs = np.concatenate([inputs, np.zeros(inputs.size % 2, np.float32)])
    low = cast.encode_plain(inputs, fmt, rounding="toward_zero")
    high = low + (cast.decode(low, fmt) != inputs).astype(np.uint8) * (low % 8 < _LARGEST)
    ends, away = np.cumsum(times), np.zeros(len(numbers))
    for _ in range(CALLS):
        codes = _codes(subject, inputs, source, fmt)[0]
        if (other := (codes != low) & (codes != high)).any():
            return [_counterexample(inputs, codes, low, int(np.argmax(other)), source, fmt, "C-2")]
        away += np.add.reduceat(codes[: ends[-1]] == high[: ends[-1]], ends - times, dtype=np.int64)
    n = CALLS * times
    off = np.abs(away - n * fractions) > 6 * np.sqrt(n * fractions * (1 - fractions))
    if not off.any():
        return []
    i = int(np.argmax(off))
    value, rates = (
        float(numbers[i]),
        [
            f"{show(float(upper[i]))} in {rate:.3g} of the calls"
            for rate in (away[i] / n[i], fractions[i])
        ],
    )
    return [
        Counterexample(
            input=show(value),
            bits=(bits_of(value, source),),
            dtype=source,
            got=rates[0],
            expected=rates[1],
            clause="C-2",
        )
    ]


def _counterexample(
    x: np.ndarray,
    got: np.ndarray,
    expected: np.ndarray,
    i: int,
    source: str,
    fmt: Format,
    clause: str,
) -> Counterexample:
    values = [show(float(cast.decode(codes[i], fmt))) for codes in (got, expected)]
    return Counterexample(
        input=show(float(x[i])),
        bits=(bits_of(float(x[i]), source),),
        dtype=source,
        got=values[0],
        expected=values[1],
        clause=clause,
    )
