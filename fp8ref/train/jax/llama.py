"""The trainer's Llama as a Flax NNX module (spec M).

Its attribute names are Hugging Face's parameter names.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from fp8ref import llama
from fp8ref.attention import Arithmetic, Mask, Variant
from fp8ref.attention_casts import Casts
from fp8ref.hardware import Multiply
from fp8ref.jax import attention, attention_casts, attention_kernel, delayed, grouped, linear
from fp8ref.jax.grouped_operands import Codes, Slot
from fp8ref.jax.scaling import Quantized
from fp8ref.llama import EXPERTS, ROUTER, SHARED, STACK, LlamaConfig, sinks_of
from fp8ref.recipe import Recipe
from fp8ref.train.jax import expert_dispatch, experts
from fp8ref.train.jax.experts import Balance
from fp8ref.train.jax.mesh import Layout

Weights = Mapping[str, np.ndarray]
"""Parameter's name -> float32 array."""

Recipes = Mapping[str, Recipe]
"""Linear's name -> recipe."""

KEPT = ("linear", "attention")
"""What selective checkpointing keeps of a layer, by ``checkpoint_name``: the outputs of linears and of
attention."""

GATHERED = "gathered"
"""The name of experts' weights that are gathered for a pass, which keeps none."""

QUERIES = 512
"""The queries that chunked attention takes at a time."""


