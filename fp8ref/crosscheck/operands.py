"""Compare the codes, scales and outputs of observed FP8 GEMMs with the simulator's.

spec S, H, G.

``observe`` records the GEMMs of one pass of a trainer; ``check_operands`` compares them.
``quantizers`` are those of the simulator and the backends, for one more comparison of each operand.
The simulator's states of delayed scaling follow the backend's from step to step
(``initial_states``, ``states_after``).
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from fp8ref.conformance.kit.compare import Report, compare_codes, compare_scales
from fp8ref.conformance.libraries import functions
from fp8ref.crosscheck import device_gemm
from fp8ref.crosscheck.attention import attention
from fp8ref.crosscheck.attention.attention import AttentionPass, recorder
from fp8ref.crosscheck.backend_checks import BackendChecks
from fp8ref.crosscheck.bounds import Part
from fp8ref.formats import Format
from fp8ref.recipe import (
    OPERANDS,
    REDUCED_AXES,
    CastSpec,
    Gemm,
    GemmSpec,
    Recipe,
    Role,
    delayed_casts,
)
from fp8ref.sim import delayed, linear
from fp8ref.sim.quantize import scaling
from fp8ref.spec import llama
from fp8ref.spec.attention.variants import Variant
from fp8ref.spec.delayed import DelayedScaling
from fp8ref.spec.hardware import Multiply
from fp8ref.train import loop
from fp8ref.train.config.config import Config

__all__ = ["as_factor", "initial_states", "observe", "states_after"]

States = Mapping[str, delayed.DelayedState]
"""``<layer>/<role>`` -> state of delayed scaling."""


def recipes_of(config: Config) -> dict[str, Recipe]:
    """The recipe of every linear, by name."""
    return {decision.path: decision.recipe for decision in config.decisions()}


Operand = tuple[np.ndarray, np.ndarray, np.ndarray]
"""hp float32, codes uint8 and scale float32, in a linear's own layout (L-2)."""


class OperandCast(NamedTuple):
    """How a GEMM in FP8 quantizes one of its operands; axis: that it reduces; seed: the GEMM's, of
    stochastic rounding."""

    role: Role
    spec: CastSpec
    axis: int
    seed: int | None = None

    def simulated(
        self, hp: np.ndarray, state: delayed.DelayedState | None = None
    ) -> scaling.Quantized:
        """hp as the simulator quantizes it; state: of a role under delayed scaling."""
        fmt, policy = self.spec.fmt, self.spec.policy
        if state is None:
            # the last block along a linear's rows may be shorter (L-5)
            if self.axis == 1:
                return linear.cast_operand(hp, self.spec, self.seed)._replace(axis=1)
            q = linear.cast_operand(hp.T, self.spec, self.seed, ragged=True)
            return as_factor(q._replace(axis=0))._replace(axis=0)
        assert self.spec.delayed is not None
        scales = delayed.scales(state, self.spec.delayed, fmt)
        q = scaling.quantize_with(
            hp if self.axis == 1 else hp.T,
            scales,
            fmt,
            policy=policy,
            axis=1,
            rounding=self.spec.rounding,
            seed=self.seed if self.spec.stochastic else None,
        )
        return q if self.axis == 1 else as_factor(q._replace(axis=0))._replace(axis=0)

    def state(self, layer: str, states: States) -> delayed.DelayedState | None:
        """The state of this role in a layer; None if its scale is dynamic."""
        return states[f"{layer}/{self.role}"] if self.spec.delayed else None


def operand_casts(which: Gemm, spec: GemmSpec) -> list[OperandCast]:
    """The casts of a GEMM's operands a and b; none of a GEMM in high precision."""
    return [
        OperandCast(role, cast_spec, axis)
        for role, cast_spec, axis in zip(
            OPERANDS[which], (spec.a, spec.b), REDUCED_AXES[which], strict=True
        )
        if cast_spec is not None
    ]


def as_factor(q: scaling.Quantized) -> scaling.Quantized:
    """An operand as the [M, K] that a GEMM takes: transposed if its first axis is reduced."""
    if q.axis == 1:
        return q
    return q._replace(codes=q.codes.T, scale=q.scale.T, scale_inv=q.scale_inv.T, axis=1)


