"""Holds both backends to the simulator on a config's real operands (SEMANTICS S, G, B).

For every converted linear, at step 0 and after some training, or before every step where scales come from the past: the codes and
scales that each backend's own step used, and those that the other makes of the same operands, against the simulator's, bit for bit;
the outputs of its three GEMMs against the exact result, or, under simulated hardware, against its own, bit for bit; then initial weights,
step-0 logits and losses, and the loss curves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fp8ref import console, llama
from fp8ref.conformance import library_calls
from fp8ref.conformance.compare import Report, compare_bits, compare_codes, compare_scales, compare_values
from fp8ref.conformance.inputs import cast_inputs, tensor_inputs
from fp8ref.conformance.library_calls import Quantizer
from fp8ref.crosscheck import bounds, delayed_states
from fp8ref.crosscheck.delayed_states import States
from fp8ref.errors import ConfigError
from fp8ref.formats import BFLOAT16, FP8_FORMATS
from fp8ref.hardware import Factor, Multiply
from fp8ref.recipe import OPERANDS, RECIPES, REDUCED_AXES, SHARED_RECIPES, CastSpec, Gemm, Recipe
from fp8ref.sim import cast, delayed, gemm, scaling
from fp8ref.train import hardware, loop
from fp8ref.train.config import Config
from fp8ref.train.data import loader

FORWARD_BATCH = 4  # sequences in the simulated forward passes
STEPS = 5  # optimizer steps before operands are taken again


@dataclass(frozen=True)
class Observation:
    """One FP8 GEMM as a backend computed it: operands (hp, codes, scale) in their own layout, and its output."""

    backend: str
    layer: str
    gemm: Gemm
    a: tuple[np.ndarray, np.ndarray, np.ndarray]
    b: tuple[np.ndarray, np.ndarray, np.ndarray]
    out: np.ndarray


def crosscheck(config: Config, *, backends: Sequence[str] = loop.BACKENDS, steps: int = STEPS) -> Report:
    """Run every comparison. Nothing is written; training here starts from the config's own initial weights.

    steps     optimizer steps of each backend, after which operands are taken again.
    Returns:  every check; of one backend there is none against another. Clauses B-1 to B-6 and B-12.
    Raises:   ConfigError: data too short, an unknown backend, several devices.
    """
    if config.parallel.devices > 1:
        raise ConfigError(f"the cross-check is on one device; got {config.parallel.devices}. Set parallel.* to 1, or give --sharded N.")
    multiply = hardware.of(config)
    report = Report()
    batches = loader.open_batches(config)
    weights = llama.initial_weights(config.model, seed=config.run.seed)
    recipes = {d.path: d.recipe for d in config.decisions()}
    replicates = bounds.REPLICATES if len(backends) > 1 else 0
    work = 1 + 2 * bounds.SAMPLES + len(backends) * (steps + 2) + replicates * (1 + bool(steps))
    with console.bar(f"crosscheck {config.numerics.recipe}", work) as advance:
        quantizers = library_calls.quantizers(backends)
        check_synthetic(report, config.numerics.recipe, quantizers)
        advance("synthetic tensors")
        for name, start in (("probe", bounds.probe_weights(weights, seed=config.run.seed)), ("step0", weights)):
            trainers = {backend: loop.trainer(backend, config, start) for backend in backends}
            tokens = batches.step(0)[:FORWARD_BATCH]
            check_forward(report, name, trainers, start, tokens, config, recipes, advance=lambda: advance("forward"))
            if name == "probe" and len(backends) > 1:
                check_gradients(report, trainers, start, tokens, config, advance=lambda: advance("gradients"))
        check_weights(report, trainers, weights)
        curves: dict[str, list[dict[str, float]]] = {name: [] for name in backends}
        for name, trainer in trainers.items():
            held = delayed_states.initial(recipes)
            for step in range(steps + 1):
                if step in (0, steps) or held:  # a state is of what every step before it had
                    seen = check_operands(report, trainer, batches.step(step), recipes, quantizers, held, multiply)
                    held = delayed_states.after(held, recipes, amaxes(seen))
                if step in (0, steps):
                    advance(f"{name}: operands after {step} steps")
                if step < steps:
                    curves[name].append(trainer.step(batches.step(step)))
                    advance(f"{name}: training")
        if len(backends) > 1 and steps:
            check_curves(report, curves, weights, batches, config, advance=lambda: advance("noise of rounding"))
    return report


def check_synthetic(report: Report, name: str, quantizers: dict[str, Quantizer]) -> None:
    """Codes and scales of made-up tensors by the recipe of this name and those that all libraries run, both axes; and bare casts, where
    saturation shows (dynamic scales never exceed max)."""
    for fmt in FP8_FORMATS.values():
        values = cast_inputs.edges(fmt)
        found = {"sim": cast.encode(values, fmt)} | {who: q.encode(values, fmt) for who, q in quantizers.items()}
        for backend in quantizers:
            compare_codes(report.check(f"synthetic.cast/{fmt}/codes/{backend}"), found, backend, fmt, values)
    gemms = [g for each in (*SHARED_RECIPES, name) for g in RECIPES[each].gemms.values()]
    specs = {(c.fmt, c.granularity, c.policy): c for g in gemms for c in (g.a, g.b) if c is not None and c.delayed is None}
    for case, values in tensor_inputs.samples().items():
        for spec in specs.values():
            for axis in (0, 1) if spec.granularity == "rowwise" else (1,):
                compare_quantized(report, f"synthetic.{case}/{spec.granularity}", values, spec, axis, {}, quantizers)


def check_weights(report: Report, trainers: dict[str, loop.Trainer], weights: dict[str, np.ndarray]) -> None:
    """Both backends start from the same bits (M-6)."""
    for backend, trainer in trainers.items():
        mine = trainer.weights()
        for name, value in weights.items():
            compare_scales(report.check(f"weights/initial/value/{backend}"), {"sim": value, backend: mine[name]}, backend)


def check_forward(
    report: Report,
    name: str,
    trainers: dict[str, loop.Trainer],
    weights: dict[str, np.ndarray],
    tokens: np.ndarray,
    config: Config,
    recipes: dict[str, Recipe],
    *,
    advance: Callable[[], None],
) -> None:
    """Logits and loss at these weights against the simulated model and each other (B-2, B-3)."""
    logits, loss, logits_bound, loss_bound = bounds.forward(
        tokens, weights, config.model, recipes, advance=advance, multiply=hardware.of(config)
    )
    found = {"sim": (logits, loss)} | {who: (t.logits(tokens[:, :-1]), t.evaluate(tokens)) for who, t in trainers.items()}
    names = list(found)
    for i, mine in enumerate(names):
        for other in names[:i]:
            pair = mine if other == "sim" else f"{other}-{mine}"
            for j, (what, bound) in enumerate((("logits", logits_bound), ("loss", loss_bound))):
                check = report.check(f"{what}/{name}/value/{pair}", bound=1.0)
                compare_values(check, found[mine][j], found[other][j], bound, names=(mine, other))


def check_gradients(
    report: Report,
    trainers: dict[str, loop.Trainer],
    weights: dict[str, np.ndarray],
    tokens: np.ndarray,
    config: Config,
    *,
    advance: Callable[[], None],
) -> None:
    """The gradient of every parameter, backend against backend, within the noise of rounding (B-5)."""
    found = {name: trainer.gradients(tokens) for name, trainer in trainers.items()}
    base = _base(found)
    replicates = []
    for seed in range(bounds.REPLICATES):
        replicates.append(loop.trainer(base, config, bounds.rerounded(weights, seed=seed)).gradients(tokens))
        advance()
    for parameter, gradient in found[base].items():
        bound = bounds.gradient(gradient, [r[parameter] for r in replicates])
        for other in found.keys() - {base}:
            distance = np.linalg.norm(found[other][parameter] - gradient)
            check = report.check(f"{parameter.removesuffix('.weight')}/gradient/value/{other}-{base}", bound=1.0)
            compare_values(check, distance, 0.0, bound, names=("norm of the difference", "none"))


def check_operands(
    report: Report,
    trainer: loop.Trainer,
    tokens: np.ndarray,
    recipes: dict[str, Recipe],
    quantizers: dict[str, Quantizer],
    held: States,
    multiply: Multiply | None = None,
) -> list[Observation]:
    """Every FP8 GEMM of one forward and backward pass, which it returns: operands bit for bit, outputs within B-1, or bit for bit too (B-12).

    held      the simulator's states, of the roles that are scaled by their past, before this pass.
    multiply  the simulated hardware that the trainer runs under.
    """
    seen: list[Observation] = []
    trainer.observe(tokens, lambda layer, which, a, b, out: seen.append(Observation(trainer.backend, layer, which, a, b, out)))
    expected = {(layer, which) for layer, recipe in recipes.items() for which, spec in recipe.gemms.items() if spec.fp8}
    found = {(o.layer, o.gemm) for o in seen}
    for layer, which in sorted(expected ^ found):
        problem = "was planned in FP8 and did not run" if (layer, which) in expected else "ran in FP8 and was not planned"
        report.check(f"{layer}/{which}/value/{trainer.backend}", bound=1.0).fail(f"the GEMM {problem}")
    for observation in (o for o in seen if (o.layer, o.gemm) in expected):
        _check_gemm(report, observation, recipes[observation.layer], quantizers, held, multiply)
    return seen


def amaxes(seen: Sequence[Observation]) -> dict[str, list[np.ndarray]]:
    """Of every operand of these GEMMs, by "<layer>/<role>"."""
    found: dict[str, list[np.ndarray]] = {}
    for o in seen:
        for role, (hp, _, _) in zip(OPERANDS[o.gemm], (o.a, o.b), strict=True):
            found.setdefault(f"{o.layer}/{role}", []).append(scaling.amax(hp))
    return found


def check_curves(
    report: Report,
    curves: dict[str, list[dict[str, float]]],
    weights: dict[str, np.ndarray],
    batches: loader.Batches,
    config: Config,
    *,
    advance: Callable[[], None],
) -> None:
    """The backends' losses and gradient norms step by step, within the noise of rounding (B-4)."""
    base = _base(curves)
    runs = []
    for seed in range(bounds.REPLICATES):
        replicate = loop.trainer(base, config, bounds.rerounded(weights, seed=seed))
        runs.append([replicate.step(batches.step(step)) for step in range(len(curves[base]))])
        advance()
    for metric in ("loss", "grad_norm"):
        found = {name: np.array([line[metric] for line in lines]) for name, lines in curves.items()}
        bound = bounds.curve(found[base], np.array([[line[metric] for line in lines] for lines in runs]))
        for name in found.keys() - {base}:
            check = report.check(f"{metric}/curve/value/{name}-{base}", bound=1.0)
            compare_values(check, found[name], found[base], bound, names=(name, base))