@dataclass
class Pass:
    """What a forward pass carries to its linears, and collects from them.

    state      delayed-scaling states by linear, which the pass reads.
    seen       amax observations by linear; each linear replaces its own.
    layout     places a linear on the mesh; None places none, as a layout of one device does.
    taps       statistics accumulators by linear and by attention (``apply_with_stats``); each replaces its own.
    attention  "xla" or "cudnn": the implementation of jax.nn.dot_product_attention; "chunked": XLA's, of
               QUERIES queries at a time.
    variant    of ``fp8ref.attention``, computed by "tiles", or cuDNN's "kernel" (spec A-20); None: none.
    arithmetic of the variant.
    checkpointing
               what the backward pass finds of a layer: everything ("none"), what is ``KEPT``
               ("selective"), or its input ("full").
    multiply   simulated hardware for FP8 GEMMs; None: XLA's own.
    copies     FP8 copies of weights by linear, which are multiplied in place of a cast of the weight (O-16).
    mu         factors by which gradients of weights are exchanged in FP8, by linear (P-22).
    balance    of experts, by layer (M-8); each replaces its own.
    casts      of single operands of attention, by layer, in place of the variant's (E-9).
    """

    state: Mapping[str, delayed.State] = field(default_factory=dict)
    seen: dict[str, delayed.Seen] = field(default_factory=dict)
    layout: Layout | None = None
    taps: dict[str, jax.Array] = field(default_factory=dict)
    attention: Literal["xla", "chunked", "cudnn", "tiles", "kernel"] = "xla"
    variant: Variant | None = None
    arithmetic: Arithmetic = "fast"
    checkpointing: Literal["none", "selective", "full"] = "none"
    multiply: Multiply | None = None
    copies: Mapping[str, Quantized] = field(default_factory=dict)
    mu: Mapping[str, jax.Array] = field(default_factory=dict)
    balance: dict[str, Balance] = field(default_factory=dict)
    casts: Mapping[str, Casts] = field(default_factory=dict)

    def attended(
        self, q: jax.Array, k: jax.Array, v: jax.Array, name: str, softcap: float | None = None, sinks: jax.Array | None = None
    ) -> jax.Array:
        """Causal attention of the layer ``name``: q [B, T, H, D]; k and v may have fewer heads; softcap and sinks [H] of a variant
        by tiles."""
        if name in self.casts:
            y = attention_casts.apply(*(x.swapaxes(1, 2) for x in (q, k, v)), self.casts[name]).swapaxes(1, 2)
        elif self.variant is not None and self.attention == "kernel":
            heads = (x.swapaxes(1, 2) for x in (q, k, v))
            scales = {role: one.stored for role, one in self.state[name].items()}
            by: dict = {"scales": scales, "variant": self.variant, "mask": Mask(causal=True), "platform": "cuda", "name": name}
            y, seen = attention_kernel.apply(*heads, **by, seen=self.seen[name])
            assert seen is not None
            y, self.seen[name] = y.swapaxes(1, 2), seen
        elif self.variant is not None:
            over = self.layout.cutting_heads if self.layout else ()
            heads = (x.swapaxes(1, 2) for x in (q, k, v))
            how: dict = {"variant": self.variant, "mask": Mask(causal=True), "arithmetic": self.arithmetic, "over": over, "name": name}
            how |= {"tokens": self.layout.context if self.layout else "", "softcap": softcap, "sinks": sinks}
            how["multiply"] = self.multiply if self.variant.fmt.bits == 8 else None
            if (state := self.state.get(name)) is not None:
                how |= {"scales": {role: one.stored for role, one in state.items()}, "seen": self.seen[name]}
            y, seen, tap = attention.apply_with_stats(*heads, **how, tap=self.taps.get(name))
            if seen is not None:
                self.seen[name] = seen
            if tap is not None:
                self.taps[name] = tap
            y = y.swapaxes(1, 2)
        elif self.attention == "chunked":
            y = _attended_in_chunks(q, k, v)
        else:
            assert self.attention in ("xla", "cudnn")
            y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=self.attention)
        return checkpoint_name(y, "attention")

    def linear(self, x: jax.Array, w: jax.Array, recipe: str | Recipe, name: str) -> jax.Array:
        """x [..., K] x w [N, K] -> [..., N], with the state, observations and placement of the
        linear ``name``."""
        placement = self.layout.placement(name) if self.layout else None
        y, seen, tap = linear.apply_with_stats(
            x,
            w,
            recipe=recipe,
            state=self.state.get(name),
            seen=self.seen.get(name),
            placement=placement,
            name=name,
            tap=self.taps.get(name),
            multiply=self.multiply,
            quantized=self.copies.get(name),
            mu=self.mu.get(name),
        )
        if seen is not None:
            self.seen[name] = seen
        if tap is not None:
            self.taps[name] = tap
        return checkpoint_name(y, "linear")

    def grouped(self, rows: jax.Array, w: jax.Array, sizes: jax.Array, recipe: str | Recipe, name: str) -> jax.Array:
        """rows [M, K] in groups x w [E, N, K], this device's piece, -> [M, N], with the state and observations of
        the grouped linear ``name``."""
        return self.grouped_codes(rows, w, sizes, recipe, name, None, False)[0]

    def grouped_codes(
        self, rows: jax.Array, w: jax.Array, sizes: jax.Array, recipe: str | Recipe, name: str, codes: Codes | None, grad_codes: bool
    ) -> tuple[jax.Array, Slot | None]:
        """``grouped`` of rows that came in FP8, or whose gradient will, and the slot of that (X-14)."""
        layout = self.layout
        over = layout.sharing_groups if layout else ()

        def product(rows, w, state, seen, tap, codes):
            w = (checkpoint_name(layout.expert_weights(w), GATHERED) if layout else w).swapaxes(-1, -2)
            how: dict = {"recipe": recipe, "state": state, "seen": seen, "over": over, "name": name}
            if codes is None and not grad_codes:
                return *grouped.apply_with_stats(rows, w, sizes, **how, tap=tap), None
            y, seen, slot = grouped.apply_codes(rows, w, sizes, **how, input_codes=codes, grad_codes=grad_codes)
            return y, seen, tap, slot

        if layout and layout.gathers_experts:  # gathered again in the backward pass, as fsdp does
            product = jax.checkpoint(product, policy=jax.checkpoint_policies.save_anything_except_these_names(GATHERED), prevent_cse=True)
        y, seen, tap, slot = product(rows, w, self.state.get(name), self.seen.get(name), self.taps.get(name), codes)
        if seen is not None:
            self.seen[name] = seen
        if tap is not None:
            self.taps[name] = tap
        return checkpoint_name(y, "linear"), slot

    def of(self, layer: str) -> tuple[dict, ...]:
        """(states, observations, taps, copies, factors) of what a layer has, by name."""
        held = (self.state, self.seen, self.taps, self.copies, self.mu)
        return tuple({name: v for name, v in d.items() if name.startswith(f"{layer}.")} for d in held)


