"""What weights of a checkpoint say of each other, and of the config: patterns, fused weights,
scales and codes without each other.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from fp8ref.checkpoints import patterns
from fp8ref.checkpoints.declared import Declared, Scheme
from fp8ref.checkpoints.evidence import NEAR, Evidence
from fp8ref.checkpoints.findings import Finding
from fp8ref.checkpoints.tensors import FLOATS, StoredTensor
from fp8ref.checkpoints.weights import FORMS, StoredWeight
from fp8ref.spec import granularity as granularities

__all__ = ["against_config", "alone", "fused", "precision", "shared_scales"]

_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
LINEARS = _PROJECTIONS | {*patterns.FUSED}
"""Modules that every engine makes a linear."""

GROUPS = {**patterns.FUSED, "w13": ("w1", "w3")}
"""{module of an engine: those of a checkpoint that it holds}."""

NO_LINEARS = {
    "a norm": r"(^|[._])(\w*norm\w*|ln_\w+)$",
    "a router": r"(^|\.)(gate|router|shared_expert_gate)$",
    "an embedding": r"(^|\.)(embed_tokens|wte|wpe|tok_embeddings|word_embeddings|embed)$",
    "the output layer": r"(^|\.)lm_head$",
}
"""{what engines leave in high precision: its modules}."""

ELSEWHERE = re.compile(r"(^|\.)(vision\w*|visual|audio\w*|mtp)(\.|$)")
"""Modules that engines build without the config."""


def module_of(name: str) -> str:
    """The module that has a weight; of experts in one tensor theirs."""
    return name.removesuffix(".weight") if name.endswith(".weight") else name.rpartition(".")[0]


def _role(module: str) -> str:
    """A module without the numbers of its layer and expert."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "N", module)


def against_config(declared: Declared, evidence: Evidence) -> Iterator[Finding]:
    """Where a weight and the config disagree."""
    weight = evidence.weight
    module = module_of(weight.name)
    scheme = declared.scheme(module)
    pattern = declared.excludes(module)
    if pattern is not None:
        text = f"codes of {weight.fmt}, but {pattern!r} of {declared.source} excludes the module"
        yield Finding("excluded", weight.name, text, {"pattern": pattern})
    elif scheme is None and declared.schemes:
        text = f"codes of {weight.fmt}, but no scheme of {declared.source} has it as a target"
        yield Finding("excluded", weight.name, text)
    elif swallowing := patterns.excluding("substring", declared.ignored, module):
        text = f"{swallowing!r} excludes it where patterns match any part of a name"
        yield Finding("pattern_engines", weight.name, text, {"pattern": swallowing})
    what = next((k for k, p in NO_LINEARS.items() if re.search(p, module)), "")
    lenient = what == "the output layer" and declared.method in ("modelopt", "torchao")
    if what and not lenient and not declared.names(module):
        text = f"{what} is quantized, and the config does not name it"
        yield Finding("not_a_linear", weight.name, text)
    if scheme is not None:
        yield from _against_scheme(scheme, evidence)


def _against_scheme(scheme: Scheme, evidence: Evidence) -> Iterator[Finding]:
    weight = evidence.weight
    if scheme.fmt and scheme.fmt != weight.fmt.name:
        text = f"codes are {weight.fmt}; the config says {scheme.fmt}"
        yield Finding("config_format", weight.name, text)
        return
    if scheme.granularity and weight.granularity and not _same_blocks(scheme, weight):
        text = f"scales are {weight.granularity}; the config says {scheme.granularity}"
        yield Finding("config_blocks", weight.name, text)
        return
    if evidence.mislabelled:
        return
    stored = weight.scale_fmt.name if weight.scale_fmt is not None else "float32"
    if scheme.scale_fmt == "e8m0fnu" and stored == "float32" and evidence.uneven:
        text = f"{evidence.uneven:,} scales are no powers of two; the config says ue8m0"
        yield Finding("config_scale", weight.name, text, evidence.first_uneven)
    elif scheme.scale_fmt not in ("", "e8m0fnu", stored) and weight.scale is not None:
        text = f"scales are {stored}; the config says {scheme.scale_fmt}"
        yield Finding("config_scale", weight.name, text)


def _same_blocks(scheme: Scheme, weight: StoredWeight) -> bool:
    """Whether a weight has as many scales as its scheme gives; small ones fit several schemes."""
    if scheme.granularity not in granularities.GRANULARITIES:
        return blocks_fit(scheme.granularity, weight)
    n, k = weight.shape[-2:]
    blocks = (granularities.lengths(g, 2, -1) for g in (scheme.granularity, weight.granularity))
    counts, others = (math.prod(granularities.block_counts((n, k), size)) for size in blocks)
    return counts == others


