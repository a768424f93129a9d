"""Test vectors of a quantizer: a tensor, and its codes and scales (spec S-5, S-6)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fp8ref import policy as policies
from fp8ref.conformance.inputs import dtypes, kinds, quantizer_inputs
from fp8ref.conformance.kit import explain
from fp8ref.conformance.vectors import format as text
from fp8ref.conformance.vectors import scale
from fp8ref.conformance.vectors.scale import Rules as Rules
from fp8ref.conformance.vectors.verdict import Verdict
from fp8ref.formats import FLOAT32, FP4_FORMATS, FP8_FORMATS, QUANTIZED_FORMATS, Format
from fp8ref.policy import ScalePolicy
from fp8ref.shared.errors import one_of
from fp8ref.sim.quantize import cast, scaling, two_level
from fp8ref.sim.quantize.scales import Scales, scales_from_amax
from fp8ref.spec import granularity as granularities

FIELDS, ANSWERS = ("shape", "values"), ("codes", "scales")
SOURCES = ("float32", "bfloat16", "float16")  # the dtypes of tensors


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
        one_of("a quantizer's format", self.format, QUANTIZED_FORMATS)
        levels = policies.by_name(self.policy).two_level
        if levels is not None and self.format not in FP4_FORMATS:
            raise ValueError(
                f"policy {self.policy!r} is of {', '.join(FP4_FORMATS)}; got {self.format!r}. "
                "Use another policy."
            )
        if levels is not None and self.granularity not in levels.granularities:
            raise ValueError(
                f"policy {self.policy!r} scales blocks of 16 under a tensor's scale (S-22); got "
                f"granularity {self.granularity!r}. Use {' or '.join(levels.granularities)}."
            )
        dtypes.check_random(self.seed, self.count)
        one_of("a tensor's source", self.source, SOURCES)
        granularities.blocks(self.granularity, self.dims, self.axis)

    @property
    def way(self) -> "Way":
        """How tensors are quantized."""
        fmt = QUANTIZED_FORMATS[self.format]
        return Way(fmt, policies.by_name(self.policy), self.granularity, self.axis)

    @property
    def dims(self) -> tuple[int, ...]:
        """The shape as numbers."""
        return dims(self.shape)

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """(pattern, bits uint64 of the shape), patterns taking turns."""
        source, patterns = dtypes.by_name(self.source), quantizer_inputs.PATTERNS
        for i in range(self.count):
            pattern, seed = patterns[i % len(patterns)], (self.seed << 32) + i
            yield pattern, quantizer_inputs.filled(pattern, self.dims, source, seed)

    def vectors(self) -> Iterator[tuple[str, str]]:
        """(pattern, line) of each tensor."""
        return ((pattern, self.line(bits)) for pattern, bits in self.tensors())

    def line(self, bits: np.ndarray) -> str:
        """The line of a tensor."""
        numbers = text.join(bits, dtypes.by_name(self.source).bits)
        return f"{','.join(map(str, bits.shape))} {numbers}"


def dims(shape: str, axes: str = "") -> tuple[int, ...]:
    """A shape as an option gives it; ValueError if it is not one or has more than 2^24 elements."""
    sizes = text.shape(shape, axes)
    if math.prod(sizes) > 1 << 24:
        raise ValueError(
            f"the sizes of a shape that gen makes multiply to 2^24 at most; got {shape}. Write "
            "more vectors instead."
        )
    return sizes


def specified(question: Quantize, rules: Rules) -> Iterator[str]:
    """The simulator's answer to each vector; of two levels, those of tensor or rows last."""
    way, source, made = question.way, dtypes.by_name(question.source), rules.made
    for _, bits in question.tensors():
        q = way.quantize(dtypes.values(bits, source))
        scales = scale.stored_bits(Scales(q.scale, q.scale_inv), way.policy, made)
        fields = [text.join(q.codes, way.fmt.bits), text.join(scales, scale.MADE[made])]
        if q.tensor_scale_inv is not None:
            fields[1] += f",{text.join(np.asarray(q.tensor_scale_inv).view(np.uint32), 32)}"
        yield " ".join(fields)