def rounded(x: jax.Array, dtype) -> jax.Array:
    """float32 x rounded to dtype, also where XLA fuses it with what reads it: a conversion to dtype
    and back may be dropped there, ``reduce_precision`` is not (spec M-3)."""
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, info.nexp, info.nmant).astype(dtype)


class Linear(nnx.Module):
    """y [..., N] = x [..., K] x weight [N, K], by the layer's recipe."""

    def __init__(self, name: str, weights: Weights, recipes: Recipes) -> None:
        self.weight = nnx.Param(jnp.asarray(weights[f"{name}.weight"]))
        self.recipe = recipes[name]
        self.name = name

    def __call__(self, x: jax.Array, run: Pass) -> jax.Array:
        return run.linear(x, self.weight[...], self.recipe, self.name)


class RMSNorm(nnx.Module):
    """x * rsqrt(mean(x^2) + eps) * weight over the last dim (spec M-3).

    In float32, rounded once to x's dtype.
    """

    def __init__(self, weight: np.ndarray, *, eps: float) -> None:
        self.weight = nnx.Param(jnp.asarray(weight))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return _normed(x, self.weight[...], self.eps)


class Embedding(nnx.Module):
    """Rows of the float32 table, rounded, before they are gathered over devices: [B, T] -> [B, T, hidden] (spec M-2)."""

    def __init__(self, weight: np.ndarray) -> None:
        self.weight = nnx.Param(jnp.asarray(weight))

    def __call__(self, tokens: jax.Array, dtype, run: Pass) -> jax.Array:
        table = run.layout.whole(self.weight[...], dtype) if run.layout else self.weight[...]
        return rounded(table[tokens], dtype)  # [B, T] -> [B, T, hidden]; the gradient sums in the table's dtype


class Attention(nnx.Module):
    """Causal rotary attention of [B, T, hidden], with grouped key and value heads (spec M-1)."""

    def __init__(self, name: str, config: LlamaConfig, weights: Weights, recipes: Recipes) -> None:
        self.head_dim, self.name = config.head_dim, name
        for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, projection, Linear(f"{name}.{projection}", weights, recipes))
        self.softcap, self.has_sinks = config.attention_softcap, config.attention_sinks
        if config.attention_sinks:
            self.sinks = nnx.Param(jnp.asarray(weights[sinks_of(name)]))
        self.normalizes = config.qk_norm
        if config.qk_norm:
            for norm in ("q_norm", "k_norm"):
                setattr(self, norm, RMSNorm(weights[f"{name}.{norm}.weight"], eps=config.rms_norm_eps))

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array, run: Pass) -> jax.Array:
        q, k, v = (p(x, run) for p in (self.q_proj, self.k_proj, self.v_proj))
        batch, length, _ = q.shape
        q, k, v = (value.reshape(batch, length, -1, self.head_dim) for value in (q, k, v))  # [B, T, H, D]
        if self.normalizes:
            q, k = self.q_norm(q), self.k_norm(k)
        sinks = self.sinks[...] if self.has_sinks else None
        y = run.attended(_rotate(q, cos, sin), _rotate(k, cos, sin), v, self.name, self.softcap, sinks)
        return self.o_proj(y.reshape(batch, length, -1), run)


class MLP(nnx.Module):
    """SwiGLU: down_proj(silu(gate) * up), the product in float32 and rounded once (spec M-3)."""

    def __init__(self, name: str, weights: Weights, recipes: Recipes) -> None:
        for projection in ("gate_proj", "up_proj", "down_proj"):
            setattr(self, projection, Linear(f"{name}.{projection}", weights, recipes))

    def __call__(self, x: jax.Array, run: Pass) -> jax.Array:
        # Past the barrier XLA keeps these two for the backward pass, and not the float32 products
        # that they are rounded from.
        gate, up = jax.lax.optimization_barrier((self.gate_proj(x, run), self.up_proj(x, run)))
        return self.down_proj(_swiglu(gate, up), run)


class Router(nnx.Module):
    """The router's weight [E, hidden]."""

    def __init__(self, weight: np.ndarray) -> None:
        self.weight = nnx.Param(jnp.asarray(weight))


