"""The trainer's Llama as a Flax NNX module, with Hugging Face's parameter names (spec M)."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from fp8ref.jax.experts.operands import Codes, Slot
from fp8ref.jax.kernels.plain import add, normed, rotate, rounded, swiglu
from fp8ref.jax.linear.fused import Norm, Reader, Rotary
from fp8ref.recipe import Recipe
from fp8ref.spec import llama
from fp8ref.spec.llama import EXPERTS, ROUTER, SHARED, STACK, LlamaConfig, sinks_of
from fp8ref.train.jax.llama import expert_dispatch, experts
from fp8ref.train.jax.llama.experts import Balance
from fp8ref.train.jax.llama.forward_pass import KEPT, Carried, Pass

Weights = Mapping[str, np.ndarray]
"""Parameter's name -> float32 array."""

Recipes = Mapping[str, Recipe]
"""Linear's name -> recipe."""


class Linear(nnx.Module):
    """y [..., N] = x [..., K] x weight [N, K], by the layer's recipe."""

    def __init__(self, name: str, weights: Weights, recipes: Recipes) -> None:
        self.weight = nnx.Param(jnp.asarray(weights[f"{name}.weight"]))
        self.recipe = recipes[name]
        self.name = name

    def __call__(self, x: jax.Array, run: Pass) -> jax.Array:
        return run.linear(x, self.weight[...], self.recipe, self.name)

    def reader(self, run: Pass) -> Reader:
        """This linear in a group (``Pass.fused``)."""
        return run.reader(self.weight[...], self.recipe, self.name)


class RMSNorm(nnx.Module):
    """x * rsqrt(mean(x^2) + eps) * weight over the last dim, rounded once from float32 (M-3)."""

    def __init__(self, name: str, config: LlamaConfig, weights: Weights) -> None:
        self.weight = nnx.Param(jnp.asarray(weights[f"{name}.weight"]))
        self.eps = config.rms_norm_eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return normed(x, *self.norm)

    @property
    def norm(self) -> Norm:
        """What the linears after it fuse."""
        return Norm(self.weight[...], self.eps)


class Embedding(nnx.Module):
    """Rows of the float32 table, rounded before a gather: [B, T] -> [B, T, hidden] (spec M-2)."""

    def __init__(self, weight: np.ndarray) -> None:
        self.weight = nnx.Param(jnp.asarray(weight))

    def __call__(self, tokens: jax.Array, dtype, run: Pass) -> jax.Array:
        table = self.weight[...]
        if run.layout:
            table = run.layout.whole(table, dtype)
        # [B, T] -> [B, T, hidden]; the gradient sums in the table's dtype
        return rounded(table[tokens], dtype)


class Attention(nnx.Module):
    """Causal rotary attention, with grouped key and value heads, of the outputs of ``projections``,
    of which q and k may be rotated: the input of o_proj, [B, T, H D] (spec M-1)."""

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
                setattr(self, norm, RMSNorm(f"{name}.{norm}", config, weights))

    @property
    def rotates_outputs(self) -> bool:
        """Whether a kernel takes the gradients of rotated heads to those of linears."""
        return not self.normalizes and self.head_dim & (self.head_dim - 1) == 0

    @property
    def projections(self) -> list[Linear]:
        """The linears that read the layer's norm."""
        return [self.q_proj, self.k_proj, self.v_proj]

    def __call__(
        self,
        projected: list[jax.Array],
        cos: jax.Array,
        sin: jax.Array,
        run: Pass,
        *,
        rotated: bool,
    ) -> jax.Array:
        q, k, v = projected
        batch, length, _ = q.shape
        # [B, T, H, D]
        q, k, v = (value.reshape(batch, length, -1, self.head_dim) for value in (q, k, v))
        if self.normalizes:
            q, k = self.q_norm(q), self.k_norm(k)
        sinks = self.sinks[...] if self.has_sinks else None
        if not rotated:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = run.attended(q, k, v, self.name, self.softcap, sinks)
        return y.reshape(batch, length, -1)


