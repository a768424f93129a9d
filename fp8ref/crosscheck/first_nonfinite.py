"""The first non-finite value of a step, and what caused it (spec K-9).

``check_site`` looks at one value: a ``Site`` with its parts. ``gemm_sites`` and ``in_backend`` list
a backend's values in the order of its pass, each with a cause if its parts do not show it.
"""

import functools
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from fp8ref.conformance.kit.compare import Check
from fp8ref.crosscheck.attention.attention import SYMBOLS, AttentionPass
from fp8ref.crosscheck.operands import Observation, backward, recipes_of, whole
from fp8ref.recipe import OPERANDS, Gemm, GemmSpec, Recipe
from fp8ref.sim.llama import Site
from fp8ref.sim.quantize import cast, scaling
from fp8ref.spec import llama
from fp8ref.spec.attention.products import Phase
from fp8ref.train import loop
from fp8ref.train.config.config import Config


@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """A value that is not finite.

    layer     full name of a module; role: which array of it.
    element   its index in that array.
    found_by  "sim" or the backend that computed it.
    """

    layer: str
    role: str
    element: tuple[int, ...]
    value: float
    why: str
    found_by: str

    def to_dict(self) -> dict:
        """As JSON, with the value as text: JSON has no infinity."""
        return asdict(self) | {"element": list(self.element), "value": str(self.value)}

    def __str__(self) -> str:
        at = f", element {list(self.element)}" if self.element else ""
        return f"{self.layer}, {self.role}{at}: {self.value}"


def first_index(value: np.ndarray) -> tuple[int, ...] | None:
    """The index of the first non-finite value in row-major order, or None."""
    bad = np.flatnonzero(~np.isfinite(value))
    if not bad.size:
        return None
    return tuple(int(i) for i in np.unravel_index(bad[0], np.shape(value)))


def check_site(site: Site, check: Check, *, by: str, why: str = "") -> NonFinite | None:
    """Count a site's finite values in check; return the first that is not finite, or None.

    why   the cause, if the site's parts do not show it.
    """
    finite = np.isfinite(site.value)
    check.compared += finite.size
    check.equal += int(finite.sum())
    index = first_index(site.value)
    if index is None:
        return None
    nonfinite = NonFinite(
        layer=site.module,
        role=site.role,
        element=index,
        value=float(site.value[index]),
        why=why or cause(site, index),
        found_by=by,
    )
    check.detail = (
        check.detail
        or f"{check.name}: {finite.size - int(finite.sum())} of {finite.size} are not finite, "
        f"first {nonfinite}; {nonfinite.why}"
    )
    return nonfinite


def cause(site: Site, index: tuple[int, ...]) -> str:
    """Why a value is not finite: an overflow of finite parts, or a part that is not finite."""
    if site.factors:
        return _product_cause(site, index)
    parts = {
        name: float(np.broadcast_to(part, site.value.shape)[index])
        for name, part in site.parts.items()
    }
    shown = ", ".join(f"{name} {part:.9g}" for name, part in parts.items())
    if not shown:
        return "no part of it is known"
    if all(map(math.isfinite, parts.values())):
        return f"{shown}: {_overflow(site)}"
    return shown if site.role != "weight" else f"{shown}: an earlier step made it so"


def _overflow(site: Site) -> str:
    return f"beyond the largest {site.fmt}, {site.fmt.max:.4g}"


def _product_cause(site: Site, index: tuple[int, ...]) -> str:
    (first, a), (second, b) = site.factors.items()
    row = a[index[:-1]]
    column = b[(*(index[:-2] if b.ndim == len(index) else ()), index[-1])]
    # in float64 the sum does not overflow: its size shows the cause
    terms = row.astype(np.float64) * column
    for name, line in ((first, row), (second, column)):
        if not np.isfinite(line).all():
            [k] = first_index(line) or (0,)
            return f"its factor {name} is {line[k]:.9g} at k = {k} of {len(line)}"
    k = int(np.abs(terms).argmax())
    return (
        f"a sum of {len(terms)} products, {terms.sum():.4g} in float64, {_overflow(site)}; the "
        f"largest of them is {first} {row[k]:.9g} times {second} {column[k]:.9g}, at k = {k}"
    )


@dataclass(frozen=True)
class Observed:
    """What a trainer showed of a failed step.

    tokens   [B, T + 1]; metrics: loss and grad_norm of the step.
    """

    tokens: np.ndarray
    config: Config
    gemms: Sequence[Observation]
    passes: Sequence[AttentionPass]
    metrics: Mapping[str, float]

    @functools.cached_property
    def recipes(self) -> dict[str, Recipe]:
        """The recipe of every linear, by name."""
        return recipes_of(self.config)


def gemm_sites(observed: Observed, layer: str, gemms: Sequence[Gemm]) -> Iterator[tuple[Site, str]]:
    """Operands, scales and outputs of a linear's FP8 GEMMs, with the cause if no part shows it."""
    batch = observed.tokens.shape
    for o in (o for o in observed.gemms if o.layer == layer and o.gemm in gemms):
        spec = observed.recipes[layer].gemms[o.gemm]
        for operand, (hp, _, scale) in o.operands(spec):
            role, why = operand.role, _finite_in_sim(o.backend)
            if role == "grad_output":
                why = f"it comes from {_before(layer, observed.recipes)}"
            yield Site(module=layer, role=role, value=whole(hp, role, batch)), why
            scale_site = Site(module=layer, role=f"{role} scale", value=np.asarray(scale))
            yield scale_site, "the tensor's values are finite"
        out = np.asarray(o.out)
        factors = {} if np.isfinite(out).all() else _factors(o, spec, batch)
        value = whole(out, o.gemm, batch)
        yield Site(module=layer, role=o.gemm, value=value, factors=factors), ""


