"""Compare both backends with the simulator on a config's real operands, on one device.

spec S, G, B.

The operands of every converted linear are taken at step 0 and after some training. Under delayed
scaling they are taken before every step: a state depends on all steps before it. Compared are:

- codes and scales, bit for bit: those of each backend's own step, and those that the other backend
  computes from the same operands;
- the outputs of the three GEMMs: against the exact result within a bound, or under simulated
  hardware bit for bit;
- initial weights, step-0 logits and losses, gradients, and the loss curves.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from fp8ref.conformance.inputs import cast_inputs, quantizer_inputs
from fp8ref.conformance.kit.compare import Report, compare_codes, compare_scales, compare_values
from fp8ref.crosscheck import bounds, operands
from fp8ref.crosscheck.attention import attention
from fp8ref.crosscheck.attention import counts as attention_counts
from fp8ref.crosscheck.attention import states as attention_states
from fp8ref.crosscheck.operands import (
    OperandCast,
    Quantizer,
    amaxes,
    check_operands,
    compare_quantized,
    initial_states,
    recipes_of,
    states_after,
)
from fp8ref.formats import QUANTIZED_FORMATS
from fp8ref.recipe import RECIPES, SHARED_RECIPES
from fp8ref.shared import console
from fp8ref.shared.errors import ConfigError
from fp8ref.sim.quantize import cast
from fp8ref.spec import llama
from fp8ref.train import loop
from fp8ref.train.config import hardware
from fp8ref.train.config.config import Config
from fp8ref.train.data import loader

__all__ = ["STEPS", "crosscheck"]

FORWARD_BATCH = 4  # the most sequences in a simulated forward pass

STEPS = 5
"""The default number of optimizer steps before operands are compared again."""


def crosscheck(
    config: Config, *, backends: Sequence[str] = loop.BACKENDS, steps: int = STEPS
) -> Report:
    """Run every comparison of clauses B-1 to B-6 and B-12.

    Training starts from the config's own initial weights. No file is written.

    steps     optimizer steps of each backend before operands are taken again.
    Returns:  every check. With one backend there are none between backends.
    Raises:   ConfigError: data too short, an unknown backend, several devices.
    """
    if config.parallel.devices > 1:
        raise ConfigError(
            f"the cross-check runs on one device; got {config.parallel.devices}. Set parallel.* "
            "to 1, or give --sharded N."
        )
    config.require_tiles("the cross-check")
    report, batches = Report(), loader.open_batches(config)
    weights = llama.initial_weights(config.model, seed=config.run.seed)
    both = len(backends) > 1
    replicates = bounds.REPLICATES if both else 0
    work = 1 + 2 * bounds.SAMPLES + len(backends) * (steps + 2) + replicates * (1 + bool(steps))
    with console.bar(f"crosscheck {config.numerics.recipe}", work) as advance:
        quantizers = operands.quantizers(backends)
        check_synthetic(report, config.numerics.recipe, quantizers)
        advance("synthetic tensors")
        probe = bounds.probe_weights(weights, seed=config.run.seed)
        for name, start in {"probe": probe, "step0": weights}.items():
            trainers = {backend: loop.trainer(backend, config, start) for backend in backends}
            tokens = batches.step(0)[:FORWARD_BATCH]
            simulated = functools.partial(advance, "forward")
            check_forward(report, name, trainers, start, tokens, config, advance=simulated)
            if name == "probe" and both:
                done = functools.partial(advance, "gradients")
                check_gradients(report, trainers, start, tokens, config, advance=done)
        check_weights(report, trainers, weights)
        curves = {
            backend: _check_training(report, trainer, batches, config, quantizers, steps, advance)
            for backend, trainer in trainers.items()
        }
        if both and steps:
            done = functools.partial(advance, "noise of rounding")
            check_curves(report, curves, weights, batches, config, advance=done)
    return report


def _check_training(
    report: Report,
    trainer: loop.Trainer,
    batches: loader.Batches,
    config: Config,
    quantizers: dict[str, Quantizer],
    steps: int,
    advance: Callable[[str], None],
) -> list[dict[str, float]]:
    """Train, and check operands, attention and its states before the first step and after the last;
    under delayed scaling before every step. Returns the metrics of each step.
    """
    curve: list[dict[str, float]] = []
    recipes, variant = recipes_of(config), config.attention_variant
    linear_states, attended = initial_states(recipes), attention.first_states(config)
    for step in range(steps + 1):
        states, tokens = dict(linear_states) | attended, batches.step(step)
        # a state depends on the amaxes of every step before it
        if step in (0, steps) or states:
            observations, passes = check_operands(
                report,
                trainer,
                tokens,
                recipes,
                quantizers,
                states,
                multiply=hardware.of(config),
                variant=variant,
            )
            linear_states = states_after(linear_states, recipes, amaxes(observations))
        if step in (0, steps):
            scales = attention.delayed_scales(states)
            attention_counts.check(report, passes, variant, scales)
            advance(f"{trainer.backend}: operands after {step} steps")
        if step < steps:
            curve.append(trainer.step(tokens))
            if attended:
                trained, before = trainer.fp8_states(), attended
                attended = attention.states_after(before, config, passes, trained)
                attention_states.check(
                    report, trainer.backend, config, passes, before, attended, trained
                )
            advance(f"{trainer.backend}: training")
    return curve


def check_synthetic(report: Report, name: str, quantizers: dict[str, Quantizer]) -> None:
    """Check codes and scales of synthetic tensors, and bare casts.

    Tensors are quantized by this recipe and by those that all libraries run, along both axes. Only
    bare casts show saturation: a dynamic scale never takes a value beyond the format's max.
    """
    for fmt in QUANTIZED_FORMATS.values():
        values = cast_inputs.edges(fmt)
        codes = {"sim": cast.encode(values, fmt)}
        codes |= {who: q.encode(values, fmt) for who, q in quantizers.items()}
        for backend in quantizers:
            check = report.check(f"synthetic.cast/{fmt}/codes/{backend}")
            compare_codes(check, codes, backend, fmt, values)
    specs = {
        (spec.fmt, spec.granularity, spec.policy): dataclasses.replace(
            spec, rotation=None, rounding="nearest_even"
        )
        for each in (*SHARED_RECIPES, name)
        for spec in RECIPES[each].casts
        if spec.delayed is None
    }
    for case, values in quantizer_inputs.samples().items():
        for spec in specs.values():
            # whose scale of the tensor may be subnormal, and XLA on a CPU flushes it (S-22)
            if spec.policy.two_level is not None and np.nanmax(np.abs(values)) < 2.0**-114:
                continue
            for axis in (0, 1) if spec.granularity == "rowwise" else (1,):
                operand, prefix = OperandCast("input", spec, axis), f"synthetic.{case}"
                compare_quantized(
                    report, f"{prefix}/{spec.granularity}", values, operand, quantizers
                )


def check_weights(
    report: Report, trainers: dict[str, loop.Trainer], weights: dict[str, np.ndarray]
) -> None:
    """Check that both backends start from the same bits (M-6)."""
    for backend, trainer in trainers.items():
        mine = trainer.weights()
        for name, value in weights.items():
            check = report.check(f"weights/initial/value/{backend}")
            compare_scales(check, {"sim": value, backend: mine[name]}, backend)


def check_forward(
    report: Report,
    name: str,
    trainers: dict[str, loop.Trainer],
    weights: dict[str, np.ndarray],
    tokens: np.ndarray,
    config: Config,
    *,
    advance: Callable[[], None],
) -> None:
    """Check logits and loss against the simulated model and each other (B-2, B-3)."""
    logits, loss, logits_bound, loss_bound = bounds.forward(
        tokens,
        weights,
        config.model,
        recipes_of(config),
        advance=advance,
        multiply=hardware.of(config),
        attention=config.numerics.attention,
        states=attention.first_states(config),
    )
    with warnings.catch_warnings():  # the simulator has the same first scales
        warnings.filterwarnings("ignore", ".*no update has set its scales", UserWarning)
        backends = {
            who: (trainer.logits(tokens[:, :-1]), trainer.evaluate(tokens))
            for who, trainer in trainers.items()
        }
    outputs = {"sim": (logits, loss)} | backends
    names, kinds = list(outputs), (("logits", logits_bound), ("loss", loss_bound))
    for i, mine in enumerate(names):
        for other in names[:i]:
            pair = mine if other == "sim" else f"{other}-{mine}"
            for j, (kind, bound) in enumerate(kinds):
                check = report.check(f"{kind}/{name}/value/{pair}", bound=1.0)
                values = outputs[mine][j], outputs[other][j]
                compare_values(check, *values, bound, names=(mine, other))


def check_gradients(
    report: Report,
    trainers: dict[str, loop.Trainer],
    weights: dict[str, np.ndarray],
    tokens: np.ndarray,
    config: Config,
    *,
    advance: Callable[[], None],
) -> None:
    """Check every parameter's gradient, backend against backend, within rounding noise (B-5)."""
    gradients = {name: trainer.gradients(tokens) for name, trainer in trainers.items()}
    base = _base(gradients)
    replicates = []
    for replicate in _replicates(base, config, weights):
        replicates.append(replicate.gradients(tokens))
        advance()
    for parameter, gradient in gradients[base].items():
        bound = bounds.gradient(gradient, [r[parameter] for r in replicates])
        for other in gradients.keys() - {base}:
            distance = np.linalg.norm(gradients[other][parameter] - gradient)
            name = f"{parameter.removesuffix('.weight')}/gradient/value/{other}-{base}"
            check = report.check(name, bound=1.0)
            compare_values(check, distance, 0.0, bound, names=("norm of the difference", "none"))


