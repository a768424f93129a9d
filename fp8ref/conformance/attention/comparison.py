"""An attention function against the simulator, on random inputs: how many outputs are equal, and
the first that is not.

The inputs reach what chosen ones do not: several tiles of different maxima, heads of keys that
share queries, masks, outliers and a key that draws most of the weight.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fp8ref.conformance.attention import scores, subjects
from fp8ref.conformance.attention.subjects import CAUSAL, Attention, Question
from fp8ref.conformance.kit.arrays import equal
from fp8ref.conformance.kit.finding import Counterexample, bits_of, show
from fp8ref.conformance.kit.subject import RefusedError
from fp8ref.formats import BFLOAT16, FLOAT16
from fp8ref.sim.attention import attention
from fp8ref.sim.quantize import cast
from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variants import FULL, Mask, Variant

NEAR = 0.99
"""The part of outputs that is equal, if only the last bits of exponentials differ.

An exponential within 2 units of 2^-24 changes the code of P next to a midpoint, which is 2^-3 to
2^-8 wide: a probability in 2^16 at most. Sums and factors then differ by a few 2^-22. That changes
an output of bfloat16 next to a midpoint, one in 2^12, and a sum that an accumulator of 13 bits cuts
off next to a multiple of 2^-13, one in 2^8 for a step of 32 keys. An output in float32 differs in
its last bits; it is near if it differs by at most ``LAST``.
"""

LAST = 2.0**-18
"""The largest difference of outputs in float32, relative to the largest of a row: exponentials, a
sum and factors of a few tiles, within 2 units of 2^-24 each."""


class Case(NamedTuple):
    """A question, with its name."""

    name: str
    question: Question


@dataclass(frozen=True)
class Agreement:
    """How a function's outputs agree with a variant's.

    compared, equal  outputs, and log-sum-exps if it returns them.
    near             those that are equal, or in float32 within LAST.
    error            the root mean square of the difference over that of the variant's outputs.
    first            the first output that differs.
    """

    variant: Variant
    compared: int
    equal: int
    near: int
    error: float
    first: Counterexample | None = None

    @property
    def exact(self) -> bool:
        """Whether all are equal."""
        return self.equal == self.compared

    @property
    def alike(self) -> bool:
        """Whether so many are equal that only exponentials can differ."""
        return self.near >= NEAR * self.compared


_WIDE, _TIES = "wide scores, outliers in v", "ties of bfloat16"  # names of cases

Operands = tuple[np.ndarray, np.ndarray, np.ndarray]  # q, k and v


def random_operands(
    rng: np.random.Generator, heads: tuple[int, int, int], tq: int, tk: int, features: int
) -> Operands:
    """q, k and v of normal numbers. heads: sequences, and heads of q and of k and v."""
    b, h, kv = heads
    shapes = ((b, h, tq, features), (b, kv, tk, features), (b, kv, tk, features))
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return q, k, v


def _outliers(
    rng: np.random.Generator, heads: tuple[int, int, int], tq: int, tk: int, features: int
) -> Operands:
    """q, k and v with wide scores, a key that draws weight, and outliers in v."""
    q, k, v = random_operands(rng, heads, tq, tk, features)
    q *= 2.0 ** rng.integers(-2, 3, (*q.shape[:3], 1)).astype(np.float32)
    k[:, :, 0] *= 4
    return q, k, np.where(rng.random(v.shape) < 0.002, 30 * v, v).astype(np.float32)


def plain_cases(tokens: int) -> list[Case]:
    """Questions that need no argument: square, of whole tiles, and without shared heads.

    tokens    two tiles, or one long one. The first question has five, so that a chain of four is
              not one of all.
    """
    rng = np.random.default_rng(0)
    several = tokens // 2 * 5 if tokens <= 512 else tokens
    ordinary = Question(*random_operands(rng, (1, 1, 1), several, several, 64))
    wide = Question(*_outliers(rng, (2, 1, 1), tokens, tokens, 64))
    ties = _ties(FULL, 64)
    behind = [((0, 0), (0, 0), (0, tokens - x.shape[2]), (0, 0)) for x in ties[:3]]
    q, k, v = map(np.pad, ties[:3], behind)
    # of the keys behind the seven none has a probability
    q[..., 0], k[:, :, 7:, 0] = scores.FAR, -scores.FAR
    ties = Question(q, k, v)
    return [Case("ordinary", ordinary), Case(_WIDE, wide), Case(_TIES, ties)]


def cases(
    mask: Mask = FULL, *, features: int = 64, softcap: float | None = None, sinks: bool = False
) -> list[Case]:
    """The questions, all under the mask. Query heads share heads of keys in the first alone.

    softcap, sinks  of all of them: a number, and whether there are random ones, between a row's
                    smallest and largest scores.
    """
    rng = np.random.default_rng(0)
    ordinary = Question(*random_operands(rng, (1, 4, 2), 70, 700, features), mask)
    wide = Question(*_outliers(rng, (2, 2, 2), 40, 333, features), mask)
    square = Question(*random_operands(rng, (1, 2, 2), 300, 300, features), mask)
    square = square._replace(q=2 * square.q)
    cases = []
    for name, question in (
        ("ordinary", ordinary),
        (_WIDE, wide),
        ("square", square),
        (_TIES, _ties(mask, features)),
    ):
        heads = (question.q.shape[1],)
        drawn = 2 * rng.standard_normal(heads).astype(np.float32) if sinks else None
        cases.append(Case(name, question._replace(softcap=softcap, sinks=drawn)))
    return cases


def _ties(mask: Mask, features: int) -> Question:
    """7 keys of score 0, the mean of whose values is a tie of bfloat16, 254.5 / 128 and 252.5 /
    128. A quotient gives the tie, which is rounded down. RN32(1 / 7) is too large by 2^-24.4 of it:
         a product with it gives the next float32 number, which is rounded up (A-10).
    """
    q, k, v = (np.zeros((1, 1, n, features), np.float32) for n in (1, 7, 7))
    v[0, 0, :3, 0], v[0, 0, :3, 1] = (13, 0.875, 0.04296875), (13, 0.75, 0.05859375)
    v[0, 0, :, 2] = 448  # a scale of 1
    return Question(q, k, v, mask)


class Asked:
    """A function's answers to the cases, each asked once."""

    def __init__(self, asked: Attention, of: list[Case]) -> None:
        self.asked = asked
        self.answers: list[tuple[Case, subjects.Answer]] = []
        refused = ""
        for case in of:
            if not asked.takes(case.question.mask):
                continue
            exact = case._replace(question=_in_dtype(case.question, asked.dtype))
            try:
                self.answers.append((exact, asked.ask(exact.question)))
            except RefusedError as error:
                refused = str(error)
        if not self.answers:
            names = ", ".join(("mask", *CAUSAL, *subjects.WINDOWS))
            raise RefusedError(
                refused or f"{asked.name} takes no such mask; name an argument {names}."
            )

    def agreement(self, variant: Variant, *, cases: int | None = None) -> Agreement | None:
        """How the first answers, or all, agree with a variant; None if it takes no such inputs."""
        counts, squares = np.zeros(3, np.int64), np.zeros(2)
        first: Counterexample | None = None
        for case, answer in self.answers[:cases]:
            result = simulated(self.asked, case.question, variant)
            if result is None:
                return None
            for what, got, right in _pairs(answer, result):
                alike = equal(got, right) | (_rounds_scale(case, variant) & close(got, right))
                counts += alike.size, alike.sum(), (alike | close(got, right)).sum()
                if what == "o":
                    wide = right.astype(np.float64)
                    difference = np.nan_to_num(got - wide, nan=np.inf)
                    squares += (difference**2).sum(), (wide**2).sum()
                if first is None and not alike.all():
                    index = tuple(int(i) for i in np.argwhere(~alike)[0])
                    first = Counterexample(
                        f"{what}{list(index)} of case {case.name!r}, {case.question}; "
                        f"{int((~alike).sum()):,} of {alike.size:,} differ",
                        _shown(got[index]),
                        f"{_shown(right[index])} of variant {variant.name!r}",
                        "A-10" if what == "o" else "A-11",
                    )
        error = float(squares[0] > 0)
        if squares[1]:
            error = math.sqrt(squares[0] / squares[1])
        compared, same, near = counts.tolist()
        return Agreement(variant, compared, same, near, error, first)


