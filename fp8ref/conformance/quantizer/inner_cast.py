"""Identify the cast within a quantizer, with scale 1: in groups whose amax is max / 2^margin."""

import dataclasses

import numpy as np

from fp8ref.conformance.cast import behavior, decisions
from fp8ref.conformance.cast.behavior import KNOWN_CASTS, Behavior, DoubleRounding
from fp8ref.conformance.cast.outputs import Output, Responses
from fp8ref.conformance.explain import simplest
from fp8ref.conformance.finding import Counterexample, Finding
from fp8ref.conformance.inputs import cast_inputs
from fp8ref.conformance.inputs.dtypes import rounded
from fp8ref.conformance.quantizer.outputs import Quantizer
from fp8ref.conformance.subject import SHAPE
from fp8ref.formats import BFLOAT16, Format


def identify_inner_cast(quantizer: Quantizer, fmt: Format, largest: float, group: np.ndarray) -> tuple[list[Finding], Behavior, Responses]:
    """The decisions of the cast that inputs of magnitude up to largest show, and its responses.

    largest  the amax whose scale is 1: the max that the policy scales to, less its margin.
    group    for each element, the index of its group, [M, K].
    """
    limit = min(fmt.max, largest)
    x = cast_inputs.identifying(fmt, quantizer.dtype, limit=limit)
    # One element of each group, the anchor, is largest; the others hold the inputs.
    anchors = np.zeros(SHAPE, bool)
    anchors.reshape(-1)[np.unique(group.reshape(-1), return_index=True)[1]] = True
    room = int((~anchors).sum())
    found = []
    for begin in range(0, x.size, room):
        some = x[begin : begin + room]
        given = np.zeros(SHAPE, np.float32)
        given[anchors] = largest
        given[~anchors] = np.concatenate([some, np.zeros(room - some.size, np.float32)])
        whole = quantizer.ask(rounded(given, quantizer.dtype))
        found.append(whole.tensor[~anchors][: some.size])
    output = Output(array=np.concatenate(found), dtype=whole.dtype)
    a = Responses(x=x, source=quantizer.dtype, output=output, fmt=fmt, codes=output.codes(fmt))
    b = KNOWN_CASTS["saturating"].behavior(fmt)
    rounding = decisions.rounding(a, b)
    b = dataclasses.replace(b, rounding=rounding.value or "nearest_even")
    # Zeros before subnormals: a lost sign would look like a wrong subnormal.
    zero = decisions.negative_zero(a, b)
    b = dataclasses.replace(b, negative_zero=zero.value or "kept")
    subnormals = decisions.subnormals(a, b)
    b = dataclasses.replace(b, subnormals=subnormals.value or "kept")
    double, through = decisions.double_rounding(a, b)
    b = decisions.with_double_rounding(b, a.source, through)
    return [rounding, subnormals, zero, dataclasses.replace(double, what="double_rounding")], b, a


def unexpected_rounding(a: Responses, fmt: Format, largest: float, compute: Format) -> list[Counterexample]:
    """The simplest input that is not cast as in S-5; as a list, empty if there is none.

    A policy that computes in bfloat16 rounds to it before the cast (S-13).
    """
    wanted = KNOWN_CASTS["saturating"].behavior(fmt)
    if compute is BFLOAT16:
        wanted = decisions.with_double_rounding(wanted, a.source, DoubleRounding(dtype=compute.name))
    differs = a.mismatches(wanted, canonical=True)
    if not differs.any():
        return []
    # Numbers, quarter points and ties first: where they are wrong, the rounding or subnormals are.
    # If only inputs next to ties are wrong, it is rounded twice (C-1).
    coarse = differs & a.among(cast_inputs.coarse(fmt))
    normal = coarse & (np.abs(a.x) >= fmt.smallest_normal)
    among, clause = (normal, "C-2") if normal.any() else (coarse, "F-1") if coarse.any() else (differs, "C-1")
    at = simplest(a.x, among)
    if a.x[at] == 0:
        clause = "C-6"
    shown = a.counterexample(at, wanted, f"S-5, {clause}")
    return [dataclasses.replace(shown, input=f"{shown.input} next to {largest:g}, under scale 1")]


def explains(a: Responses, b: Behavior) -> bool:
    """Whether all codes are those of behavior b; NaN codes count as equal."""
    return not np.any(a.canonical(a.codes) != a.canonical(behavior.encode(a.x, a.fmt, b, source=a.source).astype(np.int64)))
