"""What the bytes of one weight are consistent with, and where they contradict themselves.

A rule that scales by amax / max leaves in each block a code of the largest magnitude; one that
rounds the scale up to a power of two a code above half of it; MX's floor one of at least 2^emax.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass, field

import numpy as np

from fp8ref.checkpoints import arrangement, weights
from fp8ref.checkpoints.blocks import Section, magnitudes, numbers, sections
from fp8ref.checkpoints.findings import Finding
from fp8ref.checkpoints.tensors import FLOATS
from fp8ref.checkpoints.weights import StoredWeight
from fp8ref.formats import Format
from fp8ref.policy import POLICIES
from fp8ref.sim.quantize import scaling

__all__ = ["Evidence", "gather"]

PLAUSIBLE = 1e-8, 100.0
"""The mean magnitude of weights, as numbers, between these two."""

NEAR = 0.75
"""Codes below this share of the smallest that a rule leaves contradict it."""

CLIPPED = 1e-9
"""The probability of right codes below which something is a contradiction."""


@dataclass(kw_only=True)
class Evidence:
    """What was counted in the sections of a weight.

    tops       {largest code of a block: (number of blocks, the first, its scale)}; blocks of zeros
               and those at a policy's least scale are left out.
    logs       sums over blocks of the logarithms of the scale and of the mean code, and their
               number.
    counts     [256] how often each code occurs.
    uneven     the number of scales that are no powers of two.
    largest_scale
               of two levels: the largest scale of a block.
    """

    weight: StoredWeight
    blocks: int = 0
    uneven: int = 0
    first_uneven: dict = field(default_factory=dict)
    tops: dict[float, tuple[int, str, float]] = field(default_factory=dict)
    logs: np.ndarray = field(default_factory=lambda: np.zeros(3))
    counts: np.ndarray = field(default_factory=lambda: np.zeros(256, np.int64))
    findings: list[Finding] = field(default_factory=list)
    largest_scale: float = 0.0

    @property
    def mislabelled(self) -> bool:
        """Whether codes or scales are read as what they are not: other checks mean nothing."""
        kinds = ("scale_inverse", "scale_exponents", "scale_packed")
        return any(f.kind in kinds or (f.kind == "nan_codes" and f.cause) for f in self.findings)

    @property
    def tensor_factor(self) -> float | None:
        """The factor of the tensor above the blocks; None: one level, or one for each expert."""
        factor = self.weight.tensor_factor if self.weight.granularity else None
        return factor.item() if factor is not None and factor.size == 1 else None

    @property
    def single_scale(self) -> float | None:
        """The one scale of a matrix; None: it has several."""
        if self.weight.granularity != "tensorwise" or len(self.weight.shape) > 2:
            return None
        return next((scale for *_, scale in self.tops.values()), None)

    @property
    def powers_of_two(self) -> bool:
        """Whether all scales of one level are."""
        return bool(self.tops) and self.uneven == 0 and not self.weight.two_level

    @property
    def elements(self) -> int:
        """The codes that were counted."""
        return int(self.counts.sum())

    def occurrences(self, number: float) -> int:
        """How many codes are of this magnitude."""
        return int(self.counts[magnitudes(self.weight.fmt) == number].sum())

    def within(self, low: float, high: float) -> int:
        """How many blocks have a largest code in a range."""
        return sum(count for top, (count, *_) in self.tops.items() if low <= top <= high)

    def rule(self) -> tuple[str, float, float] | None:
        """The rule of which all blocks are, else that of most, with the smallest and the largest
        code that it leaves as a block's largest; None: no block has one.

        Of those that fit the narrowest is meant; of powers of two rounding up, unless hardly any
        block could miss the lower half.
        """
        fmt = self.weight.fmt
        largest, floor = float(fmt.max), 2.0 ** math.floor(math.log2(fmt.max))
        # vLLM takes 224 for the largest of e4m3fnuz
        least = 224.0 if fmt.name == "e4m3fnuz" else largest
        rules = [("amax / max", least, largest)]
        if self.weight.two_level:
            rules = [("amax / max in two levels", 6.0, 6.0), ("four over six", 4.0, 6.0)]
        elif self.powers_of_two:
            rules = [
                ("MX floor", floor, largest),
                ("rounded up to a power of two", largest / 2, largest),
                ("MX ceil", floor / 2, floor),
            ][self.within(0, largest) < 32 :]
        blocks = {rule: self.within(*rule[1:]) for rule in rules}
        return max(blocks, key=blocks.__getitem__) if self.tops else None

    def find(self, kind: str, what: str, cause: str = "", **evidence) -> None:
        """Add a finding, of which a weight has one of each kind."""
        if all(other.kind != kind for other in self.findings):
            self.findings.append(Finding(kind, self.weight.name, what, evidence, cause))


def gather(weight: StoredWeight) -> Evidence:
    """The evidence of a weight, read piece by piece, with its findings."""
    # a copy keeps its scales in memory, and is let go at the end
    evidence = Evidence(weight=dataclasses.replace(weight))
    if weight.scale is None:
        text = f"codes {weight.fmt} {list(weight.shape)} have no scale"
        evidence.find("codes_alone", text)
    elif not weight.granularity:
        _misfit(evidence)
    for section in sections(evidence.weight):
        evidence.counts += section.counts
        evidence.blocks += section.largest.size
        _no_numbers(evidence, section)
        if section.scales is not None:
            _add(evidence, section, section.scales)
    if weight.granularity:
        if not evidence.mislabelled and not _misread(evidence):
            _tops(evidence)
        _clipped(evidence)
    evidence.weight = weight
    return evidence


def _misfit(evidence: Evidence) -> None:
    """Find scales whose shape does not fit, which may be packed."""
    weight = evidence.weight
    assert weight.scale is not None
    text = f"scales {list(weight.scale.shape)} do not fit codes {list(weight.shape)}"
    codes = np.ascontiguousarray(weight.scale[...]).view(np.uint8)
    usual = (codes > 63) & (codes < 160)
    # the last columns may be filled with zeros
    packed = (usual | (codes == 0)).all() and usual.sum() > usual.size / 2
    if weight.scale.dtype == "F32" and packed:
        text = f"{text}; their bytes are e8m0 codes of usual sizes"
        evidence.find("scale_packed", text, bytes=codes.ravel()[:4].tolist())
    else:
        evidence.find("scale_shape", text)


def _no_numbers(evidence: Evidence, section: Section) -> None:
    """Find codes that are NaN or infinite."""
    fmt, counts, total = evidence.weight.fmt, section.counts, int(section.counts.sum())
    if section.nan_at is not None:
        count = int(counts[np.isnan(magnitudes(fmt))].sum())
        place = f"{weights.expert(section.matrix)}element {section.nan_at}"
        cause = _other_zeros(fmt, counts, section.largest.size)
        text = f"{count:,} of {total:,} codes are NaN, the first {place}"
        evidence.find("nan_codes", text, cause, element=place, count=count)
    if infinite := int(counts[np.isinf(magnitudes(fmt))].sum()):
        text = f"{infinite:,} of {total:,} codes are infinite"
        evidence.find("infinite_codes", text, count=infinite)


def _other_zeros(fmt: Format, counts: np.ndarray, blocks: int) -> str:
    """The cause of NaN codes that are numbers of the other e4m3."""
    if fmt.name == "e4m3fnuz" and counts[0x80] > counts[0x00] / 4 > 0:
        return "bytes of e4m3fn are labelled e4m3fnuz: its -0 is their NaN"
    nans = counts[[0x7F, 0xFF]].sum()
    if fmt.name == "e4m3fn" and nans >= blocks and not counts[0x80]:
        return "bytes of e4m3fnuz are labelled e4m3fn: they have no -0, and their largest is NaN"
    return ""


def _add(evidence: Evidence, section: Section, scales: np.ndarray) -> None:
    """Count a section's blocks, and find scales that are no positive numbers."""
    weight, coded = evidence.weight, section.largest > 0
    for kind, is_bad, what in (
        ("nan_scale", np.isnan(scales), "NaN"),
        ("infinite_scale", np.isinf(scales), "infinite"),
        ("negative_scale", scales < 0, "negative"),
        ("zero_scale", (scales == 0) & coded, "0, and the codes are not"),
    ):
        if is_bad.any():
            place, scale, top = section.at(np.argwhere(is_bad)[0])
            text = f"the scale of {place} is {what} ({int(is_bad.sum()):,} of {scales.size:,})"
            evidence.find(kind, text, block=place, scale=repr(scale), code=top)
    usable = coded & np.isfinite(scales) & (scales > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(scales), np.log(section.mean)
    evidence.logs += [*(float(x[usable].sum()) for x in logs), int(usable.sum())]
    if order := arrangement.identify_order(*logs, usable):
        name, strengths = order
        whose = "".join(f" of expert {i}" for i in section.matrix)
        kind, text = "unrelated", "do not depend on the codes of their blocks"
        if name:
            kind, text = "arrangement", f"fit the codes only if {name}"
        evidence.find(kind, f"scales{whose} {text}", strengths=strengths)
    largest_scale = float(np.nanmax(scales, initial=0))
    evidence.largest_scale = max(evidence.largest_scale, largest_scale)
    usable &= ~((section.largest < float(weight.fmt.max)) & _at_a_floor(scales, weight))
    uneven = usable & (np.ascontiguousarray(scales).view(np.uint32) << 9 != 0)
    evidence.uneven += int(uneven.sum())
    if uneven.any() and not evidence.first_uneven:
        place, scale, _ = section.at(np.argwhere(uneven)[0])
        evidence.first_uneven = {"block": place, "scale": scale}
    tops = section.largest[usable]
    _, firsts, counts = np.unique(tops, return_index=True, return_counts=True)
    for block, count in zip(np.argwhere(usable)[firsts], counts, strict=True):
        place, scale, top = section.at(block)
        before, place, scale = evidence.tops.get(top, (0, place, scale))
        evidence.tops[top] = before + int(count), place, scale


def _at_a_floor(scales: np.ndarray, weight: StoredWeight) -> np.ndarray:
    """Whether a scale is the least of a policy: the amax of the block may be smaller."""
    if weight.two_level:
        return scales <= 2.0**-6  # below e4m3's normal numbers a scale is far from amax / max
    at = np.zeros(scales.shape, bool)
    for floor in _floors(weight.fmt):  # one after another: scales may be many
        at |= np.abs(scales - floor) <= floor * np.float32(2.0**-8)
    return at


@functools.lru_cache(maxsize=8)
def _floors(fmt: Format) -> np.ndarray:
    """The scales of a zero amax by the policies that have a least one."""
    zero = np.zeros(1, np.float32)
    with np.errstate(all="ignore"):
        scales = {
            float(scaling.scales_from_amax(zero, fmt, policy).scale_inv[0])
            for policy in POLICIES.values()
            if fmt.bits == 8
        }
    floors = sorted(s for s in scales | {2.0**-127, 2.0**-126} if 0 < s < 1e-5)
    return np.array(floors, np.float32)


def _misread(evidence: Evidence) -> bool:
    """Find scales that are other numbers than they should be."""
    weight, (log_scale, log_mean, count) = evidence.weight, evidence.logs
    if not count:
        return False
    assert weight.scale is not None
    levels = weight.tensor_factor
    factor = 1.0 if levels is None else float(np.median(levels))
    if not 0 < factor < math.inf:
        kinds = {0.0: "zero_scale", math.inf: "infinite_scale"}
        kind = kinds.get(factor, "negative_scale" if factor < 0 else "nan_scale")
        text = f"numbers are multiplied by {factor!r}, the scale of the tensor"
        evidence.find(kind, text, scale=repr(factor))
        return True
    scale, mean = math.exp(log_scale / count), math.exp(log_mean / count)
    size = mean * scale * factor
    if size <= PLAUSIBLE[1]:
        return False
    first = next(iter(evidence.tops.values()), (0, "", scale))
    array = np.unique(weight.scales[np.isfinite(weight.scales)])
    whole = (array == np.rint(array)).all() and array.max() < 255
    exponents = mean * 2.0 ** (min(float(np.median(array)), 255) - 127)
    plausible = PLAUSIBLE[0] < exponents < PLAUSIBLE[1]
    if weight.scale.dtype in FLOATS and whole and plausible:
        text = (
            f"scales are whole numbers from {array.min():g} to {array.max():g}: weights would "
            f"be of size {size:.3g}, and of {exponents:.3g} if they are exponents"
        )
        evidence.find("scale_exponents", text, block=first[1], scale=first[2])
        return True
    inverse = mean / scale if levels is None else mean * scale / factor
    if PLAUSIBLE[0] < inverse < PLAUSIBLE[1]:
        which = "scales" if levels is None else "the tensor's scale"
        text = (
            f"weights would be of size {size:.3g}; with the reciprocal of {which} "
            f"they are of {inverse:.3g}"
        )
        evidence.find("scale_inverse", text, block=first[1], scale=first[2] * factor)
        return True
    return False


def _tops(evidence: Evidence) -> None:
    """Find blocks whose largest code contradicts the rule of the others."""
    fmt, rule = evidence.weight.fmt, evidence.rule()
    if rule is None:
        return
    name, low, high = rule
    total, largest = evidence.within(0, math.inf), float(fmt.max)
    some = 0 < evidence.uneven <= total / 10
    if some and not evidence.weight.two_level:
        text = f"{evidence.uneven:,} of {total:,} scales are no powers of two; the others are"
        evidence.find("not_power_of_two", text, **evidence.first_uneven)
        return
    if set(evidence.tops) == {largest} and evidence.powers_of_two and fmt.bits == 8:
        octave = 2.0 ** (math.floor(math.log2(largest)) + 1)
        likely = math.log2(octave / ((largest + numbers(fmt)[-2]) / 2))
        if total * math.log(likely) < math.log(CLIPPED):
            _, place, scale = evidence.tops[largest]
            text = (
                f"all {total:,} blocks have the code {largest:g}, and scales that are powers of "
                "two: no rule that rounds the scale first leaves that"
            )
            evidence.find("rounded_after", text, block=place, code=largest, scale=scale)
            return
    if evidence.weight.granularity == "tensorwise" and math.prod(evidence.weight.shape[:-2]) == 1:
        return  # siblings may share the scale: ``layers`` compares them
    count = total - evidence.within(low, high)
    if not count:
        return
    top = min(top for top in evidence.tops if not low <= top <= high)
    _, place, scale = evidence.tops[top]
    reached = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    text = (
        f"{count:,} of {total:,} blocks have a largest code outside {reached}, which {name} "
        f"leaves; {place} has {top:g}: its scale {scale:.6g} is {high / top:.3g} times "
        "that of its codes"
    )
    kind = "code_below" if top < NEAR * low else "code_near"
    evidence.find(kind, text, block=place, code=top, scale=scale)


def _clipped(evidence: Evidence) -> None:
    """Find more codes of the largest magnitude than a tail of weights has."""
    fmt, rule = evidence.weight.fmt, evidence.rule()
    before, top = map(float, numbers(fmt)[-2:])
    rest, largest = evidence.occurrences(before), evidence.occurrences(top)
    # an octave above the largest code is clipped to it by MX's floor
    ratio = 4.0 if rule is not None and rule[0] == "MX floor" else 1.5
    allowed = evidence.blocks + ratio * rest + 8 * math.sqrt(largest)
    many = int((evidence.counts > 0).sum()) > 16 or fmt.bits == 4
    if largest > allowed and many and largest > 0.002 * evidence.elements:
        text = (
            f"{largest:,} codes ({100 * largest / evidence.elements:.2g} %) are {top:g}, and "
            f"{rest:,} are {before:g}: the tail was cut"
        )
        evidence.find("clipped" if fmt.bits == 8 else "clipped_4_bits", text, code=top)
