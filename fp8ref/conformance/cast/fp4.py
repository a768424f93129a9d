"""Identify a cast to e2m1fn: its rounding, zeros, infinities and NaN, and how pairs of codes are packed.

``identify_cast`` comes here for a format of 4 bits, whose numbers are so few that all of them, their
midpoints and what is next to these are asked at once.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from fp8ref.conformance import subject as subjects
from fp8ref.conformance.cast.outputs import FLOATS
from fp8ref.conformance.finding import Counterexample, Finding, Outcome, bits_of, other_devices, show
from fp8ref.conformance.inputs import cast_inputs, dtypes
from fp8ref.conformance.subject import ConformanceError, Subject
from fp8ref.formats import Format
from fp8ref.sim import cast
from fp8ref.sim.packing import unpack

NAN_CODES = {"saturating": (7, 7), "ml_dtypes": (8, 0), "torchao_f4": (3, 11)}
"""What NaN and -NaN become, by the name of a cast: that of C-9 and PTX; ml_dtypes 0.6; torchao 0.18's
f32_to_f4_unpacked. The three are one on numbers."""

CALLS = 256
"""Calls of which the rate of stochastic rounding is taken."""


_REPEATING: tuple[cast.Rounding, ...] = ("nearest_even", "nearest_away", "toward_zero", "to_odd")


def identify_fp4_cast(
    function: Callable[..., Any], fmt: Format, *, name: str | None, expect: str | None, framework: str | None, device: str
) -> Outcome:
    """Identify a cast to e2m1fn.

    function   x [n], float32 or bfloat16 -> codes uint8 [n], pairs [n / 2] (F-5), or values [n].
    expect     a name of NAN_CODES.

    Raises:    ValueError: an unknown name; ConformanceError: not a valid cast.
    """
    if expect is not None and expect not in NAN_CODES:
        raise ValueError(f"a cast to {fmt} is expected to be one of {', '.join(NAN_CODES)}; got {expect!r}.")
    name = name or subjects.name_of(function)
    subject = subjects.wrap(name, function, framework=framework, device=device, shape=(16,))
    source = subjects.first_dtype(subject)
    x = dtypes.rounded(cast_inputs.identifying(fmt, source), source)
    x = np.concatenate([x, np.zeros(x.size % 2, np.float32)])
    number = ~np.isnan(x)
    got, packing = _codes(subject, x, source, fmt)
    found = {mode: cast.encode_plain(x, fmt, rounding=mode) for mode in _REPEATING}
    wrong = {mode: (got != codes) & number for mode, codes in found.items()}
    nearest = min(wrong, key=lambda mode: int(wrong[mode].sum()))
    repeats = np.array_equal(got, _codes(subject, x, source, fmt)[0])
    fair = repeats or _is_stochastic(subject, source, fmt)
    unlike = []
    if repeats and wrong[nearest].any():
        i = int(np.argmax(wrong[nearest]))
        unlike = [_counterexample(x, got, found[nearest], i, source, fmt, "C-2")]
    elif not fair:
        unlike = [
            Counterexample(
                input="the mean of many calls", bits=(), dtype=source, got="a biased code", expected="an unbiased one", clause="C-2"
            )
        ]
    rounding: str = nearest if repeats else "stochastic"
    pair = tuple(int(v) for v in _codes(subject, np.array([np.nan, -np.nan] * 8, np.float32), source, fmt)[0][:2])
    known = [n for n, codes in NAN_CODES.items() if codes == pair] if rounding in ("nearest_even", "stochastic") and not unlike else []
    findings = [
        Finding(what="rounding", value=rounding, evidence=f"{x.size} numbers of {fmt}, midpoints, neighbors and infinities"),
        Finding(what="packing", value=packing, evidence="the shape of its output"),
        Finding(what="NaN", value=f"{pair[0]}, {pair[1]}", evidence="the codes of NaN and -NaN, where no code is NaN (C-9)"),
    ]
    differences = list(unlike)
    if expect is not None and not unlike and expect not in known:
        same = rounding in ("nearest_even", "stochastic")
        differences = [
            Counterexample(
                input="NaN" if same else "a tie", bits=(), dtype=source, got=f"codes {pair}" if same else f"rounding {rounding}",
                expected=f"codes {NAN_CODES[expect]}" if same else "nearest_even", clause="C-9" if same else "C-2",
            )
        ]  # fmt: skip
    return Outcome(
        name=name, kind="cast", fmt=fmt, framework=subject.framework, findings=findings, identified=not unlike, named=bool(known),
        found={"format": None if unlike else fmt.name, "rounding": rounding, "packing": packing, "nan_code": pair[0], "is": known},
        summary=f"a cast to {fmt}, {rounding}, NaN to code {pair[0]}" + (f": {known[0]}" if known else "") if not unlike
        else f"no known cast to {fmt}; the nearest rounds {rounding}",
        unlike=unlike, expected=expect, differences=differences if expect is not None else [],
        limits=["other dtypes, shapes and strides", *other_devices(subject.framework, device)],
    )  # fmt: skip


def _codes(subject: Subject, x: np.ndarray, source: str, fmt: Format) -> tuple[np.ndarray, str]:
    """(codes uint8 [n], how they are packed) for x."""
    made = subjects.read_array(subject.ask(x, source))
    if made is None or made[0].shape not in (x.shape, (x.size // 2,)):
        given = "no array" if made is None else f"{made[1]} {list(made[0].shape)}"
        raise ConformanceError(
            f"{subject.name} gives {given}; a cast to {fmt} of [{x.size}] gives uint8 [{x.size}], pairs [{x.size // 2}], or values."
        )
    array, dtype = made
    if dtype in FLOATS:
        codes = cast.encode_plain(array.astype(np.float32), fmt)
        if not np.array_equal(cast.decode(codes, fmt), array):
            raise ConformanceError(f"{subject.name} gives values that are none of {fmt}. Return codes, or values of {fmt}.")
        return codes, "values"
    if array.shape == x.shape:
        if array.max(initial=0) > 15:
            raise ConformanceError(f"{subject.name} gives a code {array.max()}; codes of {fmt} are at most 15.")
        return array, "one a byte"
    swapped = array << np.uint8(4) | array >> np.uint8(4)
    expected = cast.encode_plain(x, fmt)
    agree = [int((unpack(pairs) == expected).sum()) for pairs in (array, swapped)]
    return (unpack(array), "low first") if agree[0] >= agree[1] else (unpack(swapped), "high first")


def _is_stochastic(subject: Subject, source: str, fmt: Format) -> bool:
    """Whether it rounds up as often as the fraction says: within 6 standard deviations for each of nine fractions.

    1/512 is one that 8 random bits do not tell from 0 or 1/256: 128 of the 2^16 choices, 11 a standard deviation.
    """
    fractions = np.append(np.arange(1, 9) / 16, 1 / 512)
    x = np.repeat((fractions / 2).astype(np.float32), 256)  # between 0 and 0.5, which no dtype here rounds
    ups = np.zeros(9)
    for _ in range(CALLS):
        values = cast.decode(_codes(subject, x, source, fmt)[0], fmt).reshape(9, 256)
        if not np.isin(values, (0, 0.5)).all():
            return False
        ups += (values == 0.5).sum(axis=1)
    n = CALLS * 256
    return bool(np.all(np.abs(ups - n * fractions) <= 6 * np.sqrt(n * fractions * (1 - fractions))))


def _counterexample(x: np.ndarray, got: np.ndarray, expected: np.ndarray, i: int, source: str, fmt: Format, clause: str) -> Counterexample:
    values = [show(float(cast.decode(codes[i], fmt))) for codes in (got, expected)]
    return Counterexample(
        input=show(float(x[i])), bits=(bits_of(float(x[i]), source),), dtype=source, got=values[0], expected=values[1], clause=clause
    )
