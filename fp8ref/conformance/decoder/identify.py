"""Identify a decoder or a dequantizer, by ``identify_decoder``: what it takes codes for, which
scale it multiplies each by, how it rounds, and whether all that holds for other shapes and strides.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from fp8ref import formats
from fp8ref.conformance.decoder import products, readings, scale_index
from fp8ref.conformance.decoder import subject as decoders
from fp8ref.conformance.decoder.subject import Decoder
from fp8ref.conformance.kit import subject as subjects
from fp8ref.conformance.kit.arrays import equal, same_bits
from fp8ref.conformance.kit.finding import (
    Counterexample,
    Finding,
    Outcome,
    shapes_finding,
    show,
    strides_finding,
)
from fp8ref.conformance.kit.subject import RefusedError, Subject, compare_each
from fp8ref.formats import Format
from fp8ref.shared import registry
from fp8ref.sim.quantize import cast
from fp8ref.sim.quantize.scale_layouts import SCALE_LAYOUTS, ScaleLayout
from fp8ref.spec import granularity as granularities

SHAPE = (256, 512)  # of codes, [M, K]: several tiles, and blocks of every granularity

INDEX_SHAPES = ((250, 768), (384, 512))
"""The shapes in which the index of scales is read: neither grid of scales is a square, and one has
rows that fill no tile."""


class Fault(NamedTuple):
    """A mistake, in words, and an input that shows it."""

    name: str
    witness: Counterexample


@dataclass
class _Report:
    """The findings and faults, as they come."""

    findings: list[Finding] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    def add(self, what: str, faults: list[Fault], right: str, evidence: str) -> None:
        """A question that is answered: right, or by faults."""
        self.faults += faults
        words = "; ".join(fault.name for fault in faults) or right
        witness = faults[0].witness if faults else None
        evidence = str(witness) if witness else evidence
        self.findings.append(Finding(what, words, evidence, witness=witness))

    def unasked(self, what: str, why: str) -> None:
        """A question that could not be asked."""
        finding = Finding(what, None, why, words="not tested", unasked=(f"{what}: {why}",))
        self.findings.append(finding)


def identify_decoder(
    function: Callable[..., Any],
    fmt: Format | str,
    *,
    name: str | None = None,
    granularity: str | None = None,
    layout: str | ScaleLayout = "row_major",
    framework: str | None = None,
    device: str = "cpu",
) -> Outcome:
    """Identify a decoder of codes, or a dequantizer of codes and scales.

    function     codes [M, K] -> numbers of that shape, float32, bfloat16, float16 or float64; or
                 codes and scale_inv; or also the tensor's scale_inv, float32 (S-22). Codes are
                 uint8 or the framework's own dtype; of 4 bits one a byte or two, the first in the
                 low half (F-5). What it takes is tried.
    granularity  of scale_inv; by default one for the tensor. Scales of MX blocks are e8m0 and of
                 NVFP4 blocks e4m3fn, in uint8, the framework's own dtype or float32.
    layout       of scales in memory, of ``sim.quantize.scale_layouts``.
    framework    numpy, torch or jax; by default the first imported one that it takes.
    Raises:      ValueError: unknown names, or a count of arguments that does not fit;
                 ConformanceError: not a decoder: it raises, gives other shapes, or changes its
                 arguments.
    Source:      spec F-1 to F-5, S-8, S-22, S-25.

    >>> import numpy as np
    >>> from fp8ref.sim.quantize import cast
    >>> def flushing(codes):
    ...     x = cast.decode(codes, "e4m3fn")
    ...     return np.where(abs(x) < 2.0**-6, np.float32(0) * x, x)
    >>> identify_decoder(flushing, "e4m3fn").summary
    'no right decoder of e4m3fn: subnormal codes of e4m3fn are taken for 0'
    """
    fmt = formats.by_name(fmt)
    if fmt.bits > 8:
        names = ", ".join(f.name for f in formats.FORMATS.values() if f.bits <= 8)
        raise ValueError(f"a decoder's format is one of {names}; got {fmt}.")
    if granularity is not None:
        granularities.by_name(granularity)
    kind = registry.lookup("layout is a ScaleLayout or", SCALE_LAYOUTS, layout, ScaleLayout)
    name = name or subjects.name_of(function)
    decoder = decoders.wrap(
        list(_subjects(name, function, framework, device)), fmt, granularity, kind
    )
    report = _Report()
    decoder = _codes(decoder, report)
    if decoder.levels and not report.faults:
        decoder = _scales(decoder, report)
    if not report.faults:
        _layouts(decoder, report)
    return _outcome(decoder, report)


def require_decoder(
    function: Callable[..., Any], fmt: Format | str = "e4m3fn", **options: Any
) -> Outcome:
    """Require that a function decodes or dequantizes rightly, else raise an AssertionError with the
    first inputs that differ. Options and errors are those of ``identify_decoder`` (spec F-1, S-8).
    """
    return identify_decoder(function, fmt, **options).require()


def _subjects(
    name: str, function: Callable[..., Any], framework: str | None, device: str
) -> Iterator[Subject]:
    """The function in each framework that is tried."""
    if not callable(function):
        raise ValueError(f"what is asked is a function of codes; got {type(function).__name__}.")
    if framework is not None:
        subjects.check_framework(framework)
    if device != "cpu":
        framework = "torch"
    imported = [one for one in subjects.FRAMEWORKS if one == "numpy" or one in sys.modules]
    for one in [framework] if framework else imported:
        yield Subject(name=name, function=function, framework=one, device=device)


def _codes(decoder: Decoder, report: _Report) -> Decoder:
    """Ask for all codes under a scale of 1; the decoder, told whether it divides."""
    fmt = decoder.fmt
    codes = np.resize(np.arange(1 << fmt.bits, dtype=np.uint8), SHAPE)
    codes[1::2] = codes[1::2, ::-1]  # so that neighbors, and places in a pair, differ
    right = cast.decode(codes, fmt)
    decoded = decoder.decode(codes)
    numbers, faults = decoded.numbers, list[Fault]()
    other = _swapped(decoder) if decoder.packing == "pairs" else None
    if other is not None and not same_bits(numbers, right).all():
        swapped = other.decode(codes).numbers
        if same_bits(swapped, right).mean() > same_bits(numbers, right).mean():
            at = _first(~same_bits(numbers, right))
            words = "of a pair the high half comes first"
            faults.append(Fault(words, _code_witness(decoder, codes, numbers, right, at, "F-5")))
            numbers, decoder = swapped, other
    report.add("packing", faults, decoder.packing, "codes of 4 bits in bytes")
    faults = _wrong_codes(decoder, codes, numbers, right)
    evidence = f"{1 << fmt.bits} of {1 << fmt.bits} codes, each at {codes.size >> fmt.bits} places"
    report.add("codes", faults, f"of {fmt}", evidence)
    report.findings.append(Finding("output", decoded.dtype, f"codes as {decoder.codes_as}"))
    return decoder


def _swapped(decoder: Decoder) -> Decoder:
    return dataclasses.replace(decoder, packing="pairs, high first")


def _first(wrong: np.ndarray) -> tuple[int, int]:
    i, j = np.argwhere(wrong)[0]
    return int(i), int(j)


def _wrong_codes(
    decoder: Decoder, codes: np.ndarray, numbers: np.ndarray, right: np.ndarray
) -> list[Fault]:
    fmt = decoder.fmt
    wrong = ~same_bits(numbers, right)
    if not wrong.any():
        return []
    table = numbers.reshape(-1)[np.unique(codes, return_index=True)[1]]  # by its first place
    anywhere = same_bits(table[codes], numbers)
    if not anywhere.all():
        at = _first(~anywhere)
        witness = _code_witness(decoder, codes, numbers, right, at, "F-1")
        return [Fault(f"a code's number depends on its place: {_place(~anywhere)}", witness)]
    explained, left = readings.names(table, fmt)
    at = _first(wrong & left[codes]) if left.any() else _first(wrong)
    witness = _code_witness(decoder, codes, numbers, right, at, "F-1")
    if left.any():
        explained.append(f"code 0x{int(codes[at]):02X} and {int(left.sum()) - 1} others")
    return [Fault(" and ".join(explained), witness)]


def _code_witness(
    decoder: Decoder,
    codes: np.ndarray,
    numbers: np.ndarray,
    right: np.ndarray,
    at: tuple[int, int],
    clause: str,
) -> Counterexample:
    words = f"code 0x{int(codes[at]):02X} of {decoder.fmt} at [{at[0]}, {at[1]}]"
    return Counterexample(words, show(float(numbers[at])), show(float(right[at])), clause)


def _place(wrong: np.ndarray) -> str:
    """Where elements are wrong, in words: lines in which more than half of them are."""
    for axis, word in ((0, "column"), (1, "row")):
        lines = np.flatnonzero(wrong.any(axis=axis))
        if lines.size == wrong.shape[1 - axis] or wrong.take(lines, 1 - axis).mean() < 0.5:
            continue
        first, steps = int(lines[0]), np.diff(lines)
        if lines.size == 1:
            return f"{word} {first}"
        if lines.size == wrong.shape[1 - axis] - first:
            return f"{word}s from {first} on"
        if (steps == steps[0]).all():
            return f"every {steps[0]}th {word} from {first} on"
    i, j = _first(wrong)
    return f"first at [{i}, {j}]"


def _scales(decoder: Decoder, report: _Report) -> Decoder:
    """Ask which scale each element is multiplied by, how products round, and scales at ends; the
    decoder, which may divide."""
    fmt = decoder.fmt
    one = np.full(SHAPE, cast.encode(np.ones(1, np.float32), fmt)[0], np.uint8)
    two = decoder.decode(one, 2.0).numbers
    verb = {2.0: "multiplies", 0.5: "divides", 1.0: "is ignored"}.get(float(two[0, 0]), "neither")
    faults = []
    if verb == "divides":
        decoder = dataclasses.replace(decoder, divides=True)
        parameter = subjects.needed(decoder.tested.function)[1:2] or [""]
        if decoder.scale_fmt is not None or "inv" in parameter[0]:
            verb = "it divides by scale_inv"
    if verb not in ("multiplies", "divides"):
        name = "its scale is ignored" if verb == "is ignored" else verb
        words = "code of 1 under a scale of 2 in all blocks"
        faults = [Fault(name, Counterexample(words, show(float(two[0, 0])), "2", "S-8"))]
    report.add("scale", faults, verb, f"a scale of 2, as {decoder.scales_as}")
    if not faults and decoder.granularity != "tensorwise":
        report.add("index", *_index(decoder))
    if not report.faults:
        report.add("product", *_products(decoder))
    if not report.faults:
        report.add("ends of scales", *_ends(decoder))
    return decoder


def _index(decoder: Decoder) -> tuple[list[Fault], str, str]:
    faults, shown = list[Fault](), []
    for shape in INDEX_SHAPES:
        try:
            found = scale_index.read_index(decoder, shape)
        except RefusedError:
            continue
        shown.append(shape)
        right = scale_index.expected_index(decoder, shape)
        wrong = found != right
        if not wrong.any():
            continue
        at = _first(wrong)
        words = scale_index.name(decoder, found, right)
        words = words or f"an element reads another scale: {_place(wrong)}"
        got = "none" if found[at] < 0 else f"number {found[at]}"
        witness = Counterexample(
            f"element [{at[0]}, {at[1]}] of {list(shape)}, {decoder.granularity}",
            f"its scale is {got}",
            f"number {right[at]}",
            "S-6",
        )
        faults.append(Fault(words, witness))
        break
    sizes = ", ".join(str(list(shape)) for shape in shown)
    return faults, f"{decoder.granularity}, {decoder.layout.name}", f"each scale alone, in {sizes}"


def _random(decoder: Decoder, shape: tuple[int, ...], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes of any numbers, and scales that the granularity's hardware holds."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 1 << decoder.fmt.bits, shape).astype(np.uint8)
    if decoder.granularity is None:
        return codes, np.ones(())
    scales = np.exp2(rng.uniform(-4, 4, decoder.scale_shape(shape))).astype(np.float32)
    if decoder.scale_fmt is not None:
        scales = cast.round_to(scales, decoder.scale_fmt, saturate=True)
    return codes, scales


def _products(decoder: Decoder) -> tuple[list[Fault], str, str]:
    codes, scales = _random(decoder, SHAPE, 1)
    # odd in its last place, so that each order of products rounds otherwise
    tensor = float(np.nextafter(np.float32(0.0123), np.float32(1))) if decoder.levels == 2 else 1.0
    decoded = decoder.decode(codes, scales, tensor)
    words, wrong = products.wrong_products(decoder, codes, scales, tensor, decoded)
    evidence = f"{codes.size:,} products, as {decoded.dtype}"
    if not wrong.any():
        return [], "S-8's", evidence
    witness = _product_witness(decoder, codes, scales, tensor, decoded.numbers, _first(wrong))
    return [Fault(words or "products are rounded otherwise", witness)], "", evidence


def _product_witness(
    decoder: Decoder,
    codes: np.ndarray,
    scales: np.ndarray | np.float32,
    tensor: float,
    numbers: np.ndarray,
    at: tuple[int, int],
) -> Counterexample:
    scale = np.broadcast_to(np.float32(scales), decoder.scale_shape(codes.shape))
    number = cast.decode(codes[at], decoder.fmt)
    scale_at = decoder.spread(scale, codes.shape)[at]
    words = f"code 0x{int(codes[at]):02X} ({show(float(number))})"
    words += f" under scale_inv {show(float(scale_at))}"
    words += f" and the tensor's {show(tensor)}" if decoder.levels == 2 else ""
    expected = decoder.expected(codes, scales, "float32", tensor)[at]
    return Counterexample(words, show(float(numbers[at])), show(float(expected)), "S-8")


def _ends(decoder: Decoder) -> tuple[list[Fault], str, str]:
    codes, faults, refused, ends = _random(decoder, SHAPE, 2)[0], [], [], products.ends(decoder)
    for end in ends:
        try:
            words, wrong, decoded = products.wrong_end(decoder, codes, end)
        except RefusedError:
            refused.append(f"{end:g}")
            continue
        if words:
            at = _first(wrong)
            witness = _product_witness(decoder, codes, end, 1.0, decoded.numbers, at)
            faults.append(Fault(words, witness))
    evidence = f"{len(ends)} scales from {min(ends):g} to NaN"
    evidence += f"; it raises for {', '.join(refused)}" if refused else ""
    return faults, "read as they are", evidence


def _layouts(decoder: Decoder, report: _Report) -> None:
    """Ask with other shapes and strides, random codes and scales."""

    def differ(shape: tuple[int, ...], view: str) -> list[Counterexample]:
        codes, scales = _random(decoder, shape, 3)
        decoded = decoder.decode(codes, scales, view=view)
        expected = decoder.expected(codes, scales, decoded.dtype)
        wrong = ~equal(decoded.numbers, expected)
        if not wrong.any():
            return []
        at = np.argwhere(wrong)[0]
        where = f"code 0x{int(codes[tuple(at)]):02X} at {at.tolist()} of {list(shape)}, {view}"
        got, right = (show(float(x[tuple(at)])) for x in (decoded.numbers, expected))
        return [Counterexample(where, got, right, "S-8" if decoder.levels else "F-1")]

    asked = compare_each(_shapes(decoder), lambda shape: differ(shape, "contiguous"))
    report.findings.append(shapes_finding(*asked, "as above"))
    whole = decoder.packing == "one a byte" or decoder.codes_as == "uint8"
    views = decoder.tested.views if whole else []  # pairs of torch's own dtype have no columns
    strided = compare_each(views, lambda view: differ((128, 256), view))
    report.findings.append(strides_finding(*strided))
    for what, wrong in (("shape", asked[2]), ("stride", strided[2])):
        if wrong:
            report.faults.append(Fault(f"numbers depend on the {what}", wrong[0]))


def _shapes(decoder: Decoder) -> list[tuple[int, ...]]:
    if decoder.granularity is None:
        even = decoder.packing != "one a byte"
        return (
            [(2,), (18,), (3, 66)] if even else [(), (0,), (1,), (3,), (127,), (33, 65), (3, 5, 17)]
        )
    block = granularities.by_name(decoder.granularity).reduced or 64
    whole = [(1, block), (3, 5 * block), (130, 3 * block), (257, block), (1000, 9 * block)]
    return [*whole, (5, 2 * block + block // 2), (129, 8)]


def _outcome(decoder: Decoder, report: _Report) -> Outcome:
    fmt, tested = decoder.fmt, decoder.tested
    kind = "dequantizer" if decoder.levels else "decoder"
    names = [fault.name for fault in report.faults]
    of = f"{fmt}, {decoder.granularity}" if decoder.levels else f"{fmt}"
    summary = f"a right {kind} of {of}"
    if names:
        summary = f"no right {kind} of {of}: {'; '.join(names)}"
    return Outcome(
        name=tested.name,
        kind=kind,
        fmt=fmt,
        framework=tested.framework,
        found={
            "format": None if names else fmt.name,
            "granularity": decoder.granularity,
            "layout": decoder.layout.name,
            "packing": decoder.packing,
            "codes_as": decoder.codes_as,
            "scales_as": decoder.scales_as if decoder.levels else None,
            "divides": decoder.divides,
            "faults": names,
        },
        findings=report.findings,
        identified=not names,
        named=not names,
        summary=summary,
        unlike=[fault.witness for fault in report.faults],
        limits=tested.other_devices,
    )
