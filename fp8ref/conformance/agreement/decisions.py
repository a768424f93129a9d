"""In which decisions two rules differ, and what each decision changes alone."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8ref.checkpoints.rule import WeightRule
from fp8ref.conformance.kit import explain
from fp8ref.conformance.kit.finding import bits_of
from fp8ref.policy import E8M0Rule, TwoLevel
from fp8ref.shared import package_data
from fp8ref.sim.quantize.scaling import Quantized

__all__ = ["Example", "compare_rules", "factors", "smallest"]

_FIELDS = package_data.tables(__file__, "decisions")
"""{rules or policies: {cause: their fields that decide it}}."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """The smallest tensor of which both sides make different codes or scales.

    shape   of the tensor that has ``numbers`` in its first row or column, and zeros.
    """

    numbers: tuple[float, ...]
    shape: tuple[int, int]
    codes: tuple[tuple[int, ...], tuple[int, ...]]
    scales: tuple[float, float]

    def lines(self) -> Iterator[str]:
        """The numbers, and what each side makes of them."""
        filled = " among zeros" if math.prod(self.shape) > 2 else ""
        numbers = ", ".join(map(_exact, self.numbers))
        yield f"smallest tensor, {list(self.shape)}: {numbers}{filled}"
        for who, codes, scale in zip("AB", self.codes, self.scales, strict=True):
            listed = ", ".join(f"0x{code:02X}" for code in codes)
            yield f"  {who}: codes {listed}; scale_inv {_exact(scale)}"


def _exact(x: float) -> str:
    return f"{explain.decimal(np.float32(x))} ({bits_of(x, 'float32')})"


def compare_rules(
    pairs: tuple[tuple[WeightRule, ...], tuple[WeightRule, ...]], x: np.ndarray
) -> Iterator[tuple[str, str, float, Example | None]]:
    """(cause, fields, share of codes, example) of each decision that changes codes or scales.

    pairs   rules of either side that no weight tells apart: the two most alike are compared.
    Order:  a decision of b's rule is put into a's, else a's into b's, if no rule has it so.
    """
    a, b = min(
        ((a, b) for a in pairs[0] for b in pairs[1]),
        key=lambda rules: sum(len(fields) for fields in _differing(*rules).values()),
    )
    differing = _differing(a, b)
    effects = [
        (cause, fields, max(_alone(a, b, fields, x), key=lambda effect: effect[0], default=None))
        for cause, fields in differing.items()
    ]
    if not any(effect for *_, effect in effects) and (share := _share(a, b, x)) is not None:
        together = [field for fields in differing.values() for field in fields]
        effects = [(next(iter(differing), "unexplained"), together, (share, (a, b)))]
    for cause, fields, effect in effects:
        if effect is not None:
            text = "; ".join(_words(f, _value(a, f), _value(b, f)) for f in fields)
            yield cause, text, effect[0], smallest(*effect[1], x)


def _alone(
    a: WeightRule, b: WeightRule, fields: list[str], x: np.ndarray
) -> Iterator[tuple[float, tuple[WeightRule, WeightRule]]]:
    """(share of codes, the rules of A and B) where decisions of one rule are put into the other and
    change something; none where no rule has them together."""
    for forms in ((a, _changed(a, b, fields)), (_changed(b, a, fields), b)):
        if forms[0] is not None and forms[1] is not None:
            share = _share(forms[0], forms[1], x)
            if share is not None:
                yield share, (forms[0], forms[1])


def _differing(a: WeightRule, b: WeightRule) -> dict[str, list[str]]:
    """{cause: the fields that differ}."""
    tables = ((_FIELDS["rules"], a, b), (_FIELDS["policies"], a.policy, b.policy))
    differing = {
        cause: [f for f in fields if getattr(left, f) != getattr(right, f)]
        for table, left, right in tables
        for cause, fields in table.items()
    }
    if {a.policy.ratio, b.policy.ratio} & {"exponents", "exponents_up", "exponents_even"}:
        moved = [f for f in differing["division"] if f == "ratio"]
        differing["power_of_two"] += moved
        differing["division"] = [f for f in differing["division"] if f not in moved]
    if differing["rounded_after"]:
        # the unrounded scale is that of a policy that rounds
        differing["rounded_after"] += differing.pop("power_of_two")
    return {cause: fields for cause, fields in differing.items() if fields}


def _changed(base: WeightRule, other: WeightRule, fields: list[str]) -> WeightRule | None:
    """A rule with another's decisions; None: no rule has them together."""
    own = [f for f in fields if hasattr(other, f)]
    theirs = [f for f in fields if f not in own]
    try:
        policy = dataclasses.replace(base.policy, **{f: getattr(other.policy, f) for f in theirs})
        changed = dataclasses.replace(base, policy=policy, **{f: getattr(other, f) for f in own})
        changed.quantize(np.ones((16, 16), np.float32))
        return changed
    except ValueError:
        return None


