"""Which rule makes a weight's codes and scales of its high-precision original, bit for bit."""

import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fp8ref.checkpoints import patterns, weights
from fp8ref.checkpoints.rule import SOURCES, WeightRule
from fp8ref.checkpoints.tensors import FLOATS, StoredTensor
from fp8ref.checkpoints.weights import StoredWeight
from fp8ref.formats import BFLOAT16
from fp8ref.policy import FP4_POLICIES, POLICIES, ScalePolicy
from fp8ref.spec import granularity as granularities

__all__ = ["Match", "match", "shared_amaxes"]

PIECE = 2**22
"""The elements of a weight that are quantized at once, and by which rules are chosen."""

# torchao 0.18, quantization/quant_primitives.py: _choose_scale_float8 divides in the weight's
# bfloat16, and _quantize_affine_float8 in float32. Of weights alone, so not among POLICIES.
_TORCHAO_BF16 = ScalePolicy(
    name="torchao_weight_bf16", ratio="amax/max", stored="scale_inv", scale_dtype=BFLOAT16
)


class Match(NamedTuple):
    """The rule that is nearest to a weight.

    rules    those that no row tells apart.
    counts   of codes and scales that differ, and of all codes and scales.
    place    the first block that differs; "": none does.
    first    the (matrix, rows) that have it.
    """

    rules: tuple[WeightRule, ...]
    counts: tuple[int, int, int, int]
    place: str = ""
    first: tuple[tuple[int, ...], slice] | None = None

    @property
    def names(self) -> str:
        """The rules by name, at most three."""
        late = {"stored": "", "unrounded": ", codes by the unrounded scale"}
        more = f" and {len(self.rules) - 3} more" if len(self.rules) > 3 else ""
        return ", ".join(rule.name + late[rule.codes_by] for rule in self.rules[:3]) + more


def match(
    weight: StoredWeight,
    original: StoredTensor | None,
    before: tuple[WeightRule, ...] = (),
    amax: float | None = None,
) -> Match | None:
    """The rule that makes a weight of its original, or the nearest; None: no original fits it.

    before    rules of other weights, which are tried first.
    amax      that of all weights [N, K] with the same scale of a tensor; None: the weight's own.
    Order:    every policy, source dtype and order of rounding on the first rows; then all rows by
              the first rule without a difference, else by that with the fewest.
    """
    if original is None or original.shape != weight.shape:
        return None
    if original.dtype not in FLOATS or not weight.granularity:
        return None
    pair = _Pair(dataclasses.replace(weight), original, amax)  # a copy, whose scales are let go
    begin = next(pair.weight.spans(PIECE))
    rules = [rule for rule in before if _fits(weight, rule) and not pair.count(rule, *begin)]
    earlier = _nearest(pair, rules)
    if earlier is not None and not earlier.place:
        return earlier
    counts = {rule: pair.count(rule, *begin) for rule in _candidates(weight, original)}
    fewest = min(counts.values())
    return _nearest(pair, [rule for rule, count in counts.items() if count == fewest])


def _nearest(pair: "_Pair", rules: Sequence[WeightRule]) -> Match | None:
    """The first of these rules that makes a weight, else that with the fewest differences."""
    best: Match | None = None
    while rules:
        outcome = pair.compare(rules[0])
        if best is None or sum(outcome.counts[:2]) < sum(best.counts[:2]):
            best = outcome._replace(rules=tuple(rules))
        if outcome.first is None:
            break
        # those that differ there too need no look at all rows
        rules = [rule for rule in rules[1:] if not pair.count(rule, *outcome.first)]
    return best


def shared_amaxes(
    scales: Mapping[str, float | None], originals: Mapping[str, StoredTensor]
) -> dict[str, float]:
    """{weight: the amax of all originals with its scale} of those that engines hold in one tensor,
    such as q, k and v, if they have one scale.

    scales    of the tensor, by weight; None: it has none.
    """
    groups: dict[tuple[str, float], list[str]] = defaultdict(list)
    for name, scale in scales.items():
        original = originals.get(name)
        matrix = original is not None and len(original.shape) == 2 and original.dtype in FLOATS
        if scale is not None and matrix:
            groups[patterns.fused_name(name.removesuffix(".weight")), scale].append(name)
    shared: dict[str, float] = {}
    for names in groups.values():
        if len(names) > 1:
            shared |= dict.fromkeys(names, float(np.max([_amax(originals[n]) for n in names])))
    return shared


