"""The values of one training step, in the order in which two backends are compared (spec B-10)."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fp8ref.crosscheck.attention.attention import SYMBOLS, AttentionPass
from fp8ref.crosscheck.operands import (
    Observation,
    backward,
    in_pass_order,
    observe,
    recipes_of,
    whole,
)
from fp8ref.formats import Format
from fp8ref.recipe import ROLES, CastSpec, Gemm, Recipe
from fp8ref.spec import llama
from fp8ref.spec.attention.products import Phase as AttentionPhase
from fp8ref.train import loop
from fp8ref.train.config.config import Config

Phase = Literal["state before", "batch", "forward", "loss", "backward", "optimizer"]
"""The part of a step that a value belongs to, in order."""

Part = Literal["value", "scale", "codes"]
"""Which array of an FP8 operand a value is: its high-precision tensor, scale or codes."""


@dataclass(frozen=True, kw_only=True)
class Value:
    """One array of a step.

    layer        full name of a module; or loss, gradient, optimizer, batch.
    role         which array of the layer.
    part         of an FP8 operand: its high-precision tensor (value), scale or codes; else value.
    gemm         the FP8 GEMM that has the array as operand or result.
    cast         how the operand is quantized.
    observation  the whole of that GEMM.
    passes       the passes of the layer's attention so far, if the value is of a variant.
    codes_of     the format of codes of attention.
    """

    phase: Phase
    layer: str
    role: str
    value: np.ndarray
    part: Part = "value"
    gemm: Gemm | None = None
    cast: CastSpec | None = None
    observation: Observation | None = None
    passes: tuple[AttentionPass, ...] = ()
    codes_of: Format | None = None

    @property
    def key(self) -> tuple[str, ...]:
        """What a value has in common with its counterpart in the other training."""
        return self.phase, self.layer, self.gemm or "", self.role, self.part

    @property
    def name(self) -> str:
        """The name of its ``Check``, without the backends."""
        what = self.role if self.gemm in (None, self.role) else f"{self.gemm} {self.role}"
        return f"{self.layer}/{what}/{self.part}"

    @property
    def fmt(self) -> Format | None:
        """The format of codes in FP8; None for other arrays."""
        return self.codes_of or (self.cast.fmt if self.cast and self.part == "codes" else None)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """GEMMs, passes of attention, logits and gradients of a pass, before its step is taken."""

    gemms: Sequence[Observation]
    attention: Sequence[AttentionPass]
    logits: np.ndarray | None
    gradients: Mapping[str, np.ndarray]


def look(trainer: loop.Trainer, tokens: np.ndarray, config: Config, *, operands: bool) -> Pass:
    """Run a forward and backward pass that updates nothing.

    operands   also observe FP8 GEMMs, attention by a variant, and logits.
    """
    passes: list[AttentionPass] = []
    watched = passes if config.numerics.attention is not None else None
    return Pass(
        gemms=in_pass_order(observe(trainer, tokens, watched), config) if operands else [],
        attention=passes,
        logits=trainer.logits(tokens[:, :-1]) if operands else None,
        gradients=trainer.gradients(tokens),
    )


def ordered_values(
    observed: Pass,
    metrics: Mapping[str, float],
    tokens: np.ndarray,
    config: Config,
    recipes: Mapping[str, Recipe],
    learning_rate: float,
) -> Iterator[Value]:
    """GEMMs and attention, logits, loss, gradients, norm and learning rate of a step, in order."""
    # The order is B-10's: each value is computed from values before it. The first that differs has
    # equal inputs, so that its own operation is what differs.
    outputs = {o.layer: o for o in observed.gemms if o.gemm == "output"}
    for name in llama.linear_shapes(config.model):
        if name in outputs:
            yield from _gemm_values(outputs[name], "forward", recipes, tokens.shape)
        if name.endswith("self_attn.v_proj"):
            yield from _attention_values(observed, name.rpartition(".")[0], "forward", config)
    if observed.logits is not None:
        yield Value(phase="forward", layer="lm_head", role="logits", value=observed.logits)
    yield _number("loss", "loss", "mean", metrics["loss"])
    for module in backward(config.model):
        for o in observed.gemms:
            if o.layer == module and o.gemm != "output":
                yield from _gemm_values(o, "backward", recipes, tokens.shape)
        if f"{module}.weight" in observed.gradients:
            gradient = observed.gradients[f"{module}.weight"]
            yield Value(phase="backward", layer=module, role="weight's gradient", value=gradient)
        if module.endswith("self_attn.o_proj"):
            yield from _attention_values(observed, module.rpartition(".")[0], "backward", config)
    yield _number("backward", "gradient", "norm", metrics["grad_norm"])
    yield _number("optimizer", "optimizer", "learning rate", learning_rate)


def results(trainer: loop.Trainer, config: Config, metrics: Mapping[str, float]) -> list[Value]:
    """What a step leaves: its loss and gradient norm, weights, moments and states of scaling."""
    return [
        _number("loss", "loss", "mean", metrics["loss"]),
        _number("loss", "grad_norm", "norm", metrics["grad_norm"]),
        *state_values(trainer, config, "optimizer"),
    ]


def _number(phase: Phase, layer: str, role: str, value: float) -> Value:
    return Value(phase=phase, layer=layer, role=role, value=np.asarray(value, np.float64))


def state_values(trainer: loop.Trainer, config: Config, phase: Phase) -> list[Value]:
    """The state that training changes: master weights, moments and states of delayed scaling.

    After a step moments come first, as the masters are computed from them. Parameters are in the
    order of ``llama.parameter_shapes`` in both backends.
    """
    tensors = {"master weight": trainer.weights(), **trainer.moments()}
    if phase == "optimizer":
        tensors = dict(sorted(tensors.items(), key=lambda item: item[0] == "master weight"))
    values = [
        Value(phase=phase, layer=name.removesuffix(".weight"), role=role, value=arrays[name])
        for role, arrays in tensors.items()
        for name in llama.parameter_shapes(config.model)
    ]
    states = trainer.fp8_states()
    linears = [(layer, role) for layer in llama.linear_shapes(config.model) for role in ROLES]
    casts = config.attention_casts.items()
    attended = [(layer, role) for layer, roles in casts for role in roles]
    kept = [(layer, role) for layer, role in linears if f"{layer}/{role}" in states]
    for layer, role in kept + attended:
        stored, history, _ = states[f"{layer}/{role}"]
        for what, value in (("amax history", history), ("stored scale", stored)):
            array = np.asarray(value)
            values.append(Value(phase=phase, layer=layer, role=f"{role} {what}", value=array))
    return values


def batch_value(tokens: np.ndarray) -> Value:
    """The batch's tokens."""
    return Value(phase="batch", layer="batch", role="tokens", value=np.asarray(tokens, np.int32))