class MLP(nnx.Module):
    """SwiGLU: down_proj(silu(gate) * up), the product in float32 and rounded once (spec M-3)."""

    def __init__(self, name: str, weights: Weights, recipes: Recipes) -> None:
        for projection in ("gate_proj", "up_proj", "down_proj"):
            setattr(self, projection, Linear(f"{name}.{projection}", weights, recipes))

    @property
    def projections(self) -> list[Linear]:
        """gate, up and down."""
        return [self.gate_proj, self.up_proj, self.down_proj]

    def __call__(self, x: jax.Array, run: Pass) -> jax.Array:
        # Past the barrier XLA keeps these two for the backward pass, not their float32 products.
        gate, up = jax.lax.optimization_barrier((self.gate_proj(x, run), self.up_proj(x, run)))
        return self.down_proj(swiglu(gate, up), run)


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
        """Rows of all experts, in groups of these sizes, through the experts' devices (X-13)."""
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        moved, codes = expert_dispatch.dispatched(
            run, rows, sizes, {of.name: of.recipe for of in (gate, up)}
        )
        in_fp8 = expert_dispatch.gradients_move_as_codes(run, down.recipe)
        y, slot = self._product(moved.rows, moved.sizes, run, codes, in_fp8)
        return expert_dispatch.combined(run, y, slot, moved, sizes, down.name, down.recipe)

    def _product(
        self, rows: jax.Array, sizes: jax.Array, run: Pass, codes: Codes | None, grad_codes: bool
    ) -> tuple[jax.Array, Slot | None]:
        def product(
            x: jax.Array, of: Linear, codes: Codes | None, grad_codes: bool
        ) -> tuple[jax.Array, Slot | None]:
            return run.grouped_codes(
                x, of.weight[...], sizes, of.recipe, of.name, codes, grad_codes
            )

        (gate, _), (up, _) = (
            product(rows, of, codes, False) for of in (self.gate_proj, self.up_proj)
        )
        gate, up = jax.lax.optimization_barrier((gate, up))
        return product(swiglu(gate, up), self.down_proj, None, grad_codes)


class MixtureMLP(nnx.Module):
    """The weighted sum of a token's experts, and of a shared MLP if there is one (spec M-8)."""

    def __init__(self, name: str, config: LlamaConfig, weights: Weights, recipes: Recipes) -> None:
        self.name = name
        self.chosen = config.num_experts_per_tok
        self.count = config.num_experts
        self.normalizes = config.norm_topk_prob
        self.gate = Router(weights[f"{name}{ROUTER}.weight"])
        self.experts = Experts(f"{name}{EXPERTS}", weights, recipes)
        self.shares = config.shared_expert_intermediate_size > 0
        if self.shares:
            self.shared_expert = MLP(f"{name}{SHARED}", weights, recipes)

    def __call__(self, x: jax.Array, run: Pass) -> jax.Array:
        tokens = x.reshape(-1, x.shape[-1])
        router = self.gate.weight[...]
        if run.layout:
            router = run.layout.shared(router)
        chosen, weights, probabilities = experts.route(
            tokens, router, self.chosen, normalizes=self.normalizes
        )
        y, sizes = experts.mixture(
            tokens, chosen, weights, self.count, lambda rows, sizes: self._grouped(rows, sizes, run)
        )
        run.balance[self.name] = Balance(sizes.astype(jnp.float32), probabilities.sum(0))
        if self.shares:
            y = y + self.shared_expert(tokens, run).astype(jnp.float32)
        return rounded(y, x.dtype).reshape(x.shape)

    def _grouped(self, rows: jax.Array, sizes: jax.Array, run: Pass) -> jax.Array:
        """rows [M, hidden] of all experts, in groups -> [M, hidden], on the experts' devices."""
        if run.layout and run.layout.expert_axis is not None:
            return self.experts.apart(rows, sizes, run)
        return self.experts(rows, sizes, run)


class Layer(nnx.Module):
    """h + attention(norm(h)), then h + MLP(norm(h)): [B, T, hidden] -> [B, T, hidden]."""

    def __init__(self, name: str, config: LlamaConfig, weights: Weights, recipes: Recipes) -> None:
        self.input_layernorm = RMSNorm(f"{name}.input_layernorm", config, weights)
        self.self_attn = Attention(f"{name}.self_attn", config, weights, recipes)
        after = f"{name}.post_attention_layernorm"
        self.post_attention_layernorm = RMSNorm(after, config, weights)
        mlp = f"{name}.mlp"
        self.mlp = (
            MixtureMLP(mlp, config, weights, recipes)
            if config.num_experts
            else MLP(mlp, weights, recipes)
        )

    def __call__(self, h: jax.Array, cos: jax.Array, sin: jax.Array, run: Pass) -> jax.Array:
        first, second = self.input_layernorm, self.post_attention_layernorm
        readers, rotary = [p.reader(run) for p in self.self_attn.projections], None
        if run.fuses(h, readers):
            if self.self_attn.rotates_outputs:
                rotary = Rotary(cos, sin)
            h, projected = run.fused(h, None, first.norm, readers, rotary=rotary)
        else:
            x = first(h)
            projected = [p(x, run) for p in self.self_attn.projections]
        y = self.self_attn(projected, cos, sin, run, rotated=rotary is not None)
        if isinstance(self.mlp, MLP):
            linears = [*self.mlp.projections, self.self_attn.o_proj]
            readers = [p.reader(run) for p in linears]
            if run.fuses(h, readers):
                h, [y] = run.fused(h, y, second.norm, readers, swiglu=True)
                return add(h, y)
        h = add(h, self.self_attn.o_proj(y, run))
        return add(h, self.mlp(second(h), run))


