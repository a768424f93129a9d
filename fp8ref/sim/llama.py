"""The trainer's Llama, forward pass only (spec M-3): every rounding is at a named site, all
else in float64.

Slow and plain, for checks. With ``seed=None`` all sites round to nearest even. With a seed they
round stochastically, which gives one sample of the noise of rounding alone (spec B-2, B-3).
``watch`` receives every value of the pass by its site.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fp8ref import policy as policies
from fp8ref.formats import BFLOAT16, FLOAT32, Format
from fp8ref.recipe import CastSpec, Recipe
from fp8ref.sim import delayed
from fp8ref.sim.attention import attention as variants
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
    """Rounds at the sites of M-3 and in FP8 casts: nearest even, or stochastically when a seed is
    given."""

    def __init__(self, seed: int | None = None) -> None:
        self._seed = seed
        self._site = 0
        self.rounding: cast.Rounding = "nearest_even" if seed is None else "stochastic"

    def _next_seed(self) -> int | None:
        """The seed of a site: every one draws afresh."""
        self._site += 1
        return None if self._seed is None else (self._seed << 32) + self._site

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """x rounded to bfloat16, the compute dtype."""
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
    """The scales of a cast of x along its last axis; under delayed scaling those of the state, by
    default a first step's."""
    if spec.delayed is not None:
        return delayed.scales(
            delayed.init(spec.delayed) if state is None else state, spec.delayed, spec.fmt
        )
    return scales.scales_from_amax(
        scaling.amax(x.astype(np.float32), spec.granularity, axis=-1), spec.fmt, spec.policy
    )


def forward(
    tokens: np.ndarray,
    weights: Mapping[str, np.ndarray],
    config: llama.LlamaConfig,
    recipes: Mapping[str, Recipe],
    *,
    seed: int | None = None,
    states: Mapping[str, delayed.DelayedState] | None = None,
    watch: Watch = lambda site: None,
    multiply: Multiply | None = None,
    attention: str | Variant | None = None,
) -> np.ndarray:
    """Logits of a batch, by the trainer's Llama.

    seed     of stochastic rounding at every site; None: to nearest even.
    states   "<linear>/<role>" -> state of delayed scaling; by default those of a first step.
             Attention has delayed scales if it has states, "<layer>.self_attn/<role>".
    multiply hardware that sums and scales FP8 GEMMs (G-19), and sums products of an attention in
    FP8; None: exact sums. Either way the result is rounded at M-3's site.
    watch    called with every value of the pass, in its order.
    attention
             the variant of ``fp8ref.spec.attention.variants`` that attends; None: M-3's attention.

    Shapes:   tokens [B, T] integers below vocab_size; weights as ``llama.parameter_shapes``;
              recipes: linear's name -> its recipe; logits float64 [B, T, vocab_size], values of
              bfloat16.
    Order:    spec M-3; sums in float64, so that only the stated roundings are left. Values
              that M-3 has in float32 become infinite beyond its range (M-7).
    Raises:   ValueError: a token outside the vocabulary.
    """
    if tokens.min() < 0 or tokens.max() >= config.vocab_size:
        raise ValueError(
            f"tokens must be in [0, {config.vocab_size}); got {tokens.min()} to {tokens.max()}."
        )
    rounding = Rounding(seed)
    w = {
        name: value.astype(np.float64) if name == "model.embed_tokens.weight" else rounding(value)
        for name, value in weights.items()
    }
    cos, sin = _rotary(config, tokens.shape[1])

    def report(module: str, role: str, value: np.ndarray, **made_of: Any) -> np.ndarray:
        watch(Site(module=module, role=role, value=value, **made_of))
        return value

    def linear(
        name: str, x: np.ndarray, key: str | None = None, expert: int | None = None
    ) -> np.ndarray:
        """[..., K] x [N, K] -> [..., N]; of experts, the expert's weight."""
        master, rounded = weights[key or f"{name}.weight"], None if key else w[f"{name}.weight"]
        if expert is not None and rounded is not None:
            master, rounded = master[expert], rounded[expert]
        weight = report(
            name,
            "weight",
            rounding(master) if rounded is None else rounded,
            parts={"float32 master": master},
        )
        spec = recipes[name].output if name in recipes else None
        factors = []
        operands = {"input": x.reshape(-1, x.shape[-1]), "weight": weight}
        for role, cast_spec in (("input", spec.a), ("weight", spec.b)) if spec else ():
            if cast_spec is None:
                continue
            scales = scales_of(operands[role], cast_spec, (states or {}).get(f"{name}/{role}"))
            for part, scale in scales._asdict().items():
                report(name, f"{role} {part}", np.asarray(scale), fmt=FLOAT32)
            codes = rounding.codes(operands[role], cast_spec, scales)
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
        return report(name, "output", rounding(product), factors=operands)

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        weight = report(
            name, "weight", w[f"{name}.weight"], parts={"float32 master": weights[f"{name}.weight"]}
        )
        mean_square = in_range((x**2).sum(-1, keepdims=True)) / x.shape[-1]
        parts = {"input": x, "mean of squares": mean_square, "weight": weight}
        return report(
            name,
            "output",
            rounding(x / np.sqrt(mean_square + config.rms_norm_eps) * weight),
            parts=parts,
        )

    def attended(name: str, x: np.ndarray) -> np.ndarray:
        q, k, v = (_heads(linear(f"{name}.{p}_proj", x), config.head_dim) for p in "qkv")
        if config.qk_norm:
            q, k = norm(f"{name}.q_norm", q), norm(f"{name}.k_norm", k)

        def rotated(operand: str, t: np.ndarray) -> np.ndarray:
            half = _rotate_half(t)
            return report(
                name,
                f"rotated {operand}",
                rounding(t * cos + half * sin),
                parts={operand: t, f"rotate_half({operand})": half},
            )

        q, k = rotated("query", q), rotated("key", k)
        call = None
        if attention is not None:
            variant = hardware.attending(by_name(attention), multiply)  # type: ignore[arg-type]
            cap = config.attention_softcap
            call = Call(variant=variant, mask=Mask(causal=True), softcap=cap)
        role_scales = (
            {role: states[f"{name}/{role}"].stored for role in ROLES if f"{name}/{role}" in states}
            if states
            else {}
        )
        sinks = w[llama.sinks_of(name)] if config.attention_sinks else None
        sinks = None if sinks is None else sinks.astype(np.float32)
        attention_report = functools.partial(report, name)
        o = _attention(q, k, v, rounding, attention_report, call, role_scales, sinks)
        return linear(f"{name}.o_proj", o.swapaxes(1, 2).reshape(*x.shape[:-1], -1))

    def mlp(name: str, x: np.ndarray, expert: int | None = None) -> np.ndarray:
        gate, up = (linear(f"{name}.{p}_proj", x, expert=expert) for p in ("gate", "up"))
        with np.errstate(over="ignore"):  # e^-gate, of gates below -709
            product = rounding(gate / (1 + np.exp(-gate)) * up)
        return linear(
            f"{name}.down_proj",
            report(name, "silu(gate) * up", product, parts={"gate": gate, "up": up}),
            expert=expert,
        )

    def mixture(name: str, x: np.ndarray) -> np.ndarray:
        """The weighted sum of each token's experts (M-8)."""
        tokens, router = x.reshape(-1, x.shape[-1]), f"{name}{llama.ROUTER}"
        weight = report(
            router,
            "weight",
            w[f"{router}.weight"],
            parts={"float32 master": weights[f"{router}.weight"]},
        )
        logits = report(
            router,
            "router logits",
            in_range(tokens @ weight.T),
            factors={"input": tokens, "weight": weight},
            fmt=FLOAT32,
        )
        chosen, expert_weights = route(
            logits, config.num_experts_per_tok, normalizes=config.norm_topk_prob
        )
        out = np.zeros((*chosen.shape, x.shape[-1]))
        for e in range(config.num_experts):
            token, choice = np.nonzero(chosen == e)
            if len(token):
                out[token, choice] = mlp(f"{name}{llama.EXPERTS}", tokens[token], e)
        y = (expert_weights[..., None] * out).sum(1)
        if config.shared_expert_intermediate_size:
            y = y + mlp(f"{name}{llama.SHARED}", tokens)
        return report(name, "sum of experts", rounding(y)).reshape(x.shape)

    def residual(name: str, after: str, h: np.ndarray, y: np.ndarray) -> np.ndarray:
        return report(
            name,
            f"residual after {after}",
            rounding(h + y),
            parts={"residual": h, f"output of {after}": y},
        )

    rows = w[llama.EMBEDDING][tokens]
    embedding_parts = {"token": tokens[..., None], "float32 master": rows}
    # [B, T, hidden]
    h = report(
        llama.EMBEDDING.removesuffix(".weight"), "output", rounding(rows), parts=embedding_parts
    )
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        h = residual(
            layer,
            "self_attn",
            h,
            attended(f"{layer}.self_attn", norm(f"{layer}.input_layernorm", h)),
        )
        h = residual(
            layer,
            "mlp",
            h,
            (mixture if config.num_experts else mlp)(
                f"{layer}.mlp", norm(f"{layer}.post_attention_layernorm", h)
            ),
        )
    return linear(
        "lm_head", norm("model.norm", h), llama.EMBEDDING if config.tie_word_embeddings else None
    )


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
    """cos and sin [length, head_dim], float32 values (spec M-4), written apart from the
    backends' table."""
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


