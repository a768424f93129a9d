"""Compare experts' GEMMs on a mesh with those of one device that has all rows, by the simulator
(spec X-3, X-13, X-15).

Device d of an axis expert of D holds the experts from d E / D on. Along data and fsdp devices hold
the same experts: their rows of an expert, in the order of the devices, are those of one device.
``sharded.torch_ranks`` gets each device's GEMMs from ranks that train, ``sharded.jax_mesh`` from
``grouped_rerun``.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from fp8ref.conformance.kit.compare import (
    Report,
    compare_bits,
    compare_codes,
    compare_scales,
    compare_values,
)
from fp8ref.crosscheck import bounds, device_gemm
from fp8ref.crosscheck.operands import States, transposed
from fp8ref.formats import BFLOAT16
from fp8ref.recipe import OPERANDS, REDUCED_AXES, CastSpec, Gemm, GemmSpec, Recipe, Role
from fp8ref.sim import delayed
from fp8ref.sim.quantize import cast, scaling
from fp8ref.sim.quantize.scaling import Quantized
from fp8ref.spec.granularity import by_name

Operand = tuple[np.ndarray, np.ndarray, np.ndarray]
"""hp float32, codes uint8 and scale float32, in a linear's own layout (L-2)."""

ExpertGemm = tuple[Operand, Operand, np.ndarray | None]
"""One expert's GEMM on one device: its operands a and b, and its result, float32; None of one that
is summed over devices.
"""

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
    apart: int,
    scope: str,
    states: States,
    sums: Mapping[str, np.ndarray] | None = None,
    wide: bool = True,
) -> None:
    """Compare codes and scales of every expert's operands on every device, bit for bit, and results
    within B-1.

    recipes   of experts' linears, each group's.
    devices   in the order of the mesh, whose last axis is expert, of ``apart`` devices.
    weights   float32 [E, N, K] holding bfloat16, by layer.
    scope     of amaxes (P-2): global, over the devices with the same experts, or local.
    states    of delayed scaling, by "<layer>/<role>".
    sums      grad_weight [E, N, K] by layer, of devices that give no result of their own, summed in
              float32 (wide) or bfloat16.
    """
    for layer, recipe in recipes.items():
        own = len(weights[layer]) // apart
        for which, spec in recipe.gemms.items():
            ran = {
                i
                for i, gemms in enumerate(devices)
                if any((layer, which, e) in gemms for e in range(own))
            }
            if bool(ran) != spec.fp8:
                problem = (
                    "was planned in FP8 and did not run"
                    if spec.fp8
                    else "ran in FP8 and was not planned"
                )
                report.check(f"{layer}/{which}/value/{backend}", bound=1.0).fail(
                    f"the GEMM {problem} on any device"
                )
            if not spec.fp8:
                continue
            for e in range(own * apart):
                holders = devices[e // own :: apart]
                gemms = [
                    mine[layer, which, e % own]
                    for mine in holders
                    if (layer, which, e % own) in mine
                ]
                if gemms:
                    parts = _check_expert(
                        report,
                        backend,
                        layer,
                        which,
                        spec,
                        gemms,
                        weights[layer][e],
                        scope=scope,
                        states=states,
                    )
                    if which == "grad_weight" and sums is not None:
                        _check_sum(
                            report,
                            f"{layer}/{which}/value/{backend}",
                            backend,
                            spec,
                            parts,
                            sums[layer][e],
                            wide=wide,
                        )


def _check_expert(
    report: Report,
    backend: str,
    layer: str,
    which: Gemm,
    spec: GemmSpec,
    gemms: Sequence[ExpertGemm],
    weight: np.ndarray,
    *,
    scope: str,
    states: States,
) -> list[tuple[Quantized, Quantized, np.ndarray]]:
    """Compare one expert's GEMM on the devices that have rows of it; the simulator's operands and
    result of each.
    """
    operands = []
    role_operands = zip(*((a, b) for a, b, _ in gemms), strict=True)
    for role, cast_spec, axis, casts in zip(
        OPERANDS[which], (spec.a, spec.b), REDUCED_AXES[which], role_operands, strict=True
    ):
        assert cast_spec is not None
        shards = [weight for _ in casts] if role == "weight" else [hp for hp, *_ in casts]
        state = states[f"{layer}/{role}"] if cast_spec.delayed else None
        expected = list(quantized(shards, cast_spec, axis, role, scope=scope, state=state))
        for q, shard, (hp, codes, scale) in zip(expected, shards, casts, strict=True):
            if role == "weight":
                compare_bits(
                    report.check(f"{layer}/weights/value/{backend}"),
                    hp,
                    shard,
                    names=(backend, "the master"),
                )
            compare_codes(
                report.check(f"{layer}/{role}/codes/{backend}"),
                {"sim": q.codes, backend: codes},
                backend,
                q.fmt,
                shard,
            )
            compare_scales(
                report.check(f"{layer}/{role}/scale/{backend}"),
                {"sim": q.scale, backend: scale},
                backend,
            )
        operands.append([q if q.axis == 1 else transposed(q) for q in expected])
    parts = []
    for a, b, (*_, out) in zip(*operands, gemms, strict=True):
        simulated = device_gemm.simulated(backend, a, b, spec)
        parts.append((a, b, simulated))
        if out is not None:
            check = report.check(f"{layer}/{which}/value/{backend}", bound=1.0)
            compare_values(
                check,
                out,
                simulated,
                device_gemm.bound(backend, a, b, spec, out, simulated),
                names=(backend, "sim"),
            )
    return parts


def _check_sum(
    report: Report,
    name: str,
    backend: str,
    spec: GemmSpec,
    parts: Sequence[tuple[Quantized, Quantized, np.ndarray]],
    out: np.ndarray,
    *,
    wide: bool,
) -> None:
    """Compare a sum over devices with the simulator's of the devices' results, each rounded (P-8);
    devices without rows add zeros.
    """
    check, names = report.check(name, bound=1.0), (backend, "sim")
    if len(parts) == 1:
        ((a, b, simulated),) = parts
        compare_values(
            check,
            out,
            simulated,
            device_gemm.bound(backend, a, b, spec, out, simulated),
            names=names,
        )
        return
    simulated = cast.round_to(
        np.sum([part for *_, part in parts], axis=0, dtype=np.float32), BFLOAT16
    )
    compare_values(
        check,
        out,
        simulated,
        bounds.summed_gemm(parts, spec, out, wide=wide, unit=device_gemm.unit(backend, spec)),
        names=names,
    )


def quantized(
    shards: Sequence[np.ndarray],
    spec: CastSpec,
    axis: int,
    role: Role,
    *,
    scope: str,
    state: delayed.DelayedState | None = None,
) -> Iterator[Quantized]:
    """Each device's part of an expert's operand as one device quantizes it, which has all devices'
    rows one after another.

    Shapes:   shards [M_d, C], of a weight all the same [N, K]; codes of their shapes, scales of
              S-6.
    Order:    where blocks cut the rows, and under scope local, each device quantizes its own (X-3).
    """
    options: dict = {"granularity": spec.granularity, "policy": spec.policy, "axis": axis}
    if state is not None:
        assert spec.delayed is not None
        scales = delayed.scales(state, spec.delayed, spec.fmt)
        yield from (scaling.quantize_with(shard, scales, spec.fmt, **options) for shard in shards)
        return
    kind = by_name(spec.granularity)
    row_block = kind.reduced if axis == 0 else kind.other
    if role == "weight" or scope == "local" or (axis == 0 and row_block is not None):
        yield from (scaling.quantize(shard, spec.fmt, **options) for shard in shards)
        return
    whole, begin = scaling.quantize(np.concatenate(shards), spec.fmt, **options), 0
    for shard in shards:
        rows = slice(begin, begin := begin + len(shard))
        scale, scale_inv = (
            s if row_block is None or s.ndim == 0 else s[rows]
            for s in (whole.scale, whole.scale_inv)
        )
        yield whole._replace(codes=whole.codes[rows], scale=scale, scale_inv=scale_inv)
