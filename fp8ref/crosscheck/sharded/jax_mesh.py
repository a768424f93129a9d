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

from fp8ref.conformance.kit.compare import Report
from fp8ref.crosscheck import device_gemm
from fp8ref.crosscheck.backend_checks import BackendChecks
from fp8ref.crosscheck.bounds import Part
from fp8ref.crosscheck.operands import Observation, OperandCast, as_factor, operand_casts
from fp8ref.crosscheck.sharded import experts as sharded_experts
from fp8ref.crosscheck.sharded import grouped_rerun
from fp8ref.crosscheck.sharded.grouped_rerun import Experts, Rerun
from fp8ref.formats import BFLOAT16
from fp8ref.jax.distributed.sharding import Mode, Placement
from fp8ref.jax.linear import carried, operands, rounding
from fp8ref.jax.linear import linear as jax_linear
from fp8ref.jax.linear.carried import Layer
from fp8ref.recipe import OPERANDS, RECIPES, ROLES, Gemm, Recipe, Role
from fp8ref.shared import console
from fp8ref.shared.errors import ConfigError, require
from fp8ref.sim import linear
from fp8ref.sim.quantize import cast
from fp8ref.sim.quantize.scaling import Quantized
from fp8ref.train import loop
from fp8ref.train.config.config import Config
from fp8ref.train.data import loader
from fp8ref.train.jax.mesh import Layout

__all__ = ["crosscheck"]

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
    _check(config, devices)
    report, unfit = Report(), {}
    one = _OneDevice(config)
    experts_rows = _buffer(one.experts, devices)
    last = "expert" if config.model.num_experts else "tensor"
    # plain jit moves no rows, and no mesh with experts cuts sequences
    ways = THROUGH[:1] if last == "expert" else THROUGH
    cut = [
        (sizes, sequence)
        for sizes, sequence in _factors(devices)
        if not (sequence and last == "expert")
    ]
    title = f"crosscheck {config.numerics.recipe} on {devices} devices"
    with console.bar(title, len(cut) * len(ways)) as advance:
        for (sizes, sequence), through in itertools.product(cut, ways):
            marks = " expert" * (last == "expert") + " sequence" * sequence
            name = f"{'x'.join(map(str, sizes))}{marks} {through}"
            keys = dict(zip(("data", "fsdp", last), sizes, strict=True))
            meshed = one.config.replace(
                parallel={**keys, "sequence": sequence, "through": through},
                run={"allow_fallback": True},
            )
            try:
                layout = Layout(meshed)
            except ConfigError as error:
                unfit[name] = str(error)
                continue
            checks = BackendChecks(report, f"jax {name}")
            _check_linears(checks, one, layout)
            if one.grouped:
                _check_experts(checks, one, layout, experts_rows)
            _check_model(checks, one, meshed)
            advance(name)
    if not report.checks:
        raise ConfigError(
            f"no mesh of {devices} devices fits this model: "
            + "; ".join(f"{name}: {why}" for name, why in unfit.items())
        )
    return report, unfit


def _check(config: Config, devices: int) -> None:
    supported = [name for name, recipe in RECIPES.items() if recipe.fp8 and not recipe.delayed]
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
    text = f"--sharded {devices} needs as many devices; jax has {jax.device_count()}."
    require(jax.device_count() >= devices, text, ConfigError)


class _OneDevice:
    """What one device has of step 0.

    recipes, grouped     of linears, and of experts' linears, in FP8.
    tensors, experts     their high-precision tensors, by layer.
    """

    def __init__(self, config: Config) -> None:
        self.config = config.replace(
            parallel={"data": 1, "fsdp": 1, "expert": 1, "tensor": 1, "sequence": False}
        )
        self.tokens = loader.open_batches(self.config).step(0)
        trainer = loop.trainer("jax", self.config)
        fp8 = [decision for decision in trainer.decisions if decision.fp8]
        self.recipes = {d.path: d.recipe for d in fp8 if d.experts is None}
        self.grouped = {d.path: d.recipe for d in fp8 if d.experts is not None}
        self.tensors, self.experts = _tensors(trainer, self.tokens, self.grouped)
        self.first_input = trainer.first_input(self.tokens[:, :-1])  # type: ignore[attr-defined]
        self._parts: dict[tuple[str, Gemm, int], list[Part]] = {}

    @functools.cached_property
    def simulated(self) -> dict[tuple[str, Gemm], tuple[Quantized, Quantized]]:
        """The simulator's operands of every FP8 GEMM, in their own layout."""
        quantized = {}
        for layer, recipe in self.recipes.items():
            for which, spec in recipe.gemms.items():
                if spec.fp8:
                    seed = linear.seed_of(self.seed(layer), which)
                    a, b = (
                        cast._replace(seed=seed).simulated(self.tensors[layer][cast.role])
                        for cast in operand_casts(which, spec)
                    )
                    quantized[layer, which] = a, b
        return quantized

    def seed(self, layer: str) -> int:
        """The seed of a linear's stochastic rounding in this step (S-24)."""
        return linear.seed_in_run(self.config.run.seed, 0, layer)

    def parts(self, layer: str, which: Gemm, n: int) -> list[Part]:
        """The simulator's GEMM in n equal slices of the reduced axis, computed once."""
        if (layer, which, n) not in self._parts:
            spec = self.recipes[layer].gemms[which]
            a, b = map(as_factor, self.simulated[layer, which])
            pairs = zip(_slices(a, n), _slices(b, n), strict=True)
            self._parts[layer, which, n] = [
                Part(qa, qb, device_gemm.simulated("jax", qa, qb, spec)) for qa, qb in pairs
            ]
        return self._parts[layer, which, n]


