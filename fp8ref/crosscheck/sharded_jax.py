"""Holds a mesh of devices to the simulator: what one device's linears computed, replayed on every mesh (SEMANTICS P-4, P-9, B-7).

Of every converted linear, on the operands of one device's own step: codes and scales bit for bit, outputs within B-1, for every way of cutting
N devices into data, fsdp and tensor, inside shard_map and under plain jit; and for each, of the whole model, what the first layer is given, bit
for bit, and the proof of its step.
"""

import itertools

import numpy as np

from fp8ref import console
from fp8ref.conformance.compare import Report, compare_codes, compare_scales, compare_values
from fp8ref.crosscheck import bounds
from fp8ref.crosscheck.one_device import transposed
from fp8ref.errors import ConfigError
from fp8ref.formats import BFLOAT16
from fp8ref.recipe import OPERANDS, RECIPES, REDUCED_AXES, Gemm, Recipe, Role
from fp8ref.sim import gemm, scaling
from fp8ref.train import loop
from fp8ref.train.config import Config
from fp8ref.train.data import loader

THROUGH = ("shard_map", "jit")


def crosscheck(config: Config, devices: int) -> tuple[Report, dict[str, str]]:
    """Replay step 0 of one device on every mesh of so many devices.

    Returns:  the report, its backends named "jax 2x2x2 shard_map" for data x fsdp x tensor; and why meshes that the model does not fit
              were left out, by name.
    Raises:   ConfigError: a recipe without FP8 or that only JAX runs, too few devices, no mesh that fits.
    """
    taken = [name for name, recipe in RECIPES.items() if recipe.fp8 and recipe.shared]
    if config.numerics.recipe not in taken:
        raise ConfigError(f"--sharded is of recipes {', '.join(taken)}; got {config.numerics.recipe!r}. Give --recipe one of these.")
    import jax

    if jax.device_count() < devices:
        raise ConfigError(f"--sharded {devices} needs as many devices; jax has {jax.device_count()}.")
    from fp8ref.crosscheck.mesh_rerun import replay
    from fp8ref.train.jax.mesh import Layout

    report, unfit = Report(), {}
    config = config.replace(parallel={"data": 1, "fsdp": 1, "tensor": 1, "sequence": False})
    tokens = loader.open_batches(config).step(0)
    one = loop.trainer("jax", config)
    tensors = _tensors(one, tokens)
    first = one.first_input(tokens[:, :-1])  # type: ignore[attr-defined]
    recipes = {d.path: d.recipe for d in one.decisions if d.fp8}
    expected = {layer: _simulated(tensors[layer], recipes[layer]) for layer in recipes}
    meshes = list(itertools.product(_factors(devices), THROUGH))
    with console.bar(f"crosscheck {config.numerics.recipe} on {devices} devices", len(meshes)) as advance:
        for (sizes, sequence), through in meshes:
            name = "x".join(map(str, sizes)) + (" sequence" if sequence else "") + f" {through}"
            keys = dict(zip(("data", "fsdp", "tensor"), sizes, strict=True))
            meshed = config.replace(parallel={**keys, "sequence": sequence, "through": through}, run={"allow_fallback": True})
            try:
                layout = Layout(meshed)
            except ConfigError as error:
                unfit[name] = str(error)
                continue
            for layer, recipe in recipes.items():
                placement = layout.placement(layer)
                assert placement is not None
                assert layout.mesh is not None
                found = replay(tensors[layer], recipe=recipe, placement=placement, mesh=layout.mesh, through=through)
                for which, (a, b, out) in found.items():
                    _compare(report, f"jax {name}", layer, which, recipe, tensors[layer], expected[layer][which], (a, b), out)
            many = loop.trainer("jax", meshed)
            proof = many.prove(tokens)  # type: ignore[attr-defined]
            mine = many.first_input(tokens[:, :-1])  # type: ignore[attr-defined]
            check = report.check(f"model/first_input/value/jax {name}", bound=1.0)
            compare_values(check, mine, first, 2.0**-149, names=(f"jax {name}", "one device"))  # no two differ by less
            check = report.check(f"model/proof/value/jax {name}", bound=1.0)
            planned = sum(spec.fp8 for recipe in recipes.values() for spec in recipe.gemms.values())
            compare_values(check, sum(dot["fp8"] for dot in proof["gemms"]), planned, 0.5, names=("FP8 dots", "planned"))
            for line in proof["missing"]:
                check.fail(line)
            advance(name)
    if not report.checks:
        raise ConfigError(f"no mesh of {devices} devices fits this model: " + "; ".join(f"{name}: {why}" for name, why in unfit.items()))
    return report, unfit


def _factors(devices: int) -> list[tuple[tuple[int, int, int], bool]]:
    """Every (data, fsdp, tensor) of so many devices, and where tensor is above 1, with its tokens cut over it too."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    sizes = [(d, f, devices // d // f) for d in divisors for f in divisors if devices % (d * f) == 0]
    return [(size, sequence) for size in sizes for sequence in (False, True) if size[2] > 1 or not sequence]


def _tensors(trainer: loop.Trainer, tokens: np.ndarray) -> dict[str, dict[Role, np.ndarray]]:
    """What every FP8 linear of one device multiplied, in high precision."""
    found: dict[str, dict[Role, np.ndarray]] = {}

    def observer(layer: str, which: Gemm, a, b, out) -> None:
        for role, (hp, _, _) in zip(OPERANDS[which], (a, b), strict=True):
            found.setdefault(layer, {})[role] = np.asarray(hp, np.float32)

    trainer.observe(tokens, observer)
    return found


def _simulated(tensors: dict[Role, np.ndarray], recipe: Recipe) -> dict[Gemm, tuple]:
    """Of every FP8 GEMM: both operands quantised, in their own layout, and as [M, K] and [N, K], and the exact output."""
    result = {}
    for which, spec in recipe.gemms.items():
        if spec.a is None or spec.b is None:
            continue
        own = [
            scaling.quantize(tensors[role], cast.fmt, granularity=cast.granularity, policy=cast.policy, axis=axis)
            for role, cast, axis in zip(OPERANDS[which], (spec.a, spec.b), REDUCED_AXES[which], strict=True)
        ]
        a, b = (q if q.axis == 1 else transposed(q) for q in own)
        result[which] = own, (a, b), gemm.matmul(a, b, epilogue=spec.epilogue, out_dtype=BFLOAT16)
    return result


def _compare(
    report: Report,
    backend: str,
    layer: str,
    which: Gemm,
    recipe: Recipe,
    tensors: dict[Role, np.ndarray],
    expected,
    operands,
    out: np.ndarray,
) -> None:
    own, (a, b), simulated = expected
    for role, q, (codes, scale) in zip(OPERANDS[which], own, operands, strict=True):
        name = f"{layer}/{role}"
        compare_codes(report.check(f"{name}/codes/{backend}"), {"sim": q.codes, backend: codes}, backend, q.fmt, tensors[role])
        compare_scales(report.check(f"{name}/scale/{backend}"), {"sim": q.scale, backend: scale}, backend)
    check = report.check(f"{layer}/{which}/value/{backend}", bound=1.0)
    compare_values(check, out, simulated, bounds.gemm(a, b, recipe.gemms[which], out, simulated), names=(backend, "sim"))
