"""The smallest tensor of the simplest numbers on which a quantiser and a policy part."""

import itertools
from collections.abc import Mapping

import numpy as np

from fp8ref.conformance.counterexample import Witness, bits_of, rounded, show
from fp8ref.conformance.explain import simplest
from fp8ref.conformance.inputs.kinds import AMAX_RANGES
from fp8ref.conformance.quantizer import policy_match
from fp8ref.conformance.quantizer.outputs import Quantizer, Reading
from fp8ref.conformance.quantizer.policy_match import Candidate
from fp8ref.conformance.quantizer.queries import Sharing
from fp8ref.formats import Format
from fp8ref.sim import cast, scaling

SHAPES = ((1, 1), (1, 32), (32, 1), (1, 128), (128, 1), (4, 4), (16, 16), (32, 32), (128, 128), (256, 384))
_EXPONENTS = (0, 1, -1, 2, -2, 4, -4, 8, -8, 16, -16, 32, -32)


def policy(quantizer: Quantizer, candidate: Candidate, sharing: Sharing, largest: float, kind: str) -> Witness | None:
    """A witness that it is not the candidate's, found from a group's largest on which it is not; None if a single number shows nothing."""
    signs = (abs(largest), largest) if largest < 0 else (largest,)  # positive if the sign has no part in it
    for shape in SHAPES:
        for beside, largest in itertools.product((False, True), signs):
            x = _only(shape, largest, quantizer.dtype, beside=beside)
            if _parts(quantizer, candidate, sharing, x) is not None:
                number = _simpler(quantizer, candidate, sharing, x) if kind in ("ordinary", "tiny", "huge") else largest
                x = _only(shape, number, quantizer.dtype, beside=beside)
                parts = _parts(quantizer, candidate, sharing, x)
                assert parts is not None
                return _witness(x, quantizer, *parts, candidate, sharing)
    return None


def layout(quantizer: Quantizer, candidate: Candidate, sharing: Sharing) -> Witness | None:
    """A witness that elements share scales otherwise than so: ones, and one 512 that is not for all."""
    for shape in ((2, 2), (4, 4), (2, 32), (2, 64), (32, 32), (2, 256), (64, 64), (128, 128), (256, 256), (256, 384)):
        x = np.ones(shape, np.float32)
        x[0, -1] = 512
        try:
            found, expected = quantizer.ask(x), candidate.quantize(x, sharing)
        except ValueError:  # a shape that one of them does not take
            continue
        differs = policy_match.unlike(found, expected, candidate)
        if differs.any():
            at = np.unravel_index(int(np.argmax(differs)), shape)
            where = f"element {[int(i) for i in at]}"
            return Witness(
                input=f"x {list(shape)} of ones, x[0, {shape[1] - 1}] = 512",
                bits=(bits_of(1, quantizer.dtype), bits_of(512, quantizer.dtype)),
                dtype=quantizer.dtype,
                got=f"{_tensor_said(found, at, expected.fmt)} at {where}",
                expected=f"{_code(expected.codes[at], expected.fmt, found)} as {sharing.granularity}, axis {sharing.axis}",
                clause="S-6",
            )
    return None


def _only(shape: tuple[int, int], largest: float, dtype: str, *, beside: bool) -> np.ndarray:
    """One number in zeros; beside it others, if there is room."""
    x = np.zeros(shape, np.float32)
    if beside and np.isfinite(largest):
        x.reshape(-1)[:] = np.float32(largest) * np.linspace(0.1, 0.95, x.size, dtype=np.float32)
    elif beside:
        x[:] = 1
    x.flat[0] = largest
    return rounded(x, dtype)


def _parts(quantizer: Quantizer, candidate: Candidate, sharing: Sharing, x: np.ndarray) -> tuple[Reading, scaling.Quantized, int] | None:
    """Reading, what the candidate gives, and the element on which they part (0 for a scale); None if they do not, or do not take x."""
    try:
        found, expected = quantizer.ask(x), candidate.quantize(x, sharing)
    except ValueError:
        return None
    for name, kind in sharing.kinds.items():
        if kind != "amax":
            ours, theirs = np.reshape(getattr(expected, kind), -1)[0], found.scales[name].reshape(-1)[0]
            if ours != theirs and not (np.isnan(ours) and np.isnan(theirs)):
                return found, expected, 0
    differs = policy_match.unlike(found, expected, candidate)
    return (found, expected, int(np.argmax(differs))) if differs.any() else None


