"""Test vectors of attention: q, k and v in bfloat16; o and the log-sum-exp of a variant (A)."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from fp8ref.conformance.attention import comparison
from fp8ref.conformance.inputs import dtypes
from fp8ref.conformance.kit import explain
from fp8ref.conformance.kit.arrays import equal
from fp8ref.conformance.vectors import format as text
from fp8ref.conformance.vectors import quantize
from fp8ref.conformance.vectors.verdict import Verdict
from fp8ref.shared.errors import one_of, require
from fp8ref.sim.attention import attention
from fp8ref.spec.attention import variants as variants
from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variants import VARIANTS, Mask

AXES = "B,H,Hkv,Tq,Tk,D"
"""The axes of a shape: q is [B, H, Tq, D], k and v are [B, Hkv, Tk, D]."""

FIELDS, ANSWERS = (AXES, "q", "k", "v"), ("o", "lse")
PATTERNS = ("zero scores", "ordinary", "one large score", "opposite values")
"""How the tensors are filled. Under zero scores, of small integers in v, no exponential rounds."""

MASKS = ("full", "causal", "causal_start")
"""The masks without a window; the last is aligned to the start."""

EXPONENTIALS = ("exact", "hardware")
"""How exponentials are judged: rounded correctly, or within A-5's bound (``comparison.NEAR``)."""

NO_LSE = "-"  # the answer of a program without a log-sum-exp

_BFLOAT16, _FLOAT32 = dtypes.by_name("bfloat16"), dtypes.by_name("float32")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


@dataclass(frozen=True, kw_only=True)
class Attention:
    """A set of vectors: ``count`` problems of a shape, under a mask and a window "left,right", -1
    for an open side; with a softcap, and sinks, the query heads' numbers, or "none" (A-22, A-23).

    Raises:   ValueError: an unknown variant or mask, a window, shape, seed or count out of range; a
              softcap or sinks that are no such numbers, or that the variant does not take.
    """

    variant: str
    mask: str = "full"
    window: str = "none"
    softcap: str = "none"
    sinks: str = "none"
    shape: str = "1,2,1,4,200,32"
    seed: int = 0
    count: int = 12

    def __post_init__(self) -> None:
        one_of("a variant", self.variant, VARIANTS)
        one_of("a mask", self.mask, MASKS)
        dtypes.check_random(self.seed, self.count)
        _, h, kv, _, _, d = self.dims
        require(not h % kv, f"a shape is {AXES} with Hkv dividing H; got {self.shape}.")
        text = f"variant {self.variant!r} needs D divisible by 32; got {self.shape}."
        require(VARIANTS[self.variant].granularity != "mx_1x32" or not d % 32, text)
        variants.by_name(self.variant).tile(d, self.parsed_mask)
        cap, sinks = self.parsed_softcap, self.parsed_sinks
        text = f"a softcap is one positive float32 number, or none; got {self.softcap!r}. Use 50."
        require(cap is None or 0 < cap < math.inf, text)
        text = (
            f"sinks are a finite float32 number for each of {h} query heads, with commas, or none; "
        )
        text += f"got {self.sinks!r}. Write them like 0.5,2."
        require(sinks is None or (len(sinks) == h and bool(np.isfinite(sinks).all())), text)

    @property
    def dims(self) -> tuple[int, ...]:
        """B, H, Hkv, Tq, Tk and D."""
        return quantize.dims(self.shape, AXES)

    @property
    def parsed_mask(self) -> Mask:
        """The mask itself. ValueError for a window that is none."""
        window = None
        if self.window != "none":
            sides = self.window.split(",")
            if len(sides) != 2 or not all(side == "-1" or side.isdecimal() for side in sides):
                raise ValueError(
                    "a window is left,right, -1 for an open side, or none; got "
                    f"{self.window!r}. Write it like 64,0."
                )
            left, right = (None if side == "-1" else int(side) for side in sides)
            window = (left, right)
        return Mask(
            causal=self.mask != "full",
            window=window,
            alignment="start" if self.mask == "causal_start" else "end",
        )

    @property
    def parsed_softcap(self) -> float | None:
        """The softcap."""
        numbers = _numbers(self.softcap)
        return None if numbers is None else float(numbers[0]) if numbers.size == 1 else math.nan

    @property
    def parsed_sinks(self) -> np.ndarray | None:
        """The sinks, float32."""
        return _numbers(self.sinks)

    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Those of q, k and v."""
        b, h, kv, tq, tk, d = self.dims
        return (b, h, tq, d), (b, kv, tk, d), (b, kv, tk, d)

    def problems(self) -> Iterator[tuple[str, list[np.ndarray]]]:
        """(pattern, the bfloat16 bits of q, k and v), patterns taking turns."""
        for i in range(self.count):
            pattern = PATTERNS[i % len(PATTERNS)]
            seed = (self.seed << 32) + 3 * i
            yield (
                pattern,
                [
                    _bits(pattern, role, shape, seed + n)
                    for n, (role, shape) in enumerate(zip("qkv", self.shapes(), strict=True))
                ],
            )

    def vectors(self) -> Iterator[tuple[str, str]]:
        """(pattern, line) of each problem."""
        return ((pattern, self.line(bits)) for pattern, bits in self.problems())

    def line(self, bits: list[np.ndarray]) -> str:
        """The line of these tensors."""
        return " ".join([self.shape, *(text.join(array, 16) for array in bits)])


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How attention is judged. ValueError for unknown exponentials."""

    exponentials: str = "exact"

    def __post_init__(self) -> None:
        one_of("exponentials", self.exponentials, EXPONENTIALS)