class Experts(nnx.Module):
    """SwiGLU of each expert, as grouped linears: rows [M, hidden] in groups -> [M, hidden]."""

    def __init__(self, name: str, weights: Weights, recipes: Recipes) -> None:
        for projection in ("gate_proj", "up_proj", "down_proj"):
            setattr(self, projection, Linear(f"{name}.{projection}", weights, recipes))

    def __call__(self, rows: jax.Array, sizes: jax.Array, run: Pass) -> jax.Array:
        return self._product(rows, sizes, run, None, False)[0]

    def apart(self, rows: jax.Array, sizes: jax.Array, run: Pass) -> jax.Array:
        """Rows of all experts, in groups of these sizes, through the devices that have the experts (X-13)."""
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        moved, codes = expert_dispatch.dispatched(run, rows, sizes, {of.name: of.recipe for of in (gate, up)})
        y, slot = self._product(moved.rows, moved.sizes, run, codes, expert_dispatch.gradients_move_as_codes(run, down.recipe))
        return expert_dispatch.combined(run, y, slot, moved, sizes, down.name, down.recipe)

    def _product(
        self, rows: jax.Array, sizes: jax.Array, run: Pass, codes: Codes | None, grad_codes: bool
    ) -> tuple[jax.Array, Slot | None]:
        def product(x: jax.Array, of: Linear, codes: Codes | None, grad_codes: bool) -> tuple[jax.Array, Slot | None]:
            return run.grouped_codes(x, of.weight[...], sizes, of.recipe, of.name, codes, grad_codes)

        (gate, _), (up, _) = (product(rows, of, codes, False) for of in (self.gate_proj, self.up_proj))
        gate, up = jax.lax.optimization_barrier((gate, up))
        return product(_swiglu(gate, up), self.down_proj, None, grad_codes)


class MixtureMLP(nnx.Module):
    """The weighted sum of a token's experts, and a shared MLP's output if there is one (spec M-8)."""

    def __init__(self, name: str, config: LlamaConfig, weights: Weights, recipes: Recipes) -> None:
        self.name, self.chosen, self.count, self.normalizes = name, config.num_experts_per_tok, config.num_experts, config.norm_topk_prob
        self.gate = Router(weights[f"{name}{ROUTER}.weight"])
        self.experts = Experts(f"{name}{EXPERTS}", weights, recipes)
        self.shares = config.shared_expert_intermediate_size > 0
        if self.shares:
            self.shared_expert = MLP(f"{name}{SHARED}", weights, recipes)

    def __call__(self, x: jax.Array, run: Pass) -> jax.Array:
        tokens = x.reshape(-1, x.shape[-1])
        router = run.layout.shared(self.gate.weight[...]) if run.layout else self.gate.weight[...]
        chosen, weights, probabilities = experts.route(tokens, router, self.chosen, normalizes=self.normalizes)
        y, sizes = experts.mixture(tokens, chosen, weights, self.count, lambda rows, sizes: self._of_groups(rows, sizes, run))
        run.balance[self.name] = Balance(sizes.astype(jnp.float32), probabilities.sum(0))
        if self.shares:
            y = y + self.shared_expert(tokens, run).astype(jnp.float32)
        return rounded(y, x.dtype).reshape(x.shape)

    def _of_groups(self, rows: jax.Array, sizes: jax.Array, run: Pass) -> jax.Array:
        """rows [M, hidden] of all experts, in groups -> [M, hidden]: on this device, or on those that have the experts (X-13)."""
        axis = run.layout.expert_axis if run.layout else None
        if axis is None:
            return self.experts(rows, sizes, run)
        return self.experts.apart(rows, sizes, run)


class Layer(nnx.Module):
    """h + attention(norm(h)), then h + MLP(norm(h)): [B, T, hidden] -> [B, T, hidden]."""

    def __init__(self, name: str, config: LlamaConfig, weights: Weights, recipes: Recipes) -> None:
        self.input_layernorm = RMSNorm(weights[f"{name}.input_layernorm.weight"], eps=config.rms_norm_eps)
        self.self_attn = Attention(f"{name}.self_attn", config, weights, recipes)
        self.post_attention_layernorm = RMSNorm(weights[f"{name}.post_attention_layernorm.weight"], eps=config.rms_norm_eps)
        mlp = f"{name}.mlp"
        self.mlp = MixtureMLP(mlp, config, weights, recipes) if config.num_experts else MLP(mlp, weights, recipes)

    def __call__(self, h: jax.Array, cos: jax.Array, sin: jax.Array, run: Pass) -> jax.Array:
        h = _sum(h, self.self_attn(self.input_layernorm(h), cos, sin, run))
        return _sum(h, self.mlp(self.post_attention_layernorm(h), run))