def verify(
    question: Quantize, rules: Rules, vectors: Iterator[text.Vector], verdict: Verdict
) -> None:
    """Judge every vector, and record it in the verdict. Lines may differ in shape. ValueError as
    ``scale.check_made``, or for another ``made`` than scale_inv under a policy of two levels."""
    scale.check_made(question.policy, rules.made)
    way, levels = question.way, question.way.policy.two_level
    if levels is not None and rules.made != "scale_inv":
        raise ValueError(
            f"scales of policy {question.policy!r} are compared as scale_inv (S-22); got "
            f"{rules.made!r}. Use made scale_inv."
        )
    source = dtypes.by_name(question.source)
    for vector in vectors:
        shape = vector.shape(0)
        with vector.named():
            scales_shape = granularities.scale_shape(question.granularity, shape, question.axis)
        bits = vector.numbers(
            1, source.bits, shape, f"the values, {source.name}, of shape {list(shape)}"
        )
        codes = vector.numbers(2, way.fmt.bits, shape, f"the codes of shape {list(shape)}")
        name = f"the {rules.made}s of {question.granularity} groups, shape {list(scales_shape)},"
        count = math.prod(scales_shape)
        tensor_shape, total = way.tensor_shape(shape), count
        if tensor_shape is not None:
            name, total = f"{name} then the tensor's,", count + math.prod(tensor_shape)
        scale_bits = vector.numbers(3, scale.MADE[rules.made], (total,), name)
        x = dtypes.values(bits, source)
        why = None
        if tensor_shape is not None:
            why, scale_bits = tensor_difference(x, scale_bits[count:], way), scale_bits[:count]
        why = why or difference(x, codes, scale_bits, rules.made, way)
        inputs = question.line(bits)
        kind = verdict.kind(inputs)
        if verdict.add(vector.line, inputs, kind, differs=why is not None) and why is not None:
            why["vector"] = f"{kind} tensor, {why['vector']}"
            verdict.show(vector.line, kind, why)


class Way(NamedTuple):
    """How tensors are quantized."""

    fmt: Format
    policy: ScalePolicy
    granularity: str
    axis: int

    def tensor_shape(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shape of the scales of a tensor or its rows (S-22); None if there are none."""
        levels = self.policy.two_level
        if levels is None or levels.tensor == "none":
            return None
        return granularities.scale_shape(levels.tensor_granularity, shape, self.axis)

    def quantize(self, x: np.ndarray) -> scaling.Quantized:
        """``scaling.quantize``; of few elements by its definitions, which compile nothing: tests
        that draw many examples have deadlines.
        """
        fmt, policy, granularity, axis = self
        if x.size > 1 << 16 or fmt.name not in FP8_FORMATS:  # it refuses other formats
            return scaling.quantize(x, fmt, granularity=granularity, policy=policy, axis=axis)
        value = x if policy.compute == FLOAT32 else cast.round_to(x, policy.compute)
        blocks = granularities.lengths(granularity, x.ndim, axis)
        amaxes = scaling.block_amax_plain(scaling.tensor(value), blocks)
        shape = granularities.scale_shape(granularity, x.shape, axis)
        scales = scales_from_amax(amaxes.reshape(shape)[()], fmt, policy)
        codes = scaling.quantize_blocks_plain(value, scales, fmt, blocks, policy.divides_in)
        return scaling.Quantized(codes, scales.scale, scales.scale_inv, fmt, granularity, axis)


def difference(
    x: np.ndarray, codes: np.ndarray, made_bits: np.ndarray, scale_kind: str, way: Way
) -> dict[str, str] | None:
    """Describe where a quantized tensor differs from the simulator's; None where it agrees.

    Differing scales come before differing codes, which follow; the simplest of them is described.

    An element whose scaled value is NaN has no right code in a format without NaN (C-9).

    Shapes:   x and codes alike; made_bits, of the scales, flat, as
              ``scale.expected_bits`` returns them.
    """
    fmt, policy, granularity, axis = way
    q = way.quantize(x)
    pair = Scales(np.ravel(q.scale), np.ravel(q.scale_inv))
    specified = scale.stored_bits(pair, policy, scale_kind).ravel()
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
    divides = policy.stored == "scale_inv"
    factors = scaling.spread(q.scale_inv if divides else q.scale, x.shape, q.blocks)
    with np.errstate(all="ignore"):
        wide = x.astype(np.float32)
        every = wide / factors if divides else wide * factors
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


def tensor_difference(x: np.ndarray, bits: np.ndarray, way: Way) -> dict[str, str] | None:
    """Describe how the bits of a tensor's or its rows' scale_inv differ (S-22); None where they
    agree. bits uint32, flat."""
    assert way.policy.two_level is not None
    amaxes = scaling.amax(x, way.policy.two_level.tensor_granularity, axis=way.axis)
    scales = two_level.scales_from_amaxes(amaxes, amaxes, way.fmt, way.policy)
    expected = np.ravel(scales.tensor_scale_inv).view(np.uint32)
    wrong = ~scale.same(bits, expected, "scale_inv")
    if not wrong.any():
        return None
    i = explain.simplest(np.ravel(amaxes), wrong)
    whose = f"row{at(i, amaxes.shape)}" if amaxes.shape else "the tensor"
    rule = explain.scale_rule("in range", way.policy)
    return {
        "vector": f"scale_inv of {whose}, of amax {explain.decimal(np.ravel(amaxes)[i])}",
        "expected": scale.scale_text(int(expected[i]), "scale_inv"),
        "got": scale.scale_text(int(bits[i]), "scale_inv"),
        "rule": f"{rule}. The scales of blocks follow from it.",
    }


def at(index: int, shape: tuple[int, ...]) -> str:
    """The index of an element in words, or nothing in a shape ()."""
    if shape:
        return f" [{', '.join(str(int(i)) for i in np.unravel_index(index, shape))}]"
    return ""
