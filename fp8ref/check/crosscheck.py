"""Holds both backends to the simulator on a config's real operands (SEMANTICS S, G, B).

For every converted linear, at step 0 and after some training: the codes and scales that each backend's own step used,
and those that the other makes of the same operands, against the simulator's, bit for bit; the outputs of its three GEMMs against
the exact result; then initial weights, step-0 logits and losses, and the loss curves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fp8ref import llama
from fp8ref.check import bounds, synthetic
from fp8ref.check.compare import Report, compare_codes, compare_scales, compare_values
from fp8ref.check.quantizers import Quantizer, create
from fp8ref.formats import BFLOAT16, FP8_FORMATS
from fp8ref.recipe import OPERANDS, RECIPES, REDUCED_AXES, CastSpec, Recipe
from fp8ref.run import data, loop, progress
from fp8ref.run.config import Config
from fp8ref.sim import cast, gemm, scaling

FORWARD_BATCH = 4  # sequences in the simulated forward passes
STEPS = 5  # optimizer steps before operands are taken again


@dataclass(frozen=True)
class Observation:
    """One FP8 GEMM as a backend computed it: operands (hp, codes, scale) in their own layout, and its output."""

    backend: str
    layer: str
    gemm: str
    a: tuple[np.ndarray, np.ndarray, np.ndarray]
    b: tuple[np.ndarray, np.ndarray, np.ndarray]
    out: np.ndarray


def crosscheck(config: Config, *, backends: Sequence[str] = loop.BACKENDS, steps: int = STEPS) -> Report:
    """Run every comparison. Nothing is written; training here starts from the config's own initial weights.

    Raises:   ConfigError: data too short, an unknown backend.
    """
    report = Report()
    batches = data.open_batches(config)
    weights = llama.initial_weights(config.model, seed=config.run.seed)
    recipes = {d.path: d.recipe for d in config.decisions()}
    replicates = bounds.REPLICATES if len(backends) > 1 else 0
    work = 1 + bounds.SAMPLES + len(backends) * (steps + 2) + replicates
    with progress.bar(f"crosscheck {config.numerics.recipe}", work) as advance:
        quantizers = create(backends)
        check_synthetic(report, quantizers)
        advance("synthetic tensors")
        trainers = {name: loop.trainer(name, config) for name in backends}
        check_weights(report, trainers, weights)
        check_forward(report, trainers, weights, batches.step(0)[:FORWARD_BATCH], config, recipes, advance=lambda: advance("forward"))
        curves: dict[str, list[dict[str, float]]] = {name: [] for name in backends}
        for name, trainer in trainers.items():
            check_operands(report, trainer, batches.step(0), recipes, quantizers)
            advance(f"{name}: operands at step 0")
            for step in range(steps):
                curves[name].append(trainer.step(batches.step(step)))
                advance(f"{name}: training")
            check_operands(report, trainer, batches.step(steps), recipes, quantizers)
            advance(f"{name}: operands after {steps} steps")
        if len(backends) > 1 and steps:
            check_curves(report, curves, weights, batches, config, advance=lambda: advance("noise of rounding"))
    return report


def check_synthetic(report: Report, quantizers: dict[str, Quantizer]) -> None:
    """Codes and scales of made-up tensors, both axes; and bare casts, where saturation shows (dynamic scales never exceed max)."""
    for fmt in FP8_FORMATS.values():
        values = synthetic.casts(fmt)
        found = {"sim": cast.encode(values, fmt)} | {who: q.encode(values, fmt) for who, q in quantizers.items()}
        for backend in quantizers:
            compare_codes(report.check(f"synthetic.cast/{fmt}/codes/{backend}"), found, backend, fmt, values)
    specs = {(c.fmt, c.granularity, c.policy): c for r in RECIPES.values() for g in r.gemms.values() for c in (g.a, g.b) if c is not None}
    for case, values in synthetic.tensors().items():
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
    trainers: dict[str, loop.Trainer],
    weights: dict[str, np.ndarray],
    tokens: np.ndarray,
    config: Config,
    recipes: dict[str, Recipe],
    *,
    advance: Callable[[], None],
) -> None:
    """Step-0 logits and loss against the simulated model and each other (B-2, B-3)."""
    logits, loss, logits_bound, loss_bound = bounds.forward(tokens, weights, config.model, recipes, advance=advance)
    found = {"sim": (logits, loss)} | {name: (t.logits(tokens[:, :-1]), t.evaluate(tokens)) for name, t in trainers.items()}
    names = list(found)
    for i, mine in enumerate(names):
        for other in names[:i]:
            pair = mine if other == "sim" else f"{other}-{mine}"
            for j, (what, bound) in enumerate((("logits", logits_bound), ("loss", loss_bound))):
                check = report.check(f"{what}/step0/value/{pair}", bound=1.0)
                compare_values(check, found[mine][j], found[other][j], bound, names=(mine, other))


def check_operands(
    report: Report, trainer: loop.Trainer, tokens: np.ndarray, recipes: dict[str, Recipe], quantizers: dict[str, Quantizer]
) -> None:
    """Every FP8 GEMM of one forward and backward pass: operands bit for bit, outputs within B-1."""
    seen: list[Observation] = []
    trainer.observe(tokens, lambda layer, which, a, b, out: seen.append(Observation(trainer.backend, layer, which, a, b, out)))
    expected = {(layer, which) for layer, recipe in recipes.items() for which, spec in recipe.gemms.items() if spec.fp8}
    found = {(o.layer, o.gemm) for o in seen}
    if found != expected:
        raise RuntimeError(
            f"{trainer.backend}: FP8 GEMMs planned and not run: {sorted(expected - found)}; not planned: {sorted(found - expected)}."
        )
    for observation in seen:
        _check_gemm(report, observation, recipes[observation.layer], quantizers)


def check_curves(
    report: Report,
    curves: dict[str, list[dict[str, float]]],
    weights: dict[str, np.ndarray],
    batches: data.Batches,
    config: Config,
    *,
    advance: Callable[[], None],
) -> None:
    """The backends' losses and gradient norms step by step, within the noise of rounding (B-4)."""
    base = "torch" if "torch" in curves else next(iter(curves))
    runs = []
    for seed in range(bounds.REPLICATES):
        rounded = {
            name: cast.round_to(value, BFLOAT16, rounding="stochastic", seed=(seed << 16) + i)
            for i, (name, value) in enumerate(weights.items())
        }
        replicate = loop.trainer(base, config, rounded)
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
) -> scaling.Quantized:
    """Codes and scales of hp in every implementation; ``live`` holds those a training step used. Returns the simulator's."""
    hp = np.asarray(hp, np.float32)
    simulated = scaling.quantize(hp, spec.fmt, granularity=spec.granularity, policy=spec.policy, axis=axis)
    found = {"sim": (simulated.codes, simulated.scale)}
    for backend, quantizer in quantizers.items():
        found[backend] = live[backend] if backend in live else quantizer.quantize(hp, spec, axis=axis, dtype="bfloat16")
    for backend in quantizers:
        codes, scales = ({who: pair[i] for who, pair in found.items()} for i in (0, 1))
        compare_codes(report.check(f"{prefix}/codes/{backend}"), codes, backend, spec.fmt, hp)
        compare_scales(report.check(f"{prefix}/scale/{backend}"), scales, backend)
    return simulated


