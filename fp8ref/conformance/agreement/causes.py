"""Why two sides hold different bytes for a weight."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fp8ref.checkpoints import evidence, layers, originals, patterns
from fp8ref.checkpoints.layers import module_of
from fp8ref.checkpoints.rule import WeightRule
from fp8ref.checkpoints.tensors import FLOATS, ArrayTensor
from fp8ref.checkpoints.weights import StoredWeight
from fp8ref.conformance.agreement.decisions import Example, compare_rules
from fp8ref.conformance.agreement.relations import relation
from fp8ref.conformance.agreement.sides import Part, Side
from fp8ref.shared import package_data
from fp8ref.sim.quantize import cast, scaling
from fp8ref.sim.quantize.scaling import Quantized

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
    """

    name: str
    sides: tuple[Side, Side]
    parts: tuple[Part | None, Part | None]
    answers: tuple[Quantized, Quantized]
    x: np.ndarray | None

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Codes and scales that differ, and all of them; all scales of other blocks differ."""
        a, b = self.answers
        same_blocks = a.scale_inv.size == b.scale_inv.size
        scales = np.ravel(a.scale_inv) != np.ravel(b.scale_inv) if same_blocks else np.ones(1)
        count = int(scales.sum()) if same_blocks else a.scale_inv.size
        return int(self.differing.sum()), count, a.codes.size, a.scale_inv.size

    @property
    def differing(self) -> np.ndarray:
        """Which codes differ, as bytes or, of other formats, as numbers."""
        a, b = self.answers
        if a.fmt == b.fmt:
            return a.codes != b.codes
        return cast.decode(a.codes, a.fmt) != cast.decode(b.codes, b.fmt)

    def causes(self, before: tuple[list[WeightRule], list[WeightRule]]) -> Iterator[Cause]:
        """Why they differ, the surest first; a note where layouts do.

        before   rules of earlier weights of either side, which are tried first; they are added.
        """
        a, b = self.answers
        codes, scales, *_ = self.counts
        factor, other = (q.tensor_scale_inv for q in self.answers)
        same_factors = np.array_equal(np.asarray(factor), np.asarray(other))
        layouts = [_layout(part) for part in self.parts if part is not None]
        if len(set(layouts)) > 1:
            yield Cause(kind="scale_layout", weight=self.name, detail=" and ".join(layouts))
        if not codes and not scales and same_factors and a.fmt == b.fmt:
            return
        # equal codes of two checkpoints tell what one did to the scales afterwards
        stored = all(part is not None for part in self.parts)
        related = relation(a.scale_inv, b.scale_inv, True) if stored and not codes else ("", "")
        if not related[0] and (ruled := list(self._by_rules(before))):
            yield from ruled
        else:
            kind, detail = self._by_bytes(bool(codes), bool(scales), same_factors)
            share = codes / a.codes.size
            yield Cause(kind=kind, weight=self.name, detail=detail, share=share)

    def _by_rules(self, before: tuple[list[WeightRule], ...]) -> Iterator[Cause]:
        """The decisions in which the rules of both sides differ; none if one has no rule."""
        if self.x is None:
            return
        rules = self._rules(0, before[0]), self._rules(1, before[1])
        if all(rules):
            for kind, detail, share, example in compare_rules(rules, self.x):
                yield Cause(
                    kind=kind, weight=self.name, detail=detail, share=share, example=example
                )

    def _rules(self, i: int, before: list[WeightRule]) -> tuple[WeightRule, ...]:
        """The rules that make a side's bytes exactly."""
        part, own = self.parts[i], self.sides[i].rule
        if own is not None:
            return (own,)
        weight = None if part is None else part.whole()
        if weight is None or self.x is None:
            return ()
        original = ArrayTensor.of(self.name, self.x, "F32")
        nearest = originals.match(weight, original, tuple(before))
        if nearest is None or nearest.place:
            return ()
        before[:] = nearest.rules
        return nearest.rules

    def _by_bytes(self, codes: bool, scales: bool, same_factors: bool) -> tuple[str, str]:
        """(cause, detail) of what the bytes say alone."""
        a, b = self.answers
        if a.fmt != b.fmt:
            return "format", f"{a.fmt} in A, {b.fmt} in B"
        if a.scale_inv.size != b.scale_inv.size:
            return "blocks", f"{a.granularity} in A, {b.granularity} in B"
        shared = [_is_shared(p, s) for p, s in zip(self.parts, self.sides, strict=True)]
        if shared[0] != shared[1]:
            return "one_scale", f"{'A' if shared[0] else 'B'} has one scale for several"
        if self._only_edges():
            return "padding", ""
        if scales:
            kind, detail = relation(a.scale_inv, b.scale_inv, not codes)
            if kind:
                return kind, detail
        if not same_factors:
            return "tensor_scale", " and ".join(str(q.tensor_scale_inv) for q in (a, b))
        for who, side, q in zip("AB", self.sides, self.answers, strict=True):
            if not side.rule and self._is_stale(q):
                return "stale_scale", f"{who}'s scales"
        for who, part in zip("AB", self.parts, strict=True):
            if part is not None and (kinds := _contradictions(part)):
                return "misread", f"{who}: {', '.join(kinds)}"
        if codes and scales:
            return "unexplained", ""
        return ("codes_alone" if codes else "scales_alone"), ""

    def _only_edges(self) -> bool:
        """Whether all differences are in blocks that the shape cuts."""
        a, _ = self.answers
        whole = [
            n if size is None else n - n % size
            for n, size in zip(a.codes.shape, a.blocks, strict=True)
        ]
        inside = self.differing[: whole[0], : whole[1]]
        cut = inside.size < a.codes.size and inside.size > 0
        return bool(cut and not inside.any() and self.differing.any())

    def _is_stale(self, q: Quantized) -> bool:
        """Whether codes fit the scales, and the scales do not fit the weight."""
        if self.x is None or self.x.shape != q.codes.shape:
            return False
        inv = scaling.spread(q.scale_inv, self.x.shape, q.blocks)
        amax = scaling.spread(scaling.block_amax(np.abs(self.x), q.blocks), self.x.shape, q.blocks)
        with np.errstate(all="ignore"):
            top = amax / inv
            fit = [cast.encode(n, q.fmt) for n in (self.x / inv, self.x * (1 / inv))]
        fits = any(np.mean(codes == q.codes) > 0.999 for codes in fit)
        # of a right scale the largest code is above a quarter of the largest number (MX ceil)
        return bool(fits and ((top < float(q.fmt.max) / 4) | (top > 2 * float(q.fmt.max))).any())


