"""Compare the codes, scales and outputs of observed FP8 GEMMs with the simulator's.

spec S, H, G.

``observe`` records the GEMMs of one pass of a trainer; ``check_operands`` compares them.
``quantizers`` are those of the simulator and the backends, for one more comparison of each operand.
The simulator's states of delayed scaling follow the backend's from step to step
(``initial_states``, ``states_after``).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fp8ref.conformance.kit.compare import (
    Report,
    compare_bits,
    compare_codes,
    compare_scales,
    compare_values,
)
from fp8ref.conformance.libraries.profiles import fp8ref_jax_cast, fp8ref_torch_cast, on_torch
from fp8ref.crosscheck import device_gemm
from fp8ref.crosscheck.attention.attention import (
    AttentionPass,
    check_codes,
    delayed_scales,
    recorder,
)
from fp8ref.formats import BFLOAT16, FORMATS, Format
from fp8ref.recipe import OPERANDS, REDUCED_AXES, CastSpec, Gemm, Recipe, delayed_casts
from fp8ref.sim import delayed
from fp8ref.sim.quantize import cast, scaling
from fp8ref.spec import llama
from fp8ref.spec.attention.variants import Variant
from fp8ref.spec.delayed import DelayedScaling
from fp8ref.spec.hardware import Factor, Multiply
from fp8ref.train import loop
from fp8ref.train.config.config import Config

States = Mapping[str, delayed.DelayedState]
"""``<layer>/<role>`` -> state of delayed scaling."""


@dataclass(frozen=True)
class Observation:
    """One FP8 GEMM as a backend computed it.

    Operands (hp, codes, scale) in their own layout, and its output.
    """

    backend: str
    layer: str
    gemm: Gemm
    a: tuple[np.ndarray, np.ndarray, np.ndarray]
    b: tuple[np.ndarray, np.ndarray, np.ndarray]
    out: np.ndarray


def observe(
    trainer: loop.Trainer, tokens: np.ndarray, passes: list[AttentionPass] | None = None
) -> list[Observation]:
    """Record every FP8 GEMM of one forward and backward pass, in the order of callbacks.

    passes   gets the passes of attention by a variant too, whose memory is quadratic.
    """
    observations: list[Observation] = []
    more = {} if passes is None else {"attention": recorder(trainer.backend, passes)}
    trainer.observe(
        tokens,
        lambda layer, which, a, b, out: observations.append(
            Observation(trainer.backend, layer, which, a, b, out)
        ),
        **more,
    )
    return observations


def in_pass_order(observations: Sequence[Observation], config: Config) -> list[Observation]:
    """Sort observations as the forward pass and then the backward pass run.

    Callbacks come in any order.
    """
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
        modules += [f"{layer}.input_layernorm", *(f"{layer}.self_attn.{p}_proj" for p in "qkv")]
        modules += [f"{layer}.self_attn.{p}_norm" for p in "qk" if config.qk_norm] + [
            f"{layer}.self_attn.o_proj"
        ]
        router = [f"{layer}.mlp{llama.ROUTER}"] if config.num_experts else []
        mlps = [name for name in llama.linear_shapes(config) if name.startswith(f"{layer}.mlp.")]
        modules += [f"{layer}.post_attention_layernorm", *router, *mlps]
    modules += ["model.norm"] if config.tie_word_embeddings else ["model.norm", "lm_head"]
    return modules[::-1]


def whole(value: np.ndarray, role: str, batch: tuple[int, ...]) -> np.ndarray:
    """[tokens, ...] as [sequence, position, ...]; weights, their gradients and an expert's rows
    unchanged.
    """
    if role in ("weight", "grad_weight") or len(value) != batch[0] * (batch[1] - 1):
        return value
    return value.reshape(batch[0], batch[1] - 1, -1)


class Quantizer(Protocol):
    """A quantizer and a cast, of NumPy arrays.

    Shapes:   x float32 of any shape, of axis the reduced one; codes uint8 of its shape; scale
              float32 of ``granularity.scale_shape``.
    """

    def quantize(
        self, x: np.ndarray, spec: CastSpec, *, axis: int, dtype: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """The codes and scale of x, first rounded to ``dtype``, the tensor's hp dtype."""
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
    """Check every FP8 GEMM of one forward and backward pass, and the codes and scales of an
    attention by a variant.

    Operands are compared bit for bit; outputs within B-1 or B-16, or bit for bit under a plan
    (B-12).

    states    the simulator's states of delayed scaling before this pass, those of attention too.
    multiply  the simulated hardware that the trainer runs under.
    variant   of its attention, if any.
    Returns:  the observed GEMMs, and passes of attention.
    """
    passes: list[AttentionPass] = []
    observations = observe(trainer, tokens, None if variant is None else passes)
    check_codes(report, passes, variant, delayed_scales(states))
    planned = {
        (layer, which)
        for layer, recipe in recipes.items()
        for which, spec in recipe.gemms.items()
        if spec.fp8
    }
    ran = {(o.layer, o.gemm) for o in observations}
    for layer, which in sorted(planned ^ ran):
        problem = (
            "was planned in FP8 and did not run"
            if (layer, which) in planned
            else "ran in FP8 and was not planned"
        )
        report.check(f"{layer}/{which}/value/{trainer.backend}", bound=1.0).fail(
            f"the GEMM {problem}"
        )
    for observation in (o for o in observations if (o.layer, o.gemm) in planned):
        _check_gemm(report, observation, recipes[observation.layer], quantizers, states, multiply)
    return observations, passes


