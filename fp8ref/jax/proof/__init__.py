"""Prove that a compiled step runs in FP8: its GEMMs' and collectives' types (spec B-7).

    program = proof.read(jax.jit(step).lower(*arguments))
    proof.gemms(program)            # every dot: layer, GEMM, operand types, accumulation
    proof.collectives(program)      # every gather and reduction: layer, type, shape
    proof.missing(program, {"mlp.up_proj": "tensorwise"}, {"mlp.up_proj": placement})
                                    # FP8 GEMMs and gathers that are asked for and absent
    compiled = proof.read_compiled(lowered.compile())
    proof.kernels(compiled)         # how many kernels multiply which types
    proof.lost(compiled, program)   # FP8 dots that XLA compiled to a wider type

    proof.missing_products(program, ["layers.0.attention"], variant)
                                    # products of attention by a variant that are absent
    proof.missing_kernels(proof.kernel_calls(text), ["layers.0.attention"])
                                    # a library's kernels of attention that are absent (A-20)

``hlo`` parses programs; ``verdict`` compares them with recipes, ``attention`` with a variant.
"""

from fp8ref.jax.proof.attention import (
    kernel_calls,
    manifest_of_products,
    missing_kernels,
    missing_products,
)
from fp8ref.jax.proof.verdict import (
    Collective,
    Gemm,
    Program,
    collectives,
    gathers,
    gemms,
    kernels,
    lost,
    manifest,
    missing,
    read,
    read_compiled,
)

__all__ = [
    "Collective",
    "Gemm",
    "Program",
    "collectives",
    "gathers",
    "gemms",
    "kernel_calls",
    "kernels",
    "lost",
    "manifest",
    "manifest_of_products",
    "missing",
    "missing_kernels",
    "missing_products",
    "read",
    "read_compiled",
]
