"""What a backend computed of a step, value by value, in the order in which two backends are compared (SEMANTICS B-10)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fp8ref import llama
from fp8ref.crosscheck.nonfinite.rerun import observed
from fp8ref.crosscheck.nonfinite.sites import backward, whole
from fp8ref.crosscheck.one_device import Observation
from fp8ref.formats import Format
from fp8ref.recipe import OPERANDS, ROLES, CastSpec, Gemm, Recipe
from fp8ref.train import loop
from fp8ref.train.config import Config

Phase = Literal["state before", "batch", "forward", "loss", "backward", "optimizer"]
Part = Literal["value", "scale", "codes"]


@dataclass(frozen=True, kw_only=True)
class Value:
    """One array.

    layer    full name of a module; loss, gradient, optimizer or batch where there is none.
    role     what of it.
    part     of an FP8 operand its tensor in high precision (value), its scale or its codes; a value elsewhere.
    gemm     of an operand or the result of an FP8 GEMM; cast: how the operand is quantised; seen: all of that GEMM.
    """

    phase: Phase
    layer: str
    role: str
    value: np.ndarray
    part: Part = "value"
    gemm: Gemm | None = None
    cast: CastSpec | None = None
    seen: Observation | None = None

    @property
    def key(self) -> tuple[str, ...]:
        return self.phase, self.layer, self.gemm or "", self.role, self.part

    @property
    def name(self) -> str:
        """As ``Check`` has it, less the backends."""
        what = self.role if self.gemm in (None, self.role) else f"{self.gemm} {self.role}"
        return f"{self.layer}/{what}/{self.part}"

    @property
    def fmt(self) -> Format | None:
        """Of codes."""
        return self.cast.fmt if self.cast and self.part == "codes" else None


@dataclass(frozen=True, kw_only=True)
class Pass:
    """What a step showed before it was taken: all but the loss, the norm and the update. gemms: in the order of the pass."""

    gemms: Sequence[Observation]
    logits: np.ndarray | None
    gradients: Mapping[str, np.ndarray]


def look(trainer: loop.Trainer, tokens: np.ndarray, config: Config, *, operands: bool) -> Pass:
    """A forward and backward pass that updates nothing. operands: with those of FP8 GEMMs, and the logits."""
    return Pass(
        gemms=observed(trainer, tokens, config) if operands else [],
        logits=trainer.logits(tokens[:, :-1]) if operands else None,
        gradients=trainer.gradients(tokens),
    )


def of_step(
    found: Pass, metrics: Mapping[str, float], tokens: np.ndarray, config: Config, recipes: Mapping[str, Recipe], learning_rate: float
) -> Iterator[Value]:
    """From the batch to the learning rate: what comes after the state before and before the state after."""
    for o in found.gemms:
        if o.gemm == "output":
            yield from _of_gemm(o, "forward", recipes, tokens.shape)
    if found.logits is not None:
        yield Value(phase="forward", layer="lm_head", role="logits", value=found.logits)
    yield Value(phase="loss", layer="loss", role="mean", value=np.asarray(metrics["loss"], np.float64))
    for module in backward(config.model):
        for o in found.gemms:
            if o.layer == module and o.gemm != "output":
                yield from _of_gemm(o, "backward", recipes, tokens.shape)
        if f"{module}.weight" in found.gradients:
            yield Value(phase="backward", layer=module, role="weight's gradient", value=found.gradients[f"{module}.weight"])
    yield Value(phase="backward", layer="gradient", role="norm", value=np.asarray(metrics["grad_norm"], np.float64))
    yield Value(phase="optimizer", layer="optimizer", role="learning rate", value=np.asarray(learning_rate, np.float64))


def of_state(trainer: loop.Trainer, config: Config, phase: Phase) -> list[Value]:
    """All that training changes: masters and then moments before a step; after it moments, of which the masters are made. Parameters are in the order
    of ``llama.parameter_shapes``, whatever order a backend has."""
    found = {"master weight": trainer.weights(), **trainer.moments()}
    if phase == "optimizer":
        found = dict(sorted(found.items(), key=lambda item: item[0] == "master weight"))
    values = [
        Value(phase=phase, layer=name.removesuffix(".weight"), role=role, value=of_role[name])
        for role, of_role in found.items()
        for name in llama.parameter_shapes(config.model)
    ]
    states = trainer.fp8_states()
    for name in [f"{layer}/{role}" for layer in llama.linear_shapes(config.model) for role in ROLES if f"{layer}/{role}" in states]:
        (stored, history, _), (layer, _, role) = states[name], name.rpartition("/")
        values.append(Value(phase=phase, layer=layer, role=f"{role} amax history", value=np.asarray(history)))
        values.append(Value(phase=phase, layer=layer, role=f"{role} stored scale", value=np.asarray(stored)))
    return values


def of_batch(tokens: np.ndarray) -> Value:
    return Value(phase="batch", layer="batch", role="tokens", value=np.asarray(tokens, np.int32))


def maker(linear: str) -> tuple[str, str]:
    """The module and the site of M-3 whose result is a linear's input."""
    block, _, name = linear.rpartition(".")
    layer = block.rpartition(".")[0]
    if name == "o_proj":
        return block, "attention output"
    if name == "down_proj":
        return block, "silu(gate) * up"
    if name == "lm_head":
        return "model.norm", "output"
    return f"{layer}.{'input' if block.endswith('self_attn') else 'post_attention'}_layernorm", "output"


def unobserved(layer: str, config: Config) -> list[str]:
    """Linears whose output GEMM is in high precision and that lie before this one in the forward pass."""
    names = list(llama.linear_shapes(config.model))
    recipes = {d.path: d.recipe for d in config.decisions()}
    until = names.index(layer) if layer in names else len(names)
    return [name for name in names[:until] if name not in recipes or not recipes[name].output.fp8]


def _of_gemm(o: Observation, phase: Phase, recipes: Mapping[str, Recipe], batch: tuple[int, ...]) -> Iterator[Value]:
    spec = recipes[o.layer].gemms[o.gemm]
    for role, (hp, codes, scale), cast in zip(OPERANDS[o.gemm], (o.a, o.b), (spec.a, spec.b), strict=True):
        parts: dict[Part, np.ndarray] = {
            "value": whole(np.asarray(hp, np.float32), role, batch),
            "scale": np.asarray(scale, np.float32),
            "codes": whole(np.asarray(codes), role, batch),
        }
        for part, value in parts.items():
            yield Value(phase=phase, layer=o.layer, role=role, value=value, part=part, gemm=o.gemm, cast=cast, seen=o)
    out = whole(np.asarray(o.out, np.float32), o.gemm, batch)
    yield Value(phase=phase, layer=o.layer, role=o.gemm, value=out, gemm=o.gemm, seen=o)