@dataclass(frozen=True)
class Observation:
    """One FP8 GEMM as a backend computed it: its operands and its output."""

    backend: str
    layer: str
    gemm: Gemm
    a: Operand
    b: Operand
    out: np.ndarray
    seed: int = 0

    def operands(self, spec: GemmSpec) -> Iterator[tuple[OperandCast, Operand]]:
        """Its operands, with how the recipe casts them; a linear's ``seed`` gives its GEMM's."""
        own = linear.seed_of(self.seed, self.gemm)
        for cast, operand in zip(operand_casts(self.gemm, spec), (self.a, self.b), strict=True):
            yield cast._replace(seed=own if cast.spec.stochastic else None), operand

    def used(self, spec: GemmSpec) -> Iterator[scaling.Quantized]:
        """Its operands as the backend multiplied them, in their own layout."""
        for cast, (hp, codes, scale) in self.operands(spec):
            if cast.spec.policy.two_level is not None:  # whose scales are no reciprocals
                yield cast.simulated(np.asarray(hp, np.float32))._replace(codes=np.asarray(codes))
                continue
            scale = np.asarray(scale, np.float32)
            scale_inv, kind = scaling.scale_inv_from_scale(scale), cast.spec
            own = np.asarray(codes), scale, scale_inv
            yield scaling.Quantized(*own, kind.fmt, kind.granularity, cast.axis)


def observe(
    trainer: loop.Trainer, tokens: np.ndarray, passes: list[AttentionPass] | None = None
) -> list[Observation]:
    """Record every FP8 GEMM of one forward and backward pass, in the order of callbacks.

    passes   gets the passes of attention by a variant too, whose memory is quadratic.
    """
    observations: list[Observation] = []
    reported: collections.Counter[tuple[str, Gemm]] = collections.Counter()

    def record(layer: str, which: Gemm, a: Operand, b: Operand, out: np.ndarray) -> None:
        part = reported[layer, which]
        reported[layer, which] += 1
        seed = linear.seed_in_run(trainer.config.run.seed, trainer.count, layer, part)
        observations.append(Observation(trainer.backend, layer, which, a, b, out, seed))

    if passes is None:
        trainer.observe(tokens, record)
    else:
        trainer.observe(tokens, record, attention=recorder(trainer.backend, passes))
    return observations


def in_pass_order(observations: Sequence[Observation], config: Config) -> list[Observation]:
    """Sort observations, which come in any order, as the forward and then the backward pass run."""
    place = {name: i for i, name in enumerate(llama.linear_shapes(config.model))}
    gemms = list(OPERANDS)
    return sorted(
        observations,
        key=lambda o: (
            o.gemm != "output",
            place[o.layer] if o.gemm == "output" else -place[o.layer],
            gemms.index(o.gemm),
        ),
    )


def backward(config: llama.LlamaConfig) -> list[str]:
    """Modules with parameters, in the order in which the backward pass reaches them."""
    modules = [llama.EMBEDDING.removesuffix(".weight")]
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        qkv = [f"{layer}.self_attn.{p}_proj" for p in "qkv"]
        modules += [f"{layer}.input_layernorm", *qkv]
        modules += [f"{layer}.self_attn.{p}_norm" for p in "qk" if config.qk_norm] + [
            f"{layer}.self_attn.o_proj"
        ]
        router = [f"{layer}.mlp{llama.ROUTER}"] if config.num_experts else []
        names = llama.linear_shapes(config)
        mlps = [name for name in names if name.startswith(f"{layer}.mlp.")]
        modules += [f"{layer}.post_attention_layernorm", *router, *mlps]
    modules += ["model.norm"] if config.tie_word_embeddings else ["model.norm", "lm_head"]
    return modules[::-1]


def whole(value: np.ndarray, role: str, batch: tuple[int, ...]) -> np.ndarray:
    """[tokens, ...] as [sequence, position, ...]; weights and an expert's rows unchanged."""
    if role in ("weight", "grad_weight") or len(value) != batch[0] * (batch[1] - 1):
        return value
    return value.reshape(batch[0], batch[1] - 1, -1)