_MADE_OF = {
    "s": "q, k and their scales are finite: their product left float32's range",
    "p": "the scores are finite",
    "o": "probabilities, v and their scales are finite: their product left the output's range",
    "dv": "probabilities, dO and their scales are finite: their product left the output's range",
    "ds": "probabilities, dO, v and O are finite: a product of them left float32's range",
    "dk": "dS, q and their scales are finite: their product left the output's range",
    "dq": "dS, k and their scales are finite: their product left the output's range",
}
"""What a value of attention is made of, if all before it is finite."""


def attention_sites(observed: Observed, layer: str, phase: Phase) -> Iterator[tuple[Site, str]]:
    """What passes of a layer's attention made, in order, with its cause; codes as numbers."""
    variant = observed.config.attention_variant
    assert variant is not None
    for one in (p for p in observed.passes if (p.layer, p.phase) == (layer, phase)):
        for what, part, value in one.parts():
            if part == "codes":
                value = cast.decode(value, variant.format_of(what))
            if what == "s":  # a key that is not seen has the score -infinity
                value = np.where(np.tril(np.ones(value.shape[-2:], bool)), value, 0)
            if part == "scale":
                why = "the tensor's values are finite"
            elif what == "do":
                why = f"it comes from {layer}.o_proj's grad_input"
            else:
                why = _MADE_OF.get(what, _finite_in_sim(one.backend))
            role = SYMBOLS.get(what, what) + ("" if part == "value" else f" {part}")
            yield Site(module=layer, role=role, value=value), why


def _finite_in_sim(backend: str) -> str:
    """The cause of a backend's non-finite value that is finite in the simulator."""
    return f"the simulator's value is finite: {backend} sums in another order, or has a fault"


def in_backend(trainer: loop.Trainer, observed: Observed) -> Iterator[tuple[Site, str]]:
    """The values after the forward pass's FP8 GEMMs, in order.

    Logits and loss come first, then gradients from the last layer to the first, then their norm.

    Each comes with its cause if its parts do not show one. The simulator's forward pass is finite.
    """
    tokens, metrics, config = observed.tokens, observed.metrics, observed.config
    if not math.isfinite(metrics["loss"]):
        why = _finite_in_sim(trainer.backend)
        logits = trainer.logits(tokens[:, :-1])
        yield Site(module="lm_head", role="output", value=logits), why
        yield Site(module="loss", role="mean", value=np.asarray(metrics["loss"])), why
    finite = all(map(math.isfinite, metrics.values()))
    gradients = {} if finite else trainer.gradients(tokens)
    for module in backward(config.model):
        yield from gemm_sites(observed, module, ["grad_input", "grad_weight"])
        if not finite:
            why = (
                f"a sum over {tokens[:, 1:].size} tokens; every FP8 operand and output before "
                "it is finite"
            )
            gradient = gradients[f"{module}.weight"]
            yield Site(module=module, role="weight's gradient", value=gradient), why
        if config.attention_variant is not None and module.endswith("self_attn.o_proj"):
            yield from attention_sites(observed, module.removesuffix(".o_proj"), "backward")
    if not finite:
        yield _norm_site(gradients, metrics["grad_norm"])


def _norm_site(gradients: Mapping[str, np.ndarray], norm: float) -> tuple[Site, str]:
    """The norm of finite gradients, and the largest of them."""
    name, largest = max(gradients.items(), key=lambda item: float(np.abs(item[1]).max()))
    index = tuple(int(i) for i in np.unravel_index(np.abs(largest).argmax(), largest.shape))
    squares = math.fsum(float(np.square(g.astype(np.float64)).sum()) for g in gradients.values())
    why = (
        f"all gradients are finite; the sum of their squares is {squares:.4g}, the largest "
        f"{name} {list(index)}: {largest[index]:.9g}"
    )
    return Site(module="gradient", role="norm", value=np.asarray(norm)), why


def _factors(o: Observation, spec: GemmSpec, batch: tuple[int, ...]) -> dict[str, np.ndarray]:
    """The dequantized operands with the reduced axis last, as ``Site.factors`` takes them."""
    factors: dict[str, np.ndarray] = {}
    for operand, used in zip(o.operands(spec), o.used(spec), strict=True):
        role, value = operand[0].role, scaling.dequantize(used)
        factors[role] = value if used.axis == 1 else value.T
    if o.gemm != "grad_weight":  # its rows are features, not tokens
        first = OPERANDS[o.gemm][0]
        factors[first] = whole(factors[first], first, batch)
    return factors


def _before(linear: str, linears: Container[str]) -> str:
    """The operation that the backward pass runs just before a linear."""
    layer, _, name = linear.rpartition(".")
    if name == "down_proj" and layer.endswith((llama.EXPERTS, llama.SHARED)):
        return f"the sum of experts of {layer.rpartition('.')[0]}, and their weights"
    if name in ("gate_proj", "up_proj"):
        return f"silu(gate) * up of {layer}, after down_proj's grad_input"
    if name in ("q_proj", "k_proj", "v_proj"):
        return f"the attention of {layer}, after o_proj's grad_input"
    if name == "o_proj":
        return (
            f"{layer.removesuffix('.self_attn')}.post_attention_layernorm, or the residual "
            "next to it"
        )
    if name == "down_proj":
        block, _, index = layer.removesuffix(".mlp").rpartition(".")
        after = f"{block}.{int(index) + 1}"
        if not any(f"{after}.mlp{part}.down_proj" in linears for part in ("", llama.EXPERTS)):
            return "model.norm"
        return f"{after}.input_layernorm, or the residual next to it"
    return "the loss"
