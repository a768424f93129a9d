"""Codes and scales of FP8 operands that ranks hold rows of, against the simulator's sharded quantisation (SEMANTICS P-4, P-6)."""

from collections.abc import Mapping, Sequence

import numpy as np

from fp8ref import llama
from fp8ref.conformance.compare import Report, compare_bits, compare_codes, compare_scales, compare_values
from fp8ref.crosscheck.delayed_states import States
from fp8ref.crosscheck.fsdp_run import Operands, Run
from fp8ref.formats import BFLOAT16
from fp8ref.recipe import OPERANDS, REDUCED_AXES, CastSpec, Gemm, Recipe, Role
from fp8ref.sim import cast, delayed, scaling, sharding
from fp8ref.sim.mesh import Layout, Mesh
from fp8ref.sim.scaling import Quantized
from fp8ref.train.config import Config

FIRST = tuple(f"model.layers.0.self_attn.{x}_proj" for x in "qkv")  # given the same by any scaling: nothing before them is in FP8


def check(
    report: Report,
    backend: str,
    config: Config,
    recipes: Mapping[str, Recipe],
    runs: Sequence[Run],
    states: Sequence[States],
) -> None:
    """Every operand of every rank, before the first step and after the last.

    config   whose data, fsdp and amax_scope are those of the runs.
    runs     watched ones, by rank.
    states   the simulator's delayed states, first and last among them; none where every scale is dynamic.
    """
    initial = llama.initial_weights(config.model, seed=config.run.seed)
    for when, masters in ((0, initial), (-1, runs[0].weights)):
        weights = {layer: cast.round_to(masters[f"{layer}.weight"], BFLOAT16) for layer in recipes}
        seen = [run.operands[when] for run in runs]
        for layer, r in recipes.items():
            for which, spec in r.gemms.items():
                _check_ran(report, backend, layer, which, spec.fp8, seen)
                for role, how, axis in zip(OPERANDS[which], (spec.a, spec.b), REDUCED_AXES[which], strict=True):
                    if how is None or any((layer, which, role) not in mine.fp8 for mine in seen):
                        continue
                    whole = role == "weight"
                    shards = [weights[layer] if whole else mine.hp[layer, role] for mine in seen]
                    state = states[when][f"{layer}/{role}"] if how.delayed else None
                    expected = _simulated(shards, how, axis, config, whole=whole, state=state)
                    for rank, q in enumerate(expected):
                        codes, scale = seen[rank].fp8[layer, which, role]
                        _compare(report, layer, role, backend, q, codes, scale, shards[rank])


def check_first_layer(report: Report, backend: str, runs: Sequence[Run], one: Run) -> None:
    """Under scope global, the input of the first layer before the first step is one process' (P-4): each rank has its rows of it."""
    whole, names = one.operands[0], (backend, "one process")
    for layer, which, role in whole.fp8:
        if layer not in FIRST or role != "input":
            continue
        codes, scale = whole.fp8[layer, which, role]
        for rank, run in enumerate(runs):
            mine, own = run.operands[0].fp8[layer, which, role]
            rows = slice(rank * len(mine), (rank + 1) * len(mine))
            compare_values(report.check(f"{layer}/{role}/codes/{backend} one process"), mine, codes[rows], 1.0, names=names)
            of_rows = scale[rows] if scale.ndim and len(scale) == len(codes) else scale  # a scale for each row, or for all of them
            compare_bits(report.check(f"{layer}/{role}/scale/{backend} one process"), own, of_rows, names=names)


def _check_ran(report: Report, backend: str, layer: str, which: Gemm, planned: bool, seen: Sequence[Operands]) -> None:
    for rank, mine in enumerate(seen):
        if planned != ((layer, which, OPERANDS[which][0]) in mine.fp8):
            problem = "was planned in FP8 and did not run" if planned else "ran in FP8 and was not planned"
            report.check(f"{layer}/{which}/value/{backend}", bound=1.0).fail(f"the GEMM {problem} on rank {rank}")


def _simulated(
    shards: Sequence[np.ndarray], how: CastSpec, axis: int, config: Config, *, whole: bool, state: delayed.DelayedState | None
) -> list[Quantized]:
    """Every rank's operand, of rows [m, K] that follow each other in rank order, or of a tensor that each has all of."""
    options = {"granularity": how.granularity, "policy": how.policy, "axis": axis}
    if state is not None:
        assert how.delayed is not None
        scales = delayed.scales(state, how.delayed, how.fmt)
        return [scaling.quantize_with(shard, scales, how.fmt, **options) for shard in shards]  # type: ignore[arg-type]
    if whole:
        return [scaling.quantize(shards[0], how.fmt, **options)] * len(shards)  # type: ignore[arg-type]
    mesh = Mesh(axes={"data": config.parallel.data, "fsdp": config.parallel.fsdp})
    layout = Layout(mesh=mesh, shape=(sum(map(len, shards)), shards[0].shape[1]), splits={0: ("data", "fsdp")})
    by_device = dict(zip(mesh.devices, shards, strict=True))
    found = sharding.quantize(by_device, layout, how.fmt, scope=config.parallel.amax_scope, **options)  # type: ignore[arg-type]
    return [found[device] for device in mesh.devices]


def _compare(report: Report, layer: str, role: Role, backend: str, q: Quantized, codes: np.ndarray, scale: np.ndarray, hp) -> None:
    name = f"{layer}/{role}"
    compare_codes(report.check(f"{name}/codes/{backend}"), {"sim": q.codes, backend: codes}, backend, q.fmt, hp)
    compare_scales(report.check(f"{name}/scale/{backend}"), {"sim": q.scale, backend: scale}, backend)