def simulated(asked: Attention, question: Question, variant: Variant) -> attention.Result | None:
    """What a variant gives for a question; None if it does not take it.

    Codes are quantized by heads before the call.
    """
    scales = None
    if asked.takes_codes:
        heads_share = variant.granularity in ("tensor", "head")
        if not heads_share or variant.rotated or variant.fmt != asked.fmt:
            return None
        variant = dataclasses.replace(variant, granularity="head", policy="te_current")
        if asked.ones:
            shape = *question.k.shape[:2], 1, 1
            scales = dict.fromkeys("qkv", np.ones(shape, np.float32))
    mask, scale, softcap = question.mask, question.scale, question.softcap
    return attention.forward(
        question.q,
        question.k,
        question.v,
        variant=Call(variant=variant, mask=mask, scale=scale, softcap=softcap),
        documents=question.documents,
        scales=scales,
        sinks=question.sinks,
    )


def _rounds_scale(case: Case, variant: Variant) -> bool:
    """Whether real arithmetic has another softmax scale than the variant, which rounds it to
    float32: scores up to 2^6 then differ by 2^-19, outputs and log-sum-exps by ``LAST``.
    """
    question = case.question
    scale = 1 / math.sqrt(question.q.shape[-1]) if question.scale is None else question.scale
    return variant.real and float(np.float32(scale)) != scale


def _pairs(
    answer: subjects.Answer, result: attention.Result
) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """(name, the function's, the variant's) of o, and of log-sum-exps if it returns them."""
    in_fp8 = answer.dtype.startswith("float8_") and "o" in result.tensors
    pairs = [("o", answer.o, result.tensors["o"].values if in_fp8 else result.o)]
    return pairs + ([] if answer.lse is None else [("lse", answer.lse, result.lse)])


def close(outputs: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Where outputs [B, H, Tq, D], or log-sum-exps [B, H, Tq], differ by at most LAST."""
    largest = np.maximum(np.abs(right), 1)
    if right.ndim == 4:
        largest = np.abs(right).max(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return np.abs(outputs - right) <= LAST * largest


def _shown(value: np.float32) -> str:
    return f"{show(float(value))} ({bits_of(float(value), 'float32')})"


def _in_dtype(question: Question, dtype: str) -> Question:
    """The tensors as numbers that the dtype has."""
    fmt = {"bfloat16": BFLOAT16, "float16": FLOAT16}.get(dtype)
    if fmt is None:
        return question
    q, k, v = (cast.round_to(x, fmt) for x in question[:3])
    return question._replace(q=q, k=k, v=v)