class Decoder(nnx.Module):
    """The parameters between tokens and lm_head, under Hugging Face's names.

    ``Llama`` runs them.
    """

    def __init__(self, config: LlamaConfig, weights: Weights, recipes: Recipes) -> None:
        self.embed_tokens = Embedding(weights["model.embed_tokens.weight"])
        # One layer, whose parameters are stacks of all layers', where the weights are named so.
        self.stacked = f"{STACK}.input_layernorm.weight" in weights
        names = [STACK] if self.stacked else [f"model.layers.{i}" for i in range(config.num_hidden_layers)]
        layers = [Layer(name, config, weights, recipes) for name in names]
        self.layers = layers[0] if self.stacked else nnx.List(layers)
        self.norm = RMSNorm(weights["model.norm.weight"], eps=config.rms_norm_eps)


class Llama(nnx.Module):
    """Logits: tokens [B, T] int -> [B, T, vocab_size], of the compute dtype.

    Order:    spec M-3, rounded to the compute dtype at each of its sites.
    The weights' dtype is the caller's: the training step rounds float32 masters to bfloat16 first
    (spec M-2).
    """

    def __init__(self, config: LlamaConfig, weights: Weights, recipes: Recipes) -> None:
        self.config = config
        self.model = Decoder(config, weights, recipes)
        if not config.tie_word_embeddings:
            self.lm_head = Linear("lm_head", weights, recipes)

    def __call__(self, tokens: jax.Array, run: Pass | None = None) -> jax.Array:
        """run: the states and the layout.

        Under sequence parallelism the logits are of a device's part of each sequence.
        """
        run = run or Pass()
        h = self.hidden(tokens, run)
        return run.linear(h, self.head(h.dtype), "bf16", "lm_head") if self.config.tie_word_embeddings else self.lm_head(h, run)

    def head(self, dtype) -> jax.Array:
        """The weight of the last linear, [V, hidden] or a device's piece of it: a tied one is the embedding table, rounded."""
        return self.model.embed_tokens.weight[...].astype(dtype) if self.config.tie_word_embeddings else self.lm_head.weight[...]

    def hidden(self, tokens: jax.Array, run: Pass) -> jax.Array:
        """The last linear's input, [B, T, hidden]."""
        parts = run.layout.config.context if run.layout else 1
        tables = (jnp.asarray(table) for table in llama.rotary_tables(self.config, tokens.shape[1] * parts))
        cos, sin = (run.layout.own_context(table, axis=0) if run.layout else table for table in tables)
        h = self.embedded(tokens, run)
        if self.model.stacked:
            graph, params = nnx.split(self.model.layers, nnx.Param)
            one = _checkpointed(functools.partial(_layer, graph, cos, sin, run), run.checkpointing, in_loop=True)
            h, (seen, taps, balance) = lax.scan(lambda h, of_layer: one(h, *of_layer), h, (params, *run.of(STACK)))
            run.seen |= seen
            run.taps |= taps
            run.balance |= balance
        else:
            for i, layer in enumerate(self.model.layers):
                if run.checkpointing == "none":
                    h = layer(h, cos, sin, run)
                    continue
                graph, params = nnx.split(layer, nnx.Param)
                one = _checkpointed(functools.partial(_layer, graph, cos, sin, run), run.checkpointing, in_loop=False)
                h, (seen, taps, balance) = one(h, params, *run.of(f"model.layers.{i}"))
                run.seen |= seen
                run.taps |= taps
                run.balance |= balance
        return self.model.norm(h)

    def first_input(self, tokens: jax.Array, run: Pass) -> jax.Array:
        """The input of the first layer's linears, after its norm: [B, T, hidden]."""
        graph, params = nnx.split(self.model.layers if self.model.stacked else self.model.layers[0], nnx.Param)
        first = nnx.merge(graph, jax.tree.map(lambda stack: stack[0], params) if self.model.stacked else params)
        return first.input_layernorm(self.embedded(tokens, run))

    def embedded(self, tokens: jax.Array, run: Pass) -> jax.Array:
        """The first layer's input.

        [B, T, hidden] of the compute dtype, or a device's part of it.
        """
        own = run.layout.own_sequence(tokens) if run.layout else tokens
        h = self.model.embed_tokens(own, self.model.norm.weight[...].dtype, run)
        return run.layout.cut_sequence(h) if run.layout else h


