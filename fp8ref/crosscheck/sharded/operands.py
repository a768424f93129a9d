"""Compare the operands of every rank with the simulator's sharded quantization (spec P-4 to P-6,
P-14).

``sharded.torch_ranks`` runs the ranks.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from fp8ref.conformance.kit.compare import (
    Report,
    compare_bits,
    compare_codes,
    compare_scales,
    compare_values,
)
from fp8ref.crosscheck.fsdp_run import Operands, Run
from fp8ref.crosscheck.operands import States, initial_states
from fp8ref.crosscheck.sharded import experts as sharded_experts
from fp8ref.formats import BFLOAT16
from fp8ref.recipe import CUT_AXES, OPERANDS, REDUCED_AXES, CastSpec, Gemm, Recipe, Role
from fp8ref.sim import delayed
from fp8ref.sim.distributed import sharding
from fp8ref.sim.distributed.mesh import Layout, Mesh, split
from fp8ref.sim.quantize import cast, scaling
from fp8ref.sim.quantize.scaling import Quantized
from fp8ref.spec import llama
from fp8ref.train.config.config import Config

FIRST = tuple(f"model.layers.0.self_attn.{x}_proj" for x in "qkv")
"""The linears with no FP8 in front of them: every scaling gives them the same input."""


def check_ranks(
    report: Report,
    backend: str,
    config: Config,
    recipes: Mapping[str, Recipe],
    runs: Sequence[Run],
    states: Sequence[States],
) -> None:
    """Compare codes and scales of every rank's operands, before and after training (P-4, P-6), and
    experts' results.

    config   whose data, fsdp, expert, tensor and amax_scope are those of the runs.
    recipes  by layer; those of experts are each group's.
    runs     the watched run of each rank.
    states   the simulator's delayed states, first and last among them; empty if every scale is
             dynamic.
    """
    for when, masters in ((0, _initial(config)), (-1, runs[0].weights)):
        rank_operands = [run.operands[when] for run in runs]
        _check_operands(
            report, backend, config, recipes, rank_operands, masters, states[when] if states else {}
        )


def check_pass(
    report: Report, backend: str, config: Config, recipes: Mapping[str, Recipe], observed: Operands
) -> None:
    """Compare the operands of one process's first pass."""
    _check_operands(
        report, backend, config, recipes, [observed], _initial(config), initial_states(recipes)
    )


def _initial(config: Config) -> dict[str, np.ndarray]:
    return llama.initial_weights(config.model, seed=config.run.seed)


def _check_operands(
    report: Report,
    backend: str,
    config: Config,
    recipes: Mapping[str, Recipe],
    rank_operands: Sequence[Operands],
    masters: Mapping[str, np.ndarray],
    states: States,
) -> None:
    """Compare what ranks have of one pass, under these masters and states."""
    weights = {layer: cast.round_to(masters[f"{layer}.weight"], BFLOAT16) for layer in recipes}
    keys, experts = (
        config.parallel,
        {layer: r for layer, r in recipes.items() if weights[layer].ndim > 2},
    )
    expert_gemms = [mine.experts for mine in rank_operands]
    sharded_experts.check(
        report,
        backend,
        experts,
        expert_gemms,
        weights,
        apart=keys.expert,
        scope=keys.amax_scope,
        states=states,
    )
    for layer, r in recipes.items():
        for which, spec in r.gemms.items() if layer not in experts else ():
            _check_ran(report, backend, layer, which, spec.fp8, rank_operands)
            for role, cast_spec, axis in zip(
                OPERANDS[which], (spec.a, spec.b), REDUCED_AXES[which], strict=True
            ):
                if cast_spec is None or any(
                    (layer, which, role) not in mine.fp8 for mine in rank_operands
                ):
                    continue
                cut = _layout(
                    config,
                    role,
                    layer,
                    weights[layer].shape if role == "weight" else None,
                    rank_operands,
                )
                shards = (
                    list(split(weights[layer], cut).values())
                    if role == "weight"
                    else [mine.hp[layer, role] for mine in rank_operands]
                )
                state = states[f"{layer}/{role}"] if cast_spec.delayed else None
                expected = _simulated(shards, cut, cast_spec, axis, config, state=state)
                for rank, q in enumerate(expected):
                    codes, scale = rank_operands[rank].fp8[layer, which, role]
                    _compare(report, layer, role, backend, q, codes, scale, shards[rank])


