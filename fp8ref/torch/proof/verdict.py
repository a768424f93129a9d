"""Compare the GEMMs and gathers that a step ran with those that were planned (spec B-8)."""

import collections
from collections.abc import Iterable, Iterator, Mapping

from torch import nn

from fp8ref import recipe as recipes
from fp8ref.recipe import Recipe
from fp8ref.torch.distributed.fp8_gather import FP8Gather
from fp8ref.torch.gemm import gemm
from fp8ref.torch.gemm.kind import GemmKind
from fp8ref.torch.proof.records import GemmRecord, GemmTrace, linears, type_name
from fp8ref.torch.quantize import cast


def missing(
    trace: GemmTrace, planned: Mapping[str, str | Recipe], plan: str | None = None
) -> list[str]:
    """A line for each planned FP8 GEMM that did not run, or ever ran otherwise than planned.

    Types, accumulation and granularity are compared. Two kinds of GEMM may be absent: those whose
    gradient is not needed, and, unless under simulated hardware, those of block scales, for which
    the device may have no kernel (G-16, G-17).

    plan      the simulated hardware that every GEMM must run under (B-12); None: the framework's
              own GEMMs.
    """
    here: dict[str, set[GemmRecord]] = {}
    for record in trace.gemms:
        here.setdefault(record.name, set()).add(record)
    lines, pruned = [], trace.pruned
    for promised, granularity in _fp8(planned, plan):
        if promised.name in pruned or (plan is None and gemm.in_blocks(granularity)):
            continue
        others = sorted(str(record) for record in here.get(promised.name, set()) - {promised})
        lines += [
            f"{promised.name}: planned {promised}; {have}"
            for have in (others if promised.name in here else ["no GEMM of it was seen"])
        ]
    return lines


def missing_gathers(model: nn.Module, planned: Iterable[str]) -> list[str]:
    """A line for each planned weight that FSDP2 did not gather as FP8 codes."""
    dtypes = gathers(model)
    return [
        f"{layer}/weight: planned a gather of one byte an element; "
        f"{dtypes.get(layer, 'none of it was seen')}"
        for layer in planned
        if dtypes.get(layer) != "u8"
    ]


def gathers(model: nn.Module) -> dict[str, str]:
    """The type in which FSDP2 last gathered each weight with an FP8 gather: u8 means codes."""
    fp8_gathers = {name: getattr(linear, "fp8_gather", None) for name, linear in linears(model)}
    return {
        name: type_name(g.moved)
        for name, g in fp8_gathers.items()
        if isinstance(g, FP8Gather) and g.moved is not None
    }


def manifest(
    trace: GemmTrace,
    planned: Mapping[str, str | Recipe],
    missing: list[str],
    gathers: Mapping[str, str] | None = None,
    plan: str | None = None,
) -> dict:
    """The proof for a run's manifest, as plain data.

    It holds each distinct GEMM of a planned linear once, the GEMMs on dequantized operands, those
    whose gradient is not needed, the number of weights gathered in each type, and what is missing.
    GEMMs of FP4 operands, which are emulated (R-9), and those under simulated hardware are lists of
    their own.
    """
    fp8, pruned = list(_fp8(planned, plan)), trace.pruned
    once = [g for g in dict.fromkeys(trace.gemms) if g.layer in planned]
    simulated = [g.entry("accumulate", "granularity", "plan") for g in once if g.plan is not None]
    by_kernel = {g.name for g in trace.gemms if g.fp8} - {g.name for g in trace.gemms if not g.fp8}
    ran = pruned | (by_kernel if plan is None else set())
    emulated = [name for name in recipes.emulated_gemms(planned) if name not in ran]
    proof = {
        "read_from": trace.read_from,
        "gemms": [g.entry("accumulate", "granularity", "fp8") for g in once if g.plan is None],
        "on_dequantised_operands": [
            record.name
            for record, granularity in fp8
            if plan is None and gemm.in_blocks(granularity) and record.name not in by_kernel
        ],
        "pruned": [record.name for record, _ in fp8 if record.name in pruned],
        "gathers": dict(collections.Counter((gathers or {}).values())),
        "missing": missing,
    }
    proof |= {"emulated": emulated} if emulated else {}
    return proof | ({"simulated": simulated} if plan else {})


def _fp8(planned: Mapping[str, str | Recipe], plan: str | None) -> Iterator[tuple[GemmRecord, str]]:
    """The FP8 GEMMs of a plan: expected record and granularity of operand a."""
    for layer, recipe in planned.items():
        for which, spec in recipes.by_name(recipe).gemms.items():
            if spec.a is not None and spec.b is not None:
                a, b = (type_name(cast.DTYPES[c.fmt.name]) for c in (spec.a, spec.b))
                scaled = GemmKind.of(spec).scales
                yield (
                    GemmRecord(layer, which, a, b, spec.accumulate, scaled, plan),
                    spec.a.granularity,
                )
