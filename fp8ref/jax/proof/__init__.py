"""What a compiled step really multiplies and moves: every dot's operand types, accumulation and layer, every collective's type (SEMANTICS B-7).

program = proof.read(jax.jit(step).lower(*arguments))
proof.gemms(program)            # of each dot: layer, GEMM, operand types, accumulation
proof.collectives(program)      # of each gather and reduction: layer, type, shape
proof.missing(program, {"mlp.up_proj": "tensorwise"}, {"mlp.up_proj": placement})    # what was planned and is absent
compiled = proof.read_compiled(lowered.compile())
proof.kernels(compiled)         # how many kernels multiply which types
proof.lost(compiled, program)   # FP8 dots of the program that the compiled one multiplies in a wider type
"""

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
    "kernels",
    "lost",
    "manifest",
    "missing",
    "read",
    "read_compiled",
]