def _simpler(quantizer: Quantizer, candidate: Candidate, sharing: Sharing, x: np.ndarray) -> float:
    """The largest with as few bits, then as near to 1, as still shows it, everything else in proportion."""
    largest = float(x.flat[0])
    fraction, own = np.frexp(largest)
    mantissa = float(fraction) * 2
    for bits in range(24):
        kept = sorted({np.floor(mantissa * 2**bits) / 2**bits, np.ceil(mantissa * 2**bits) / 2**bits})
        for exponent in (*_EXPONENTS, int(own) - 1):
            for m in kept:
                with np.errstate(over="ignore", under="ignore"):
                    number = np.float32(m * 2.0**exponent)
                if not np.isfinite(number) or number == 0:
                    continue
                tried = rounded((x.astype(np.float64) * (float(number) / largest)).astype(np.float32), quantizer.dtype)
                tried.flat[0] = rounded(np.array([number], np.float32), quantizer.dtype)[0]
                if _parts(quantizer, candidate, sharing, tried) is not None:
                    return float(tried.flat[0])
    return largest


def _witness(
    x: np.ndarray,
    quantizer: Quantizer,
    found: Reading,
    expected: scaling.Quantized,
    at: int,
    candidate: Candidate,
    sharing: Sharing,
) -> Witness:
    index = np.unravel_index(at, x.shape)
    others = "" if at == 0 else f", and x{[int(i) for i in index]} = {show(x[index])}"
    alone = x.size > 1 and not np.any(x.reshape(-1)[1:])
    got, want = _tensor_said(found, index, expected.fmt), _code(expected.codes[index], expected.fmt, found)
    for name, kind in sharing.kinds.items():
        if kind != "amax":
            got += f", {kind} {show(found.scales[name].flat[0])}"
            want += f", {kind} {show(np.reshape(getattr(expected, kind), -1)[0])}"
    return Witness(
        input=f"x {list(x.shape)} = {show(x.flat[0])}" + (", then zeros" if alone else others),
        bits=tuple(bits_of(v, quantizer.dtype) for v in ([x.flat[0]] if at == 0 else [x.flat[0], x[index]])),
        dtype=quantizer.dtype,
        got=got,
        expected=f"{want} by {candidate.policy.name}",
        clause=candidate.clause,
    )


def shown(reading: Reading, at: tuple, scales: Mapping[str, float], q: scaling.Quantized, group: int, sharing: Sharing) -> tuple[str, str]:
    """What was given for an element of a group, and what a policy gives, in words."""
    got = _tensor_said(reading, at, q.fmt) + "".join(f", {name or 'scale'} {show(scale)}" for name, scale in scales.items())
    own = "".join(f", {kind} {show(np.reshape(getattr(q, kind), -1)[group])}" for kind in sharing.kinds.values() if kind != "amax")
    return got, _code(q.codes[at], q.fmt, reading) + own


def _tensor_said(reading: Reading, at: tuple, fmt: Format) -> str:
    if reading.codes is None:
        return show(reading.tensor[at])
    return _code(reading.codes[at], fmt, reading)


def _code(code: np.uint8, fmt: Format, reading: Reading) -> str:
    value = show(cast.decode(np.array([code], np.uint8), fmt)[0])
    return f"code 0x{int(code):02X} ({value})" if reading.codes is not None else f"that of code 0x{int(code):02X} ({value})"


def worst_kind(kinds: np.ndarray, wrong: np.ndarray, largest: np.ndarray) -> list[tuple[str, float]]:
    """Of each kind of amax with a wrong answer, the kind and its simplest largest element."""
    found = []
    for i, kind in enumerate(AMAX_RANGES):
        of = wrong & (kinds == i)
        if of.any():
            found.append((kind, float(largest[simplest(largest, of)])))
    return found
