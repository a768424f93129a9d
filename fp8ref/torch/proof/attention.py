"""The verdict on attention by a variant: which of its products a step ran, and in which types (spec
B-15)."""

from collections.abc import Sequence

import torch

from fp8ref.spec.attention.products import formats, products
from fp8ref.spec.attention.variants import Arithmetic, Variant
from fp8ref.torch.attention.fast import operands as attention_fast_operands
from fp8ref.torch.proof.records import KERNELS, GemmTrace, ProductRecord, type_name
from fp8ref.torch.quantize import cast


def multiplies_codes(variant: Variant, arithmetic: Arithmetic, device: torch.device) -> bool:
    """Whether products take FP8 codes: not of MX blocks, nor in the fast form on a CPU."""
    if variant.fmt.bits != 8 or variant.granularity == "mx_1x32":
        return False
    return arithmetic == "stated" or attention_fast_operands.takes_codes(
        torch.empty(0, device=device, dtype=torch.float32), variant
    )


def missing_products(
    trace: GemmTrace,
    layers: Sequence[str],
    variant: Variant,
    *,
    codes: bool,
    plan: str | None = None,
) -> list[str]:
    """A line for each product of these layers' attention that did not run, or ever ran otherwise
    than planned.

    codes       ``multiplies_codes``: types and accumulation are compared. Without, a product must
                have run.
    plan        the simulated hardware that each must run under (B-12); None: the framework's own
                GEMMs.
    """
    here: dict[str, set[ProductRecord]] = {}
    for record in trace.products:
        here.setdefault(record.name, set()).add(record)
    lines = []
    for planned in _planned(layers, variant, plan):
        seen = here.get(planned.name, set())
        # whose backward pass makes scores again, of no codes
        if codes and variant.backward == "bf16":
            seen = {record for record in seen if record.fp8}
        others = sorted(str(record) for record in seen - {planned}) if codes else []
        what = planned if codes else "a product of dequantized operands"
        others = others if seen else ["no product of it was seen"]
        lines += [f"{planned.name}: planned {what}; {have}" for have in others]
    return lines


def manifest_of_products(
    trace: GemmTrace, layers: Sequence[str], variant: Variant, *, codes: bool
) -> dict:
    """The proof of attention for a run's manifest: each distinct product once, and those on
    dequantized operands."""
    return {
        "variant": variant.name,
        "backward": variant.backward,
        "gemms": [
            record.entry("accumulate", "fp8", *(["plan"] if record.plan else []))
            for record in dict.fromkeys(trace.products)
            if record.layer in layers
        ],
        "on_dequantised_operands": [
            f"{layer}/{product}" for layer in layers for product in products(variant) if not codes
        ],
    }


def missing_kernels(trace: GemmTrace, layers: Sequence[str]) -> list[str]:
    """A line for each of these layers whose attention no library's kernel computed (A-20)."""
    return [
        f"{layer}/attention: planned the kernel {' or '.join(KERNELS)}; no call of it was seen"
        for layer in layers
        if not any(call.startswith(f"{layer}: ") for call in trace.kernels)
    ]


def manifest_of_kernels(trace: GemmTrace, variant: Variant) -> dict:
    """The proof of attention by a library's kernel for a run's manifest: each distinct call
    once."""
    return {
        "variant": variant.name,
        "backward": variant.backward,
        "gemms": [],
        "kernels": list(dict.fromkeys(trace.kernels)),
    }


def _planned(
    layers: Sequence[str], variant: Variant, plan: str | None = None
) -> list[ProductRecord]:
    if not layers:  # of attention in high precision none is planned
        return []
    accumulate = "fast" if variant.plan == "hopper_fast" else "slow"
    operand_types = [
        (product, [type_name(cast.DTYPES[fmt.name]) for fmt in formats(product, variant)])
        for product in products(variant)
    ]
    return [
        ProductRecord(layer, product, a, b, accumulate, plan)
        for layer in layers
        for product, (a, b) in operand_types
    ]
