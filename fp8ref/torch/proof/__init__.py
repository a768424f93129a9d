"""Prove that a step ran in FP8: trace its GEMMs, and compare them with the plan (B-8).

with proof.trace_eager(model) as trace:      # eager: the products in the model's linears
    loss(model(x)).backward()
with proof.trace_compiled(model) as trace:   # compiled: the graphs that inductor compiles
    loss(torch.compile(model)(x)).backward()
missing = proof.missing(trace, {"mlp.up_proj": "tensorwise"})  # absent GEMMs, a line each
proof.manifest(trace, {"mlp.up_proj": "tensorwise"}, missing)  # the proof, for a run's manifest
"""

from fp8ref.torch.proof.attention import (
    manifest_of_kernels,
    manifest_of_products,
    missing_kernels,
    missing_products,
    multiplies_codes,
)
from fp8ref.torch.proof.compiled import trace_compiled
from fp8ref.torch.proof.eager import trace_eager
from fp8ref.torch.proof.records import GemmRecord, GemmTrace, ProductRecord
from fp8ref.torch.proof.verdict import gathers, manifest, missing, missing_gathers

__all__ = [
    "GemmRecord",
    "GemmTrace",
    "ProductRecord",
    "gathers",
    "manifest",
    "manifest_of_kernels",
    "manifest_of_products",
    "missing",
    "missing_gathers",
    "missing_kernels",
    "missing_products",
    "multiplies_codes",
    "trace_compiled",
    "trace_eager",
]
