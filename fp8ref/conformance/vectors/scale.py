"""Test vectors of a scale: float32 bits of an amax, and of its scale under a policy (S-3, S-9).

A set has zero, infinity, NaN, subnormals, every power of two, every amax whose scale is a power of
two, the policy's eps, and the amax below which a scale overflows, all with their neighbors. Random
bits follow: half any, half near 1 (``inputs.quantizer_inputs.vector_bits``).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fp8ref import policy as policies
from fp8ref.conformance.inputs import dtypes, kinds, quantizer_inputs
from fp8ref.conformance.kit import explain
from fp8ref.conformance.vectors import format as text
from fp8ref.conformance.vectors.verdict import Verdict
from fp8ref.formats import E8M0FNU, QUANTIZED_FORMATS, Format
from fp8ref.policy import POLICIES, ScalePolicy
from fp8ref.shared.errors import one_of
from fp8ref.sim.quantize import cast, scales

FIELDS, ANSWERS = ("amax",), ("scale",)
MADE = {"scale": 32, "scale_inv": 32, "e8m0": 8}
"""{what a library may make of an amax: its bits}; scale_inv is what multiplies out of FP8."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A set of vectors: amaxes, whose scales a policy makes; ``count`` are random, by ``seed``.

    Raises:   ValueError: an unknown format or policy, a seed or count out of range.
    """

    format: str
    policy: str = "torchao"
    seed: int = 0
    count: int = 5_000

    def __post_init__(self) -> None:
        one_of("a scale's format", self.format, QUANTIZED_FORMATS)
        if policies.by_name(self.policy).two_level is not None:
            raise ValueError(
                f"policy {self.policy!r} makes scales from a block's amax and the tensor's "
                "(S-22). Ask for quantize in place of scale."
            )
        dtypes.check_random(self.seed, self.count)

    @property
    def fmt(self) -> Format:
        """The format itself."""
        return QUANTIZED_FORMATS[self.format]

    def inputs(self) -> np.ndarray:
        """The float32 bits of all amaxes, each once; uint64."""
        return quantizer_inputs.vector_bits(self.fmt, self.policy, seed=self.seed, count=self.count)

    def vectors(self) -> Iterator[tuple[str, str]]:
        """(kind, line) of each amax."""
        inputs = self.inputs()
        names = (kinds.AMAXES[kind] for kind in self.kinds(inputs))
        return zip(names, text.hexadecimal(inputs, 32), strict=True)

    def kinds(self, bits: np.ndarray) -> np.ndarray:
        """For each amax, an index of kinds.AMAXES."""
        return kinds.amax_kinds(bits.astype(np.uint32).view(np.float32), self.fmt, self.policy)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """made: the answer: ``scale`` (multiplies into FP8), ``scale_inv``, or its code, ``e8m0``."""

    made: str = "scale"


def expected_bits(amax: np.ndarray, fmt: Format, policy: str, scale_kind: str) -> np.ndarray:
    """The bits of a policy's scales of float32 amaxes [n], uint32, or uint8 for e8m0; a previous
    scale is 1 (S-11). Raises as ``check_made``.
    """
    return stored_bits(scales.scales_from_amax(amax, fmt, policy), policy, scale_kind)


def stored_bits(pair: scales.Scales, policy: str | ScalePolicy, scale_kind: str) -> np.ndarray:
    """The bits of ``scale`` or ``scale_inv`` of a pair, uint32, or the e8m0 codes of scale_inv,
    uint8. Raises as ``check_made``.
    """
    check_made(policy, scale_kind)
    if scale_kind == "e8m0":
        return cast.encode(pair.scale_inv, E8M0FNU)
    return np.atleast_1d(np.asarray(getattr(pair, scale_kind), np.float32)).view(np.uint32)


def check_made(policy: str | ScalePolicy, scale_kind: str) -> None:
    """Raise ValueError unless scale_kind is one of MADE and the policy has it."""
    one_of("made", scale_kind, MADE)
    policy = policies.by_name(policy)
    if scale_kind == "e8m0" and policy.e8m0 is None:
        names = ", ".join(p.name for p in POLICIES.values() if p.e8m0 is not None)
        raise ValueError(
            f"e8m0 needs a policy with e8m0 scales, {names}; got {policy.name!r}. Compare scale or "
            "scale_inv."
        )


def same(bits: np.ndarray, reference: np.ndarray, scale_kind: str) -> np.ndarray:
    """Where bits are equal, or both are NaN."""
    equal = bits == reference
    if scale_kind == "e8m0":
        return equal
    return equal | (np.isnan(bits.view(np.float32)) & np.isnan(reference.view(np.float32)))


def scale_text(bits: int, scale_kind: str) -> str:
    """Bits and their value, in words."""
    if scale_kind == "e8m0":
        return explain.code(bits, E8M0FNU)
    return f"{bits:08X} ({explain.decimal(np.uint32(bits).view(np.float32))})"


def specified(question: Scale, rules: Rules) -> Iterator[str]:
    """The simulator's answer to each vector. Raises as ``check_made``."""
    amax = question.inputs().astype(np.uint32).view(np.float32)
    bits = expected_bits(amax, question.fmt, question.policy, rules.made)
    return iter(text.hexadecimal(bits, MADE[rules.made]))


def verify(question: Scale, rules: Rules, vectors: Iterator[text.Vector], verdict: Verdict) -> None:
    """Judge every vector, and record it in the verdict. All NaNs count as equal.

    Raises:   MalformedError: a line that is not a vector; ValueError as ``check_made``.
    """
    check_made(question.policy, rules.made)
    width = MADE[rules.made]
    for batch in text.batches(vectors):
        bits = np.array([v.number(0, 32, "an amax") for v in batch], np.uint32)
        for vector, amax in zip(batch, bits, strict=True):
            if amax >> 31:
                raise text.MalformedError(
                    vector.line, f"an amax is not negative; got {amax:08X}. Clear its sign."
                )
        answers = [v.number(1, width, f"a {rules.made}") for v in batch]
        scale_bits = np.array(answers, f"uint{width}")
        specified = expected_bits(bits.view(np.float32), question.fmt, question.policy, rules.made)
        differ = ~same(scale_bits, specified, rules.made)
        lines = text.hexadecimal(bits, 32)
        kind_indices = question.kinds(bits)
        for i, vector in enumerate(batch):
            kind = kinds.AMAXES[kind_indices[i]]
            if verdict.add(vector.line, lines[i], kind, differs=differ[i]):
                why = {
                    "vector": f"amax {scale_text(bits[i], 'scale')} ({kind})",
                    "expected": scale_text(specified[i], rules.made),
                    "got": scale_text(scale_bits[i], rules.made),
                    "rule": explain.scale_rule(kind, question.policy) + ".",
                }
                verdict.show(vector.line, kind, why)
