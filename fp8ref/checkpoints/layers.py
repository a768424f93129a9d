"""What weights of a checkpoint say of each other, and of the config: patterns, fused weights,
scales and codes without each other.
"""

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping

from fp8ref.checkpoints import patterns
from fp8ref.checkpoints.declared import Declared, Scheme
from fp8ref.checkpoints.evidence import NEAR, Evidence
from fp8ref.checkpoints.findings import Finding
from fp8ref.checkpoints.tensors import FLOATS, StoredTensor
from fp8ref.checkpoints.weights import FORMS, StoredWeight, block_counts
from fp8ref.spec.granularity import GRANULARITIES

__all__ = ["against_config", "alone", "fused", "precision", "shared_scales"]

_PROJECTIONS = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"
LINEARS = {*_PROJECTIONS.split(), *patterns.FUSED}
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

_ELSEWHERE = r"(^|\.)(vision\w*|visual|audio\w*|mtp)(\.|$)"
NOT_MEANT = re.compile("|".join([*NO_LINEARS.values(), _ELSEWHERE]))
"""Those, and modules that engines build without the config."""


def module_of(name: str) -> str:
    """The module that has a weight; of experts in one tensor theirs."""
    module = name.removesuffix(".weight")
    return module if module != name else name.rpartition(".")[0]