def _amax(original: StoredTensor) -> np.floating:
    """The largest magnitude of a matrix; NaN counts as the largest."""
    n, k = original.shape
    step = max(PIECE // max(k, 1), 1)
    pieces = (original[i : i + step].astype(np.float32) for i in range(0, n, step))
    return np.max([np.abs(piece).max(initial=0) for piece in pieces], initial=0)


def _fits(weight: StoredWeight, rule: WeightRule) -> bool:
    return (rule.fmt, rule.granularity) == (weight.fmt, weight.granularity)


def _candidates(weight: StoredWeight, original: StoredTensor) -> Iterator[WeightRule]:
    more = {_TORCHAO_BF16.name: _TORCHAO_BF16}
    policies = FP4_POLICIES if weight.two_level else POLICIES | more
    # a narrow original is what it is in float32
    wide = original.dtype in ("F32", "F64")
    sources = list(SOURCES.values()) if wide else [SOURCES["float32"]]
    ragged = weight.shape[-1] % 16 != 0
    for policy, source in itertools.product(policies.values(), sources):
        blocks = () if policy.two_level is None else policy.two_level.granularities
        four_over_six = policy.two_level is not None and bool(policy.two_level.error)
        if blocks and (four_over_six or len(blocks) == 1) and weight.granularity not in blocks:
            continue
        if four_over_six and ragged:
            continue
        rule = WeightRule(
            fmt=weight.fmt, granularity=weight.granularity, policy=policy, source=source
        )
        yield rule
        if policy.power_of_two is not None and not policy.of_exponents:
            yield dataclasses.replace(rule, codes_by="unrounded")


@dataclass(frozen=True)
class _Pair:
    """A weight and its original."""

    weight: StoredWeight
    original: StoredTensor
    amax: float | None

    def rows(self, matrix: tuple[int, ...], rows: slice) -> np.ndarray:
        """Rows of the original, float32."""
        return self.original[(*matrix, rows)].astype(np.float32)

    @functools.cached_property
    def amaxes(self) -> np.ndarray:
        """The amax of each matrix, float32; NaN counts as the largest. 0 if no scale needs it."""
        amaxes = np.full(self.weight.shape[:-2], self.amax or 0, np.float32)
        needed = self.weight.granularity == "tensorwise" or self.weight.two_level
        if needed and self.amax is None:
            for matrix, rows in self.weight.spans(PIECE):
                piece = np.abs(self.rows(matrix, rows)).max(initial=0)
                amaxes[matrix] = np.maximum(amaxes[matrix], piece)
        return amaxes

    def differences(
        self, rule: WeightRule, matrix: tuple[int, ...], rows: slice
    ) -> tuple[np.ndarray, np.ndarray]:
        """Which codes and which scales of rows a rule makes in another way."""
        q, x = self.weight.quantized(matrix, rows), self.rows(matrix, rows)
        height = granularities.lengths(rule.granularity, 2, -1)[0] or 1
        blocks = -(-len(x) // height)
        # below the piece, blocks that have the amax of the matrix
        last = np.zeros((blocks * height + height - len(x), x.shape[1]), np.float32)
        last[-1, 0] = self.amaxes[matrix]
        with np.errstate(all="ignore"):
            own = rule.quantize(np.concatenate([x, last]))
        scales, stored = np.asarray(own.scale_inv), np.asarray(q.scale_inv)
        scales = scales[:blocks] if scales.ndim else scales
        assert self.weight.scale is not None
        dtype = FLOATS.get(self.weight.scale.dtype, np.dtype(np.float32))
        scales = scales.astype(dtype).astype(np.float32)
        differ = ~np.equal(scales, stored.reshape(scales.shape))
        if q.tensor_scale_inv is not None and own.tensor_scale_inv is not None:
            factor = np.asarray(own.tensor_scale_inv, np.float32)
            factor = factor[: len(x)] if factor.ndim else factor
            differ |= ~self._is_factor(q.tensor_scale_inv, factor)
        return own.codes[: len(x)] != q.codes, differ

    def _is_factor(self, stored: np.ndarray, factor: np.ndarray) -> np.ndarray:
        """Whether the scale of a tensor is a rule's; a reciprocal of it was rounded twice."""
        with np.errstate(all="ignore"):
            twice = np.float32(1) / (np.float32(1) / factor)
        return np.equal(stored, factor) | (self.weight.form.divides & np.equal(stored, twice))

    def count(self, rule: WeightRule, matrix: tuple[int, ...], rows: slice) -> int:
        """How many codes and scales of rows differ."""
        return sum(int(differs.sum()) for differs in self.differences(rule, matrix, rows))

    def compare(self, rule: WeightRule) -> Match:
        """The differences of a rule in all rows."""
        counts, place, first = np.zeros(4, np.int64), "", None
        for span in self.weight.spans(PIECE):
            codes, scales = self.differences(rule, *span)
            counts += (codes.sum(), scales.sum(), codes.size, scales.size)
            if first is None and (codes.any() or scales.any()):
                first, place = span, _place(rule, *span, codes, scales)
        codes_off, scales_off, codes_all, scales_all = counts.tolist()
        return Match((rule,), (codes_off, scales_off, codes_all, scales_all), place, first)


def _place(rule: WeightRule, matrix: tuple[int, ...], rows: slice, codes, scales) -> str:
    """The first block that differs, of its codes if they do."""
    lengths = granularities.lengths(rule.granularity, 2, -1)
    sizes = granularities.block_sizes(codes.shape, lengths)
    differs, sizes = (codes, sizes) if codes.any() else (np.atleast_2d(scales), (1, 1))
    row, column = (int(i) // size for i, size in zip(np.argwhere(differs)[0], sizes, strict=True))
    row += rows.start // (lengths[0] or rows.stop + 1)
    return f"{weights.expert(matrix)}block ({row}, {column})"
