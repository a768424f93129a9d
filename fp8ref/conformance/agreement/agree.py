"""Compare how two sides quantize the same weights, and name the causes of differences."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8ref.checkpoints.rule import WeightRule
from fp8ref.checkpoints.tensors import StoredTensor
from fp8ref.conformance.agreement.causes import CAUSES, Cause, Pair, of_one_side
from fp8ref.conformance.agreement.sides import Side, high_precision, places, planted
from fp8ref.conformance.agreement.sides import side as side_of
from fp8ref.shared.errors import require
from fp8ref.shared.result import Result

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Agreement", "agree"]

Source = WeightRule | Callable | Path | str
"""A rule or its name, a function or module:function, or a checkpoint's path."""


@dataclass(frozen=True, kw_only=True)
class Agreement(Result):
    """The result of ``agree``.

    weights   the number that was compared.
    counts    int64 [4]: codes and scales that differ, and all codes and scales.
    causes    of each weight, in the order of ``CAUSES``.
    """

    a: str
    b: str
    weights: int
    counts: np.ndarray
    causes: tuple[Cause, ...]

    @property
    def ok(self) -> bool:
        """Whether both sides hold the same numbers."""
        return not any(cause.alarm for cause in self.causes)

    def sentence(self) -> str:
        """The result in a sentence."""
        codes, scales, all_codes, all_scales = self.counts
        first = next((cause for cause in self.causes if cause.alarm), None)
        if first is None:
            return (
                f"A and B agree: {all_codes:,} codes and {all_scales:,} scales of "
                f"{self.weights:,} weights are equal"
            )
        return (
            f"A and B differ in {codes:,} of {all_codes:,} codes and {scales:,} of "
            f"{all_scales:,} scales; the first cause is {first.kind}"
        )

    def by_kind(self) -> dict[str, list[Cause]]:
        """{cause: the weights that show it}."""
        groups = {kind: [c for c in self.causes if c.kind == kind] for kind in CAUSES}
        return {kind: members for kind, members in groups.items() if members}

    def to_dict(self) -> dict[str, Any]:
        """What --json keeps."""
        codes, scales, all_codes, all_scales = self.counts.tolist()
        return {
            "a": self.a,
            "b": self.b,
            "ok": self.ok,
            "weights": self.weights,
            "codes": {"differ": codes, "of": all_codes},
            "scales": {"differ": scales, "of": all_scales},
            "causes": [
                {
                    "cause": kind,
                    "text": CAUSES[kind]["text"],
                    "remedy": CAUSES[kind]["remedy"],
                    "detail": members[0].detail,
                    "share": members[0].share,
                    "weights": [cause.weight for cause in members],
                    "example": [
                        line for c in members[:1] if c.example for line in c.example.lines()
                    ],
                }
                for kind, members in self.by_kind().items()
            ],
        }

    def render(self, console: "Console") -> None:
        """Print it for a person."""
        console.print(f"A: {self.a}\nB: {self.b}")
        for kind, members in self.by_kind().items():
            first = max(members, key=lambda cause: (cause.example is not None, cause.share or 0))
            more = f" and {len(members) - 1:,} more" if len(members) > 1 else ""
            share = f"it changes {100 * first.share:.3g} % of codes" if first.share else ""
            label = "cause" if first.alarm else "note"
            console.print(f"{label} {kind}: {CAUSES[kind]['text']}.")
            said = "; ".join(filter(None, (first.detail, share)))
            console.print(f"  {first.weight}{more}{': ' if said else ''}{said}")
            for line in first.example.lines() if first.example else ():
                console.print(f"  {line}")
            if CAUSES[kind]["remedy"]:
                console.print(f"  remedy: {CAUSES[kind]['remedy']}")
        console.print(self.sentence())


def agree(a: Source, b: Source, weights: Mapping[str, Any] | Path | str | None = None) -> Agreement:
    """Whether two sides quantize the same weights to the same codes and scales, and why not.

    a, b      a rule or its name (``vllm_block``, ``sglang_group:bfloat16``), a function of a
              weight [N, K] that returns codes and scale, or its ``module:function``, or the path of
              a checkpoint.
    weights   in high precision: a directory of safetensors, or arrays by name. None: small ones
              that tell rules apart, unless a side is a checkpoint, whose bytes are compared alone.
    Order:    a weight is compared as codes and as float32 scales; where both sides have an exact
              rule, causes are the decisions in which the rules differ, else what bytes say.
    Raises:   ValueError: a side that is none of these; a rule or a function beside a checkpoint
              without weights; nothing to compare. OSError: a checkpoint cannot be read.

    >>> agree("vllm_block", "flashinfer_block").sentence().split(";")[1]
    ' the first cause is amax_floor'
    """
    checkpoints = [isinstance(side, Path | str) and Path(side).exists() for side in (a, b)]
    text = "a rule or a function quantizes weights in high precision, which a checkpoint has not."
    require(weights is not None or len({*checkpoints}) == 1, f"{text} Name them with --weights.")
    if weights is None:
        weights = {} if all(checkpoints) else planted()
    originals = high_precision(weights)
    sides = side_of(a, originals), side_of(b, originals)
    counts, count, causes = np.zeros(4, np.int64), 0, list[Cause]()
    rules: tuple[list[WeightRule], list[WeightRule]] = [], []
    for name, shape, matrix in _matrices(sides, originals):
        count += 1
        pair = _pair(name, shape, matrix, sides, originals)
        if isinstance(pair, Cause):
            causes.append(pair)
            continue
        counts += pair.counts
        causes += pair.causes(rules)
    require(count > 0, "A and B have no weight in common with codes. Name other directories.")
    order = list(CAUSES)
    return Agreement(
        a=sides[0].label,
        b=sides[1].label,
        weights=count,
        counts=counts,
        causes=tuple(sorted(causes, key=lambda cause: order.index(cause.kind))),
    )


def _matrices(
    sides: tuple[Side, Side], originals: Mapping[str, StoredTensor]
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """(weight, shape [N, K], () or the index of an expert) of all that is compared: what either
    side has, or of two rules the originals. Fused weights are compared in the parts that the other
    side has."""
    shapes = {name: weight.shape for side in sides for name, weight in side.weights.items()}
    if not shapes:
        shapes = {name: tensor.shape for name, tensor in originals.items()}
    held = {stored for name in shapes for stored, *_ in islice(places(name), 1, None)}
    for name, shape in shapes.items():
        if name not in held:
            yield from ((name, shape[-2:], matrix) for matrix in np.ndindex(shape[:-2]))


def _pair(
    name: str,
    shape: tuple[int, ...],
    matrix: tuple[int, ...],
    sides: tuple[Side, Side],
    originals: Mapping[str, StoredTensor],
) -> Pair | Cause:
    """Both sides of a weight; a cause where one has no codes of it."""
    original = originals.get(name)
    x = None if original is None else original[matrix or ...].astype(np.float32)
    if x is None and any(side.rule for side in sides):
        return Cause(kind="original_missing", weight=name)
    parts = [side.locate(name, shape, matrix) for side in sides]
    with np.errstate(all="ignore"):
        a, b = (
            side.rule.quantize(x) if side.rule else None if part is None else part.quantized()
            for side, part in zip(sides, parts, strict=True)
        )
    if a is None or b is None:
        return of_one_side(name, sides, parts)
    label = name + "".join(f"[{i}]" for i in matrix)
    return Pair(name=label, sides=sides, parts=(parts[0], parts[1]), answers=(a, b), x=x)
