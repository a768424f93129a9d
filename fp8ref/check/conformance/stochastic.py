"""A cast that rounds at random: to either neighbour, by chance or by position."""

import dataclasses

import numpy as np

from fp8ref.check.conformance import behaviour, replies
from fp8ref.check.conformance.behaviour import KNOWN
from fp8ref.check.conformance.decisions import Answers
from fp8ref.check.conformance.outcome import Finding, Outcome
from fp8ref.check.conformance.subject import ConformanceError, Subject
from fp8ref.check.conformance.witness import Witness, bits_of, show
from fp8ref.formats import Format

REPEATED = 1 << 12
FRACTIONS = (0.25, 0.5, 0.75)


def varies(subject: Subject, source: str, fmt: Format) -> bool:
    """Whether equal numbers of one input get unequal codes."""
    codes = replies.ask(subject, _between(fmt, 0.25), source).codes(fmt)
    return bool((codes != codes[0]).any())


def identify(subject: Subject, a: Answers, fmt: Format, findings: list[Finding], expect: str | None) -> Outcome:
    """How often it rounds up where, and whether a second call gives other codes.

    Raises:   ConformanceError: what it gives is not one of the two neighbours, so that this is not rounding.
    """
    layout, finite = a.fmt, np.isfinite(a.x) & (np.abs(a.x) <= a.fmt.max)
    lower, upper = behaviour.neighbours(a.x, layout, dataclasses.replace(KNOWN["saturating"].of(layout)))
    outside = finite & (a.codes != lower) & (a.codes != upper) & ((a.codes | lower) & 0x7F != 0)
    if outside.any():
        at = int(np.argmax(outside))
        raise ConformanceError(
            f"{subject.name} does not repeat itself, and is no stochastic rounding: {a.source} {show(a.x[at])} ({bits_of(a.x[at], a.source)}) "
            f"gave {replies.said(a.reply, at, layout)}, which is no neighbour. Make it a function of its input."
        )
    shares, again = [], False
    for fraction in FRACTIONS:
        x = _between(layout, fraction)
        codes, second = (replies.ask(subject, x, a.source).codes(layout) for _ in range(2))
        again |= bool((codes != second).any())
        shares.append(float((codes == codes.max()).mean()))
    # The standard deviation of a share of 4096 is at most 2^-7; five of them
    fair = all(abs(share - fraction) < 5 * 2.0**-7 for share, fraction in zip(shares, FRACTIONS, strict=True))
    evidence = f"of {REPEATED} equal numbers at {', '.join(map(str, FRACTIONS))} between neighbours, {', '.join(f'{s:.3f}' for s in shares)} went up"
    evidence += "; a second call gives other codes" if again else "; a second call gives the same codes: by position, from a fixed seed"
    findings = [*findings, Finding(what="rounding", value="stochastic", evidence=evidence)]
    witness = Witness(
        input=f"{show(_between(layout, 0.25)[0])}, {REPEATED} times",
        bits=(bits_of(_between(layout, 0.25)[0], a.source),),
        dtype=a.source,
        got=f"the upper neighbour {shares[0]:.3f} of the time",
        expected="one code" if expect else "0.250 of the time",
        clause="C-2",
    )
    summary = f"a cast to {layout} that rounds at random, " + ("with the probability of C-2" if fair else "but not by the distance (C-2)")
    return Outcome(
        name=subject.name, kind="cast", fmt=fmt, framework=subject.framework, findings=findings, identified=fair and layout is fmt,
        found={"format": layout.name, "behaviour": [], "rounding": "stochastic", "repeats_itself": not again, "policy": None, "gives": a.reply.dtype},
        summary=summary, unlike=[] if fair else [witness], expected=expect, differences=[witness] if expect else [],
    )  # fmt: skip


def _between(fmt: Format, fraction: float) -> np.ndarray:
    """A number at a fraction of the way from 1 to its upper neighbour, many times."""
    return np.full(REPEATED, 1 + fraction * 2.0**-fmt.mantissa_bits, np.float32)