def _slices(q: Quantized, n: int) -> list[Quantized]:
    """n equal slices of an operand [M, K] along K, each with its scales."""
    if q.blocks[1] is None:  # which is one scale
        return [q._replace(codes=codes) for codes in np.split(q.codes, n, axis=1)]
    each = (np.split(part, n, axis=1) for part in (q.codes, q.scale, q.scale_inv))
    return [
        q._replace(codes=codes, scale=scale, scale_inv=scale_inv)
        for codes, scale, scale_inv in zip(*each, strict=True)
    ]


def _check_linears(checks: BackendChecks, one: _OneDevice, layout: Layout) -> None:
    """Rerun every linear on a mesh; compare codes and scales, and outputs: with the sum of parts
    (P-8), or of accumulators with one whole (P-7).
    """
    through = layout.config.through
    for layer, recipe in one.recipes.items():
        placement = layout.placement(layer)
        assert placement is not None
        assert layout.mesh is not None
        gemms = rerun_linear(
            one.tensors[layer],
            recipe=recipe,
            placement=placement,
            mesh=layout.mesh,
            through=through,
            seed=one.seed(layer),
        )
        for which, (a, b, out) in gemms.items():
            simulated = one.simulated[layer, which]
            for role, q, operand in zip(OPERANDS[which], simulated, (a, b), strict=True):
                checks.operand(f"{layer}/{role}", q, *operand, one.tensors[layer][role])
            # Under plain jit XLA sums accumulators, unless a GPU's GEMMs write results (P-9).
            reduction = placement.reduction(which, 1)
            whole = reduction.parts == "accumulators" or (
                through == "jit" and not (layout.on_gpu and reduction.parts == "result")
            )
            n = 1
            if not whole:
                n = math.prod(layout.mesh.shape[axis] for axis in reduction.axes)
            parts, wide = one.parts(layer, which, n), reduction.parts == "float32"
            checks.output(f"{layer}/{which}", parts, recipe.gemms[which], out, wide=wide)


def _check_model(checks: BackendChecks, one: _OneDevice, meshed: Config) -> None:
    """Compare the first layer's input with one device's; check the proof of the compiled step."""
    trainer = loop.trainer("jax", meshed)
    proof = trainer.prove(one.tokens)  # type: ignore[attr-defined]
    mine = trainer.first_input(one.tokens[:, :-1])  # type: ignore[attr-defined]
    # bit for bit: no two float32 differ by less
    names = checks.backend, "one device"
    checks.values("model/first_input/value", mine, one.first_input, 2.0**-149, names)
    recipes = (*one.recipes.values(), *one.grouped.values())
    # operands in blocks are dequantized (G-16)
    planned = sum(
        spec.fp8 for recipe in recipes if not recipe.in_blocks for spec in recipe.gemms.values()
    )
    # checkpointing runs some of them twice
    dots = {dot["gemm"] for dot in proof["gemms"] if dot["fp8"]}
    checks.values("model/proof/value", len(dots), planned, 0.5, ("FP8 dots", "planned"))
    for line in proof["missing"]:
        checks.check("model/proof/value").fail(line)


def _factors(devices: int) -> list[tuple[tuple[int, int, int], bool]]:
    """Every (data, fsdp, tensor) of so many devices; above tensor 1 also with cut sequences."""
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


def _check_experts(checks: BackendChecks, one: _OneDevice, layout: Layout, rows: int) -> None:
    """Rerun the experts of every layer on a mesh, and compare them (X-3, X-13)."""
    reruns = {recipe: Rerun(layout, recipe) for recipe in set(one.grouped.values())}
    devices: list[dict] = [{} for _ in range(layout.config.devices)]
    sums = {}
    weights = {layer: tensors.weight for layer, tensors in one.experts.items()}
    for layer, recipe in one.grouped.items():
        device_gemms, sums[layer] = reruns[recipe](one.experts[layer], rows)
        for mine, gemms in zip(devices, device_gemms, strict=True):
            mine |= {(layer, *key): gemm for key, gemm in gemms.items()}
    sharded_experts.check(
        checks.report,
        checks.backend,
        one.grouped,
        devices,
        weights,
        parallel=layout.config,
        states={},
        sums=sums,
    )