def compare_quantized(
    report: Report,
    prefix: str,
    hp: np.ndarray,
    spec: CastSpec,
    axis: int,
    live: dict[str, tuple[np.ndarray, np.ndarray]],
    quantizers: dict[str, Quantizer],
    state: delayed.DelayedState | None = None,
) -> scaling.Quantized:
    """Codes and scales of hp in every implementation; ``live`` holds those a training step used. Returns the simulator's.

    state  of a role that is scaled by its past, which no quantizer has: then those of ``live`` are compared alone.
    """
    hp = np.asarray(hp, np.float32)
    if state is None:
        simulated = scaling.quantize(hp, spec.fmt, granularity=spec.granularity, policy=spec.policy, axis=axis)
    else:
        assert spec.delayed is not None
        simulated = scaling.quantize_with(hp, delayed.scales(state, spec.delayed, spec.fmt), spec.fmt, policy=spec.policy, axis=axis)
        quantizers = {backend: quantizer for backend, quantizer in quantizers.items() if backend in live}
    found = {"sim": (simulated.codes, simulated.scale)}
    for backend, quantizer in quantizers.items():
        found[backend] = live[backend] if backend in live else quantizer.quantize(hp, spec, axis=axis, dtype="bfloat16")
    for backend in quantizers:
        codes, scales = ({who: pair[i] for who, pair in found.items()} for i in (0, 1))
        compare_codes(report.check(f"{prefix}/codes/{backend}"), codes, backend, spec.fmt, hp)
        compare_scales(report.check(f"{prefix}/scale/{backend}"), scales, backend)
    return simulated