def _layout(part: Part) -> str:
    return part.weight.scale_layout + ", transposed" * part.weight.transposed


def _is_shared(part: Part | None, side: Side) -> bool:
    """Whether a weight has one scale with others that engines hold in the same tensor."""
    if part is None or (scale := _single(part.weight)) is None:
        return False
    if part.rows.indices(part.weight.shape[-2])[:2] != (0, part.weight.shape[-2]):
        return True
    parent, _, last = module_of(part.weight.name).rpartition(".")
    names = (members for members in layers.GROUPS.values() if last in members)
    siblings = {f"{parent}.{name}.weight" for members in names for name in members if name != last}
    return any(scale == _single(side.weights[name]) for name in siblings & side.weights.keys())


def _single(weight: StoredWeight) -> float | None:
    """The one scale of a matrix or above its blocks; None: it has several."""
    whole = weight.scales if weight.granularity == "tensorwise" else weight.tensor_factor
    return whole.item() if whole is not None and whole.size == 1 else None


def _contradictions(part: Part) -> list[str]:
    """The findings of an audit of a weight."""
    return [f.kind for f in evidence.gather(part.weight).findings if f.alarm]


def of_one_side(name: str, sides: tuple[Side, Side], parts: Sequence[Part | None]) -> Cause:
    """The cause of a weight that one side alone has as codes with scales."""
    for who, part in zip("AB", parts, strict=True):
        if part is not None and part.quantized() is None:
            detail = f"{who}: {', '.join(_contradictions(part)) or 'its scales do not fit'}"
            return Cause(kind="misread", weight=name, detail=detail)
    (who, missing), other = next(
        ((w, s), sides[1 - i])
        for i, (w, s) in enumerate(zip("AB", sides, strict=True))
        if parts[i] is None
    )
    plain = missing.tensors.get(name)
    if plain is None or plain.dtype not in FLOATS:
        return Cause(kind="absent", weight=name, detail=f"{who} lacks it")
    module = module_of(name)
    for declared in (missing.declared, other.declared):
        for engine in (declared.engine, *patterns.ENGINES):
            if pattern := patterns.excluding(engine, declared.ignored, module):
                detail = f"in {who} it is {plain.dtype}: {pattern!r}, matched as {engine} does"
                return Cause(kind="left_out", weight=name, detail=detail)
    return Cause(kind="left_out", weight=name, detail=f"in {who} it is {plain.dtype}; no pattern")