class Quantizer(Protocol):
    """A backend's quantizer and cast, of NumPy arrays."""

    def quantize(self, x: np.ndarray, cast: OperandCast) -> tuple[np.ndarray, np.ndarray]:
        """The codes and scale of x, first rounded to bfloat16, the model's high precision.

        Shapes:   x float32 of any shape; codes uint8 of its shape; scale float32 of
                  ``granularity.scale_shape``.
        """
        ...

    def encode(self, x: np.ndarray, fmt: Format) -> np.ndarray:
        """The codes of the bare cast, saturating, from float32."""
        ...


def check_operands(
    report: Report,
    trainer: loop.Trainer,
    tokens: np.ndarray,
    recipes: dict[str, Recipe],
    quantizers: dict[str, Quantizer],
    states: States,
    multiply: Multiply | None = None,
    variant: Variant | None = None,
) -> tuple[list[Observation], list[AttentionPass]]:
    """Check each FP8 GEMM of one forward and backward pass, and codes and scales of attention.

    Operands are compared bit for bit; outputs within B-1 or B-16, or a plan's bits (B-12).

    states    the simulator's states of delayed scaling before this pass, those of attention too.
    multiply  the simulated hardware that the trainer runs under.
    variant   of its attention, if any.
    Returns:  the observed GEMMs, and passes of attention.
    """
    passes: list[AttentionPass] = []
    observations = observe(trainer, tokens, None if variant is None else passes)
    attention.check_codes(report, passes, variant, attention.delayed_scales(states))
    planned = {
        (layer, which)
        for layer, recipe in recipes.items()
        for which, spec in recipe.gemms.items()
        if spec.fp8
    }
    ran = {(o.layer, o.gemm) for o in observations}
    checks = BackendChecks(report, trainer.backend)
    for layer, which in sorted(planned ^ ran):
        checks.misplanned(layer, which, (layer, which) in planned)
    for observation in (o for o in observations if (o.layer, o.gemm) in planned):
        spec = recipes[observation.layer].gemms[observation.gemm]
        pair = compare_operands(report, observation, spec, quantizers, states)
        _check_output(checks, observation, spec, pair, multiply)
    return observations, passes


def amaxes(observations: Sequence[Observation]) -> dict[str, list[np.ndarray]]:
    """The amax of every operand of these GEMMs, by "<layer>/<role>"."""
    operand_amaxes: dict[str, list[np.ndarray]] = {}
    for o in observations:
        for role, (hp, _, _) in zip(OPERANDS[o.gemm], (o.a, o.b), strict=True):
            operand_amaxes.setdefault(f"{o.layer}/{role}", []).append(scaling.amax(hp))
    return operand_amaxes


def compare_operands(
    report: Report,
    observed: Observation,
    spec: GemmSpec,
    quantizers: Mapping[str, Quantizer],
    states: States,
) -> tuple[scaling.Quantized, scaling.Quantized]:
    """Compare codes and scales of a GEMM's operands with the simulator's, bit for bit.

    Returns:  the simulator's operands, as a GEMM takes them.
    """
    a, b = (
        compare_quantized(
            report,
            f"{observed.layer}/{cast.role}",
            hp,
            cast,
            quantizers,
            live={observed.backend: (codes, scale)},
            state=cast.state(observed.layer, states),
        )
        for cast, (hp, codes, scale) in observed.operands(spec)
    )
    return as_factor(a), as_factor(b)


def compare_quantized(
    report: Report,
    prefix: str,
    hp: np.ndarray,
    cast: OperandCast,
    quantizers: Mapping[str, Quantizer],
    *,
    live: Mapping[str, tuple[np.ndarray, np.ndarray]] | None = None,
    state: delayed.DelayedState | None = None,
) -> scaling.Quantized:
    """Compare codes and scales of hp in every implementation.

    live      codes and scale of a training step, by backend; other backends quantize hp anew, if
              the cast is plain.
    state     of a role under delayed scaling, which no quantizer has: ``live`` is compared.
    Returns:  the simulator's codes and scales.
    """
    hp, live = np.asarray(hp, np.float32), live or {}
    simulated = cast.simulated(hp, state)
    quantized = {"sim": (simulated.codes, simulated.scale)}
    for backend, quantizer in quantizers.items():
        if backend in live:
            quantized[backend] = live[backend]
        elif state is None and cast.spec.plain:
            quantized[backend] = quantizer.quantize(hp, cast)
    codes, scales = ({who: pair[i] for who, pair in quantized.items()} for i in (0, 1))
    for backend in (who for who in quantizers if who in quantized):
        check = report.check(f"{prefix}/codes/{backend}")
        compare_codes(check, codes, backend, cast.spec.fmt, hp)
        compare_scales(report.check(f"{prefix}/scale/{backend}"), scales, backend)
    return simulated


