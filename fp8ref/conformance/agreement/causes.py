"""Why two sides hold different bytes for a weight."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fp8ref.checkpoints import evidence, originals, patterns
from fp8ref.checkpoints.layers import module_of
from fp8ref.checkpoints.rule import WeightRule
from fp8ref.checkpoints.tensors import FLOATS, ArrayTensor
from fp8ref.conformance.agreement.decisions import Example, compare_rules, factors
from fp8ref.conformance.agreement.relations import relation
from fp8ref.conformance.agreement.sides import Part, Side
from fp8ref.shared import package_data
from fp8ref.sim.quantize import cast, scaling
from fp8ref.sim.quantize.scaling import Quantized
from fp8ref.spec import granularity as granularities

__all__ = ["CAUSES", "Cause", "Pair"]

CAUSES = package_data.tables(__file__, "causes")
"""{cause: its text and remedy}, in the order in which a side decides."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A cause in one weight.

    detail    what differs here, such as a decision's two values.
    share     of the codes of the weight that it changes alone; None: not known.
    """

    kind: str
    weight: str
    detail: str = ""
    share: float | None = None
    example: Example | None = None

    @property
    def alarm(self) -> bool:
        """Whether the sides hold different numbers by it."""
        return CAUSES[self.kind].get("alarm", True)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A weight of both sides [N, K].

    parts   where checkpoints and functions have it; None: a rule, which has its answer alone.
    x       float32, in high precision; None: it was not given.
    amaxes  of all weights that have one scale of a tensor with it; None: its own.
    """

    name: str
    sides: tuple[Side, Side]
    parts: tuple[Part | None, Part | None]
    answers: tuple[Quantized, Quantized]
    x: np.ndarray | None
    amaxes: tuple[float | None, float | None] = (None, None)

    @cached_property
    def codes(self) -> np.ndarray:
        """Which codes differ, as bytes or, of other formats, as numbers; [N, K]."""
        a, b = self.answers
        if a.fmt == b.fmt:
            return a.codes != b.codes
        return _differ(*(cast.decode(q.codes, q.fmt) for q in self.answers))

    @cached_property
    def scales(self) -> np.ndarray:
        """Which factors out of codes differ, of A's shape; of other blocks all do."""
        a, b = (factors(q) for q in self.answers)
        return np.ones_like(a, bool) if self.other_blocks else _differ(a, b.reshape(a.shape))

    @cached_property
    def other_blocks(self) -> bool:
        """Whether other elements share a scale."""
        shape = self.answers[0].codes.shape
        sizes = (granularities.block_sizes(shape, q.blocks) for q in self.answers)
        a, b = ([min(size) for size in zip(shape, each, strict=True)] for each in sizes)
        return a != b

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Codes and scales that differ, and all of them."""
        return int(self.codes.sum()), int(self.scales.sum()), self.codes.size, self.scales.size

    def causes(self, before: tuple[list[WeightRule], list[WeightRule]]) -> Iterator[Cause]:
        """Why they differ, the surest first; a note where layouts do.

        before   rules of earlier weights of either side, which are tried first; they are added.
        """
        layouts = [_layout(part) for part in self.parts if part is not None]
        if len(set(layouts)) > 1:
            yield Cause(kind="scale_layout", weight=self.name, detail=" and ".join(layouts))
        formats = {q.fmt for q in self.answers}
        if not self.codes.any() and not self.scales.any() and len(formats) == 1:
            return
        rules = self._rules(0, before[0]), self._rules(1, before[1])
        ruled = list(self._by_rules(rules))
        yield from ruled
        if not ruled:
            kind, detail = self._by_bytes()
            exact = [
                f"{who}'s bytes are {each[0].name}'s"
                for who, each in zip("AB", rules, strict=True)
                if each and not all(rules)
            ]
            detail = "; ".join(filter(None, (detail, *exact)))
            share = self.counts[0] / self.codes.size
            yield Cause(kind=kind, weight=self.name, detail=detail, share=share)

    def _by_rules(self, rules: tuple[tuple[WeightRule, ...], ...]) -> Iterator[Cause]:
        """The decisions in which the rules of both sides differ; none if one has no rule."""
        if self.x is None or not all(rules):
            return
        make = functools.partial(Cause, weight=self.name)
        for kind, detail, share, example in compare_rules((rules[0], rules[1]), self.x):
            yield make(kind=kind, detail=detail, share=share, example=example)
        # a rule does not say in which dtype its scales are stored
        a, b = (
            "F32" if part is None or part.weight.scale is None else part.weight.scale.dtype
            for part in self.parts
        )
        if a != b and {a, b} <= FLOATS.keys() and self.scales.any():
            yield make(kind="scale_dtype", detail=f"scales are {a} in A, {b} in B")

    def _rules(self, i: int, before: list[WeightRule]) -> tuple[WeightRule, ...]:
        """The rules that make a side's bytes exactly."""
        part, own = self.parts[i], self.sides[i].rule
        if own is not None:
            return (own,)
        weight = None if part is None else part.whole()
        if weight is None or self.x is None:
            return ()
        original = ArrayTensor.of(self.name, self.x, "F32")
        nearest = originals.match(weight, original, tuple(before), self.amaxes[i])
        if nearest is None or nearest.place:
            return ()
        before[:] = nearest.rules
        return nearest.rules

    def _by_bytes(self) -> tuple[str, str]:
        """(cause, detail) of what the bytes say alone."""
        a, b = self.answers
        if a.fmt != b.fmt:
            return "format", f"{a.fmt} in A, {b.fmt} in B"
        if self.other_blocks:
            return "blocks", f"{a.granularity} in A, {b.granularity} in B"
        shared = [side.shares(part) for side, part in zip(self.sides, self.parts, strict=True)]
        if shared[0] != shared[1]:
            return "one_scale", f"{'AB'[shared[1]]} has one scale for several"
        if self._only_edges():
            return "padding", ""
        codes, scales = (
            self.codes.any(),
            _differ(a.scale_inv, b.scale_inv.reshape(a.scale_inv.shape)),
        )
        if scales.any():
            related = relation(a.scale_inv, b.scale_inv, not codes)
            if related[0]:
                return related
        elif self.scales.any():
            return "tensor_scale", f"{a.tensor_scale_inv} in A, {b.tensor_scale_inv} in B"
        contradictions = [_contradictions(part) for part in self.parts]
        for who, kinds in zip("AB", contradictions, strict=True):
            if named := [kind for kind in kinds if kind in CAUSES]:
                return named[0], f"{who}'s, among other differences"
        for who, side, q in zip("AB", self.sides, self.answers, strict=True):
            if side.rule is None and self._is_stale(q):
                return "stale_scale", f"{who}'s"
        for who, kinds in zip("AB", contradictions, strict=True):
            if kinds:
                return "misread", f"{who}: {', '.join(kinds)}"
        if codes and self.scales.any():
            return "unexplained", ""
        return ("codes_alone" if codes else "scales_alone"), ""

    def _only_edges(self) -> bool:
        """Whether all codes that differ are in blocks that the shape cuts."""
        shape, blocks = self.codes.shape, self.answers[0].blocks
        whole = [n if size is None else n - n % size for n, size in zip(shape, blocks, strict=True)]
        inside = self.codes[: whole[0], : whole[1]]
        return 0 < inside.size < self.codes.size and not inside.any() and bool(self.codes.any())

    def _is_stale(self, q: Quantized) -> bool:
        """Whether the scales are not those of the weight: the largest number of a block is far
        below the largest code, or above."""
        if self.x is None:
            return False
        amax = scaling.block_amax(np.abs(self.x), q.blocks)
        with np.errstate(all="ignore"):
            top = (amax / factors(q).reshape(amax.shape))[amax > 0]
        # of a right scale it is above a quarter of the largest code (MX ceil)
        return bool(((top < float(q.fmt.max) / 4) | (top > 2 * float(q.fmt.max))).any())