def amaxes(observations: Sequence[Observation]) -> dict[str, list[np.ndarray]]:
    """The amax of every operand of these GEMMs, by "<layer>/<role>"."""
    operand_amaxes: dict[str, list[np.ndarray]] = {}
    for o in observations:
        for role, (hp, _, _) in zip(OPERANDS[o.gemm], (o.a, o.b), strict=True):
            operand_amaxes.setdefault(f"{o.layer}/{role}", []).append(scaling.amax(hp))
    return operand_amaxes


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
    """Compare codes and scales of hp in every implementation.

    live      codes and scale that a training step used, by backend. Other backends quantize hp
              anew.
    state     of a role under delayed scaling. No quantizer has it, so that only ``live`` is
              compared.
    Returns:  the simulator's codes and scales.
    """
    hp = np.asarray(hp, np.float32)
    if state is None:
        simulated = scaling.quantize(
            hp, spec.fmt, granularity=spec.granularity, policy=spec.policy, axis=axis
        )
    else:
        assert spec.delayed is not None
        simulated = scaling.quantize_with(
            hp,
            delayed.scales(state, spec.delayed, spec.fmt),
            spec.fmt,
            policy=spec.policy,
            axis=axis,
        )
        quantizers = {
            backend: quantizer for backend, quantizer in quantizers.items() if backend in live
        }
    quantized = {"sim": (simulated.codes, simulated.scale)}
    for backend, quantizer in quantizers.items():
        quantized[backend] = (
            live[backend]
            if backend in live
            else quantizer.quantize(hp, spec, axis=axis, dtype="bfloat16")
        )
    for backend in quantizers:
        codes, scales = ({who: pair[i] for who, pair in quantized.items()} for i in (0, 1))
        compare_codes(report.check(f"{prefix}/codes/{backend}"), codes, backend, spec.fmt, hp)
        compare_scales(report.check(f"{prefix}/scale/{backend}"), scales, backend)
    return simulated


def transposed(q: scaling.Quantized) -> scaling.Quantized:
    """An operand that is reduced along its first axis, as the [M, K] that a GEMM takes."""
    return q._replace(codes=q.codes.T, scale=q.scale.T, scale_inv=q.scale_inv.T, axis=1)


def _check_gemm(
    report: Report,
    observed: Observation,
    recipe: Recipe,
    quantizers: dict[str, Quantizer],
    states: States,
    multiply: Multiply | None,
) -> None:
    layer, backend, spec = observed.layer, observed.backend, recipe.gemms[observed.gemm]
    operands = []
    for role, operand, cast_spec, axis in zip(
        OPERANDS[observed.gemm],
        (observed.a, observed.b),
        (spec.a, spec.b),
        REDUCED_AXES[observed.gemm],
        strict=True,
    ):
        assert cast_spec is not None
        hp, codes, scale = operand
        state = states[f"{layer}/{role}"] if cast_spec.delayed else None
        q = compare_quantized(
            report,
            f"{layer}/{role}",
            hp,
            cast_spec,
            axis,
            {backend: (codes, scale)},
            quantizers,
            state,
        )
        operands.append(q if axis == 1 else transposed(q))
    a, b = operands
    # The simulator's operands are multiplied, not the backend's: a wrong code shows in the output
    # too.
    out = np.asarray(observed.out, np.float32)
    if multiply is not None:
        assert spec.accumulate is not None
        factors = (Factor(q.codes, q.scale_inv, q.fmt, q.granularity) for q in operands)
        expected = multiply(
            *factors, accumulate=spec.accumulate, epilogue=spec.epilogue, out_dtype=BFLOAT16
        )
        compare_bits(
            report.check(f"{layer}/{observed.gemm}/value/{backend}"),
            out,
            expected,
            names=(backend, "sim"),
        )
        return
    simulated = device_gemm.simulated(backend, a, b, spec)
    check = report.check(f"{layer}/{observed.gemm}/value/{backend}", bound=1.0)
    compare_values(
        check,
        out,
        simulated,
        device_gemm.bound(backend, a, b, spec, out, simulated),
        names=(backend, "sim"),
    )


