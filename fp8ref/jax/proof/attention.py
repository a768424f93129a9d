"""The verdict on attention by a variant: its products in a step, and their types (spec B-15)."""

import re
from collections.abc import Sequence

from fp8ref.jax.attention.kernel import CALLS
from fp8ref.jax.attention.operands.operands import FAST
from fp8ref.jax.proof import hlo
from fp8ref.jax.proof.verdict import Program, gemms, hlo_name
from fp8ref.jax.quantize import cast
from fp8ref.spec.attention.products import Product, formats, products
from fp8ref.spec.attention.variants import Variant


def missing_products(
    program: Program, layers: Sequence[str], variant: Variant, plan: str | None = None
) -> list[str]:
    """Products of these layers' attention that a step needs and the program lacks, a line for each.

    Each product must be there. Of FP8 codes each of its dots must take two FP8 operands of the
    variant's formats, accumulated as its plan says; under ``mx_1x32`` they take dequantized
    operands (G-16).

    plan    the simulated hardware that each must run under (B-12); None: XLA's own dots.
    """
    lines, dots = [], gemms(program)
    for layer in layers:
        for product in products(variant):
            here = [dot for dot in dots if (dot.layer, dot.which) == (layer, product)]
            planned = _wanted(product, variant)
            # whose backward pass makes scores again, of no codes
            if planned and variant.backward == "bf16":
                here = [dot for dot in here if dot.fp8]
            planned = planned and planned + (f", under {plan}" if plan else "")
            promise = f"{layer}/{product}: planned {planned or 'a dot of dequantized operands'}"
            others = {dot.said for dot in here} - {planned} if planned else set()
            lines += [
                f"{promise}; {have}" for have in (sorted(others) if here else ["found no such dot"])
            ]
    return lines


def manifest_of_products(program: Program, layers: Sequence[str], variant: Variant) -> dict:
    """The proof for a manifest: distinct dots, and products of dequantized operands."""
    here = [dot for dot in gemms(program) if dot.layer in layers and dot.which in products(variant)]
    entries = [
        dot.entry | {"fp8": dot.fp8} | ({"plan": dot.plan} if dot.plan else {}) for dot in here
    ]
    return {
        "variant": variant.name,
        "backward": variant.backward,
        "gemms": [entry for i, entry in enumerate(entries) if entry not in entries[:i]],
        "on_dequantised_operands": [
            f"{layer}/{product}"
            for layer in layers
            for product in products(variant)
            if _wanted(product, variant) is None
        ],
    }


def kernel_calls(text: str) -> list[str]:
    """Calls of attention kernels in optimized HLO, as ``<layer>: <call>`` (A-20)."""
    calls = []
    for instruction in hlo.instructions(text):
        call = next(
            (call for call in CALLS.values() if f'custom_call_target="{call}"' in instruction.line),
            None,
        )
        scope = re.search(r"(?P<layer>[^/()]+)/attention:kernel_", instruction.path)
        if call is not None:
            calls.append(f"{scope['layer'] if scope else 'no layer'}: {call}")
    return calls


def missing_kernels(calls: Sequence[str], layers: Sequence[str]) -> list[str]:
    """The passes of these layers' attention that no kernel runs, a line for each."""
    return [
        f"{layer}/attention: planned the kernel {call}; found {', '.join(calls) or 'no such call'}"
        for layer in layers
        for call in CALLS.values()
        if f"{layer}: {call}" not in calls
    ]


def _wanted(product: Product, variant: Variant) -> str | None:
    """The types and accumulation of a product of FP8 codes; None if dequantized."""
    if variant.granularity == "mx_1x32":
        return None
    a, b = (hlo_name(cast.DTYPES[fmt.name]) for fmt in formats(product, variant))
    return f"{a} x {b}, {'fast' if variant.plan in FAST else 'slow'}"
