"""The trainer's Llama, forward only (M-3): roundings are at named sites, all else in float64.

Slow and plain, for checks. With ``seed=None`` all sites round to nearest even. With a seed they
round stochastically, which gives one sample of the noise of rounding alone (spec B-2, B-3).
``watch`` receives every value of the pass by its site.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fp8ref import policy as policies
from fp8ref.formats import BFLOAT16, FLOAT32, Format
from fp8ref.recipe import CastSpec, Recipe
from fp8ref.sim import delayed
from fp8ref.sim.attention import attention as variants
from fp8ref.sim.attention.operands import hadamard
from fp8ref.sim.gemm import hardware
from fp8ref.sim.quantize import cast, scales, scaling
from fp8ref.sim.quantize.scales import Scales
from fp8ref.spec import granularity as granularities
from fp8ref.spec import llama
from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variants import ROLES, Mask, Variant, by_name
from fp8ref.spec.hardware import Factor, Multiply

_TOO_LARGE = 2.0**128 - 2.0**103  # rounds to infinity in float32, as all above


@dataclass(frozen=True, kw_only=True)
class Site:
    """One value of the pass, given to ``watch``.

    module, role   the module's full name; input, weight or output, or M-3's name of the site.
    parts          the arrays it was computed from, element by element: name -> array that
                   broadcasts to value's shape.
    factors        the operands of a product that sums over K: value[..., i, j] = sum_k of first
                   [..., i, k] * second [..., j, k]; second may lack the leading dims.
    fmt            the format that it is rounded to; float32 within float32 results.
    """

    module: str
    role: str
    value: np.ndarray
    parts: Mapping[str, np.ndarray] = field(default_factory=dict)
    factors: Mapping[str, np.ndarray] = field(default_factory=dict)
    fmt: Format = BFLOAT16


Watch = Callable[[Site], None]
"""A function that a forward pass calls with each of its values."""


class Rounding:
    """Rounds at M-3's sites and in FP8 casts: to nearest, or stochastically with a seed."""

    def __init__(self, seed: int | None = None) -> None:
        self._seed = seed
        self._site = 0
        self.rounding: cast.Rounding = "nearest_even" if seed is None else "stochastic"

    def _next_seed(self) -> int | None:
        self._site += 1
        return None if self._seed is None else (self._seed << 32) + self._site

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """x rounded to bfloat16."""
        rounded = cast.round_to(x, BFLOAT16, rounding=self.rounding, seed=self._next_seed())
        return rounded.astype(np.float64)

    def codes(self, x: np.ndarray, spec: CastSpec, scales: Scales) -> np.ndarray:
        """uint8, x scaled along its last axis and cast."""
        blocks = granularities.lengths(spec.granularity, x.ndim, -1)
        return scaling.quantize_blocks(
            x.astype(np.float32),
            scales,
            spec.fmt,
            blocks,
            divides_in=policies.by_name(spec.policy).divides_in,
            rounding=self.rounding,
            seed=self._next_seed(),
        )


def values(codes: np.ndarray, spec: CastSpec, scales: Scales) -> np.ndarray:
    """decode(codes) * scale_inv, in float64: the values that the GEMM multiplies."""
    blocks = granularities.lengths(spec.granularity, codes.ndim, -1)
    scale_inv = scaling.spread(scales.scale_inv, codes.shape, blocks)
    return cast.decode(codes, spec.fmt).astype(np.float64) * scale_inv


def scales_of(x: np.ndarray, spec: CastSpec, state: delayed.DelayedState | None = None) -> Scales:
    """The scales of a cast along x's last axis; if delayed, those of its state. Of two levels
    scale_inv is RN32(tensor_scale_inv * scale_inv), as S-8 multiplies by it (S-22)."""
    if spec.delayed is not None:
        return delayed.scales(
            delayed.init(spec.delayed) if state is None else state, spec.delayed, spec.fmt
        )
    if spec.policy.two_level is not None:
        q = scaling.quantize(
            x.astype(np.float32), spec.fmt, granularity=spec.granularity, policy=spec.policy
        )
        whole = np.float32(1) if q.tensor_scale_inv is None else q.tensor_scale_inv
        return Scales(q.scale, whole * q.scale_inv)
    return scales.scales_from_amax(
        scaling.amax(x.astype(np.float32), spec.granularity, axis=-1), spec.fmt, spec.policy
    )


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """What a pass computes in.

    recipes    linear's name -> its recipe.
    states     "<linear>/<role>" -> state of delayed scaling; by default those of a first step.
               Attention has delayed scales if it has states, "<layer>.self_attn/<role>".
    multiply   hardware that sums and scales FP8 GEMMs (G-19), and sums products of an attention in
               FP8; None: exact sums. Either way the result is rounded at M-3's site.
    attention  the variant of ``fp8ref.spec.attention.variants`` that attends; None: M-3's
               attention.
    """

    recipes: Mapping[str, Recipe] = field(default_factory=dict)
    states: Mapping[str, delayed.DelayedState] = field(default_factory=dict)
    multiply: Multiply | None = None
    attention: str | Variant | None = None