def specified(question: Attention, rules: Rules) -> Iterator[str]:
    """The simulator's answer to each vector."""
    for _, bits in question.problems():
        result = _forward(question, *(dtypes.values(array, _BFLOAT16) for array in bits))
        pair = (dtypes.bits(np.asarray(x), _FLOAT32) for x in (result.o, result.lse))
        yield " ".join(text.join(array, 32) for array in pair)


def verify(
    question: Attention, rules: Rules, vectors: Iterator[text.Vector], verdict: Verdict
) -> None:
    """Judge every vector, and record it in the verdict.

    All NaNs count as equal; a log-sum-exp of ``-`` is not judged.
    """
    for vector in vectors:
        if vector.shape(0, AXES) != question.dims:
            raise text.MalformedError(
                vector.line,
                f"the shape is {question.shape}; got {vector.fields[0]}. Copy gen's line.",
            )
        names = ("q", "k", "v")
        bits = [
            vector.numbers(n + 1, 16, shape, f"the numbers of {names[n]} {list(shape)}, bfloat16,")
            for n, shape in enumerate(question.shapes())
        ]
        shape_o = question.shapes()[0]
        pairs = [("o", _float32(vector, 4, shape_o, "o"))]
        if vector.fields[5] != NO_LSE:
            pairs.append(("lse", _float32(vector, 5, shape_o[:3], "lse")))
        inputs = question.line(bits)
        kind = verdict.kind(inputs)
        q, k, v = (dtypes.values(array, _BFLOAT16) for array in bits)
        with vector.named():
            result = _forward(question, q, k, v)
        for name, values in pairs:
            expected = result.o if name == "o" else result.lse
            differ = ~equal(values, expected)
            if _fails(differ, values, expected, rules):
                break
        else:
            verdict.add(vector.line, inputs, kind, differs=False)
            continue
        if verdict.add(vector.line, inputs, kind, differs=True):
            i = int(np.argmax(differ.ravel()))
            count = f"{int(differ.sum())} of {differ.size} values differ"
            why = {
                "vector": f"{kind}, {name}{quantize.at(i, differ.shape)}",
                "expected": _shown(expected.ravel()[i]),
                "got": _shown(values.ravel()[i]),
                "rule": f"variant {question.variant} (A-1). {count}. "
                f"{_guess(question, q, k, v, pairs[0][1])}".strip(),
            }
            verdict.show(vector.line, kind, why)


def _fails(differ: np.ndarray, values: np.ndarray, expected: np.ndarray, rules: Rules) -> bool:
    if rules.exponentials == "exact" or not differ.any():
        return bool(differ.any())
    far = differ & ~comparison.close(values, expected)
    return int(far.sum()) > max(1, (1 - comparison.NEAR) * far.size)


