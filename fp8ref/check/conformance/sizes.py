"""Arrays of other sizes and shapes: whether each element gets the answer that it gets elsewhere, tails of blocks included."""

from collections.abc import Iterable, Mapping

import numpy as np

from fp8ref.check.conformance import amaxes, asking, policies, replies
from fp8ref.check.conformance.asking import Asked, Sharing
from fp8ref.check.conformance.decisions import Answers
from fp8ref.check.conformance.outcome import Finding
from fp8ref.check.conformance.policies import Candidate
from fp8ref.check.conformance.quantized import Quantizer, Reading
from fp8ref.check.conformance.subject import RefusedError, Subject
from fp8ref.check.conformance.witness import Witness, bits_of, rounded, show
from fp8ref.formats import Format
from fp8ref.sim.scaling import Quantized

# Beside the sizes of vectors, warps and blocks, and beyond a million elements
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (3,), (127,), (1025,), ((1 << 20) + 13,), (33, 65), (3, 5, 17))


def of_cast(subject: Subject, a: Answers, fmt: Format) -> tuple[Finding, list[Witness]]:
    """Hold the answers in arrays of other shapes to those in one of a.x.size elements; a shape that it raises for is said, and no fault."""
    taken, refused, found = [], [], list[Witness]()
    for shape in SHAPES:
        count = int(np.prod(shape))
        at = np.arange(count) % a.x.size
        try:
            reply = replies.ask(subject, a.x[at].reshape(shape), a.source)
        except RefusedError:
            refused.append(shape)
            continue
        taken.append(shape)
        differs = a.canonical(reply.codes(fmt).reshape(-1)) != a.canonical(a.codes[at])
        if differs.any():
            found = found or [_witness(a, reply, at, shape, int(np.argmax(differs)), fmt)]
    evidence = f"{_listed(taken)} give each number the code that it has among {a.x.size:,}" + (
        f"; it raises for {_listed(refused)}" if refused else ""
    )
    if found:
        evidence = str(found[0])
    return Finding(what="shapes", value=not found, said="not all alike" if found else "all alike", evidence=evidence), found


def _witness(a: Answers, reply: replies.Reply, at: np.ndarray, shape: tuple[int, ...], first: int, fmt: Format) -> Witness:
    index = [int(i) for i in np.unravel_index(first, shape)]
    value = a.x[at[first]]
    return Witness(
        input=f"x{index} = {show(value)} of x {list(shape)}",
        bits=(bits_of(value, a.source),),
        dtype=a.source,
        got=replies.said(reply, first, fmt),
        expected=f"{replies.said(a.reply, int(at[first]), fmt)}, as at x[{int(at[first])}] of x [{a.x.size}]",
        clause="C-1",
    )


def _listed(shapes: Iterable[tuple[int, ...]]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)


def of_quantizer(quantizer: Quantizer, candidate: Candidate, sharing: Sharing) -> tuple[Finding, list[Witness]]:
    """Hold tensors of other shapes to the policy that was found: few rows, many, and more than a million elements; K as S-6 asks."""
    taken, refused, found = [], [], list[Witness]()
    rng = np.random.default_rng(0)
    for rows, columns in ((1, 128), (3, 256), (131, 128), (1031, 1152)):
        shape = (columns, rows) if sharing.axis == 0 else (rows, columns)
        x = rounded((rng.standard_normal(shape) * 2.0 ** rng.integers(-4, 5, shape)).astype(np.float32), quantizer.dtype)
        try:
            reading = quantizer.ask(x)
        except RefusedError:
            refused.append(shape)
            continue
        taken.append(shape)
        found = found or _unlike(x, reading, candidate, sharing, quantizer.dtype)
    evidence = f"{_listed(taken)} are quantised so too"
    evidence = str(found[0]) if found else evidence + (f"; it raises for {_listed(refused)}" if refused else "")
    return Finding(what="shapes", value=not found, said="not all alike" if found else "all alike", evidence=evidence), found


def _unlike(x: np.ndarray, reading: Reading, candidate: Candidate, sharing: Sharing, dtype: str) -> list[Witness]:
    """The first element of a tensor whose code, or whose group's scale, is not the candidate's."""
    group = amaxes.groups(x.shape, sharing.granularity, sharing.axis)
    largest = np.zeros(int(group.max()) + 1, np.float32)
    asked = Asked(x=x, group=group, kind=np.zeros(largest.size, np.int64), largest=largest, reading=reading)
    expected = candidate.quantize(x, sharing)
    differs = policies.unlike(reading, expected, candidate)
    scales = policies.agreement(candidate, [asked], sharing).scales
    differs |= False if scales is None else ~scales[group]
    if not differs.any():
        return []
    at = np.unravel_index(int(np.argmax(differs)), x.shape)
    return [
        Witness(
            input=f"x{[int(i) for i in at]} = {show(x[at])} of random x {list(x.shape)}",
            bits=(bits_of(x[at], dtype),),
            dtype=dtype,
            got=_shown(reading, at, {name: asking.per_group(asked, name, sharing)[group[at]] for name in sharing.kinds}, candidate.fmt),
            expected=_shown_by(expected, at, group[at], sharing) + f" by {candidate.policy.name}",
            clause="S-5, S-6",
        )
    ]


def _shown(reading: Reading, at: tuple, scales: Mapping[str, float], fmt: Format) -> str:
    what = show(reading.tensor[at]) if reading.codes is None else f"code {replies.code_said(reading.codes[at], fmt)}"
    return what + "".join(f", {name} {show(scale)}" for name, scale in scales.items())


def _shown_by(q: Quantized, at: tuple, group: int, sharing: Sharing) -> str:
    scales = "".join(f", {kind} {show(np.reshape(getattr(q, kind), -1)[group])}" for kind in sharing.kinds.values() if kind != "amax")
    return f"code {replies.code_said(q.codes[at], q.fmt)}{scales}"
