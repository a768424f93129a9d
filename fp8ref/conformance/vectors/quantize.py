"""Test vectors of a quantizer: a tensor, and its codes and scales (spec S-5, S-6)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fp8ref import policy as policies
from fp8ref.conformance.inputs import dtypes, kinds, quantizer_inputs
from fp8ref.conformance.kit import explain
from fp8ref.conformance.vectors import format as text
from fp8ref.conformance.vectors import scale
from fp8ref.conformance.vectors.scale import Rules as Rules
from fp8ref.conformance.vectors.verdict import Verdict
from fp8ref.formats import FLOAT32, FP4_FORMATS, FP8_FORMATS, QUANTIZED_FORMATS, Format
from fp8ref.sim.quantize import cast, scaling, two_level
from fp8ref.sim.quantize.scales import Scales, scales_from_amax
from fp8ref.spec import granularity as granularities

FIELDS, ANSWERS = ("shape", "values"), ("codes", "scales")
SOURCES = ("float32", "bfloat16", "float16")  # the dtypes of tensors

_TWO_LEVEL = ("nvfp4_1x16", "nvfp4_16x16")  # the granularities that scales of two levels have


@dataclass(frozen=True, kw_only=True)
class Quantize:
    """A set of vectors: ``count`` tensors of a shape; ``axis`` is the reduced one.

    Raises:   ValueError: an unknown format, source, policy or granularity, a shape that does not
              fit, a seed or count out of range.
    """

    format: str
    source: str = "float32"
    policy: str = "torchao"
    granularity: str = "tensorwise"
    axis: int = -1
    shape: str = "4,128"
    seed: int = 0
    count: int = 30

    def __post_init__(self) -> None:
        if self.format not in QUANTIZED_FORMATS:
            raise ValueError(
                f"a quantizer's format is one of {', '.join(QUANTIZED_FORMATS)}; got "
                f"{self.format!r}."
            )
        if policies.by_name(self.policy).two_level is not None and self.format not in FP4_FORMATS:
            raise ValueError(
                f"policy {self.policy!r} is of {', '.join(FP4_FORMATS)}; got {self.format!r}. "
                "Use another policy."
            )
        if (
            policies.by_name(self.policy).two_level is not None
            and self.granularity not in _TWO_LEVEL
        ):
            raise ValueError(
                f"policy {self.policy!r} scales blocks of 16 under a tensor's scale (S-22); got "
                f"granularity {self.granularity!r}. Use {' or '.join(_TWO_LEVEL)}."
            )
        dtypes.check_random(self.seed, self.count)
        if self.source not in SOURCES:
            raise ValueError(
                f"a tensor's source is one of {', '.join(SOURCES)}; got {self.source!r}."
            )
        granularities.blocks(self.granularity, self.dims, self.axis)

    @property
    def fmt(self) -> Format:
        """The format itself."""
        return QUANTIZED_FORMATS[self.format]

    @property
    def dims(self) -> tuple[int, ...]:
        """The shape as numbers."""
        return dims(self.shape)

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """(pattern, bits uint64 of the shape), patterns taking turns."""
        source = dtypes.by_name(self.source)
        for i in range(self.count):
            pattern = quantizer_inputs.PATTERNS[i % len(quantizer_inputs.PATTERNS)]
            yield (
                pattern,
                quantizer_inputs.filled(pattern, self.dims, source, (self.seed << 32) + i),
            )

    def vectors(self) -> Iterator[tuple[str, str]]:
        """(pattern, line) of each tensor."""
        return ((pattern, self.line(bits)) for pattern, bits in self.tensors())

    def line(self, bits: np.ndarray) -> str:
        """The line of a tensor."""
        return (
            f"{','.join(map(str, bits.shape))} {text.join(bits, dtypes.by_name(self.source).bits)}"
        )


def dims(shape: str, axes: str = "") -> tuple[int, ...]:
    """A shape as an option gives it; ValueError if it is not one or has more than 2^24 elements."""
    sizes = text.shape(shape, axes)
    if math.prod(sizes) > 1 << 24:
        raise ValueError(
            f"the sizes of a shape that gen makes multiply to 2^24 at most; got {shape}. Write "
            "more vectors instead."
        )
    return sizes


def verify(
    question: Quantize, rules: Rules, vectors: Iterator[text.Vector], verdict: Verdict
) -> None:
    """Judge every vector, and record it in the verdict. Lines may differ in shape. ValueError as
    ``scale.check_made``, or for another ``made`` than scale_inv under a policy of two levels."""
    scale.check_made(question.policy, rules.made)
    levels = policies.by_name(question.policy).two_level
    tensor = _has_tensor_scale(question.policy)
    if levels is not None and rules.made != "scale_inv":
        raise ValueError(
            f"scales of policy {question.policy!r} are compared as scale_inv (S-22); got "
            f"{rules.made!r}. Use made scale_inv."
        )
    source, fmt = dtypes.by_name(question.source), question.fmt
    for vector in vectors:
        shape = vector.shape(0)
        with vector.named():
            scales_shape = granularities.scale_shape(question.granularity, shape, question.axis)
        bits = vector.numbers(
            1, source.bits, shape, f"the values, {source.name}, of shape {list(shape)}"
        )
        codes = vector.numbers(2, fmt.bits, shape, f"the codes of shape {list(shape)}")
        name = f"the {rules.made}s of {question.granularity} groups, shape {list(scales_shape)},"
        count = (math.prod(scales_shape),)
        if tensor:
            name, count = f"{name} then the tensor's,", (count[0] + 1,)
        scale_bits = vector.numbers(3, scale.MADE[rules.made], count, name)
        x = dtypes.values(bits, source)
        why = None
        if tensor:
            why = tensor_difference(x, scale_bits[-1], fmt, question.policy)
        why = why or difference(
            x,
            codes,
            scale_bits[:-1] if tensor else scale_bits,
            fmt,
            scale_kind=rules.made,
            policy=question.policy,
            granularity=question.granularity,
            axis=question.axis,
        )
        inputs = question.line(bits)
        kind = verdict.kind(inputs)
        if verdict.add(vector.line, inputs, kind, differs=why is not None) and why is not None:
            why["vector"] = f"{kind} tensor, {why['vector']}"
            verdict.show(vector.line, kind, why)


def difference(
    x: np.ndarray,
    codes: np.ndarray,
    made_bits: np.ndarray,
    fmt: Format,
    *,
    scale_kind: str,
    policy: str,
    granularity: str,
    axis: int,
) -> dict[str, str] | None:
    """Describe where a quantized tensor differs from the simulator's; None where it agrees.

    A differing scale comes before differing codes, which follow from it; of either the simplest is
    described.

    An element whose scaled value is NaN has no right code in a format without NaN (C-9).

    Shapes:   x and codes alike; made_bits, of the scales, flat, as
              ``scale.expected_bits`` returns them.
    """
    q = _quantized(x, fmt, policy=policy, granularity=granularity, axis=axis)
    specified = scale.stored_bits(
        Scales(np.ravel(q.scale), np.ravel(q.scale_inv)), policy, scale_kind
    ).ravel()
    wrong = ~scale.same(made_bits, specified, scale_kind)
    if wrong.any():
        amaxes = np.ravel(scaling.amax(x, granularity, axis=axis))
        group = explain.simplest(amaxes, wrong)
        amax = amaxes[group : group + 1]
        kind = kinds.AMAXES[kinds.amax_kinds(amax, fmt, policy)[0]]
        return {
            "vector": f"{scale_kind}{at(group, np.shape(q.scale))}, of amax "
            f"{scale.scale_text(amax.view(np.uint32)[0], 'scale')} ({kind})",
            "expected": scale.scale_text(specified[group], scale_kind),
            "got": scale.scale_text(made_bits[group], scale_kind),
            "rule": f"{explain.scale_rule(kind, policy)}. {int(wrong.sum())} of {specified.size} "
            "scales differ.",
        }
    # scales agree from here on, so that a wrong code comes from the multiplication or the cast
    divides = policies.by_name(policy).stored == "scale_inv"
    factors = scaling.spread(q.scale_inv if divides else q.scale, x.shape, q.blocks)
    with np.errstate(all="ignore"):
        every = x.astype(np.float32) / factors if divides else x.astype(np.float32) * factors
    differ = (cast.canonical_nans(codes, fmt) != q.codes) & explain.has_code(every, fmt)
    if not differ.any():
        return None
    i = explain.simplest(x, differ)
    factor = np.broadcast_to(factors, x.shape).ravel()[i]
    value, scaled = np.ravel(x)[i].astype(np.float32), every.ravel()[i]
    term = "RN32(x / scale_inv)" if divides else "RN32(x * scale)"
    return {
        "vector": f"element{at(i, x.shape)}, {explain.decimal(value)}, under "
        f"{'scale_inv' if divides else 'scale'} {explain.decimal(factor)}",
        "expected": explain.code(int(q.codes.ravel()[i]), fmt),
        "got": explain.code(int(codes.ravel()[i]), fmt),
        "rule": f"{term} = {explain.decimal(scaled)}, clipped to {fmt.max:g}, cast to nearest even "
        f"({'S-13' if divides else 'S-5'}). {int(differ.sum())} of {differ.size} codes "
        "differ.",
    }


def tensor_difference(
    x: np.ndarray, bits: np.uint32, fmt: Format, policy: str
) -> dict[str, str] | None:
    """Describe how the bits of the tensor's scale_inv differ, of a policy that makes one (S-22);
    None where they agree.
    """
    amax = scaling.amax(x)
    expected = np.float32(
        two_level.scales_from_amaxes(amax, amax, fmt, policy).tensor_scale_inv
    ).view(np.uint32)
    if scale.same(np.atleast_1d(bits), np.atleast_1d(expected), "scale_inv")[0]:
        return None
    return {
        "vector": f"scale_inv of the tensor, of amax {explain.decimal(amax)}",
        "expected": scale.scale_text(int(expected), "scale_inv"),
        "got": scale.scale_text(int(bits), "scale_inv"),
        "rule": f"{explain.scale_rule('in range', policy)}. The scales of blocks follow from it.",
    }


def _quantized(
    x: np.ndarray, fmt: Format, *, policy: str, granularity: str, axis: int
) -> scaling.Quantized:
    """``scaling.quantize``; of few elements by its definitions, which compile nothing: tests that
    draw many examples have deadlines.
    """
    if x.size > 1 << 16 or fmt.name not in FP8_FORMATS:  # scaling.quantize refuses other formats
        return scaling.quantize(x, fmt, granularity=granularity, policy=policy, axis=axis)
    compute = policies.by_name(policy).compute
    value = x if compute == FLOAT32 else cast.round_to(x, compute)
    blocks = granularities.lengths(granularity, x.ndim, axis)
    amaxes = scaling.block_amax_plain(scaling.tensor(value), blocks)
    shape = granularities.scale_shape(granularity, x.shape, axis)
    scales = scales_from_amax(amaxes.reshape(shape)[()], fmt, policy)
    divides_in = policies.by_name(policy).divides_in
    codes = scaling.quantize_blocks_plain(value, scales, fmt, blocks, divides_in)
    return scaling.Quantized(codes, scales.scale, scales.scale_inv, fmt, granularity, axis)


def _has_tensor_scale(policy: str) -> bool:
    """Whether a policy's quantizer returns a scale of the tensor too."""
    rule = policies.by_name(policy).two_level
    return rule is not None and rule.tensor != "none"


def at(index: int, shape: tuple[int, ...]) -> str:
    """The index of an element in words, or nothing in a shape ()."""
    if shape:
        return f" [{', '.join(str(int(i)) for i in np.unravel_index(index, shape))}]"
    return ""
