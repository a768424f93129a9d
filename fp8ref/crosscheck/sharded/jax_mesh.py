"""Compare JAX's sharded linears with the simulator on every mesh of N devices.

spec P-4, P-9, B-7.

One device runs step 0, and every converted linear's tensors are kept. Each linear is then rerun on
every mesh data x fsdp x tensor, inside shard_map and under plain jit; of a model with experts on
every mesh data x fsdp x expert, inside shard_map, and experts' linears by ``grouped_rerun``. Codes
and scales are compared bit for bit, outputs within B-1. Of the whole model on each mesh, the first
layer's input is compared bit for bit, and the proof of the compiled step is checked.
"""

import functools
import itertools
import math
from collections.abc import Callable, Collection

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fp8ref.conformance.kit.compare import (
    Check,
    Report,
    compare_codes,
    compare_scales,
    compare_values,
)
from fp8ref.crosscheck import bounds, device_gemm
from fp8ref.crosscheck.operands import Observation, transposed
from fp8ref.crosscheck.sharded import experts as sharded_experts
from fp8ref.crosscheck.sharded import grouped_rerun
from fp8ref.crosscheck.sharded.grouped_rerun import Experts, Rerun
from fp8ref.formats import BFLOAT16
from fp8ref.jax.distributed.sharding import Placement, Reduction
from fp8ref.jax.linear import linear, operands
from fp8ref.jax.linear.operands import Use
from fp8ref.recipe import (
    OPERANDS,
    RECIPES,
    REDUCED_AXES,
    ROLES,
    CastSpec,
    Gemm,
    GemmSpec,
    Recipe,
    Role,
)
from fp8ref.shared import console
from fp8ref.shared.errors import ConfigError
from fp8ref.sim.quantize import cast, scaling
from fp8ref.train import loop
from fp8ref.train.config.config import Config
from fp8ref.train.data import loader
from fp8ref.train.jax.mesh import Layout

Operand = tuple[np.ndarray, np.ndarray]
"""The codes uint8 and the scale float32 of an operand."""

THROUGH = ("shard_map", "jit")
"""The ways to run a linear on a mesh (``parallel.through``); every mesh is compared with both."""