def check_first_layer(
    report: Report, backend: str, runs: Sequence[Run], one: Run, *, tensor: int
) -> None:
    """Under scope global, compare each rank's first input with its rows of one process's (P-4).

    tensor    ranks that follow each other and have the same rows.
    """
    whole, names = one.operands[0], (backend, "one process")
    for layer, which, role in whole.fp8:
        if layer not in FIRST or role != "input":
            continue
        codes, scale = whole.fp8[layer, which, role]
        for rank, run in enumerate(runs):
            mine, own = run.operands[0].fp8[layer, which, role]
            first = rank // tensor * len(mine)
            rows = slice(first, first + len(mine))
            compare_values(
                report.check(f"{layer}/{role}/codes/{backend} one process"),
                mine,
                codes[rows],
                1.0,
                names=names,
            )
            per = len(codes) // len(scale) if scale.ndim else 1  # rows that share a scale
            row_scales = (
                scale
                if own.shape == scale.shape
                else scale[first // per : (first + len(mine)) // per]
            )
            compare_bits(
                report.check(f"{layer}/{role}/scale/{backend} one process"),
                own,
                row_scales,
                names=names,
            )


def _check_ran(
    report: Report,
    backend: str,
    layer: str,
    which: Gemm,
    planned: bool,
    rank_operands: Sequence[Operands],
) -> None:
    for rank, mine in enumerate(rank_operands):
        if planned != ((layer, which, OPERANDS[which][0]) in mine.fp8):
            problem = (
                "was planned in FP8 and did not run"
                if planned
                else "ran in FP8 and was not planned"
            )
            report.check(f"{layer}/{which}/value/{backend}", bound=1.0).fail(
                f"the GEMM {problem} on rank {rank}"
            )


def _layout(
    config: Config,
    role: Role,
    layer: str,
    shape: tuple[int, ...] | None,
    rank_operands: Sequence[Operands],
) -> Layout:
    """How ranks cut an operand [rows, columns] (P-10); shape: of a weight."""
    keys, last = config.parallel, layer.rpartition(".")[2]
    mesh = Mesh(
        axes={"data": keys.data, "fsdp": keys.fsdp, "expert": keys.expert, "tensor": keys.tensor}
    )
    splits: dict[int, tuple[str, ...]] = {} if role == "weight" else {0: ("data", "fsdp", "expert")}
    axis = (
        CUT_AXES["colwise"].get(role)
        if last in llama.COLUMN
        else CUT_AXES["rowwise"].get(role)
        if last in llama.ROW
        else None
    )
    if axis is not None:
        splits[axis] = ("tensor",)
    if shape is None:
        part = rank_operands[0].hp[layer, role].shape
        shape = (part[0] * keys.batch_parts, part[1] * (keys.tensor if axis == 1 else 1))
    return Layout(mesh=mesh, shape=shape, splits=splits)


def _simulated(
    shards: Sequence[np.ndarray],
    layout: Layout,
    spec: CastSpec,
    axis: int,
    config: Config,
    *,
    state: delayed.DelayedState | None,
) -> list[Quantized]:
    """The simulator's operand on every rank, whose piece of a layout is its shard."""
    options = {"granularity": spec.granularity, "policy": spec.policy, "axis": axis}
    if state is not None:
        assert spec.delayed is not None
        scales = delayed.scales(state, spec.delayed, spec.fmt)
        return [scaling.quantize_with(shard, scales, spec.fmt, **options) for shard in shards]  # type: ignore[arg-type]
    by_device = dict(zip(layout.mesh.devices, shards, strict=True))
    # Ranks that share a linear share its amaxes under either scope (P-14).
    scope = "global" if config.parallel.amax_scope == "global" else ("tensor",)
    pieces = sharding.quantize(by_device, layout, spec.fmt, scope=scope, **options)  # type: ignore[arg-type]
    return [pieces[device] for device in layout.mesh.devices]


def _compare(
    report: Report,
    layer: str,
    role: Role,
    backend: str,
    q: Quantized,
    codes: np.ndarray,
    scale: np.ndarray,
    hp,
) -> None:
    name = f"{layer}/{role}"
    compare_codes(
        report.check(f"{name}/codes/{backend}"),
        {"sim": q.codes, backend: codes},
        backend,
        q.fmt,
        hp,
    )
    compare_scales(
        report.check(f"{name}/scale/{backend}"), {"sim": q.scale, backend: scale}, backend
    )
