"""Compare every rank's operands with the simulator's sharded quantization (P-4 to P-6, P-14).

``sharded.torch_ranks`` runs the ranks.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from fp8ref.conformance.kit.compare import Report, compare_bits, compare_values
from fp8ref.crosscheck import operands
from fp8ref.crosscheck.backend_checks import BackendChecks
from fp8ref.crosscheck.fsdp_run import Operands, Run
from fp8ref.crosscheck.sharded import experts as sharded_experts
from fp8ref.formats import BFLOAT16
from fp8ref.recipe import CUT_AXES, OPERANDS, Gemm, GemmSpec, Recipe, Role
from fp8ref.sim import delayed, linear
from fp8ref.sim.distributed import sharding
from fp8ref.sim.distributed.mesh import Layout, Mesh, split
from fp8ref.sim.quantize import cast
from fp8ref.sim.quantize.scaling import Quantized
from fp8ref.spec import llama
from fp8ref.train.config import device_shapes
from fp8ref.train.config.config import Config
from fp8ref.train.config.sections import ParallelConfig

FIRST = tuple(f"model.layers.0.self_attn.{x}_proj" for x in "qkv")
"""The linears with no FP8 in front of them: every scaling gives them the same input."""


def check_ranks(
    report: Report,
    backend: str,
    config: Config,
    recipes: Mapping[str, Recipe],
    runs: Sequence[Run],
    states: Sequence[operands.States],
) -> None:
    """Compare codes and scales of every rank's operands, before and after training, and experts.

    config   whose data, fsdp, expert, tensor and amax_scope are those of the runs.
    recipes  by layer; those of experts are each group's.
    runs     the watched run of each rank.
    states   the simulator's delayed states, first and last among them; empty without any.
    """
    for when, masters in ((0, _initial(config)), (-1, runs[0].weights)):
        rank_operands = [run.operands[when] for run in runs]
        now = states[when] if states else {}
        _check_operands(report, backend, config, recipes, rank_operands, masters, now)


def check_pass(
    report: Report, backend: str, config: Config, recipes: Mapping[str, Recipe], observed: Operands
) -> None:
    """Compare the operands of one process's first pass."""
    weights, states = _initial(config), operands.initial_states(recipes)
    _check_operands(report, backend, config, recipes, [observed], weights, states)


def _initial(config: Config) -> dict[str, np.ndarray]:
    return llama.initial_weights(config.model, seed=config.run.seed)


def _check_operands(
    report: Report,
    backend: str,
    config: Config,
    recipes: Mapping[str, Recipe],
    rank_operands: Sequence[Operands],
    masters: Mapping[str, np.ndarray],
    states: operands.States,
) -> None:
    """Compare what ranks have of one pass, under these masters and states."""
    checks = BackendChecks(report, backend)
    weights = {layer: cast.round_to(masters[f"{layer}.weight"], BFLOAT16) for layer in recipes}
    experts = {layer: r for layer, r in recipes.items() if weights[layer].ndim > 2}
    expert_gemms = [mine.experts for mine in rank_operands]
    sharded_experts.check(
        report, backend, experts, expert_gemms, weights, parallel=config.parallel, states=states
    )
    for layer, recipe in recipes.items():
        for which, spec in recipe.gemms.items() if layer not in experts else ():
            weight = weights[layer]
            _check_gemm(checks, config, layer, which, spec, rank_operands, weight, states)


def _check_gemm(
    checks: BackendChecks,
    config: Config,
    layer: str,
    which: Gemm,
    spec: GemmSpec,
    rank_operands: Sequence[Operands],
    weight: np.ndarray,
    states: operands.States,
) -> None:
    for rank, mine in enumerate(rank_operands):
        if spec.fp8 != ((layer, which, OPERANDS[which][0]) in mine.fp8):
            checks.misplanned(layer, which, spec.fp8, f" on rank {rank}")
    step, seed = rank_operands[0].step, config.run.seed
    own = linear.seed_of(linear.seed_in_run(seed, step, layer), which)
    for operand in operands.operand_casts(which, spec):
        operand = operand._replace(seed=own if operand.spec.stochastic else None)
        role, is_weight = operand.role, operand.role == "weight"
        if any((layer, which, role) not in mine.fp8 for mine in rank_operands):
            continue
        shape = weight.shape if is_weight else rank_operands[0].hp[layer, role].shape
        cut = _layout(config.parallel, role, layer, shape)
        if is_weight:
            shards = list(split(weight, cut).values())
        else:
            shards = [mine.hp[layer, role] for mine in rank_operands]
        state = operand.state(layer, states)
        expected = _simulated(shards, cut, operand, config.parallel.amax_scope, state)
        for mine, q, shard in zip(rank_operands, expected, shards, strict=True):
            checks.operand(f"{layer}/{role}", q, *mine.fp8[layer, which, role], shard)


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
            check = report.check(f"{layer}/{role}/codes/{backend} one process")
            compare_values(check, mine, codes[rows], 1.0, names=names)
            per = len(codes) // len(scale) if scale.ndim else 1  # rows that share a scale
            part = slice(first // per, rows.stop // per)
            row_scales = scale if own.shape == scale.shape else scale[part]
            check = report.check(f"{layer}/{role}/scale/{backend} one process")
            compare_bits(check, own, row_scales, names=names)


def _layout(keys: ParallelConfig, role: Role, layer: str, shape: tuple[int, ...]) -> Layout:
    """How ranks cut an operand [rows, columns] (P-10); shape: of a weight, or of a rank's part."""
    style = device_shapes.style(layer)
    axis = CUT_AXES[style].get(role) if style else None
    splits: dict[int, tuple[str, ...]] = {}
    if role != "weight":
        splits[0] = ("data", "fsdp", "expert")
        rows, columns = shape
        shape = (rows * keys.batch_parts, columns * (keys.tensor if axis == 1 else 1))
    if axis is not None:
        splits[axis] = ("tensor",)
    axes = {key: getattr(keys, key) for key in ("data", "fsdp", "expert", "tensor")}
    return Layout(mesh=Mesh(axes=axes), shape=shape, splits=splits)


def _simulated(
    shards: Sequence[np.ndarray],
    layout: Layout,
    operand: operands.OperandCast,
    amax_scope: str,
    state: delayed.DelayedState | None,
) -> list[Quantized]:
    """The simulator's operand on every rank, whose piece of a layout is its shard."""
    if state is not None:
        return [operand.simulated(shard, state) for shard in shards]
    spec, by_device = operand.spec, dict(zip(layout.mesh.devices, shards, strict=True))
    if not spec.plain or spec.policy.two_level is not None:
        whole = np.empty(layout.shape, np.float32)
        for device, shard in by_device.items():
            whole[layout.index(device)] = shard
        q = operand.simulated(whole)
        return [sharding.piece(q, layout, device, operand.axis) for device in layout.mesh.devices]
    pieces = sharding.quantize(
        by_device,
        layout,
        spec.fmt,
        granularity=spec.granularity,
        policy=spec.policy,
        axis=operand.axis,
        # Ranks that share a linear share its amaxes under either scope (P-14).
        scope="global" if amax_scope == "global" else ("tensor",),
    )
    return [pieces[device] for device in layout.mesh.devices]