def _differ(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Where numbers differ; NaN is itself."""
    return np.asarray((x != y) & ~(np.isnan(x) & np.isnan(y)))


def _layout(part: Part) -> str:
    return part.weight.scale_layout + ", transposed" * part.weight.transposed


def _contradictions(part: Part | None) -> list[str]:
    """The findings of an audit of a weight; none of a rule."""
    findings = [] if part is None else evidence.gather(part.whole() or part.weight).findings
    return [finding.kind for finding in findings if finding.alarm]


def of_one_side(name: str, sides: tuple[Side, Side], parts: Sequence[Part | None]) -> Cause:
    """The cause of a weight that one side alone has as codes with scales."""
    for who, part in zip("AB", parts, strict=True):
        if part is not None and part.weight.granularity and part.cuts_a_block:
            return Cause(kind="blocks", weight=name, detail=f"a block of {who} has rows before it")
        if part is not None and part.quantized() is None:
            detail = f"{who}: {', '.join(_contradictions(part)) or 'its scales do not fit'}"
            return Cause(kind="misread", weight=name, detail=detail)
    i = next(i for i, part in enumerate(parts) if part is None and sides[i].rule is None)
    who, missing, other = "AB"[i], sides[i], sides[1 - i]
    if missing.function is not None:
        return Cause(kind="absent", weight=name, detail=f"{who} refuses it")
    plain = missing.tensors.get(name)
    if plain is None or plain.dtype not in FLOATS:
        shape = (
            ""
            if name not in missing.weights
            else f" of this shape, but {missing.weights[name].shape}"
        )
        return Cause(kind="absent", weight=name, detail=f"{who} has none{shape}")
    text = f"in {who} it is {plain.dtype}"
    for declared in (missing.declared, other.declared):
        for engine in (declared.engine, "substring", *patterns.ENGINES):
            try:
                pattern = patterns.excluding(engine, declared.ignored, module_of(name))
            except ValueError:  # no pattern of this engine's
                continue
            if pattern:
                detail = f"{text}: {pattern!r}, matched as {engine} does"
                return Cause(kind="left_out", weight=name, detail=detail)
    return Cause(kind="left_out", weight=name, detail=f"{text}; no pattern excludes it")
