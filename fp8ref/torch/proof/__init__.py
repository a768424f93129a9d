"""Which GEMMs a training step really runs in FP8, layer by layer (SEMANTICS B-8): traced, and compared with the plan.

with proof.trace_eager(model) as trace:      # eager: every product inside the model's linears, as it is dispatched
    loss(model(x)).backward()
with proof.trace_compiled(model) as trace:   # compiled: the graphs that inductor generates code from
    loss(torch.compile(model)(x)).backward()
missing = proof.missing(trace, {"mlp.up_proj": "tensorwise"})    # what was planned and is absent, a line each
proof.manifest(trace, {"mlp.up_proj": "tensorwise"}, missing)    # as a run's manifest keeps it
"""

from fp8ref.torch.proof.compiled import trace_compiled
from fp8ref.torch.proof.eager import trace_eager
from fp8ref.torch.proof.records import Gemm, Seen
from fp8ref.torch.proof.verdict import gathers, manifest, missing, missing_gathers

__all__ = ["Gemm", "Seen", "gathers", "manifest", "missing", "missing_gathers", "trace_compiled", "trace_eager"]