def crosscheck(config: Config, devices: int) -> tuple[Report, dict[str, str]]:
    """Rerun the linears of one device's step 0 on every mesh of so many devices.

    Returns:  the report, whose backends are named "jax 2x2x2 shard_map" for data x fsdp x tensor,
              or "jax 2x2x2 expert shard_map" for data x fsdp x expert;
              and why each mesh that the model does not fit was left out, by name.
    Raises:   ConfigError: a recipe without FP8 or that only JAX runs, gradients in FP8, too few
              devices, no mesh that fits.
    """
    supported = [name for name, recipe in RECIPES.items() if recipe.fp8 and recipe.shared]
    if config.numerics.recipe not in supported:
        raise ConfigError(
            f"--sharded takes recipes {', '.join(supported)}; got {config.numerics.recipe!r}. Set "
            "--recipe to one of these."
        )
    if config.parallel.reduce_dtype == "float8_e4m3fn":
        raise ConfigError(
            "--sharded bounds sums of gradients that were not cast; got parallel.reduce_dtype "
            "'float8_e4m3fn'. Set it to float32 or bfloat16."
        )
    if jax.device_count() < devices:
        raise ConfigError(
            f"--sharded {devices} needs as many devices; jax has {jax.device_count()}."
        )
    report, unfit = Report(), {}
    config = config.replace(
        parallel={"data": 1, "fsdp": 1, "expert": 1, "tensor": 1, "sequence": False}
    )
    tokens = loader.open_batches(config).step(0)
    one = loop.trainer("jax", config)
    grouped = {d.path: d.recipe for d in one.decisions if d.fp8 and d.experts is not None}
    tensors, experts = _tensors(one, tokens, grouped)
    rows = _buffer(experts, devices)
    first = one.first_input(tokens[:, :-1])  # type: ignore[attr-defined]
    recipes = {d.path: d.recipe for d in one.decisions if d.fp8 and d.experts is None}
    simulated = _Simulated(
        {layer: _quantized(tensors[layer], recipes[layer]) for layer in recipes}, recipes
    )
    last = "expert" if config.model.num_experts else "tensor"
    cut = [
        (sizes, sequence)
        for sizes, sequence in _factors(devices)
        if not (sequence and last == "expert")
    ]
    # plain jit moves no rows
    meshes = list(itertools.product(cut, THROUGH[:1] if last == "expert" else THROUGH))
    with console.bar(
        f"crosscheck {config.numerics.recipe} on {devices} devices", len(meshes)
    ) as advance:
        for (sizes, sequence), through in meshes:
            name = (
                "x".join(map(str, sizes))
                + " expert" * (last == "expert")
                + " sequence" * sequence
                + f" {through}"
            )
            keys = dict(zip(("data", "fsdp", last), sizes, strict=True))
            meshed = config.replace(
                parallel={**keys, "sequence": sequence, "through": through},
                run={"allow_fallback": True},
            )
            try:
                layout = Layout(meshed)
            except ConfigError as error:
                unfit[name] = str(error)
                continue
            for layer, recipe in recipes.items():
                placement = layout.placement(layer)
                assert placement is not None
                assert layout.mesh is not None
                gemms = rerun_linear(
                    tensors[layer],
                    recipe=recipe,
                    placement=placement,
                    mesh=layout.mesh,
                    through=through,
                )
                for which, (a, b, out) in gemms.items():
                    own, _ = simulated.expected[layer][which]
                    _compare(report, f"jax {name}", layer, which, tensors[layer], own, (a, b))
                    # Under plain jit XLA sums accumulators, unless a GPU's GEMMs write results
                    # (P-9).
                    reduction = placement.reduction(which, 1)
                    whole = reduction.parts == "accumulators" or (
                        through == "jit" and not (layout.on_gpu and reduction.parts == "result")
                    )
                    n = (
                        1
                        if whole
                        else math.prod(layout.mesh.shape[axis] for axis in reduction.axes)
                    )
                    check = report.check(f"{layer}/{which}/value/jax {name}", bound=1.0)
                    simulated.compare(
                        check, layer, which, out, (f"jax {name}", "sim"), reduction, n
                    )
            if grouped:
                _check_experts(report, f"jax {name}", layout, grouped, experts, rows)
            many = loop.trainer("jax", meshed)
            proof = many.prove(tokens)  # type: ignore[attr-defined]
            mine = many.first_input(tokens[:, :-1])  # type: ignore[attr-defined]
            check = report.check(f"model/first_input/value/jax {name}", bound=1.0)
            # bit for bit: no two float32 differ by less
            compare_values(check, mine, first, 2.0**-149, names=(f"jax {name}", "one device"))
            check = report.check(f"model/proof/value/jax {name}", bound=1.0)
            planned = sum(
                spec.fp8
                for recipe in (*recipes.values(), *grouped.values())
                for spec in recipe.gemms.values()
            )
            # checkpointing runs some of them twice
            dots = {dot["gemm"] for dot in proof["gemms"] if dot["fp8"]}
            compare_values(check, len(dots), planned, 0.5, names=("FP8 dots", "planned"))
            for line in proof["missing"]:
                check.fail(line)
            advance(name)
    if not report.checks:
        raise ConfigError(
            f"no mesh of {devices} devices fits this model: "
            + "; ".join(f"{name}: {why}" for name, why in unfit.items())
        )
    return report, unfit