def initial_states(recipes: Mapping[str, Recipe]) -> States:
    """The simulator's states of delayed scaling before the first step.

    Empty if every scale is dynamic.
    """
    return {name: delayed.init(config) for name, (_, config) in _delayed_casts(recipes).items()}


def states_after(
    states: States, recipes: Mapping[str, Recipe], amaxes: Mapping[str, Sequence]
) -> States:
    """The states after a step in which each role had these amaxes, float32 ().

    One for every use or rank.
    """
    new_states = {}
    for name, (fmt, config) in _delayed_casts(recipes).items():
        new_states[name] = delayed.update(
            states[name], *map(delayed.observe, amaxes[name]), config=config, fmt=fmt
        )
    return new_states


def _delayed_casts(recipes: Mapping[str, Recipe]) -> dict[str, tuple[Format, DelayedScaling]]:
    """Format and configuration of every role under delayed scaling, by "<layer>/<role>"."""
    return {
        f"{layer}/{role}": delayed_cast
        for layer, r in recipes.items()
        for role, delayed_cast in delayed_casts(r).items()
    }


def quantizers(names: Iterable[str]) -> dict[str, Quantizer]:
    """Fresh quantizers of these names: "sim", "jax", "torch"."""
    classes: dict[str, Callable[[], Quantizer]] = {
        "sim": _SimQuantizer,
        "jax": _JaxQuantizer,
        "torch": _TorchQuantizer,
    }
    return {name: classes[name]() for name in names}


class _SimQuantizer:
    def quantize(
        self, x: np.ndarray, spec: CastSpec, *, axis: int, dtype: str
    ) -> tuple[np.ndarray, np.ndarray]:
        x = cast.round_to(x, FORMATS[dtype])
        q = scaling.quantize(
            x, spec.fmt, granularity=spec.granularity, policy=spec.policy, axis=axis
        )
        return q.codes, q.scale

    def encode(self, x: np.ndarray, fmt: Format) -> np.ndarray:
        return cast.encode(x, fmt)


class _JaxQuantizer:
    """Compiled, as in training: XLA's rewrites are part of what is compared. Each (spec, axis) is
    compiled once a shape.
    """

    def __init__(self) -> None:
        self._compiled: dict[tuple, Callable] = {}

    def quantize(
        self, x: np.ndarray, spec: CastSpec, *, axis: int, dtype: str
    ) -> tuple[np.ndarray, np.ndarray]:
        import jax
        import jax.numpy as jnp

        from fp8ref.jax.quantize import scaling

        def run(x):
            q = scaling.quantize(
                x, spec.fmt, granularity=spec.granularity, policy=spec.policy, axis=axis
            )
            return jax.lax.bitcast_convert_type(q.codes, jnp.uint8), q.scale

        compiled = self._compiled.setdefault((spec, axis), jax.jit(run))
        codes, scale = compiled(jnp.asarray(x, jnp.float32).astype(dtype))
        return np.asarray(codes), np.asarray(scale)

    def encode(self, x: np.ndarray, fmt: Format) -> np.ndarray:
        return fp8ref_jax_cast(fmt)(x)


class _TorchQuantizer:
    """Eager, on the CPU."""

    def quantize(
        self, x: np.ndarray, spec: CastSpec, *, axis: int, dtype: str
    ) -> tuple[np.ndarray, np.ndarray]:
        import torch

        from fp8ref.torch.quantize import scaling

        value = torch.from_numpy(np.ascontiguousarray(x, np.float32)).to(getattr(torch, dtype))
        q = scaling.quantize(
            value, spec.fmt, granularity=spec.granularity, policy=spec.policy, axis=axis
        )
        return q.codes.view(torch.uint8).numpy(), q.scale.numpy()

    def encode(self, x: np.ndarray, fmt: Format) -> np.ndarray:
        return on_torch("cpu")(fp8ref_torch_cast(fmt))(x)
