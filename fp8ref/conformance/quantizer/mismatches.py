"""Where a quantizer is not what was expected: minimal counterexamples."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from fp8ref.conformance.counterexample import Witness, bits_of, show
from fp8ref.conformance.explain import simplest
from fp8ref.conformance.inputs.kinds import AMAX_RANGES
from fp8ref.conformance.quantizer import granularity as influence
from fp8ref.conformance.quantizer import matching, minimize, policy_match, queries
from fp8ref.conformance.quantizer.matching import Matched
from fp8ref.conformance.quantizer.outputs import Quantizer, Reading
from fp8ref.conformance.quantizer.policy_match import Agreement, Candidate
from fp8ref.conformance.quantizer.queries import Asked, Sharing
from fp8ref.formats import Format
from fp8ref.policy import ScalePolicy


def policy(
    quantizer: Quantizer, wanted: ScalePolicy, fmt: Format, asked: Sequence[Asked], sharing: Sharing, matched: Matched, layout: Format,
) -> list[Witness]:  # fmt: skip
    """Where scales, or codes if there are none, are not those of the policy that was expected."""
    # Subnormals may be zeros where XLA flushes them (S-12)
    ways = (False, True) if quantizer.subject.framework == "jax" else (False,)
    held = [policy_match.agreement(Candidate(policy=wanted, top=fmt, fmt=layout, flushes=f), asked, sharing) for f in ways]
    agreed = max(held, key=lambda a: matching.score(a, matched.considered))
    if (agreed.deciding | ~matched.considered).all() and layout is fmt:
        return []
    found = witnesses(quantizer, matched, agreed, sharing)
    if layout is not fmt:
        code = Witness(
            input="x of ones", bits=("0x3F800000",), dtype="float32", got=f"codes of {layout}", expected=f"codes of {fmt}", clause="F-2"
        )
        found.insert(0, code)
    return found


def layout_of(
    quantizer: Quantizer, group: influence.Group, granularity: str | None, axis: int | None, candidate: Candidate, sharing: Sharing
) -> list[Witness]:
    """Where elements share scales otherwise than expected."""
    same = granularity in (None, group.granularity) and (axis is None or group.axis is None or axis == group.axis)
    if same:
        return []
    assert group.granularity is not None
    expected = dataclasses.replace(sharing, granularity=granularity or group.granularity, axis=-1 if axis is None else axis)
    found = minimize.layout(quantizer, candidate, expected)
    return [found] if found else []


def scales_shapes(reading: Reading, sharing: Sharing) -> list[Witness]:
    """Scales the other way round than the tensor's blocks, which broadcast to it wrongly."""
    shape = reading.tensor.shape
    turned = (s for name in sharing.kinds if sharing.turned(s := reading.scales[name].shape, shape))
    return [
        Witness(
            input=f"x {list(shape)}", bits=(), dtype=reading.dtype, got=f"scales {list(s)}",
            expected=f"{list(sharing.shape(shape))}, one for each block where that block is", clause="S-6",
        )
        for s in turned
    ]  # fmt: skip


def witnesses(quantizer: Quantizer, matched: Matched, of: Agreement, sharing: Sharing) -> list[Witness]:
    """Of each kind of amax with a wrong answer, a minimal input; of those that one deviation explains, or another policy, the first alone."""
    largest, kind = (np.concatenate([getattr(a, key) for a in matched.asked]) for key in ("largest", "kind"))
    wrong = matched.wrong(of)
    found: list[Witness] = []
    for k, a in minimize.worst_kind(kind, wrong, largest):
        if found and matched.explained[wrong & (kind == AMAX_RANGES.index(k))].all():
            continue
        shown = minimize.policy(quantizer, of.candidate, sharing, a, k)
        found += [shown] if shown is not None and shown not in found else []
    if not found and wrong.any():
        found.append(_among_others(matched, of, sharing, quantizer.dtype))
    return found


def _among_others(matched: Matched, of: Agreement, sharing: Sharing, dtype: str) -> Witness:
    """The first wrong answer in the tensor that was asked, where no group by itself shows one."""
    begin = 0
    for a in matched.asked:
        wrong = (~of.both & matched.considered)[begin : begin + a.amax.size]
        begin += a.amax.size
        if wrong.any():
            break
    group = int(np.argmax(wrong))
    expected = of.candidate.quantize(a.x, sharing)
    inside = a.group == group
    differs = inside & policy_match.unlike(a.reading, expected, of.candidate)
    at = np.unravel_index(int(np.argmax(differs if differs.any() else inside)), a.x.shape)
    shown = minimize.shown(a.reading, at, {n: queries.per_group(a, n, sharing)[group] for n in sharing.kinds}, expected, group, sharing)
    return Witness(
        input=f"x{[int(i) for i in at]} = {show(a.x[at])} of x {list(a.x.shape)}, whose group has amax {show(a.amax[group])}, beside groups of every kind",
        bits=(bits_of(a.x[at], dtype),), dtype=dtype, got=shown[0], expected=f"{shown[1]} by {of.candidate.policy.name}", clause="S-6",
    )  # fmt: skip


def misnamed(asked: Sequence[Asked], sharing: Sharing, policy: ScalePolicy) -> list[Witness]:
    """Arrays whose name says something else than they hold: of e8m0 policies, and those that divide, ``scale`` may be a scale_inv."""
    found = []
    for name, kind in sharing.kinds.items():
        plain = name.strip("_").lower()
        wrong = (plain == "scale_inv" and kind != "scale_inv") or (
            plain == "scale" and kind != "scale" and policy.stored == "scale" and not policy.e8m0
        )
        if wrong:
            found.append(_of_name(name, f"what is a {kind}", f"a {plain}", "S-1"))
    for name in asked[0].reading.scales:
        largest, amax = (np.concatenate(v) for v in zip(*((queries.per_group(a, name, sharing), a.amax) for a in asked), strict=True))
        if name.strip("_").lower() == "amax" and not np.array_equal(largest, amax, equal_nan=True):
            at = simplest(amax, ~((largest == amax) | (np.isnan(largest) & np.isnan(amax))))
            found.append(_of_name(name, show(largest[at]), f"{show(amax[at])}, the largest magnitude of its group", "S-2"))
    return found


def _of_name(name: str, got: str, expected: str, clause: str) -> Witness:
    return Witness(input=f"{name!r} of what it returns", bits=(), dtype="float32", got=got, expected=expected, clause=clause)
