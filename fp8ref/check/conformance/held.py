"""Where a cast or a quantiser is not what was expected: the simplest inputs."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from fp8ref.check.conformance import asking, behaviour, influence, matching, policies, questions, shrink
from fp8ref.check.conformance.amaxes import KINDS
from fp8ref.check.conformance.asking import Asked, Sharing
from fp8ref.check.conformance.behaviour import Behaviour
from fp8ref.check.conformance.decisions import Answers
from fp8ref.check.conformance.matching import Matched
from fp8ref.check.conformance.outcome import Finding
from fp8ref.check.conformance.policies import Agreement, Candidate
from fp8ref.check.conformance.quantized import Quantizer, Reading
from fp8ref.check.conformance.witness import Witness, bits_of, show
from fp8ref.check.explain import simplest
from fp8ref.formats import Format
from fp8ref.policy import ScalePolicy


def cast(answers: dict[str, Answers], wanted: Behaviour, fmt: Format, layout: Format, findings: list[Finding]) -> list[Witness]:
    """The simplest input on which it is not what was expected, for each kind of input."""
    if layout is not fmt:
        return [f.witness for f in findings if f.what == "format" and f.witness]
    found: dict[str, Witness] = {}
    for a in answers.values():
        if a.source == "float64":  # which no name speaks of, C-8
            continue
        differs, magnitude = a.unlike(wanted, canonical=True), np.abs(a.x)
        coarse = a.of(questions.coarse(fmt))
        over = magnitude > (fmt.max + questions.numbers(fmt)[-1]) / 2
        zero = (a.codes & ~fmt.sign_bit) == 0
        flushed = coarse & zero & (magnitude > fmt.smallest_subnormal / 2) & (magnitude < fmt.smallest_normal)
        beyond = "C-3" if wanted.overflow == "max" else "C-4"
        normal = coarse & ~over & (magnitude >= fmt.smallest_normal)
        if (differs & normal).any():  # it rounds otherwise, and so to zero
            flushed = np.zeros_like(flushed)
        expected = behaviour.encode(a.x, fmt, wanted, source=a.source).astype(np.int64)
        zeros = (a.x == 0) | (zero & (expected & ~fmt.sign_bit == 0))  # of another sign, where they differ
        kinds = {
            "rounding": ("C-2", normal if (differs & normal).any() else coarse & ~over & ~flushed & ~zeros),
            "overflow": (beyond, over & np.isfinite(a.x)),
            "infinity": (beyond, np.isinf(a.x)),
            "NaN": ("C-5", np.isnan(a.x)),
            "subnormal": ("F-1", flushed),
            "zero": ("C-6", zeros),
        }
        seen = over | np.isnan(a.x) | coarse | zeros
        kinds["twice"] = ("C-1", ~seen if not (differs & coarse).any() else np.zeros_like(seen))
        for kind, (clause, among) in kinds.items():
            if kind not in found and (differs & among).any():
                found[kind] = a.witness(simplest(a.x, differs & among), wanted, clause)
    return list(found.values())


def policy(
    quantizer: Quantizer, wanted: ScalePolicy, fmt: Format, asked: Sequence[Asked], sharing: Sharing, matched: Matched, layout: Format,
) -> list[Witness]:  # fmt: skip
    """Where scales, or codes if there are none, are not those of the policy that was expected."""
    # Subnormals may be zeros where XLA flushes them (S-12)
    ways = (False, True) if quantizer.subject.framework == "jax" else (False,)
    held = [policies.agreement(Candidate(policy=wanted, top=fmt, fmt=layout, flushes=f), asked, sharing) for f in ways]
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
    found = shrink.layout(quantizer, candidate, expected)
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
    for k, a in shrink.worst_kind(kind, wrong, largest):
        if found and matched.explained[wrong & (kind == KINDS.index(k))].all():
            continue
        shown = shrink.policy(quantizer, of.candidate, sharing, a, k)
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
    differs = inside & policies.unlike(a.reading, expected, of.candidate)
    at = np.unravel_index(int(np.argmax(differs if differs.any() else inside)), a.x.shape)
    shown = shrink.shown(a.reading, at, {n: asking.per_group(a, n, sharing)[group] for n in sharing.kinds}, expected, group, sharing)
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
        largest, amax = (np.concatenate(v) for v in zip(*((asking.per_group(a, name, sharing), a.amax) for a in asked), strict=True))
        if name.strip("_").lower() == "amax" and not np.array_equal(largest, amax, equal_nan=True):
            at = simplest(amax, ~((largest == amax) | (np.isnan(largest) & np.isnan(amax))))
            found.append(_of_name(name, show(largest[at]), f"{show(amax[at])}, the largest magnitude of its group", "S-2"))
    return found


def _of_name(name: str, got: str, expected: str, clause: str) -> Witness:
    return Witness(input=f"{name!r} of what it returns", bits=(), dtype="float32", got=got, expected=expected, clause=clause)