def _factors(devices: int) -> list[tuple[tuple[int, int, int], bool]]:
    """Every (data, fsdp, tensor) of so many devices.

    If tensor is above 1, also with tokens cut over it (sequence parallelism).
    """
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    sizes = [
        (d, f, devices // d // f) for d in divisors for f in divisors if devices % (d * f) == 0
    ]
    return [
        (size, sequence)
        for size in sizes
        for sequence in (False, True)
        if size[2] > 1 or not sequence
    ]


def _check_experts(
    report: Report,
    backend: str,
    layout: Layout,
    recipes: dict[str, Recipe],
    tensors: dict[str, Experts],
    rows: int,
) -> None:
    """Rerun the experts of every layer on a mesh, and compare them (X-3, X-13)."""
    reruns = {recipe: Rerun(layout, recipe) for recipe in set(recipes.values())}
    devices: list[dict] = [{} for _ in range(layout.config.devices)]
    sums, weights = {}, {layer: layer_experts.weight for layer, layer_experts in tensors.items()}
    for layer, recipe in recipes.items():
        device_gemms, sums[layer] = reruns[recipe](tensors[layer], rows)
        for mine, layer_experts in zip(devices, device_gemms, strict=True):
            mine |= {(layer, *key): one for key, one in layer_experts.items()}
    keys = layout.config
    options: dict = {
        "apart": keys.expert,
        "scope": keys.amax_scope,
        "states": {},
        "wide": keys.reduce_dtype == "float32",
    }
    sharded_experts.check(report, backend, recipes, devices, weights, sums=sums, **options)


def _buffer(experts: dict[str, Experts], devices: int) -> int:
    """The rows of a device's buffer that holds any layer's, as they are dealt; a multiple of 16."""
    counts = [
        int(grouped_rerun.dealt([len(x) for x in layer_experts.input], devices).sum(1).max())
        for layer_experts in experts.values()
    ]
    return -(-(max(counts, default=0) + 1) // 16) * 16


def _tensors(
    trainer: loop.Trainer, tokens: np.ndarray, experts: Collection[str]
) -> tuple[dict[str, dict[Role, np.ndarray]], dict[str, Experts]]:
    """The high-precision input, weight and grad_output of every FP8 linear on one device; and those
    of experts.
    """
    tensors: dict[str, dict[Role, np.ndarray]] = {}
    grouped: dict[str, list[Observation]] = {layer: [] for layer in experts}

    def observer(layer: str, which: Gemm, a, b, out) -> None:
        if layer in experts:
            grouped[layer].append(Observation("jax", layer, which, a, b, out))
            return
        for role, (hp, _, _) in zip(OPERANDS[which], (a, b), strict=True):
            tensors.setdefault(layer, {})[role] = np.asarray(hp, np.float32)

    trainer.observe(tokens, observer)
    masters = trainer.weights() if experts else {}
    rounded = {layer: cast.round_to(masters[f"{layer}.weight"], BFLOAT16) for layer in experts}
    return tensors, {
        layer: grouped_rerun.expert_tensors(grouped[layer], rounded[layer]) for layer in experts
    }


def _quantized(tensors: dict[Role, np.ndarray], recipe: Recipe) -> dict[Gemm, tuple]:
    """For every FP8 GEMM: both operands quantized in their own layout, and the same as [M, K] and
    [N, K]."""
    result = {}
    for which, spec in recipe.gemms.items():
        if spec.a is None or spec.b is None:
            continue
        own = [
            scaling.quantize(
                tensors[role], cast.fmt, granularity=cast.granularity, policy=cast.policy, axis=axis
            )
            for role, cast, axis in zip(
                OPERANDS[which], (spec.a, spec.b), REDUCED_AXES[which], strict=True
            )
        ]
        a, b = (q if q.axis == 1 else transposed(q) for q in own)
        result[which] = own, (a, b)
    return result


class _Simulated:
    """The simulator's GEMMs, each computed once for every number of parts that meshes cut it
    into.
    """

    def __init__(self, expected: dict[str, dict[Gemm, tuple]], recipes: dict[str, Recipe]) -> None:
        self.expected, self._recipes = expected, recipes
        self._parts: dict[tuple[str, Gemm, int], list] = {}

    def compare(
        self,
        check: Check,
        layer: str,
        which: Gemm,
        out: np.ndarray,
        names: tuple[str, str],
        reduction: Reduction,
        n: int,
    ) -> None:
        """Compare an output with the sum of n parts (P-8); of accumulators, with one whole
        (P-7).
        """
        spec = self._recipes[layer].gemms[which]
        parts = self._parts_of(layer, which, spec, n)
        if n == 1:
            (a, b, simulated), *_ = parts
            compare_values(
                check,
                out,
                simulated,
                device_gemm.bound("jax", a, b, spec, out, simulated),
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
            bounds.summed_gemm(
                parts,
                spec,
                out,
                wide=reduction.parts == "float32",
                unit=device_gemm.unit("jax", spec),
            ),
            names=names,
        )

    def _parts_of(self, layer: str, which: Gemm, spec: GemmSpec, n: int) -> list:
        """(a, b, output) of n equal slices of the reduced axis."""
        if (layer, which, n) not in self._parts:
            _, (a, b) = self.expected[layer][which]
            slices = zip(*(np.split(q.codes, n, axis=1) for q in (a, b)), strict=True)
            operands = [
                (a._replace(codes=codes_a), b._replace(codes=codes_b))
                for codes_a, codes_b in slices
            ]
            self._parts[layer, which, n] = [
                (qa, qb, device_gemm.simulated("jax", qa, qb, spec)) for qa, qb in operands
            ]
        return self._parts[layer, which, n]


def _compare(
    report: Report,
    backend: str,
    layer: str,
    which: Gemm,
    tensors: dict[Role, np.ndarray],
    own,
    operands,
) -> None:
    """Compare codes and scales of both operands with the simulator's ``own``."""
    for role, q, (codes, scale) in zip(OPERANDS[which], own, operands, strict=True):
        name = f"{layer}/{role}"
        compare_codes(
            report.check(f"{name}/codes/{backend}"),
            {"sim": q.codes, backend: codes},
            backend,
            q.fmt,
            tensors[role],
        )
        compare_scales(
            report.check(f"{name}/scale/{backend}"), {"sim": q.scale, backend: scale}, backend
        )


def rerun_linear(
    tensors: dict[Role, np.ndarray],
    *,
    recipe: Recipe,
    placement: Placement,
    mesh: Mesh,
    through: str,
) -> dict[Gemm, tuple[Operand, Operand, np.ndarray]]:
    """Run one linear's three GEMMs on a mesh.

    Codes and scales of the operands, and the output, float32.

    Shapes:   tensors input [M, K], weight [N, K], grad_output [M, N], float32 holding bfloat16;
              codes of their shapes. All are whole tensors, not shards.
    Order:    each tensor is cut by the placement, then quantized and multiplied by
              ``linear.apply``, inside shard_map or under plain jit.
    """
    cut = (
        jax.device_put(
            jnp.asarray(tensors[role], jnp.bfloat16),
            NamedSharding(mesh, P(*placement.at_rest(role))),
        )
        for role in ROLES
    )
    outputs, quantized = _program(recipe, placement, mesh, through)(*cut)
    fetched = jax.tree.map(np.asarray, quantized)
    return {
        which: (*fetched[which], np.asarray(outputs[which], np.float32))
        for which in recipe.gemms
        if which in fetched
    }


@functools.lru_cache(maxsize=64)
def _program(recipe: Recipe, placement: Placement, mesh: Mesh, through: str) -> Callable:
    """Compile the three GEMMs of a linear on a mesh.

    Returns:  (input, weight, grad_output) -> (the outputs of all three GEMMs, and of the FP8 ones
              (codes, scale) of both operands).
    """
    # In shard_map a device sees its own shard alone, and amaxes take explicit collectives. Under
    # jit XLA inserts them. Quantizing has to know which of the two it is in.
    use = Use(
        recipe=recipe,
        name="rerun",
        placement=placement,
        mode="shard_map" if through == "shard_map" else "jit",
    )
    fp8 = {
        which: [
            (role, cast)
            for role, cast in zip(OPERANDS[which], (spec.a, spec.b), strict=True)
            if cast
        ]
        for which, spec in recipe.gemms.items()
        if spec.fp8
    }

    def run(x: jax.Array, w: jax.Array, g: jax.Array):
        tensors: dict[Role, jax.Array] = {"input": x, "weight": w, "grad_output": g}
        y, vjp = jax.vjp(
            lambda x, w: linear.apply(x, w, recipe=recipe, placement=placement, name="rerun")[0],
            x,
            w,
        )
        return dict(zip(recipe.gemms, (y, *vjp(g)), strict=True)), {
            which: tuple(
                quantized(tensors[role], role, cast, use.axis(which, role)) for role, cast in casts
            )
            for which, casts in fp8.items()
        }

    def quantized(x: jax.Array, role: Role, cast: CastSpec, axis: int):
        q = operands.quantize(x, role, cast, axis, {}, use)
        return jax.lax.bitcast_convert_type(q.codes, jnp.uint8), q.scale

    def scale_spec(role: Role, cast: CastSpec, axis: int) -> P:
        rows, columns = placement.at_rest(role)
        # A rowwise scale is cut as the dimension that is not reduced; a tensorwise one is on every
        # device.
        return (
            P()
            if cast.granularity == "tensorwise"
            else P(rows, None)
            if axis == -1
            else P(None, columns)
        )

    if through == "jit":
        return jax.jit(run)
    at_rest = {role: P(*placement.at_rest(role)) for role in ROLES}
    results = dict(
        zip(
            recipe.gemms, (at_rest["grad_output"], at_rest["input"], at_rest["weight"]), strict=True
        )
    )
    operand_specs = {
        which: tuple(
            (at_rest[role], scale_spec(role, cast, use.axis(which, role))) for role, cast in casts
        )
        for which, casts in fp8.items()
    }
    return jax.jit(
        jax.shard_map(
            run, mesh=mesh, in_specs=tuple(at_rest.values()), out_specs=(results, operand_specs)
        )
    )