def _attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    rounding: Rounding,
    report: Callable,
    call: Call | None = None,
    scales: Mapping[str, np.ndarray] | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Causal attention, key and value heads shared by groups of query heads: [B, H, T, D], as q."""
    if call is not None:
        # A variant takes finite numbers alone, and has finite scores; of others nothing is known.
        # Quantizing changes a score by less than a factor of 2 of the largest that its magnitudes
        # allow.
        with np.errstate(over="ignore", invalid="ignore"):
            sizes = np.abs(q) @ np.repeat(np.abs(k), q.shape[1] // k.shape[1], axis=1).swapaxes(
                -1, -2
            )
        finite = all(np.isfinite(x).all() for x in (q, k, v)) and bool(
            (2 * sizes < _TOO_LARGE).all()
        )
        operands = (x.astype(np.float32) for x in (q, k, v))
        o = (
            variants.forward(*operands, variant=call, scales=scales, sinks=sinks).o
            if finite
            else np.full(q.shape, np.nan)
        )
        out = rounding(o.astype(np.float64))
        report("attention output", out)
        return out
    groups = q.shape[1] // k.shape[1]
    k, v = (np.repeat(t, groups, axis=1) for t in (k, v))
    scores = in_range(q @ k.swapaxes(-1, -2)) / np.sqrt(q.shape[-1])  # [B, H, T, T]
    scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    # A score of -inf is a probability of 0, no failure, unless all of a token's scores are -inf.
    report(
        "attention scores",
        np.where(np.isneginf(scores) & ~np.isneginf(top), 0, scores),
        factors={"query": q, "key": k},
        fmt=FLOAT32,
    )
    p = np.exp(scores - top)
    p = rounding(p / p.sum(-1, keepdims=True))
    report("attention probabilities", p)
    out = rounding(p @ v)
    report("attention output", out)
    return out