def blocks_fit(size: str, weight: StoredWeight) -> bool:
    """Whether a weight's scales are those of blocks of a size such as 64x64."""
    if not re.fullmatch(r"[1-9]\d{0,9}x[1-9]\d{0,9}", size) or weight.scale is None:
        return False
    blocks = map(int, size.split("x"))
    counts = [-(-n // block) for n, block in zip(weight.shape[-2:], blocks, strict=True)]
    return math.prod(weight.scale.shape) == math.prod((*weight.shape[:-2], *counts))


def precision(
    declared: Declared, tensors: Mapping[str, StoredTensor], weights: Mapping[str, StoredWeight]
) -> Iterator[Finding]:
    """Layers in high precision that neither a pattern nor their kind explains."""
    roles = {_role(module_of(name)) for name in weights}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        plain = tensor.dtype in FLOATS and len(tensor.shape) == 2 and name.endswith(".weight")
        if not plain or name in weights or not declared.method or ELSEWHERE.search(module):
            continue
        if any(re.search(p, module) for p in NO_LINEARS.values()):
            continue
        if declared.excludes(module) is not None or declared.scheme(module) is None:
            continue
        text = f"it is {tensor.dtype}, and no pattern of {declared.source} excludes it"
        swallowing = patterns.excluding("substring", declared.ignored, module)
        cause = f"{swallowing!r} was matched with any part of a name" if swallowing else ""
        is_linear = module.rpartition(".")[2] in LINEARS and declared.method != "mxfp4"
        if _role(module) in roles or is_linear:
            yield Finding("left_out", name, text, cause=cause)
        else:
            yield Finding("not_named", name, text)


def fused(
    tensors: Mapping[str, StoredTensor], evidences: Mapping[str, Evidence]
) -> Iterator[Finding]:
    """Weights that engines hold in one tensor, and that differ in precision or in their scale."""
    parents: dict[str, dict[str, str]] = defaultdict(dict)
    for name in tensors.keys() | evidences.keys():
        if name.endswith(".weight"):
            parent, _, last = name.removesuffix(".weight").rpartition(".")
            parents[parent][last] = name
    for parent, members in sorted(parents.items()):
        for group, parts in GROUPS.items():
            names = [members[part] for part in parts if part in members]
            if len(names) == len(parts):
                yield from _in_one(f"{parent}.{group}", names, tensors, evidences)


def _in_one(
    group: str,
    names: list[str],
    tensors: Mapping[str, StoredTensor],
    evidences: Mapping[str, Evidence],
) -> Iterator[Finding]:
    quantized = [evidences[name] for name in names if name in evidences]
    plain = [name for name in names if name not in evidences]
    if quantized and plain:
        text = f"{plain[0]} is {tensors[plain[0]].dtype}; engines hold both in {group}"
        yield Finding("fused_mixed", quantized[0].weight.name, text)
        return
    for kind, scales in (
        ("fused_scales", [e.tensor_factor for e in quantized]),
        ("fused_requantized", [e.single_scale for e in quantized]),
    ):
        misread = any(e.mislabelled for e in quantized)
        if len(set(scales)) > 1 and None not in scales and not misread:
            text = (
                f"the scale of the tensor is {scales[0]:.6g}, and {scales[-1]:.6g} of {names[-1]}"
            )
            place = {"scales": scales}
            yield Finding(kind, names[0], text, place)


def shared_scales(evidences: Mapping[str, Evidence]) -> Iterator[Finding]:
    """Weights with one scale, of a tensor or above blocks, that reaches no largest code, neither
    in them nor in those that have the same scale."""
    groups: dict[tuple[str, float | None], list[Evidence]] = defaultdict(list)
    for evidence in evidences.values():
        groups["blocks", evidence.tensor_factor].append(evidence)
        groups["codes", evidence.single_scale].append(evidence)
    for (what, scale), members in groups.items():
        if scale is None:
            continue
        first = members[0]
        if what == "codes":
            rule = first.rule()
            if rule is None:
                continue
            tops = [max(e.tops, default=0.0) for e in members]
            kinds, low = ("code_below", "code_near"), rule[1]
        else:
            tops, low = [e.largest_scale for e in members], 256.0
            kinds = ("tensor_scale", "code_near")
        if (top := max(tops)) < low:
            held = "its codes" if what == "codes" else "its blocks' scales"
            text = (
                f"the largest of {held} is {top:g}, not {low:g} or more, and no weight with the "
                f"same scale {scale:.6g} has a larger one"
            )
            place = {"code": top, "scale": scale}
            kind = kinds[0] if top < NEAR * low else kinds[1]
            yield Finding(kind, first.weight.name, text, place)


def alone(
    tensors: Mapping[str, StoredTensor], weights: Mapping[str, StoredWeight]
) -> Iterator[Finding]:
    """Scales without codes, and codes of one axis."""
    used = set()
    for weight in weights.values():
        parts = (weight.codes, weight.scale, weight.tensor_scale)
        used |= {part.name for part in parts if part is not None}
    endings = {ending for form in FORMS.values() for ending in (form.scale, form.tensor_scale)}
    for name, tensor in tensors.items():
        if name in used:
            continue
        ending = max((e for e in endings if e and name.endswith(e)), key=len, default="")
        if ending:
            text = f"a scale {tensor.dtype} {list(tensor.shape)} has no codes beside it"
            module = name.removesuffix(ending)
            held = tensors.get(f"{module}.weight") or tensors.get(f"{module}.weight_packed")
            if held is not None and held.dtype not in FLOATS:
                continue  # integers
            if held is not None:
                text += f"; {held.name} is {held.dtype} {list(held.shape)}"
            yield Finding("scale_alone", name, text)
        elif tensor.fmt is not None and len(tensor.shape) < 2 and tensor.fmt.name != "e8m0fnu":
            text = f"a vector is stored as codes of {tensor.fmt}"
            yield Finding("not_a_linear", name, text)