def _layer(
    graph,
    cos: jax.Array,
    sin: jax.Array,
    run: Pass,
    h: jax.Array,
    params,
    state: Mapping,
    seen: Mapping,
    taps: Mapping,
    copies: Mapping,
    mu: Mapping,
):
    """One layer as a pure function: (h, (observations, taps, balance of experts)) after it."""
    own = dataclasses.replace(run, state=state, seen=dict(seen), taps=dict(taps), copies=copies, mu=mu, balance={})
    h = nnx.merge(graph, params)(h, cos, sin, own)
    return h, (own.seen, own.taps, own.balance)


def _checkpointed(layer: Callable, how: str, *, in_loop: bool) -> Callable:
    """A layer that keeps what ``Pass.checkpointing`` says, and computes the rest again in the
    backward pass."""
    if how == "none":
        return layer
    policy = jax.checkpoint_policies.save_only_these_names(*KEPT) if how == "selective" else None
    # A loop's passes are separate programs; elsewhere XLA would merge both computations into one.
    return jax.checkpoint(layer, policy=policy, prevent_cse=not in_loop)


def _attended_in_chunks(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention whose scores exist for QUERIES queries at a time, in both passes.

    Each query's probabilities and output are those of XLA's attention.
    """
    batch, length, heads, dim = q.shape
    size = min(QUERIES, length)
    padded = -length % size
    chunks = jnp.pad(q, ((0, 0), (0, padded), (0, 0), (0, 0))).reshape(batch, -1, size, heads, dim).swapaxes(0, 1)
    # In float32 the loop adds up the gradients of k and v unrounded.
    wide = k.astype(jnp.float32), v.astype(jnp.float32)

    @jax.checkpoint
    def attended(first: jax.Array, queries: jax.Array) -> jax.Array:
        # Past the barrier the mask depends on what is differentiated, so that it is computed again too.
        first, queries = lax.optimization_barrier((first, queries))
        mask = first + jnp.arange(size)[:, None] >= jnp.arange(length)
        keys, values = (x.astype(q.dtype) for x in wide)
        return jax.nn.dot_product_attention(queries, keys, values, mask=mask[None, None], implementation="xla")

    y = lax.map(lambda chunk: attended(*chunk), (jnp.arange(0, length + padded, size), chunks))
    return y.swapaxes(0, 1).reshape(batch, -1, heads, dim)[:, :length]


# The backward pass computes the float32 values within these functions again, from bfloat16. A loop
# over layers would keep all of them; elsewhere XLA finds the forward pass's own.
_recomputed = functools.partial(jax.checkpoint, prevent_cse=False)


@functools.partial(_recomputed, static_argnums=2)
def _normed(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x * rsqrt(mean(x^2) + eps) * weight over the last dim, rounded once to x's dtype."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return rounded(wide * jax.lax.rsqrt(mean_square + eps) * weight.astype(jnp.float32), x.dtype)


@_recomputed
def _swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up in float32, rounded once to gate's dtype."""
    return rounded(jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32), gate.dtype)


@_recomputed
def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding of [B, T, H, D] by float32 tables [T, D], rounded once to x's dtype."""
    wide = x.astype(jnp.float32)
    first, second = jnp.split(wide, 2, axis=-1)
    half = jnp.concatenate([-second, first], axis=-1)
    return rounded(wide * cos[:, None, :] + half * sin[:, None, :], x.dtype)


def _sum(x: jax.Array, y: jax.Array) -> jax.Array:
    """x + y in float32, rounded once to x's dtype."""
    return rounded(x.astype(jnp.float32) + y.astype(jnp.float32), x.dtype)
