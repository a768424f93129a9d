"""Audit a checkpoint with quantized weights: what its bytes say, what its config says, and where
they contradict each other.

Every finding is a contradiction; what a right checkpoint may have too is a note. Memory is bounded:
of a weight one piece of codes is held, and its scales.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8ref.checkpoints import declared as configs
from fp8ref.checkpoints import evidence as evidences
from fp8ref.checkpoints import layers, weights
from fp8ref.checkpoints.declared import Declared
from fp8ref.checkpoints.evidence import Evidence
from fp8ref.checkpoints.findings import KINDS, Finding
from fp8ref.checkpoints.originals import Match, match, shared_amaxes
from fp8ref.checkpoints.rule import WeightRule
from fp8ref.checkpoints.tensors import StoredTensor, stored
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
            first = members[0].to_dict()
            more = f" (and {len(members) - 1:,} more)" if len(members) > 1 else ""
            label = "finding" if first["alarm"] else "note"
            console.print(f"{label} {kind}: {first['tensor'] or self.path}{more}")
            console.print(f"  {first['what']}.")
            for key in ("cause", "remedy"):
                if first[key]:
                    console.print(f"  {key}: {first[key]}")
        console.print(self.sentence())


def audit(
    path: Path | str, *, originals: Path | str | None = None, progress: bool = False
) -> Audit:
    """What the quantized weights of a checkpoint are consistent with, and what contradicts it.

    path       a directory with safetensors and config.json, or one file of safetensors.
    originals  the checkpoint in high precision that was quantized: codes and scales are compared
               with those of every rule, bit for bit.
    progress   show a bar on standard error: codes are counted when they are read, and again when
               they are compared.
    Raises:    ValueError: no safetensors, or damaged ones; a config that is no JSON, or has a
               pattern that ``patterns.matches`` refuses. OSError: it cannot be read.
    """
    path = Path(path)
    missing: list[str] = []
    tensors = stored(path, missing.append)
    require(
        bool(tensors), f"{path} has no tensors. Name the directory of a checkpoint of safetensors."
    )
    sources = None if originals is None else stored(Path(originals), lambda line: None)
    declared, quantized = configs.read(path), weights.find(tensors)
    audited = {name: weight for name, weight in quantized.items() if not weight.is_integer}
    held: dict[str, Evidence] = {}
    rules: dict[str, str] = {}
    findings = [Finding("index", line.split()[0], line) for line in missing]
    size = sum(weight.codes.nbytes for weight in audited.values())
    total = size if sources is None else 2 * size
    with consoles.bar("audit, bytes", total, shown=progress) as advance:
        for name, weight in audited.items():
            held[name] = evidences.gather(weight)
            findings += layers.against_config(declared, held[name])
            advance(by=weight.codes.nbytes)
        findings += _between(declared, tensors, quantized, held)
        if sources is not None:
            before: tuple[WeightRule, ...] = ()
            scales = {name: one.tensor_factor or one.single_scale for name, one in held.items()}
            amaxes = shared_amaxes(scales, sources)
            matched: dict[str, Match | None] = {}
            for name, weight in audited.items():
                nearest = match(weight, sources.get(name), before, amaxes.get(name))
                before = nearest.rules if nearest else before
                rules[name] = nearest.names if nearest and not nearest.place else ""
                matched[name] = nearest
                advance(by=weight.codes.nbytes)
            # no policy is compressed-tensors' own; of another weight nearly all codes differ
            form = "compressed_tensors_nvfp4"
            named = any(rules[name] for name, w in audited.items() if w.form.name == form)
            for name, weight in audited.items():
                unnamed = weight.form.name == form and not named
                findings += _against_original(weight, matched[name], unnamed)
    return Audit(
        path=str(path),
        declared=declared,
        rows=tuple(_row(evidence, rules.get(name)) for name, evidence in held.items()),
        findings=tuple(findings),
        bytes_read=size,
    )


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
    yield from layers.shared_scales(e for e in held.values() if not e.mislabelled)


def _against_original(
    weight: StoredWeight, nearest: Match | None, unnamed: bool
) -> Iterator[Finding]:
    """The finding of a weight; ``unnamed``: of a form in which no weight has a rule."""
    if not weight.granularity:
        return
    if nearest is None:
        text = "no tensor of this name, shape and a dtype of high precision is among the originals"
        yield Finding("original_missing", weight.name, text)
    elif nearest.place:
        codes, scales, elements, blocks = nearest.counts
        text = (
            f"no rule makes these bytes of the original; the nearest, {nearest.names}, differs in "
            f"{codes:,} of {elements:,} codes and {scales:,} of {blocks:,} scales, first in "
            f"{nearest.place}"
        )
        place = {"block": nearest.place, "rule": nearest.names}
        near = unnamed and 0 < codes <= elements / 2
        yield Finding("original_near" if near else "original_differs", weight.name, text, place)


def _row(evidence: Evidence, made_by: str | None) -> Row:
    weight, rule, elements = evidence.weight, evidence.rule(), evidence.elements
    layout = weight.scale_layout
    return Row(
        tensor=weight.name,
        form=weight.form.name,
        fmt=weight.fmt.name,
        granularity=weight.granularity,
        scale_dtype="none" if weight.scale is None else weight.scale.dtype,
        scale_layout=f"{layout}, transposed" if weight.transposed else layout,
        rule="" if rule is None else rule[0],
        elements=elements,
        saturated=evidence.occurrences(float(weight.fmt.max)) / max(elements, 1),
        zeroed=evidence.occurrences(0.0) / max(elements, 1),
        made_by=made_by,
    )
