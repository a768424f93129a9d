"""The trainer's Llama as a Flax NNX module (SEMANTICS M). Attributes spell Hugging Face's parameter names."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fp8ref import llama
from fp8ref.jax import linear
from fp8ref.llama import LlamaConfig
from fp8ref.recipe import Recipe

Weights = Mapping[str, np.ndarray]  # parameter's name -> float32 array
Recipes = Mapping[str, Recipe]  # linear's name -> recipe


class Linear(nnx.Module):
    """y [..., N] = x [..., K] x weight [N, K], by the layer's recipe."""

    def __init__(self, name: str, weights: Weights, recipes: Recipes) -> None:
        self.weight = nnx.Param(jnp.asarray(weights[f"{name}.weight"]))
        self.recipe = recipes[name]
        self.name = name

    def __call__(self, x: jax.Array) -> jax.Array:
        return linear.apply(x, self.weight[...], recipe=self.recipe, name=self.name)[0]


class RMSNorm(nnx.Module):
    def __init__(self, weight: np.ndarray, *, eps: float) -> None:
        self.weight = nnx.Param(jnp.asarray(weight))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        return (wide * jax.lax.rsqrt(mean_square + self.eps) * self.weight[...].astype(jnp.float32)).astype(x.dtype)


class Embedding(nnx.Module):
    def __init__(self, weight: np.ndarray) -> None:
        self.weight = nnx.Param(jnp.asarray(weight))

    def __call__(self, tokens: jax.Array, dtype) -> jax.Array:
        return self.weight[...][tokens].astype(dtype)  # [B, T] -> [B, T, hidden]; the gradient sums in the table's dtype


class Attention(nnx.Module):
    def __init__(self, name: str, config: LlamaConfig, weights: Weights, recipes: Recipes) -> None:
        self.head_dim = config.head_dim
        for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, projection, Linear(f"{name}.{projection}", weights, recipes))

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        batch, length, _ = x.shape
        q, k, v = (p(x).reshape(batch, length, -1, self.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj))  # [B, T, H, D]
        y = jax.nn.dot_product_attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True)
        return self.o_proj(y.reshape(batch, length, -1))


class MLP(nnx.Module):
    def __init__(self, name: str, weights: Weights, recipes: Recipes) -> None:
        for projection in ("gate_proj", "up_proj", "down_proj"):
            setattr(self, projection, Linear(f"{name}.{projection}", weights, recipes))

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = self.gate_proj(x).astype(jnp.float32), self.up_proj(x).astype(jnp.float32)
        return self.down_proj((jax.nn.silu(gate) * up).astype(x.dtype))


class Layer(nnx.Module):
    def __init__(self, name: str, config: LlamaConfig, weights: Weights, recipes: Recipes) -> None:
        self.input_layernorm = RMSNorm(weights[f"{name}.input_layernorm.weight"], eps=config.rms_norm_eps)
        self.self_attn = Attention(f"{name}.self_attn", config, weights, recipes)
        self.post_attention_layernorm = RMSNorm(weights[f"{name}.post_attention_layernorm.weight"], eps=config.rms_norm_eps)
        self.mlp = MLP(f"{name}.mlp", weights, recipes)

    def __call__(self, h: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        h = h + self.self_attn(self.input_layernorm(h), cos, sin)
        return h + self.mlp(self.post_attention_layernorm(h))


class Decoder(nnx.Module):
    def __init__(self, config: LlamaConfig, weights: Weights, recipes: Recipes) -> None:
        self.embed_tokens = Embedding(weights["model.embed_tokens.weight"])
        self.layers = nnx.List([Layer(f"model.layers.{i}", config, weights, recipes) for i in range(config.num_hidden_layers)])
        self.norm = RMSNorm(weights["model.norm.weight"], eps=config.rms_norm_eps)


class Llama(nnx.Module):
    """Logits of a batch of tokens: [B, T] int -> [B, T, vocab_size] of the norms' dtype, the compute dtype.

    The weights' dtype is the caller's: the training step rounds float32 masters to bfloat16 first (SEMANTICS M-2).
    """

    def __init__(self, config: LlamaConfig, weights: Weights, recipes: Recipes) -> None:
        self.config = config
        self.model = Decoder(config, weights, recipes)
        if not config.tie_word_embeddings:
            self.lm_head = Linear("lm_head", weights, recipes)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        dtype = self.model.norm.weight[...].dtype
        cos, sin = (jnp.asarray(table) for table in llama.rotary_tables(self.config, tokens.shape[1]))
        h = self.model.embed_tokens(tokens, dtype)
        for layer in self.model.layers:
            h = layer(h, cos, sin)
        h = self.model.norm(h)
        if not self.config.tie_word_embeddings:
            return self.lm_head(h)
        return linear.apply(h, self.model.embed_tokens.weight[...].astype(dtype), recipe="bf16", name="lm_head")[0]


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding of [B, T, H, D] by float32 tables [T, D], rounded once to x's dtype."""
    wide = x.astype(jnp.float32)
    first, second = jnp.split(wide, 2, axis=-1)
    half = jnp.concatenate([-second, first], axis=-1)
    return (wide * cos[:, None, :] + half * sin[:, None, :]).astype(x.dtype)
