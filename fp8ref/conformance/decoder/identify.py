"""Identify a decoder or a dequantizer, by ``identify_decoder``: what it takes codes for, which
scale it multiplies each by, how it rounds, and whether all that holds for other shapes and strides.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fp8ref import formats
from fp8ref.conformance.decoder import codes, scales
from fp8ref.conformance.decoder import subject as decoders
from fp8ref.conformance.decoder.report import Fault, Report
from fp8ref.conformance.decoder.subject import Decoder
from fp8ref.conformance.kit import subject as subjects
from fp8ref.conformance.kit.arrays import equal
from fp8ref.conformance.kit.finding import (
    Counterexample,
    Outcome,
    shapes_finding,
    show,
    strides_finding,
)
from fp8ref.conformance.kit.subject import Subject, compare_each
from fp8ref.formats import Format
from fp8ref.shared import registry
from fp8ref.shared.errors import one_of
from fp8ref.sim.quantize.scale_layouts import SCALE_LAYOUTS, ScaleLayout
from fp8ref.spec import granularity as granularities


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
    report = Report()
    decoder = codes.ask_codes(decoder, report)
    if decoder.levels and not report.faults:
        decoder = scales.ask_scales(decoder, report)
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
        one_of("framework", framework, subjects.FRAMEWORKS)
    if device != "cpu":
        framework = "torch"
    imported = [one for one in subjects.FRAMEWORKS if one == "numpy" or one in sys.modules]
    for one in [framework] if framework else imported:
        yield Subject(name=name, function=function, framework=one, device=device)


def _layouts(decoder: Decoder, report: Report) -> None:
    """Ask with other shapes and strides, random codes and scales."""

    def differ(shape: tuple[int, ...], view: str) -> list[Counterexample]:
        asked, scale_inv = scales.random(decoder, shape, 3)
        decoded = decoder.decode(asked, scale_inv, view=view)
        expected = decoder.expected(asked, scale_inv, decoded.dtype)
        wrong = ~equal(decoded.numbers, expected)
        if not wrong.any():
            return []
        at = np.argwhere(wrong)[0]
        where = f"code 0x{int(asked[tuple(at)]):02X} at {at.tolist()} of {list(shape)}, {view}"
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
        if decoder.packing != "one a byte":
            return [(2,), (18,), (3, 66)]
        return [(), (0,), (1,), (3,), (127,), (33, 65), (3, 5, 17)]
    block = granularities.by_name(decoder.granularity).reduced or 64
    blocks = (1, 1), (3, 5), (130, 3), (257, 1), (1000, 9)
    whole = [(rows, n * block) for rows, n in blocks]
    return [*whole, (5, 2 * block + block // 2), (129, 8)]


def _outcome(decoder: Decoder, report: Report) -> Outcome:
    fmt, tested = decoder.fmt, decoder.tested
    kind = "dequantizer" if decoder.levels else "decoder"
    names = [fault.name for fault in report.faults]
    of = f"{fmt}, {decoder.granularity}" if decoder.levels else f"{fmt}"
    wrong = f": {'; '.join(names)}" if names else ""
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
        summary=f"{'no' if names else 'a'} right {kind} of {of}{wrong}",
        unlike=[fault.witness for fault in report.faults],
        limits=tested.other_devices,
    )