def _role(module: str) -> str:
    """A module without the numbers of its layer and expert."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "N", module)


def against_config(declared: Declared, evidence: Evidence) -> Iterator[Finding]:
    """The findings of a weight, and where it and the config disagree."""
    name, fmt, source = evidence.weight.name, evidence.weight.fmt, declared.source
    module = module_of(name)
    scheme, pattern = declared.scheme(module), declared.excludes(module)
    against = list(_against_scheme(scheme, evidence)) if scheme is not None else []
    # a size of blocks that fp8ref has not is no contradiction
    noted = any(finding.kind == "not_audited" for finding in against)
    yield from (f for f in evidence.findings if not (noted and f.kind == "scale_shape"))
    if not declared.method:
        return
    if pattern is not None:
        text = f"codes of {fmt}, but {pattern!r} of {source} excludes the module"
        yield Finding("excluded", name, text, {"pattern": pattern})
    elif scheme is None and declared.schemes:
        text = f"codes of {fmt}, but no scheme of {source} has it as a target"
        yield Finding("excluded", name, text)
    elif swallowing := patterns.excluding("substring", declared.ignored, module):
        text = f"{swallowing!r} excludes it where patterns match any part of a name"
        yield Finding("pattern_engines", name, text, {"pattern": swallowing})
    what = next((k for k, p in NO_LINEARS.items() if re.search(p, module)), "")
    lenient = what == "the output layer" and declared.method in ("modelopt", "torchao")
    if what and not lenient and not declared.names(module):
        text = f"{what} is quantized, and the config does not name it"
        yield Finding("not_a_linear", name, text)
    yield from against


def _against_scheme(scheme: Scheme, evidence: Evidence) -> Iterator[Finding]:
    """Where codes, else blocks, else scales are not those of the config."""
    weight, size = evidence.weight, scheme.granularity
    name, fits = weight.name, _has_blocks(weight, size)
    stored = weight.scale_fmt.name if weight.scale_fmt is not None else "float32"
    if scheme.fmt not in ("", weight.fmt.name):
        text = f"codes are {weight.fmt}; the config says {scheme.fmt}"
        yield Finding("config_format", name, text)
        return
    if size and weight.granularity and not fits:
        text = f"scales are {weight.granularity}; the config says {size}"
        yield Finding("config_blocks", name, text)
        return
    if fits and not weight.granularity:
        text = f"scales are those of blocks of {size}, as the config says"
        yield Finding("not_audited", name, text)
    if evidence.mislabelled:
        return
    if scheme.scale_fmt == "e8m0fnu" and stored == "float32" and evidence.uneven:
        text = f"{evidence.uneven:,} scales are no powers of two; the config says ue8m0"
        yield Finding("config_scale", name, text, evidence.first_uneven)
    elif scheme.scale_fmt not in ("", "e8m0fnu", stored) and weight.scale is not None:
        text = f"scales are {stored}; the config says {scheme.scale_fmt}"
        yield Finding("config_scale", name, text)


def _has_blocks(weight: StoredWeight, size: str) -> bool:
    """Whether a weight has as many scales as a granularity or a size such as 64x64 gives; small
    ones fit several."""
    is_size = size in GRANULARITIES or re.fullmatch(r"[1-9]\d{0,9}x[1-9]\d{0,9}", size)
    if weight.scale is None or not is_size:
        return False
    wanted = math.prod(block_counts(size, weight.shape))
    if weight.granularity:
        return wanted == math.prod(weight.counts)
    return wanted * math.prod(weight.shape[:-2]) == math.prod(weight.scale.shape)


def precision(
    declared: Declared, tensors: Mapping[str, StoredTensor], quantized: Collection[str]
) -> Iterator[Finding]:
    """Layers in high precision that neither a pattern nor their kind explains."""
    roles = {_role(module_of(name)) for name in quantized}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if name == module or name in quantized or tensor.dtype not in FLOATS:
            continue
        if len(tensor.shape) != 2 or NOT_MEANT.search(module):
            continue
        if declared.excludes(module) is not None or declared.scheme(module) is None:
            continue
        text = f"it is {tensor.dtype}, and no pattern of {declared.source} excludes it"
        swallowing = patterns.excluding("substring", declared.ignored, module)
        cause = f"{swallowing!r} was matched with any part of a name" if swallowing else ""
        is_linear = module.rpartition(".")[2] in LINEARS and declared.method != "mxfp4"
        kind = "left_out" if _role(module) in roles or is_linear else "not_named"
        yield Finding(kind, name, text, cause=cause)


def fused(
    tensors: Mapping[str, StoredTensor], evidences: Mapping[str, Evidence]
) -> Iterator[Finding]:
    """Weights that engines hold in one tensor, and that differ in precision or in their scale."""
    names = tensors.keys() | evidences.keys()
    parents = {"".join(name.removesuffix(".weight").rpartition(".")[:2]) for name in names}
    for parent, (group, parts) in itertools.product(sorted(parents), GROUPS.items()):
        members = [f"{parent}{part}.weight" for part in parts]
        if names >= set(members):
            yield from _in_one(parent + group, members, tensors, evidences)


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
        misread = None in scales or any(e.mislabelled for e in quantized)
        if len(set(scales)) > 1 and not misread:
            text = (
                f"the scale of the tensor is {scales[0]:.6g}, and {scales[-1]:.6g} of {names[-1]}"
            )
            yield Finding(kind, names[0], text, {"scales": scales})


def shared_scales(evidences: Iterable[Evidence]) -> Iterator[Finding]:
    """Weights with one scale, of a tensor or above blocks, that reaches no largest code, neither
    in them nor in those that have the same scale."""
    groups: dict[tuple[str, float | None], list[Evidence]] = defaultdict(list)
    for evidence in evidences:
        groups["blocks' scales", evidence.tensor_factor].append(evidence)
        groups["codes", evidence.single_scale].append(evidence)
    for (what, scale), members in groups.items():
        first, kind, low = members[0], "tensor_scale", 256.0
        tops = [e.largest_scale for e in members]
        if what == "codes":
            kind, (_, low, _) = "code_below", first.rule() or ("", 0.0, 0.0)
            tops = [max(e.tops, default=0.0) for e in members]
        if scale is not None and (top := max(tops)) < low:
            text = (
                f"the largest of its {what} is {top:g}, not {low:g} or more, and no weight with "
                f"the same scale {scale:.6g} has a larger one"
            )
            kind = kind if top < NEAR * low else "code_near"
            yield Finding(kind, first.weight.name, text, {"code": top, "scale": scale})


def alone(
    tensors: Mapping[str, StoredTensor], weights: Mapping[str, StoredWeight]
) -> Iterator[Finding]:
    """Scales without codes, and codes of one axis."""
    used = {part.name for weight in weights.values() for part in weight.parts}
    endings = {ending for form in FORMS.values() for ending in (form.scale, form.tensor_scale)}
    for name, tensor in tensors.items():
        if name in used:
            continue
        ending = max((e for e in endings if e and name.endswith(e)), key=len, default="")
        if ending:
            text = f"a scale {tensor.dtype} {list(tensor.shape)} has no codes beside it"
            module = name.removesuffix(ending)
            names = (f"{module}.weight", f"{module}.weight_packed")
            held = next((tensors[key] for key in names if key in tensors), None)
            if held is not None and held.dtype not in FLOATS:
                continue  # integers
            if held is not None:
                text += f"; {held.name} is {held.dtype} {list(held.shape)}"
            yield Finding("scale_alone", name, text)
        elif tensor.fmt is not None and len(tensor.shape) < 2 and tensor.fmt.name != "e8m0fnu":
            text = f"a vector is stored as codes of {tensor.fmt}"
            yield Finding("not_a_linear", name, text)