def _guess(question: Attention, q, k, v, outputs: np.ndarray) -> str:
    """Which other variant, or wrong use of a softcap or sinks, gives these outputs; '' if none."""
    forward = functools.partial(_forward, question, q, k, v)
    for name in VARIANTS:
        try:
            other = forward(variant=name).o
        except ValueError:  # features that it does not take
            continue
        if name != question.variant and np.array_equal(outputs, other):
            return f"The answer is what variant {name} gives."
    cap, sinks = question.parsed_softcap, question.parsed_sinks
    scale = 1 / math.sqrt(question.dims[5])
    wrong: dict[str, Callable[[], attention.Result]] = {}
    if cap is not None:
        wrong["no softcap"] = functools.partial(forward, softcap=None)
        early = functools.partial(forward, softcap=cap * scale)
        wrong["a softcap before the softmax scale"] = early
    if sinks is not None:
        wrong["no sinks"] = functools.partial(forward, sinks=None)
        scaled = functools.partial(forward, sinks=sinks * np.float32(scale))
        wrong["sinks times the softmax scale"] = scaled
        wrong["sinks of the heads in reverse"] = functools.partial(forward, sinks=sinks[::-1])
    for description, simulated in wrong.items():
        if np.array_equal(outputs, simulated().o):
            return f"The answer is what {description} gives."
    return ""


def _forward(question: Attention, q, k, v, **changes) -> attention.Result:
    sinks = changes.pop("sinks", question.parsed_sinks)
    call = Call(
        variant=variants.by_name(question.variant),
        mask=question.parsed_mask,
        softcap=question.parsed_softcap,
    )
    call = dataclasses.replace(call, **changes)
    return attention.forward(q, k, v, variant=call, sinks=sinks)


def _numbers(text: str) -> np.ndarray | None:
    """Numbers with commas, in decimal, as float32: NaN for other text; None for "none"."""
    if text == "none":
        return None
    parts = text.split(",")
    numbers = [float(part) if _DECIMAL.fullmatch(part) else math.nan for part in parts]
    with np.errstate(over="ignore"):  # a larger number becomes infinite
        return np.array(numbers).astype(np.float32)


def _float32(vector: text.Vector, field: int, shape: tuple[int, ...], name: str) -> np.ndarray:
    return (
        vector.numbers(field, 32, shape, f"the numbers of {name} {list(shape)}, float32,")
        .astype(np.uint32)
        .view(np.float32)
    )


def _shown(value: np.float32) -> str:
    return f"{int(dtypes.bits(np.full(1, value), _FLOAT32)[0]):08X} ({explain.decimal(value)})"


def _bits(pattern: str, role: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """bfloat16 numbers, as uint16."""
    raw = dtypes.random(seed, math.prod(shape)).reshape(shape)
    sign = (raw >> np.uint64(63)).astype(np.uint16) << 15
    # from 2^-3 to 2, and more of them small
    ordinary = (
        sign
        | ((np.uint64(124) + (raw & np.uint64(3))).astype(np.uint16) << 7)
        | (raw >> np.uint64(8) & np.uint64(0x7F)).astype(np.uint16)
    )
    if pattern == "zero scores":
        integers = (raw >> np.uint64(4) & np.uint64(7)).astype(np.float32)
        if role == "q":
            return np.zeros(shape, np.uint16)
        return dtypes.bits(integers, _BFLOAT16).astype(np.uint16) | np.where(integers > 0, sign, 0)
    bits = ordinary
    # of the first query and the key of the seed's number
    if pattern == "one large score" and role == "k":
        bits = ordinary.copy()
        bits[:, :, seed // 3 % shape[2]] += np.uint16(3 << 7)
    # the second half of the keys negates the first
    if pattern == "opposite values" and role == "v":
        half = shape[2] // 2
        bits = ordinary.copy()
        bits[:, :, half : 2 * half] = bits[:, :, :half] ^ np.uint16(0x8000)
    return bits.astype(np.uint16)