def _buffer(experts: dict[str, Experts], devices: int) -> int:
    """The rows of a device's buffer that holds any layer's, as they are dealt; a multiple of 16."""
    rows = [[len(x) for x in layer_experts.input] for layer_experts in experts.values()]
    counts = [int(grouped_rerun.dealt(own, devices).sum(1).max()) for own in rows]
    return -(-(max(counts, default=0) + 1) // 16) * 16


def _tensors(
    trainer: loop.Trainer, tokens: np.ndarray, experts: Collection[str]
) -> tuple[dict[str, dict[Role, np.ndarray]], dict[str, Experts]]:
    """input, weight and grad_output of every FP8 linear on one device; and those of experts."""
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


def rerun_linear(
    tensors: dict[Role, np.ndarray],
    *,
    recipe: Recipe,
    placement: Placement,
    mesh: Mesh,
    through: str,
    seed: int = 0,
) -> dict[Gemm, tuple[Operand, Operand, np.ndarray]]:
    """Run one linear's three GEMMs on a mesh; seed: the linear's, of stochastic rounding.

    Codes and scales of the operands, and the output, float32.

    Shapes:   tensors input [M, K], weight [N, K], grad_output [M, N], float32 holding bfloat16;
              codes of their shapes. All are whole tensors, not shards.
    Order:    each tensor is cut by the placement, then quantized and multiplied by
              ``linear.apply``, inside shard_map or under plain jit.
    """
    places = {role: NamedSharding(mesh, P(*placement.at_rest(role))) for role in ROLES}
    hp = {role: jnp.asarray(tensors[role], jnp.bfloat16) for role in ROLES}
    cut = (jax.device_put(hp[role], places[role]) for role in ROLES)
    halves = jnp.array([seed & 0xFFFFFFFF, seed >> 32], jnp.uint32)
    outputs, quantized = _program(recipe, placement, mesh, through)(*cut, halves)
    fetched = jax.tree.map(np.asarray, quantized)
    return {
        which: (*fetched[which], np.asarray(outputs[which], np.float32))
        for which in recipe.gemms
        if which in fetched
    }


@functools.lru_cache(maxsize=64)
def _program(recipe: Recipe, placement: Placement, mesh: Mesh, through: str) -> Callable:
    """Compile the three GEMMs of a linear on a mesh.

    Returns:  (input, weight, grad_output, seed) -> (the outputs of all three GEMMs, and of the FP8
              ones (codes, scale) of both operands).
    """
    # In shard_map a device sees its own shard alone, and amaxes take explicit collectives. Under
    # jit XLA inserts them. Quantizing has to know which of the two it is in.
    mode: Mode = "shard_map" if through == "shard_map" else "jit"
    layer = Layer(recipe=recipe, name="rerun", placement=placement, mode=mode)
    casts = {
        which: [
            OperandCast(cast.role, cast.spec, layer.axis(which, cast.role))
            for cast in operand_casts(which, spec)
        ]
        for which, spec in recipe.gemms.items()
        if spec.fp8
    }

    def run(x: jax.Array, w: jax.Array, g: jax.Array, seed: jax.Array):
        def forward(x, w):
            with rounding.seeded({"rerun": seed}):
                return jax_linear.apply(x, w, recipe=recipe, placement=placement, name="rerun")[0]

        tensors: dict[Role, jax.Array] = {"input": x, "weight": w, "grad_output": g}
        y, vjp = jax.vjp(forward, x, w)
        outputs = dict(zip(recipe.gemms, (y, *vjp(g)), strict=True))
        return outputs, {
            which: tuple(_quantized(tensors[cast.role], cast, layer, seed) for cast in pair)
            for which, pair in casts.items()
        }

    if through == "jit":
        return jax.jit(run)
    at_rest = {role: P(*placement.at_rest(role)) for role in ROLES}
    results: dict[Gemm, P] = {
        "output": at_rest["grad_output"],
        "grad_input": at_rest["input"],
        "grad_weight": at_rest["weight"],
    }
    operand_specs = {
        which: tuple((at_rest[cast.role], _scale_cut(cast, placement)) for cast in pair)
        for which, pair in casts.items()
    }
    in_specs, out_specs = (*at_rest.values(), P()), (results, operand_specs)
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def _quantized(
    x: jax.Array, cast: OperandCast, layer: Layer, seed: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The codes, uint8, and the scale of an operand."""
    operand = carried.Operand(x, seed=seed)
    q = operands.quantize(operand, cast.role, cast.spec, cast.axis, layer)
    return q.code_bits, q.scale


def _scale_cut(cast: OperandCast, placement: Placement) -> P:
    """How a scale is cut: rowwise as the axis that is not reduced; in blocks as the tensor;
    tensorwise it is whole."""
    rows, columns = placement.at_rest(cast.role)
    if cast.spec.granularity == "tensorwise":
        return P()
    if cast.spec.granularity != "rowwise":
        return P(rows, columns)
    return P(rows, None) if cast.axis == -1 else P(None, columns)