def transposed(q: scaling.Quantized) -> scaling.Quantized:
    """An operand reduced along its first axis, as the [M, K] that a GEMM takes."""
    return q._replace(codes=q.codes.T, scale=q.scale.T, scale_inv=q.scale_inv.T, axis=1)


def _check_gemm(
    report: Report, seen: Observation, recipe: Recipe, quantizers: dict[str, Quantizer], held: States, multiply: Multiply | None
) -> None:
    spec = recipe.gemms[seen.gemm]
    operands = []
    for role, operand, how, axis in zip(OPERANDS[seen.gemm], (seen.a, seen.b), (spec.a, spec.b), REDUCED_AXES[seen.gemm], strict=True):
        assert how is not None
        hp, codes, scale = operand
        state = held[f"{seen.layer}/{role}"] if how.delayed else None
        q = compare_quantized(report, f"{seen.layer}/{role}", hp, how, axis, {seen.backend: (codes, scale)}, quantizers, state)
        operands.append(q if axis == 1 else transposed(q))
    a, b = operands
    if multiply is not None:
        assert spec.accumulate is not None
        factors = (Factor(q.codes, q.scale_inv, q.fmt, q.granularity) for q in operands)
        expected = multiply(*factors, accumulate=spec.accumulate, epilogue=spec.epilogue, out_dtype=BFLOAT16)
        exact = report.check(f"{seen.layer}/{seen.gemm}/value/{seen.backend}")
        compare_bits(exact, np.asarray(seen.out, np.float32), expected, names=(seen.backend, "sim"))
        return
    simulated = gemm.matmul(a, b, epilogue=spec.epilogue, out_dtype=BFLOAT16)  # [M, K] x [N, K] -> [M, N]
    out = np.asarray(seen.out, np.float32)
    check = report.check(f"{seen.layer}/{seen.gemm}/value/{seen.backend}", bound=1.0)
    compare_values(check, out, simulated, bounds.gemm(a, b, spec, out, simulated), names=(seen.backend, "sim"))


def _base(found: dict) -> str:
    """The backend whose replicates set the bounds: torch, which compiles nothing, where it takes part."""
    return "torch" if "torch" in found else next(iter(found))
