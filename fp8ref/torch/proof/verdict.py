"""Compare the GEMMs and gathers that a step ran with those that were planned (SEMANTICS B-8)."""

import collections
from collections.abc import Iterable, Iterator, Mapping

from torch import nn

from fp8ref import recipe as recipes
from fp8ref.recipe import Recipe
from fp8ref.torch import cast, gemm, hardware
from fp8ref.torch.fsdp import FP8Gather
from fp8ref.torch.proof.records import Gemm, Seen, linears, type_name


def missing(seen: Seen, planned: Mapping[str, str | Recipe], plan: str | None = None) -> list[str]:
    """What a plan promises and was not seen, a line each: FP8 GEMMs by layer, operand types, accumulation and granularity.

    Every time that a GEMM ran it ran as planned, or there is a line. A GEMM of operands in blocks, which the device may have no kernel
    for (G-16, G-17), is not asked for, but under a plan, nor is one whose gradient nobody needs.

    plan      the simulated hardware that all of them are to run under (B-12); None: the framework's own GEMMs.
    """
    here: dict[str, set[Gemm]] = {}
    for found in seen.gemms:
        here.setdefault(found.name, set()).add(found)
    lines, pruned = [], seen.pruned
    for wanted, granularity in _fp8(planned, plan):
        if wanted.name in pruned or (plan is None and gemm.in_blocks(granularity)):
            continue
        others = sorted(str(found) for found in here.get(wanted.name, set()) - {wanted})
        lines += [f"{wanted.name}: planned {wanted}; {have}" for have in (others if wanted.name in here else ["no GEMM of it was seen"])]
    return lines


def missing_gathers(model: nn.Module, planned: Iterable[str]) -> list[str]:
    """The linears, of those planned, whose weight FSDP2 has not gathered as one byte an element, a line each."""
    found = gathers(model)
    return [
        f"{layer}/weight: planned a gather of one byte an element; {found.get(layer, 'none of it was seen')}"
        for layer in planned
        if found.get(layer) != "u8"
    ]


def gathers(model: nn.Module) -> dict[str, str]:
    """By linear, the type in which FSDP2 last gathered its weight, of those that are to be gathered in FP8: u8, codes."""
    found = {name: getattr(linear, "fp8_gather", None) for name, linear in linears(model)}
    return {name: type_name(g.moved) for name, g in found.items() if isinstance(g, FP8Gather) and g.moved is not None}


def manifest(
    seen: Seen, planned: Mapping[str, str | Recipe], missing: list[str], gathers: Mapping[str, str] | None = None, plan: str | None = None
) -> dict:
    """The proof as a run's manifest keeps it: every kind of GEMM of a planned linear, once; those on dequantised operands; those whose
    gradient nobody needs; how many weights were gathered in which type; what is missing; under simulated hardware, its GEMMs apart."""
    fp8, pruned = list(_fp8(planned, plan)), seen.pruned
    once = [g for g in dict.fromkeys(seen.gemms) if g.layer in planned]
    by_kernel = {g.name for g in seen.gemms if g.fp8} - {g.name for g in seen.gemms if not g.fp8}
    return {
        "read_from": seen.read_from,
        "gemms": [
            {"gemm": g.name, "a": g.a, "b": g.b, "accumulate": g.accumulate, "granularity": g.granularity, "fp8": g.fp8}
            for g in once
            if g.plan is None
        ],
        "on_dequantised_operands": [
            wanted.name for wanted, granularity in fp8 if plan is None and gemm.in_blocks(granularity) and wanted.name not in by_kernel
        ],
        "pruned": [wanted.name for wanted, _ in fp8 if wanted.name in pruned],
        "gathers": dict(collections.Counter((gathers or {}).values())),
        "missing": missing,
    } | ({"simulated": [_of_simulated(g) for g in once if g.plan is not None]} if plan else {})


def _of_simulated(g: Gemm) -> dict:
    return {"gemm": g.name, "a": g.a, "b": g.b, "accumulate": g.accumulate, "granularity": g.granularity, "plan": g.plan}


def _fp8(planned: Mapping[str, str | Recipe], plan: str | None) -> Iterator[tuple[Gemm, str]]:
    """The FP8 GEMMs of a plan, and how operand a of each is scaled."""
    for layer, recipe in planned.items():
        for which, spec in recipes.by_name(recipe).gemms.items():
            if spec.a is not None and spec.b is not None:
                a, b = (type_name(cast.DTYPES[c.fmt.name]) for c in (spec.a, spec.b))
                scaled = hardware.granularity(spec.a.granularity, spec.b.granularity)
                yield Gemm(layer, which, a, b, spec.accumulate, scaled, plan), spec.a.granularity