def _value(rule: WeightRule, field: str) -> Any:
    return getattr(rule, field) if hasattr(rule, field) else getattr(rule.policy, field)


def _words(field: str, a: Any, b: Any) -> str:
    """A decision of both sides; of decisions with parts, the parts that differ."""
    if isinstance(a, E8M0Rule | TwoLevel) and isinstance(b, type(a)):
        parts = [f.name for f in dataclasses.fields(a) if getattr(a, f.name) != getattr(b, f.name)]
        return "; ".join(_words(part, getattr(a, part), getattr(b, part)) for part in parts)
    words = ("none" if v is None else "set" if isinstance(v, E8M0Rule) else str(v) for v in (a, b))
    return "{} is {} in A, {} in B".format(field, *words)


def _share(a: WeightRule, b: WeightRule, x: np.ndarray) -> float | None:
    """The share of codes that differ; None: neither codes nor scales do."""
    with np.errstate(all="ignore"):
        one, other = a.quantize(x), b.quantize(x)
    share = float(np.mean(one.codes != other.codes))
    same = np.array_equal(factors(one), factors(other), equal_nan=True)
    return None if not share and same else share


def factors(q: Quantized) -> np.ndarray:
    """The factors out of codes, of both levels."""
    return q.scale_inv * np.float32(1 if q.tensor_scale_inv is None else q.tensor_scale_inv)


def smallest(a: WeightRule, b: WeightRule, x: np.ndarray) -> Example | None:
    """The smallest numbers of x of which two rules make different codes or scales: a single one,
    one beside the amax, or both in a block of zeros; None: only larger ones do."""
    with np.errstate(all="ignore"):
        one, other = a.quantize(x), b.quantize(x)
    differ = np.argwhere(one.codes != other.codes)
    place = differ[0] if len(differ) else np.unravel_index(np.abs(x).argmax(), x.shape)
    row, column = map(int, place)
    number, amax = x[row, column], _amax(one, x, (row, column))
    for numbers, shape, second in (
        ((number,), (1, 1), (0, 0)),
        ((amax, number), (1, 2), (0, 1)),
        ((amax, number), (2, 1), (1, 0)),
        ((amax, number), (1, 128), (0, 1)),
        ((amax, number), (128, 128), (1, 0)),
    ):
        tensor, places = np.zeros(shape, np.float32), ([0, second[0]], [0, second[1]])
        tensor[places] = numbers
        try:
            with np.errstate(all="ignore"):
                answers = [rule.quantize(tensor) for rule in (a, b)]
        except ValueError:  # four over six needs whole blocks
            continue
        codes = [tuple(map(int, q.codes[places][: len(numbers)])) for q in answers]
        scales = [float(np.ravel(factors(q))[0]) for q in answers]
        if codes[0] != codes[1] or scales[0] != scales[1]:
            return Example(
                numbers=tuple(map(float, numbers)),
                shape=shape,
                codes=(codes[0], codes[1]),
                scales=(scales[0], scales[1]),
            )
    return None


def _amax(q: Quantized, x: np.ndarray, place: tuple[int, int]) -> np.float32:
    """The largest number, with its sign, of the block of an element."""
    sizes = (n if size is None else size for n, size in zip(x.shape, q.blocks, strict=True))
    firsts = ((i - i % size, size) for i, size in zip(place, sizes, strict=True))
    block = x[tuple(slice(first, first + size) for first, size in firsts)]
    return block.flat[np.abs(block).argmax()]
