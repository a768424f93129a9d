"""Compare how two sides quantize the same weights, and name the causes of differences."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8ref.checkpoints.layers import module_of
from fp8ref.checkpoints.originals import shared_amaxes
from fp8ref.checkpoints.rule import WeightRule
from fp8ref.checkpoints.tensors import StoredTensor
from fp8ref.conformance.agreement.causes import CAUSES, Cause, Pair, of_one_side
from fp8ref.conformance.agreement.fused import Place, Shapes, locate, separate
from fp8ref.conformance.agreement.sides import Part, Side, high_precision, is_linear, planted
from fp8ref.conformance.agreement.sides import side as side_of
from fp8ref.shared.errors import require
from fp8ref.shared.result import Result
from fp8ref.sim.quantize.scaling import Quantized

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
        """{cause: the weights that show it, those with an example and the largest share first}."""
        ordered = sorted(self.causes, key=lambda c: (c.example is None, -(c.share or 0)))
        groups = {kind: [c for c in ordered if c.kind == kind] for kind in CAUSES}
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
                    "weights": [
                        {"name": c.weight, "detail": c.detail, "share": c.share} for c in members
                    ],
                    "example": list(members[0].example.lines()) if members[0].example else [],
                }
                for kind, members in self.by_kind().items()
            ],
        }

    def render(self, console: "Console") -> None:
        """Print it for a person."""
        console.print(f"A: {self.a}\nB: {self.b}")
        for kind, members in self.by_kind().items():
            first = members[0]
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
    sides = side_of(a), side_of(b)
    computing = [side.computes for side in sides]
    text = "a rule or a function quantizes weights in high precision, which a checkpoint has not."
    require(weights is not None or len({*computing}) == 1, f"{text} Name them with --weights.")
    if weights is None and all(computing):
        weights = planted()
    originals = {} if weights is None else high_precision(weights)
    compared = _Compared(sides=sides, originals=originals)
    counts, count, causes = np.zeros(4, np.int64), 0, list[Cause]()
    rules: tuple[list[WeightRule], list[WeightRule]] = [], []
    for pair in compared.pairs():
        count += 1
        if isinstance(pair, Cause):
            causes.append(pair)
        else:
            counts += pair.counts
            causes += pair.causes(rules)
    text = "A and B have no weight with codes to compare. Name other directories, or call a "
    stored = not all(side.computes for side in sides)
    require(
        bool(counts[2] or (causes and stored)),
        f"{text}function on a weight to find why it refuses.",
    )
    order = list(CAUSES)
    return Agreement(
        a=sides[0].label,
        b=sides[1].label,
        weights=count,
        counts=counts,
        causes=tuple(sorted(causes, key=lambda cause: order.index(cause.kind))),
    )


@dataclass(frozen=True, kw_only=True)
class _Compared:
    """The weights of both sides, and those in high precision."""

    sides: tuple[Side, Side]
    originals: Mapping[str, StoredTensor]

    @cached_property
    def known(self) -> Shapes:
        """The shapes of all weights, also of those in high precision."""
        every = [*(side.tensors for side in self.sides), self.originals]
        plain = {name: tensor.shape for held in every for name, tensor in held.items()}
        plain = {name: shape for name, shape in plain.items() if len(shape) in (2, 3)}
        return plain | {n: w.shape for side in self.sides for n, w in side.weights.items()}

    def names(self) -> Shapes:
        """The shapes of what is compared: what either side has as codes, and what a rule or a
        function would quantize, unless the config of the other side excludes it. Fused weights are
        compared in the parts that are known."""
        names = [name for side in self.sides for name in side.weights]
        if any(side.computes for side in self.sides):
            excluding = [side.declared.excludes for side in self.sides]
            linears = filter(is_linear, self.originals)
            names += [n for n in linears if not any(each(module_of(n)) for each in excluding)]
        return dict(part for name in names for part in separate(name, self.known))

    def pairs(self) -> Iterator[Pair | Cause]:
        """Both sides of each matrix; a cause where one has no codes of it."""
        shapes = {name: tensor.shape for name, tensor in self.originals.items()}
        held = [{name: w.shape for name, w in side.weights.items()} for side in self.sides]
        names = self.names()
        places = {n: [locate(n, s, each, self.known) for each in held] for n, s in names.items()}
        amaxes = [self.shared_amaxes(i, places, names) for i in (0, 1)]
        for name, shape in names.items():
            original = locate(name, shape, shapes, self.known)
            for matrix in np.ndindex(shape[:-2]):
                x = None
                if original is not None:
                    index = (*original.matrix, *matrix, original.rows)
                    x = self.originals[original.name][index].astype(np.float32)
                pair = self.pair(name, matrix, x, places[name])
                if isinstance(pair, Pair):
                    own = amaxes[0].get(name), amaxes[1].get(name)
                    pair = dataclasses.replace(pair, amaxes=own)
                yield pair

    def shared_amaxes(
        self, i: int, places: Mapping[str, list[Place | None]], names: Shapes
    ) -> dict[str, float]:
        """{weight: the amax of all that have one scale with it} on a side."""
        held = {name: each[i] for name, each in places.items()}
        weights = self.sides[i].weights
        scales = {
            name: Part(weight=weights[place.name], rows=place.rows).single_scale
            for name, place in held.items()
            if place is not None and not place.matrix
        }
        shapes = {name: tensor.shape for name, tensor in self.originals.items()}
        originals = {}
        for name in scales:
            place = locate(name, names[name], shapes, self.known)
            if place is not None and not place.matrix:
                originals[name] = self.originals[place.name].piece(place.rows)
        return shared_amaxes(scales, originals)

    def pair(
        self,
        name: str,
        matrix: tuple[int, ...],
        x: np.ndarray | None,
        places: Sequence[Place | None],
    ) -> Pair | Cause:
        """Both sides of a matrix."""
        if x is None and any(side.computes for side in self.sides):
            return Cause(kind="original_missing", weight=name)
        parts, answers = list[Part | None](), list[Quantized | None]()
        for side, place in zip(self.sides, places, strict=True):
            part = None
            if side.function is not None and x is not None:
                part = side.ask(x)
            elif place is not None:
                # a copy, whose scales are let go
                stored = dataclasses.replace(side.weights[place.name])
                part = Part(weight=stored, matrix=(*place.matrix, *matrix), rows=place.rows)
            with np.errstate(all="ignore"):
                ruled = None if side.rule is None or x is None else side.rule.quantize(x)
            parts.append(part)
            answers.append(part.quantized() if part is not None else ruled)
        if answers[0] is None or answers[1] is None:
            return of_one_side(name, self.sides, parts)
        return Pair(
            name=name + "".join(f"[{i}]" for i in matrix),
            sides=self.sides,
            parts=(parts[0], parts[1]),
            answers=(answers[0], answers[1]),
            x=x,
        )
