"""Compare experts' GEMMs on a mesh with one device's of all rows, simulated (X-3, X-13, X-15).

Device d of an axis expert of D holds the experts from d E / D on. Along data and fsdp devices hold
the same experts: their rows of an expert, in the order of the devices, are those of one device.
``sharded.torch_ranks`` gets each device's GEMMs from ranks that train, ``sharded.jax_mesh`` from
``grouped_rerun``.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from fp8ref.conformance.kit.compare import Report
from fp8ref.crosscheck import device_gemm
from fp8ref.crosscheck.backend_checks import BackendChecks
from fp8ref.crosscheck.bounds import Part
from fp8ref.crosscheck.operands import Operand, OperandCast, States, as_factor, operand_casts
from fp8ref.recipe import Gemm, GemmSpec, Recipe
from fp8ref.sim import delayed
from fp8ref.sim.quantize.scaling import Quantized
from fp8ref.spec.granularity import by_name
from fp8ref.train.config.sections import ParallelConfig

ExpertGemm = tuple[Operand, Operand, np.ndarray | None]
"""One expert's GEMM on one device: a, b, and the result, float32; None if summed over devices."""

ExpertGemms = Mapping[tuple[str, Gemm, int], ExpertGemm]
"""Those of one device, by layer, GEMM and the expert's number on the device; of an expert without
rows none, or one of a row of zeros."""


def check(
    report: Report,
    backend: str,
    recipes: Mapping[str, Recipe],
    devices: Sequence[ExpertGemms],
    weights: Mapping[str, np.ndarray],
    *,
    parallel: ParallelConfig,
    states: States,
    sums: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Compare codes and scales of every expert's operands, bit for bit, and results within B-1.

    recipes   of experts' linears, each group's.
    devices   in the order of the mesh, whose last axis is expert.
    weights   float32 [E, N, K] holding bfloat16, by layer.
    parallel  of the mesh: its axis expert; the scope of amaxes (P-2), global, over the devices with
              the same experts, or local; and the dtype in which sums are taken.
    states    of delayed scaling, by "<layer>/<role>".
    sums      grad_weight [E, N, K] by layer, of devices without results, in ``reduce_dtype``.
    """
    checks, wide = BackendChecks(report, backend), parallel.reduce_dtype == "float32"
    for layer, recipe in recipes.items():
        own = len(weights[layer]) // parallel.expert
        for which, spec in recipe.gemms.items():
            ran = any((layer, which, e) in gemms for gemms in devices for e in range(own))
            if ran != spec.fp8:
                checks.misplanned(layer, which, spec.fp8, " on any device")
            for e in range(len(weights[layer])) if spec.fp8 else ():
                holders = devices[e // own :: parallel.expert]
                key = layer, which, e % own
                gemms = [mine[key] for mine in holders if key in mine]
                if not gemms:
                    continue
                scope, weight = parallel.amax_scope, weights[layer][e]
                parts = _check_expert(checks, layer, which, spec, gemms, weight, scope, states)
                if which == "grad_weight" and sums is not None:
                    # devices without rows add zeros
                    checks.output(f"{layer}/{which}", parts, spec, sums[layer][e], wide=wide)


def _check_expert(
    checks: BackendChecks,
    layer: str,
    which: Gemm,
    spec: GemmSpec,
    gemms: Sequence[ExpertGemm],
    weight: np.ndarray,
    scope: str,
    states: States,
) -> list[Part]:
    """Compare one expert's GEMM on the devices with rows of it; the simulator's part of each."""
    operands = []
    role_operands = zip(*((a, b) for a, b, _ in gemms), strict=True)
    for cast, used in zip(operand_casts(which, spec), role_operands, strict=True):
        is_weight = cast.role == "weight"
        shards = [weight if is_weight else hp for hp, *_ in used]
        expected = list(quantized(shards, cast, scope=scope, state=cast.state(layer, states)))
        for q, shard, (hp, codes, scale) in zip(expected, shards, used, strict=True):
            if is_weight:
                checks.bits(f"{layer}/weights/value", hp, shard, "the master")
            checks.operand(f"{layer}/{cast.role}", q, codes, scale, shard)
        operands.append([as_factor(q) for q in expected])
    parts = []
    for a, b, (*_, out) in zip(*operands, gemms, strict=True):
        part = Part(a, b, device_gemm.simulated(checks.backend, a, b, spec))
        parts.append(part)
        if out is not None:
            checks.output(f"{layer}/{which}", [part], spec, out)
    return parts


def quantized(
    shards: Sequence[np.ndarray],
    cast: OperandCast,
    *,
    scope: str,
    state: delayed.DelayedState | None = None,
) -> Iterator[Quantized]:
    """Each device's part of an expert's operand as one device, with all rows in turn, quantizes it.

    Shapes:   shards [M_d, C], of a weight all the same [N, K]; codes alike, scales of S-6.
    Order:    where blocks cut the rows, and under scope local, each device quantizes its own (X-3).
    """
    kind = by_name(cast.spec.granularity)
    row_block = kind.reduced if cast.axis == 0 else kind.other
    rows_cut = cast.axis == 0 and row_block is not None
    if state is not None or cast.role == "weight" or scope == "local" or rows_cut:
        yield from (cast.simulated(shard, state) for shard in shards)
        return
    whole, begin = cast.simulated(np.concatenate(shards)), 0
    for shard in shards:
        rows = slice(begin, begin := begin + len(shard))
        scale, scale_inv = (
            s if row_block is None or s.ndim == 0 else s[rows]
            for s in (whole.scale, whole.scale_inv)
        )
        yield whole._replace(codes=whole.codes[rows], scale=scale, scale_inv=scale_inv)