def forward(
    tokens: np.ndarray,
    weights: Mapping[str, np.ndarray],
    config: llama.LlamaConfig,
    numerics: Numerics,
    *,
    seed: int | None = None,
    watch: Watch = lambda site: None,
) -> np.ndarray:
    """Logits of a batch, by the trainer's Llama.

    seed     of stochastic rounding at every site; None: to nearest even.
    watch    called with every value of the pass, in its order.

    Shapes:   tokens [B, T] integers below vocab_size; weights as ``llama.parameter_shapes``; logits
              float64 [B, T, vocab_size], values of bfloat16.
    Order:    spec M-3; sums in float64, so that only the stated roundings are left. Values
              that M-3 has in float32 become infinite beyond its range (M-7).
    Raises:   ValueError: a token outside the vocabulary.
    """
    if tokens.min() < 0 or tokens.max() >= config.vocab_size:
        raise ValueError(
            f"tokens are in [0, {config.vocab_size}); got {tokens.min()} to {tokens.max()}."
        )
    return _Pass(weights, config, numerics, Rounding(seed), watch).logits(tokens)


class _Pass:
    """One forward pass; each layer reports its values and rounds at its sites."""

    def __init__(
        self,
        weights: Mapping[str, np.ndarray],
        config: llama.LlamaConfig,
        numerics: Numerics,
        rounding: Rounding,
        watch: Watch,
    ) -> None:
        self.masters, self.config, self.numerics = weights, config, numerics
        self.rounding, self.watch = rounding, watch
        self.weights = {
            name: value.astype(np.float64) if name == llama.EMBEDDING else rounding(value)
            for name, value in weights.items()
        }

    def report(self, module: str, role: str, value: np.ndarray, **made_of: Any) -> np.ndarray:
        """value, shown to whoever watches."""
        self.watch(Site(module=module, role=role, value=value, **made_of))
        return value

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """[B, T] -> [B, T, vocab_size]."""
        config, name = self.config, llama.EMBEDDING.removesuffix(".weight")
        rotary = _rotary(config, tokens.shape[1])
        rows = self.weights[llama.EMBEDDING][tokens]
        parts = {"token": tokens[..., None], "float32 master": rows}
        h = self.report(name, "output", self.rounding(rows), parts=parts)  # [B, T, hidden]
        mlp = self.mixture if config.num_experts else self.mlp
        for i in range(config.num_hidden_layers):
            layer = f"model.layers.{i}"
            x = self.norm(f"{layer}.input_layernorm", h)
            h = self.residual(layer, "self_attn", h, self.attended(f"{layer}.self_attn", x, rotary))
            x = self.norm(f"{layer}.post_attention_layernorm", h)
            h = self.residual(layer, "mlp", h, mlp(f"{layer}.mlp", x))
        tied = llama.EMBEDDING if config.tie_word_embeddings else None
        return self.linear("lm_head", self.norm("model.norm", h), tied)

    def linear(
        self, name: str, x: np.ndarray, key: str | None = None, expert: int | None = None
    ) -> np.ndarray:
        """[..., K] x [N, K] -> [..., N]; of experts, the expert's weight."""
        master = self.masters[key or f"{name}.weight"]
        rounded = None if key else self.weights[f"{name}.weight"]
        if expert is not None and rounded is not None:
            master, rounded = master[expert], rounded[expert]
        weight = self.rounding(master) if rounded is None else rounded
        self.report(name, "weight", weight, parts={"float32 master": master})
        recipe, multiply = self.numerics.recipes.get(name), self.numerics.multiply
        spec = None if recipe is None else recipe.output
        factors = []
        operands = {"input": x.reshape(-1, x.shape[-1]), "weight": weight}
        for role, cast_spec in (("input", spec.a), ("weight", spec.b)) if spec else ():
            if cast_spec is None:
                continue
            if cast_spec.rotation is not None:
                operands[role] = hadamard.rotate_blocks(operands[role], cast_spec.rotation)
            state = self.numerics.states.get(f"{name}/{role}")
            scales = scales_of(operands[role], cast_spec, state)
            for part, scale in scales._asdict().items():
                self.report(name, f"{role} {part}", np.asarray(scale), fmt=FLOAT32)
            codes = self.rounding.codes(operands[role], cast_spec, scales)
            factors.append(Factor(codes, scales.scale_inv, cast_spec.fmt, cast_spec.granularity))
            operands[role] = values(codes, cast_spec, scales)
        operands["input"] = operands["input"].reshape(x.shape)
        if multiply is None or spec is None or spec.accumulate is None:
            product = operands["input"] @ operands["weight"].T
        else:
            product = multiply(
                *factors, accumulate=spec.accumulate, epilogue=spec.epilogue, out_dtype=FLOAT32
            )
            product = product.reshape(*x.shape[:-1], -1)
        return self.report(name, "output", self.rounding(product), factors=operands)

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        """RMSNorm."""
        weight, master = self.weights[f"{name}.weight"], self.masters[f"{name}.weight"]
        self.report(name, "weight", weight, parts={"float32 master": master})
        mean_square = in_range((x**2).sum(-1, keepdims=True)) / x.shape[-1]
        parts = {"input": x, "mean of squares": mean_square, "weight": weight}
        y = self.rounding(x / np.sqrt(mean_square + self.config.rms_norm_eps) * weight)
        return self.report(name, "output", y, parts=parts)

    def attended(
        self, name: str, x: np.ndarray, rotary: tuple[np.ndarray, np.ndarray]
    ) -> np.ndarray:
        """Attention with its four linears."""
        config = self.config
        q, k, v = (_heads(self.linear(f"{name}.{p}_proj", x), config.head_dim) for p in "qkv")
        if config.qk_norm:
            q, k = self.norm(f"{name}.q_norm", q), self.norm(f"{name}.k_norm", k)
        q, k = (
            self._rotated(name, operand, t, rotary) for operand, t in (("query", q), ("key", k))
        )
        attend = self._attention_in_fp8
        if self.numerics.attention is None:
            attend = self._attention
        o = attend(name, q, k, v)
        return self.linear(f"{name}.o_proj", o.swapaxes(1, 2).reshape(*x.shape[:-1], -1))

    def _rotated(
        self, name: str, operand: str, t: np.ndarray, rotary: tuple[np.ndarray, np.ndarray]
    ) -> np.ndarray:
        cos, sin = rotary
        half = _rotate_half(t)
        parts = {operand: t, f"rotate_half({operand})": half}
        return self.report(
            name, f"rotated {operand}", self.rounding(t * cos + half * sin), parts=parts
        )

    def _attention(self, name: str, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Causal attention with shared key and value heads: [B, H, T, D], as q."""
        groups = q.shape[1] // k.shape[1]
        k, v = (np.repeat(t, groups, axis=1) for t in (k, v))
        scores = in_range(q @ k.swapaxes(-1, -2)) / np.sqrt(q.shape[-1])  # [B, H, T, T]
        scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
        top = scores.max(-1, keepdims=True)
        # A score of -inf is a probability of 0, no failure, unless all of a token's are.
        shown = np.where(np.isneginf(scores) & ~np.isneginf(top), 0, scores)
        factors = {"query": q, "key": k}
        self.report(name, "attention scores", shown, factors=factors, fmt=FLOAT32)
        p = np.exp(scores - top)
        p = self.rounding(p / p.sum(-1, keepdims=True))
        self.report(name, "attention probabilities", p)
        return self.report(name, "attention output", self.rounding(p @ v))

    def _attention_in_fp8(
        self, name: str, q: np.ndarray, k: np.ndarray, v: np.ndarray
    ) -> np.ndarray:
        variant = hardware.attending(by_name(self.numerics.attention), self.numerics.multiply)  # type: ignore[arg-type]
        states = self.numerics.states
        role_scales = {
            role: states[f"{name}/{role}"].stored for role in ROLES if f"{name}/{role}" in states
        }
        sinks = None
        if self.config.attention_sinks:
            sinks = self.weights[llama.sinks_of(name)].astype(np.float32)
        # A variant takes finite numbers alone, and has finite scores; of others nothing is known.
        # Quantizing changes a score by less than a factor of 2 of the largest that its magnitudes
        # allow.
        keys = np.repeat(np.abs(k), q.shape[1] // k.shape[1], axis=1)
        with np.errstate(over="ignore", invalid="ignore"):
            sizes = np.abs(q) @ keys.swapaxes(-1, -2)
        finite = all(np.isfinite(x).all() for x in (q, k, v))
        o = np.full(q.shape, np.nan)
        if finite and (2 * sizes < _TOO_LARGE).all():
            softcap = self.config.attention_softcap
            call = Call(variant=variant, mask=Mask(causal=True), softcap=softcap)
            qkv = (x.astype(np.float32) for x in (q, k, v))
            o = variants.forward(*qkv, variant=call, scales=role_scales, sinks=sinks).o
        return self.report(name, "attention output", self.rounding(o.astype(np.float64)))

    def mlp(self, name: str, x: np.ndarray, expert: int | None = None) -> np.ndarray:
        """down(silu(gate) * up), of an expert."""
        gate, up = (self.linear(f"{name}.{p}_proj", x, expert=expert) for p in ("gate", "up"))
        with np.errstate(over="ignore"):  # e^-gate, of gates below -709
            product = self.rounding(gate / (1 + np.exp(-gate)) * up)
        self.report(name, "silu(gate) * up", product, parts={"gate": gate, "up": up})
        return self.linear(f"{name}.down_proj", product, expert=expert)

    def mixture(self, name: str, x: np.ndarray) -> np.ndarray:
        """The weighted sum of each token's experts (M-8)."""
        config, router = self.config, f"{name}{llama.ROUTER}"
        tokens = x.reshape(-1, x.shape[-1])
        weight = self.weights[f"{router}.weight"]
        master = self.masters[f"{router}.weight"]
        self.report(router, "weight", weight, parts={"float32 master": master})
        logits = in_range(tokens @ weight.T)
        factors = {"input": tokens, "weight": weight}
        self.report(router, "router logits", logits, factors=factors, fmt=FLOAT32)
        chosen, expert_weights = route(
            logits, config.num_experts_per_tok, normalizes=config.norm_topk_prob
        )
        out = np.zeros((*chosen.shape, x.shape[-1]))
        for e in range(config.num_experts):
            token, choice = np.nonzero(chosen == e)
            if len(token):
                out[token, choice] = self.mlp(f"{name}{llama.EXPERTS}", tokens[token], e)
        y = (expert_weights[..., None] * out).sum(1)
        if config.shared_expert_intermediate_size:
            y = y + self.mlp(f"{name}{llama.SHARED}", tokens)
        return self.report(name, "sum of experts", self.rounding(y)).reshape(x.shape)

    def residual(self, name: str, after: str, h: np.ndarray, y: np.ndarray) -> np.ndarray:
        """The sum of a residual and what a block makes of it."""
        parts = {"residual": h, f"output of {after}": y}
        return self.report(name, f"residual after {after}", self.rounding(h + y), parts=parts)


def route(logits: np.ndarray, count: int, *, normalizes: bool) -> tuple[np.ndarray, np.ndarray]:
    """The experts of each token [T, k], largest probability first and of equal ones the first
    expert, and their weights [T, k], from a router's logits [T, E] (M-8)."""
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    chosen = np.argsort(-p, axis=-1, kind="stable")[:, :count]
    expert_weights = np.take_along_axis(p, chosen, -1)
    return chosen, expert_weights / expert_weights.sum(
        -1, keepdims=True
    ) if normalizes else expert_weights


def loss(logits: np.ndarray, targets: np.ndarray) -> float:
    """Mean over all tokens of ``losses``, in nats (spec M-5)."""
    return float(losses(logits, targets).mean())


def losses(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The loss of every token, logsumexp(logits) - logits[target], float64 [B, T] in nats; Inf
    beyond float32 (M-7).

    Shapes:   logits [B, T, V]; targets [B, T].
    """
    top = logits.max(-1)
    logsumexp = top + np.log(np.exp(logits - top[..., None]).sum(-1))
    return in_range(logsumexp - np.take_along_axis(logits, targets[..., None], -1)[..., 0])


def in_range(x: np.ndarray) -> np.ndarray:
    """x, with infinities where float32 would overflow."""
    return np.where(np.abs(x) >= _TOO_LARGE, np.copysign(np.inf, x), x)


def _rotary(config: llama.LlamaConfig, length: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin [length, head_dim] in float32, independent of the backends' table (M-4)."""
    i = np.arange(config.head_dim) % (config.head_dim // 2)
    angle = np.arange(length)[:, None] / config.rope_theta ** (2 * i / config.head_dim)
    return np.cos(angle).astype(np.float32).astype(np.float64), np.sin(angle).astype(
        np.float32
    ).astype(np.float64)


def _heads(x: np.ndarray, head_dim: int) -> np.ndarray:
    """[B, T, heads * head_dim] -> [B, heads, T, head_dim]"""
    return x.reshape(*x.shape[:2], -1, head_dim).swapaxes(1, 2)


def _rotate_half(x: np.ndarray) -> np.ndarray:
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([-second, first], axis=-1)