def _check_output(
    checks: BackendChecks,
    observed: Observation,
    spec: GemmSpec,
    pair: tuple[scaling.Quantized, scaling.Quantized],
    multiply: Multiply | None,
) -> None:
    # The simulator's operands are multiplied: a backend's wrong code shows in its output too.
    name = f"{observed.layer}/{observed.gemm}"
    out = np.asarray(observed.out, np.float32)
    if multiply is None:
        expected = device_gemm.simulated(checks.backend, *pair, spec)
        checks.output(name, [Part(*pair, expected)], spec, out)
        return
    check, names = checks.check(f"{name}/value"), (checks.backend, "sim")
    device_gemm.compare_planned(check, pair, spec, out, multiply, names=names)


def initial_states(recipes: Mapping[str, Recipe]) -> States:
    """The simulator's states of delayed scaling before the first step; {} if scales are dynamic."""
    casts = _delayed_casts(recipes).items()
    return {name: delayed.init(config) for name, (_, config) in casts}


def states_after(
    states: States, recipes: Mapping[str, Recipe], amaxes: Mapping[str, Sequence]
) -> States:
    """The states after a step in which each role had these amaxes, float32 (), of uses or ranks."""
    return {
        name: delayed.update(
            states[name], *map(delayed.observe, amaxes[name]), config=config, fmt=fmt
        )
        for name, (fmt, config) in _delayed_casts(recipes).items()
    }


def _delayed_casts(recipes: Mapping[str, Recipe]) -> dict[str, tuple[Format, DelayedScaling]]:
    """Format and configuration of every role under delayed scaling, by "<layer>/<role>"."""
    return {
        f"{layer}/{role}": delayed_cast
        for layer, r in recipes.items()
        for role, delayed_cast in delayed_casts(r).items()
    }


def quantizers(names: Iterable[str]) -> dict[str, Quantizer]:
    """Fresh quantizers of these backends."""
    classes: dict[str, Callable[[], Quantizer]] = {"jax": _JaxQuantizer, "torch": _TorchQuantizer}
    return {name: classes[name]() for name in names}


class _JaxQuantizer:
    """Compiled, as in training: XLA's rewrites are part of what is compared."""

    def __init__(self) -> None:
        self._compiled: dict[OperandCast, Callable] = {}

    def quantize(self, x: np.ndarray, cast: OperandCast) -> tuple[np.ndarray, np.ndarray]:
        import jax
        import jax.numpy as jnp

        from fp8ref.jax.quantize import scaling

        spec, axis = cast.spec, cast.axis

        def run(x):
            q = scaling.quantize(
                x, spec.fmt, granularity=spec.granularity, policy=spec.policy, axis=axis
            )
            return q.code_bits, q.scale

        compiled = self._compiled.setdefault(cast, jax.jit(run))
        codes, scale = compiled(jnp.asarray(x, jnp.float32).astype(jnp.bfloat16))
        return np.asarray(codes), np.asarray(scale)

    def encode(self, x: np.ndarray, fmt: Format) -> np.ndarray:
        return functions.fp8ref_jax_cast(fmt)(x)


class _TorchQuantizer:
    """Eager, on the CPU."""

    def quantize(self, x: np.ndarray, cast: OperandCast) -> tuple[np.ndarray, np.ndarray]:
        import torch

        from fp8ref.torch.quantize import scaling

        spec, axis = cast.spec, cast.axis
        value = torch.from_numpy(np.ascontiguousarray(x, np.float32)).to(torch.bfloat16)
        q = scaling.quantize(
            value, spec.fmt, granularity=spec.granularity, policy=spec.policy, axis=axis
        )
        return q.code_bits.numpy(), q.scale.numpy()

    def encode(self, x: np.ndarray, fmt: Format) -> np.ndarray:
        return functions.on_torch("cpu")(functions.fp8ref_torch_cast(fmt))(x)