def check_curves(
    report: Report,
    curves: dict[str, list[dict[str, float]]],
    weights: dict[str, np.ndarray],
    batches: loader.Batches,
    config: Config,
    *,
    advance: Callable[[], None],
) -> None:
    """Check losses and gradient norms of every step, backend against backend (B-4)."""
    base = _base(curves)
    runs = []
    for replicate in _replicates(base, config, weights):
        runs.append([replicate.step(batches.step(step)) for step in range(len(curves[base]))])
        advance()
    for metric in ("loss", "grad_norm"):
        series = {
            name: np.array([line[metric] for line in lines]) for name, lines in curves.items()
        }
        repeated = np.array([[line[metric] for line in lines] for lines in runs])
        bound = bounds.curve(series[base], repeated)
        for name in series.keys() - {base}:
            check = report.check(f"{metric}/curve/value/{name}-{base}", bound=1.0)
            compare_values(check, series[name], series[base], bound, names=(name, base))


def _replicates(
    backend: str, config: Config, weights: dict[str, np.ndarray]
) -> Iterator[loop.Trainer]:
    """Trainers whose initial weights were rounded stochastically."""
    for seed in range(bounds.REPLICATES):
        yield loop.trainer(backend, config, bounds.rerounded(weights, seed=seed))


def _base(by_backend: dict) -> str:
    """The backend whose replicates set the bounds: torch if there, as it compiles nothing."""
    return "torch" if "torch" in by_backend else next(iter(by_backend))