class Decoder(nnx.Module):
    """The parameters between tokens and lm_head, by Hugging Face's names, which ``Llama`` runs."""

    def __init__(self, config: LlamaConfig, weights: Weights, recipes: Recipes) -> None:
        self.embed_tokens = Embedding(weights["model.embed_tokens.weight"])
        # One layer, whose parameters are stacks of all layers', where the weights are named so.
        self.stacked = f"{STACK}.input_layernorm.weight" in weights
        names = [STACK]
        if not self.stacked:
            names = [f"model.layers.{i}" for i in range(config.num_hidden_layers)]
        layers = [Layer(name, config, weights, recipes) for name in names]
        self.layers = layers[0] if self.stacked else nnx.List(layers)
        self.norm = RMSNorm("model.norm", config, weights)


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
        """run: states and layout; under sequence parallelism logits are of a device's tokens."""
        run = run or Pass()
        h = self.hidden(tokens, run)
        if not self.config.tie_word_embeddings:
            return self.lm_head(h, run)
        return run.linear(h, self.head(h.dtype), "bf16", "lm_head")

    def head(self, dtype) -> jax.Array:
        """The last linear's weight [V, hidden], or a piece; a tied one is the rounded embedding."""
        if not self.config.tie_word_embeddings:
            return self.lm_head.weight[...]
        return self.model.embed_tokens.weight[...].astype(dtype)

    def hidden(self, tokens: jax.Array, run: Pass) -> jax.Array:
        """The last linear's input, [B, T, hidden]."""
        positions = tokens.shape[1] * (run.layout.config.context if run.layout else 1)
        tables = map(jnp.asarray, llama.rotary_tables(self.config, positions))
        cos, sin = (
            run.layout.own_context(table, axis=0) if run.layout else table for table in tables
        )
        h = self.embedded(tokens, run)
        if self.model.stacked:
            block, params = _block(self.model.layers, cos, sin, run)
            h, collected = lax.scan(lambda h, slices: block(h, *slices), h, (params, run.of(STACK)))
            run.collect(collected)
            return self.model.norm(h)
        for i, layer in enumerate(self.model.layers):
            if run.checkpointing == "none":
                h = layer(h, cos, sin, run)
                continue
            block, params = _block(layer, cos, sin, run)
            h, collected = block(h, params, run.of(f"model.layers.{i}"))
            run.collect(collected)
        return self.model.norm(h)

    def first_input(self, tokens: jax.Array, run: Pass) -> jax.Array:
        """The input of the first layer's linears, after its norm: [B, T, hidden]."""
        layers = self.model.layers
        first = layers if self.model.stacked else layers[0]
        if self.model.stacked:
            graph, params = nnx.split(layers, nnx.Param)
            first = nnx.merge(graph, jax.tree.map(lambda stack: stack[0], params))
        return first.input_layernorm(self.embedded(tokens, run))

    def embedded(self, tokens: jax.Array, run: Pass) -> jax.Array:
        """The first layer's input [B, T, hidden], or a device's part, of the compute dtype."""
        own = run.layout.own_sequence(tokens) if run.layout else tokens
        h = self.model.embed_tokens(own, self.model.norm.weight[...].dtype, run)
        return run.layout.cut_sequence(h) if run.layout else h


def _block(layer: Layer, cos: jax.Array, sin: jax.Array, run: Pass) -> tuple[Callable, nnx.State]:
    """A layer as a pure function, and its parameters: (h, parameters, ``Pass.of`` the layer) ->
    (h, ``Pass.collected``), which keeps what ``Pass.checkpointing`` says, and computes the rest
    again in the backward pass."""
    graph, params = nnx.split(layer, nnx.Param)

    def block(h: jax.Array, params: nnx.State, carried: Carried) -> tuple[jax.Array, tuple]:
        own = run.begun(carried)
        return nnx.merge(graph, params)(h, cos, sin, own), own.collected

    if run.checkpointing == "none":
        return block, params
    names = jax.checkpoint_policies.save_only_these_names(*KEPT)
    policy = names if run.checkpointing == "selective" else None
    # A loop's passes are separate programs; elsewhere XLA would merge both computations into one.
    in_loop = layer.self_attn.name.startswith(STACK)
    return jax.checkpoint(block, policy=policy, prevent_cse=not in_loop), params
