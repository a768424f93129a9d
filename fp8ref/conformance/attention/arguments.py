"""Each argument of an attention function, and each two, against the simulator, on random inputs
that need them (spec A-17).

The variant is named on plain inputs: square, of whole tiles, a head of keys for each query head. So
a fault of one argument shows in the cases of this argument alone, and does not rename the variant.
Kernels have paths of their own for masks: every two arguments that are right alone are combined.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fp8ref.conformance.attention.comparison import Agreement, Asked, Case, random_operands
from fp8ref.conformance.attention.subjects import (
    CAUSAL,
    SCALES,
    SINKS,
    SOFTCAPS,
    Attention,
    Question,
)
from fp8ref.conformance.kit.finding import Counterexample
from fp8ref.conformance.kit.subject import RefusedError
from fp8ref.spec.attention.variants import FULL, VARIANTS, Mask, Variant

Alignment = Literal["end", "start"]
"""``Mask.alignment`` of a function whose causal mask has no argument for it."""

CAP = 2.0  # the softcap of random inputs: small beside scores of standard deviation 4

CAPPED = 2.0**-5
"""The largest error of outputs under ``CAP``, relative, where exponentials are hardware's. Its tanh
errs by 2^-11 (A-22), so a score by CAP 2^-11 = 2^-10: one code of P in 2^-10 / 2^-4 = 2^-6 is a
neighbor, by 2^-3 at most, which is sqrt(2^-6) 2^-3 = 2^-6 of the outputs in the root mean square.
The wrong orders of A-27 differ by more than 2^-2."""

ONE = "one query"
"""Of a case with a single query, as in decoding: one of the cases of ``lengths``."""

_LENGTHS = ("lengths", ONE, "causal mask", "window")
"""Of these, each two are asked together among the cases of one."""

_OTHERS = ("documents", "softcap", "sinks", "scale")
_PAIRED = (*_LENGTHS[:2], "heads", *_LENGTHS[2:], *_OTHERS)
"""The arguments that are asked two at a time."""

FINDINGS = {"softcap argument": "softcap", "sinks argument": "sinks", "mask and softcap": "softcap"}
"""{finding of a fault: its argument}, where they have other names."""


@dataclass(frozen=True, kw_only=True)
class Argument:
    """How a function's outputs under one argument agree with a variant's.

    agreements  of the cases that the function does not refuse.
    refused     why it refuses the others; empty if it refuses none.
    """

    name: str
    agreements: tuple[Agreement, ...]
    refused: str = ""

    def differing(self, exact: bool) -> Agreement | None:
        """The first case that does not agree in every bit, or without ``exact`` but for
        exponentials; None if all do.
        """
        agrees = (lambda agreement: agreement.exact) if exact else self._near
        return next((one for one in self.agreements if not agrees(one)), None)

    def _near(self, agreement: Agreement) -> bool:
        return agreement.alike or ("softcap" in self.name and agreement.error <= CAPPED)

    def first(self, exact: bool) -> Counterexample | None:
        """The first output that differs."""
        agreement = self.differing(exact)
        return None if agreement is None else agreement.first

    def to_dict(self, exact: bool) -> dict[str, Any]:
        """What --json writes."""
        first = self.first(exact)
        return {
            "cases": len(self.agreements),
            "equal": not first,
            "refused": self.refused,
            "first": first and first.to_dict(),
        }


def compare(
    attention: Attention, variant: Variant, tokens: int, alignment: Alignment, *, exact: bool
) -> list[Argument]:
    """Every argument that the function has, compared with the variant; ``tokens`` are whole tiles.

    Once unequal lengths, shared heads or a causal mask differ alone, no other argument has them.
    """
    arguments: list[Argument] = []
    for name, cases in _cases(attention, variant, tokens, alignment):
        wrong = {argument.name for argument in arguments if argument.differing(exact)}
        kept = [case for case in cases if not wrong & _also(case.question)] or cases[:1]
        arguments.append(_argument(attention, variant, name, kept))
    right = {one.name for one in arguments if one.agreements and not one.differing(exact)}
    right |= {ONE} if "lengths" in right else set()
    for a, b in itertools.combinations([name for name in _PAIRED if name in right], 2):
        if not {a, b} <= set(_LENGTHS):
            case = _pair({a, b}, tokens, alignment)
            pair = _argument(attention, variant, f"{a} with {b}", [case])
            arguments += [pair] if pair.differing(exact) else []
    return [argument for argument in arguments if argument.agreements or argument.refused]


def _also(question: Question) -> set[str]:
    """The arguments that a case needs beside its own."""
    heads, tokens = (question.q.shape[axis] != question.k.shape[axis] for axis in (1, 2))
    needs = {"lengths": tokens, "heads": heads, "causal mask": question.mask.causal}
    return {name for name, needed in needs.items() if needed}


def _argument(attention: Attention, variant: Variant, name: str, cases: list[Case]) -> Argument:
    agreements, refused = [], ""
    for case in cases:
        try:
            agreement = Asked(attention, [case]).agreement(variant)
        except RefusedError as error:
            refused = str(error)
        else:
            agreements += [agreement] if agreement is not None else []
    return Argument(name=name, agreements=tuple(agreements), refused=refused)


def _cases(
    attention: Attention, variant: Variant, tokens: int, alignment: Alignment
) -> Iterator[tuple[str, list[Case]]]:
    """(argument, its cases)."""
    rng = np.random.default_rng(1)

    def case(
        name: str,
        tq: int = tokens,
        tk: int = tokens,
        *,
        heads: tuple[int, int, int] = (1, 2, 2),
        features: int = 64,
        **more,
    ) -> Case:
        return Case(name, Question(*random_operands(rng, heads, tq, tk, features), **more))

    ragged = tokens + 37
    lengths = [(ragged, ragged), (40, ragged), (ragged, 60), (1, ragged)]
    lengths.append((20, 4 * tokens + 5))
    yield "lengths", [case(f"{tq} queries, {tk} keys", tq, tk) for tq, tk in lengths]
    shared = [(3, 4, 2), (1, 3, 1)]
    words = "{1} query heads, {2} heads of keys"
    yield "heads", [case(words.format(*heads), heads=heads) for heads in shared]
    # measured tiles are those of no mask and 64 features
    if variant.tiles in [one.tiles for one in VARIANTS.values()]:
        yield "features", [case("128 features", features=128)]
        yield from _masks(attention, case, alignment)
    if attention.takes_documents:
        yield from _documents_cases(attention, case, alignment, tokens, rng)
    if attention.argument(SCALES):
        yield "scale", [case("softmax scale 0.3", scale=0.3)]
    if attention.argument(SOFTCAPS):
        capped = case(f"softcap {CAP:g}", softcap=CAP)
        question = capped.question._replace(q=4 * capped.question.q)
        yield "softcap", [capped._replace(question=question)]
    if attention.argument(SINKS):
        with_sinks = []
        for heads in ((1, 2, 2), (1, 4, 2)):
            sinks = (2 * rng.standard_normal(heads[1])).astype(np.float32)
            with_sinks.append(case("sinks", heads=heads, sinks=sinks))
        yield "sinks", with_sinks


def _documents_cases(
    attention: Attention,
    case: Callable[..., Case],
    alignment: Alignment,
    tokens: int,
    rng: np.random.Generator,
) -> Iterator[tuple[str, list[Case]]]:
    """The cases of documents, and of padding, whose document is -1."""
    documents = []
    for name, mask in (("no mask", FULL), ("causal", _causal(alignment))):
        if attention.takes(mask):
            ids = np.sort(rng.integers(0, 5, (2, tokens)), axis=1)  # others in each sequence
            pair = ids, ids
            documents.append(case(f"documents, {name}", heads=(2, 2, 2), documents=pair, mask=mask))
    yield "documents", documents
    fills = [("numbers", 3.0)] + ([] if attention.takes_codes else [("NaN", math.nan)])
    padded = []
    for name, fill in fills:
        plain = case(f"documents of -1, {name} in their memory", heads=(2, 2, 2))
        padded.append(_padding(plain, tokens, fill))
    yield "padding", padded


def _masks(
    attention: Attention, case: Callable[..., Case], alignment: Alignment
) -> Iterator[tuple[str, list[Case]]]:
    """The cases of masks: square, more keys, and more queries than keys."""
    ends: tuple[Alignment, ...] = (alignment,)
    if "mask" in attention.names and attention.argument(CAUSAL) is None:
        ends = "end", "start"  # the mask says it
    shapes: tuple[tuple[int, ...], ...] = ((), (40, 200), (90, 60))
    if attention.takes(_causal(alignment)):
        tiles = itertools.product((*shapes, (150, 200)), ends)  # queries of more than a tile
        words = "causal, aligned to the {}"
        yield (
            "causal mask",
            [case(words.format(end), *shape, mask=_causal(end)) for shape, end in tiles],
        )
    windows = [Mask(window=one) for one in ((17, 5), (30, None), (0, 3))]
    windows.insert(2, Mask(causal=True, window=(64, 0)))
    pairs = itertools.product((mask for mask in windows if attention.takes(mask)), ends)
    masks = [dataclasses.replace(mask, alignment=end) for mask, end in pairs]
    if masks:
        whole = itertools.product(shapes, masks)
        words = "window {}"
        windowed = [case(words.format(m.window), *shape, mask=m) for shape, m in whole]
        yield "window", windowed


def _pair(names: set[str], tokens: int, alignment: Alignment) -> Case:
    """The case that needs two arguments."""
    rng = np.random.default_rng(3)
    tq, tk = 1 if ONE in names else tokens, tokens
    if "lengths" in names:
        tq, tk = 40, tokens + 37
    batch, heads = 2 if "documents" in names else 1, 4 if "heads" in names else 2
    causal = "causal mask" in names
    mask = Mask(
        causal=causal,
        window=((64, 0) if causal else (30, 5)) if "window" in names else None,
        alignment=alignment,
    )
    ids = None
    if "documents" in names:
        ids = tuple(np.sort(rng.integers(0, 3, (batch, n)), axis=1) for n in (tq, tk))
    q, k, v = random_operands(rng, (batch, heads, 2), tq, tk, 64)
    question = Question(
        4 * q if "softcap" in names else q,
        k,
        v,
        mask if mask.causal or mask.window else FULL,
        ids,
        softcap=CAP if "softcap" in names else None,
        scale=0.3 if "scale" in names else None,
        sinks=(2 * rng.standard_normal(heads)).astype(np.float32) if "sinks" in names else None,
    )
    return Case(" with ".join(sorted(names)), question)


def _causal(alignment: Alignment) -> Mask:
    return Mask(causal=True, alignment=alignment)


def _padding(case: Case, tokens: int, fill: float) -> Case:
    """The case with padding behind the tokens, and in the middle of the second sequence."""
    ids = np.zeros((2, tokens), np.int64)
    ids[:, tokens - 40 :], ids[1, 50:60] = -1, -1
    padded = (ids < 0)[:, None, :, None]
    q, k, v = (np.where(padded, np.float32(fill), x) for x in case.question[:3])
    return case._replace(question=case.question._replace(q=q, k=k, v=v, documents=(ids, ids)))
