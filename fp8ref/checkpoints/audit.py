"""Audit a checkpoint with quantized weights: what its bytes say, what its config says, and where
they contradict each other.

Every finding is a contradiction; what a right checkpoint may have too is a note. Memory is bounded:
of a weight one piece of codes is held, and its scales.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8ref.checkpoints import declared as configs
from fp8ref.checkpoints import evidence as evidences
from fp8ref.checkpoints import layers, weights
from fp8ref.checkpoints.declared import Declared
from fp8ref.checkpoints.evidence import Evidence
from fp8ref.checkpoints.findings import KINDS, Finding
from fp8ref.checkpoints.originals import Match, match
from fp8ref.checkpoints.rule import WeightRule
from fp8ref.checkpoints.tensors import FLOATS, StoredTensor, stored
from fp8ref.checkpoints.weights import StoredWeight
from fp8ref.shared import console as consoles
from fp8ref.shared.errors import require
from fp8ref.shared.result import Result

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Audit", "Row", "audit"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """What the bytes of a weight are consistent with.

    rule        how scales follow from codes; "": from none, or there is nothing but zeros.
    saturated, zeroed
                shares of the codes of the largest magnitude, and of 0.
    made_by     the rules that make these bytes of the original; "": none does; None: not asked.
    """

    tensor: str
    form: str
    fmt: str
    granularity: str
    scale_dtype: str
    scale_layout: str
    rule: str
    elements: int
    saturated: float
    zeroed: float
    made_by: str | None = None

    @property
    def group(self) -> tuple[str, ...]:
        """What weights have in common in a table."""
        layout = "" if self.scale_layout == "row_major" else f", {self.scale_layout}"
        return (
            self.form,
            self.fmt,
            self.granularity or "?",
            self.scale_dtype + layout,
            self.made_by or self.rule or "none",
        )


@dataclass(frozen=True, kw_only=True)
class Audit(Result):
    """The result of ``audit``: a row for each weight, findings, and what the config says."""

    path: str
    declared: Declared
    rows: tuple[Row, ...]
    findings: tuple[Finding, ...]
    bytes_read: int

    @property
    def ok(self) -> bool:
        """Whether nothing contradicts itself; notes are no findings."""
        return not any(finding.alarm for finding in self.findings)

    def sentence(self) -> str:
        """The result in a sentence."""
        alarms = sum(finding.alarm for finding in self.findings)
        notes = len(self.findings) - alarms
        kinds = {f.kind for f in self.findings if f.alarm}
        verdict = f"{alarms:,} findings of {len(kinds)} kinds" if alarms else "nothing wrong"
        return (
            f"{verdict} in {len(self.rows):,} quantized weights, {self.bytes_read / 1e9:.3g} GB; "
            f"{notes:,} notes"
        )

    def by_kind(self) -> dict[str, list[Finding]]:
        """{kind: its findings}, alarms first, in the order of ``KINDS``."""
        kinds = sorted(KINDS, key=lambda kind: not KINDS[kind].alarm)
        groups = {kind: [f for f in self.findings if f.kind == kind] for kind in kinds}
        return {kind: members for kind, members in groups.items() if members}

    def groups(self) -> dict[tuple[str, ...], list[Row]]:
        """{what weights have in common: their rows}, the largest group first."""
        groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
        for row in self.rows:
            groups[row.group].append(row)
        return dict(sorted(groups.items(), key=lambda item: -len(item[1])))

    def to_dict(self) -> dict[str, Any]:
        """What --json keeps."""
        return {
            "path": self.path,
            "ok": self.ok,
            "declared": dataclasses.asdict(self.declared),
            "findings": [finding.to_dict() for finding in self.findings],
            "weights": [dataclasses.asdict(row) for row in self.rows],
        }

    def render(self, console: "Console") -> None:
        """Print it for a person."""
        method = self.declared.method or "no quantization_config"
        table = consoles.table(
            *("names as", "codes", "blocks", "scales", "consistent with"),
            *(">weights", ">largest code", ">zeros"),
            title=f"{self.path}: {method}",
        )
        for group, rows in self.groups().items():
            total = max(sum(row.elements for row in rows), 1)
            shares = (
                sum(getattr(row, key) * row.elements for row in rows) / total
                for key in ("saturated", "zeroed")
            )
            table.add_row(*group, f"{len(rows):,}", *(f"{100 * s:.3g} %" for s in shares))
        console.print(table)
        for kind, members in self.by_kind().items():
            first = members[0]
            more = f" (and {len(members) - 1:,} more)" if len(members) > 1 else ""
            label = "finding" if KINDS[kind].alarm else "note"
            said = first.to_dict()
            console.print(f"{label} {kind}: {first.tensor or self.path}{more}")
            console.print(f"  {first.what}.")
            console.print(f"  cause: {said['cause']}")
            if said["remedy"]:
                console.print(f"  remedy: {said['remedy']}")
        console.print(self.sentence())


def audit(
    path: Path | str,
    *,
    originals: Path | str | None = None,
    advance: Callable[[int], None] | None = None,
) -> Audit:
    """What the quantized weights of a checkpoint are consistent with, and what contradicts it.

    path       a directory with safetensors and config.json, or one file of safetensors.
    originals  the checkpoint in high precision that was quantized: codes and scales are compared
               with those of every rule, bit for bit.
    advance    called with numbers of bytes as they are read.
    Raises:    ValueError: no safetensors, or damaged ones; a config that is no JSON. OSError: it
               cannot be read.
    """
    path = Path(path)
    lines: list[str] = []
    tensors = stored(path, lines.append)
    findings = [Finding("index", line.split()[0], line) for line in lines]
    declared = configs.read(path)
    quantized = {k: w for k, w in weights.find(tensors).items() if len(w.shape) > 1}
    require(
        bool(tensors), f"{path} has no tensors. Name the directory of a checkpoint of safetensors."
    )
    held: dict[str, Evidence] = {}
    for name, weight in quantized.items():
        if _is_integer(weight):
            continue
        held[name] = evidences.gather(weight)
        if advance is not None:
            advance(weight.codes.nbytes)
    for one in held.values():
        findings += _not_audited(declared, one)
        if declared.method:
            findings += layers.against_config(declared, one)
    findings += _between(declared, tensors, quantized, held)
    rules: dict[str, str] = {}
    if originals is not None:
        sources = stored(Path(originals), lambda line: None)
        for name, nearest in _matched(quantized, sources):
            rules[name] = nearest.names if nearest and not nearest.place else ""
            findings += _match_findings(name, nearest)
    return Audit(
        path=str(path),
        declared=declared,
        rows=tuple(_row(one, rules.get(name)) for name, one in held.items()),
        findings=tuple(findings),
        bytes_read=sum(one.weight.codes.nbytes for one in held.values()),
    )


def _is_integer(weight: StoredWeight) -> bool:
    """Whether bytes with a scale are integers of 8 bits, as W8A8 stores them, and no FP4."""
    coarse = weight.granularity in ("tensorwise", "rowwise", "")
    return weight.fmt.bits == 4 and weight.codes.dtype == "I8" and coarse


def _not_audited(declared: Declared, one: Evidence) -> Iterator[Finding]:
    """The findings of a weight; of blocks that the config says and fp8ref has not, a note."""
    scheme = declared.scheme(layers.module_of(one.weight.name))
    for finding in one.findings:
        size = scheme.granularity if scheme is not None else ""
        if finding.kind == "scale_shape" and layers.blocks_fit(size, one.weight):
            text = f"scales are those of blocks of {size}, as the config says"
            yield Finding("not_audited", finding.tensor, text)
        else:
            yield finding


def _between(
    declared: Declared,
    tensors: Mapping[str, StoredTensor],
    quantized: Mapping[str, StoredWeight],
    held: Mapping[str, Evidence],
) -> Iterator[Finding]:
    """Findings of several weights, or of none."""
    if held and not declared.method:
        text = "weights are quantized, and config.json has no quantization_config"
        yield Finding("config_missing", "", text)
    if declared.method and not quantized:
        text = f"{declared.source} says {declared.method}, and no weight is quantized"
        yield Finding("config_alone", "", text)
    else:
        yield from layers.precision(declared, tensors, quantized)
    yield from layers.alone(tensors, quantized)
    yield from layers.fused(tensors, held)
    yield from layers.shared_scales({k: e for k, e in held.items() if not e.mislabelled})


def _matched(
    quantized: Mapping[str, StoredWeight], sources: Mapping[str, StoredTensor]
) -> Iterator[tuple[str, Match | None]]:
    """(weight, the rule that is nearest); None: it has no original."""
    before: tuple[WeightRule, ...] = ()
    for name, weight in quantized.items():
        original = sources.get(name)
        same = original is not None and original.shape == weight.shape
        if not weight.granularity or original is None or not same or original.dtype not in FLOATS:
            yield name, None
            continue
        # a copy keeps its scales in memory, and is let go
        nearest = match(dataclasses.replace(weight), original, before)
        before = nearest.rules
        yield name, nearest


def _match_findings(name: str, nearest: Match | None) -> Iterator[Finding]:
    if nearest is None:
        text = "no tensor of this name, shape and a dtype of high precision is among the originals"
        yield Finding("original_missing", name, text)
    elif nearest.place:
        codes, scales, elements, blocks = nearest.counts
        text = (
            f"no rule makes these bytes of the original; the nearest, {nearest.names}, differs in "
            f"{codes:,} of {elements:,} codes and {scales:,} of {blocks:,} scales, first in "
            f"{nearest.place}"
        )
        place = {"block": nearest.place, "rule": nearest.names}
        yield Finding("original_differs", name, text, place)


def _row(one: Evidence, made_by: str | None) -> Row:
    weight = one.weight
    rule = one.rule()
    codes = weight.form.name
    layout = weight.scale_layout
    return Row(
        tensor=weight.name,
        form=codes,
        fmt=weight.fmt.name,
        granularity=weight.granularity,
        scale_dtype="none" if weight.scale is None else weight.scale.dtype,
        scale_layout=f"{layout}, transposed" if weight.transposed else layout,
        rule="" if rule is None else rule[0],
        elements=one.elements,
        saturated=one.share(float(weight.fmt.max)),
        zeroed=one.share(0.0),
        made_by=made_by,
    )