def site_before(linear: str) -> tuple[str, str]:
    """The module and the site of M-3 that compute a linear's input."""
    block, _, name = linear.rpartition(".")
    layer = block.rpartition(".")[0]
    if name == "o_proj":
        return block, "attention output"
    if name == "down_proj":
        return block, "silu(gate) * up"
    if name == "lm_head":
        return "model.norm", "output"
    norm = "input_layernorm" if block.endswith("self_attn") else "post_attention_layernorm"
    return f"{layer}.{norm}", "output"


def unobserved(layer: str, config: Config) -> list[str]:
    """Linears before this layer whose output GEMM is in high precision, which no observer sees."""
    names, recipes = list(llama.linear_shapes(config.model)), recipes_of(config)
    until = names.index(layer) if layer in names else len(names)
    fp8 = {name for name, recipe in recipes.items() if recipe.output.fp8}
    return [name for name in names[:until] if name not in fp8]


def _attention_values(
    observed: Pass, layer: str, phase: AttentionPhase, config: Config
) -> Iterator[Value]:
    passes = [one for one in observed.attention if one.layer == layer]
    variant = config.attention_variant
    for one in passes:
        if one.phase != phase or variant is None:
            continue
        until = tuple(p for p in passes if p.phase == "forward" or phase == "backward")
        for what, part, value in one.parts():
            yield Value(
                phase=phase,
                layer=layer,
                role=SYMBOLS.get(what, what),
                value=value,
                part=part,  # type: ignore[arg-type]
                passes=until,
                codes_of=variant.format_of(what) if part == "codes" else None,
            )


def _gemm_values(
    o: Observation, phase: Phase, recipes: Mapping[str, Recipe], batch: tuple[int, ...]
) -> Iterator[Value]:
    out = whole(np.asarray(o.out, np.float32), o.gemm, batch)
    result = Value(phase=phase, layer=o.layer, role=o.gemm, value=out, gemm=o.gemm, observation=o)
    for cast, (hp, codes, scale) in o.operands(recipes[o.layer].gemms[o.gemm]):
        operand = dataclasses.replace(result, role=cast.role, cast=cast.spec)
        value = whole(np.asarray(hp, np.float32), cast.role, batch)
        yield dataclasses.replace(operand, value=value)
        yield dataclasses.replace(operand, part="scale", value=np.asarray(scale, np.float32))
        codes = whole(np.asarray(codes), cast.role, batch)
        yield dataclasses.replace(operand, part="codes", value=codes)
    yield result