def _check_gemm(report: Report, seen: Observation, recipe: Recipe, quantizers: dict[str, Quantizer]) -> None:
    spec = recipe.gemms[seen.gemm]  # type: ignore[index]
    operands = []
    for role, operand, how, axis in zip(OPERANDS[seen.gemm], (seen.a, seen.b), (spec.a, spec.b), REDUCED_AXES[seen.gemm], strict=True):  # type: ignore[index]
        assert how is not None
        hp, codes, scale = operand
        q = compare_quantized(report, f"{seen.layer}/{role}", hp, how, axis, {seen.backend: (codes, scale)}, quantizers)
        operands.append(q if axis == 1 else _transposed(q))
    a, b = operands
    simulated = gemm.matmul(a, b, epilogue=spec.epilogue, out_dtype=BFLOAT16)  # [M, K] x [N, K] -> [M, N]
    out = np.asarray(seen.out, np.float32)
    check = report.check(f"{seen.layer}/{seen.gemm}/value/{seen.backend}", bound=1.0)
    compare_values(check, out, simulated, bounds.gemm(a, b, spec, out, simulated), names=(seen.backend, "sim"))


def _transposed(q: scaling.Quantized) -> scaling.Quantized:
    """An operand reduced along its first axis, as the [M, K] that a GEMM takes."""
    return q._replace(codes=q.codes.T, scale=q.scale.T, scale_inv=q.scale_inv.T, axis=1)
