"""The trainer's Llama as data for both backends (M): sizes, names and shapes, initial weights.

Names and shapes are those of ``transformers.LlamaForCausalLM``; with experts (M-8) those of
``transformers.Qwen3MoeForCausalLM``, of which each projection of a layer's experts is one parameter
[E, N, K]. The forward passes are ``sim.llama``, ``train.jax.llama`` and ``train.torch.llama``.
"""

import math
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fp8ref.shared.errors import require, require_least

__all__ = ["parameter_shapes"]

EMBEDDING = "model.embed_tokens.weight"
"""The parameter name of the embedding table."""

COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Linears that tensor parallelism cuts by output features."""

FIRST_READER = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
"""Of linears that read the input of an earlier one: the first that reads it."""

STACK = "model.layers.*"
"""The name of all layers where they are stacked and run as a loop: ``model.layers.*.mlp``."""

ROUTER, EXPERTS, SHARED = ".gate", ".experts", ".shared_expert"
"""What an MLP with experts has, by name: the router, the experts, and what takes every token."""

ROW = ("o_proj", "down_proj")
"""Linears that tensor parallelism cuts by input features."""


MATRICES = 2**17
"""The most layers, times experts: the names of all weights are made before any is looked for."""


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """The keys of the Hugging Face ``LlamaConfig`` that this model uses, under the same names, and
    those of ``Qwen3MoeConfig`` for experts."""

    vocab_size: int = 256
    """Tokens in the vocabulary; at least 256."""
    hidden_size: int = 128
    """Features of the residual stream; a multiple of twice num_attention_heads."""
    intermediate_size: int = 384
    """Inner features of an MLP, or of each expert."""
    num_hidden_layers: int = 2
    """Transformer blocks."""
    num_attention_heads: int = 4
    """Query heads."""
    num_key_value_heads: int = 2
    """Key and value heads; divides num_attention_heads."""
    rms_norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    rope_theta: float = 500000.0
    """Base of the rotary position embedding."""
    tie_word_embeddings: bool = False
    """Whether lm_head uses the embedding table."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights."""
    head_size: int | None = None
    """Features of a head, even: ``head_dim`` of Hugging Face.

    Default: hidden_size / num_attention_heads.
    """
    qk_norm: bool = False
    """Normalize each head's query and key by RMSNorm before the rotary embedding, as Qwen3 does."""
    attention_softcap: float | None = None
    """Scores of attention become cap tanh(score / cap): Gemma 2's ``attn_logit_softcapping``.

    Takes numerics.attention. Default: none.
    """
    attention_sinks: bool = False
    """A learned logit of each query head joins the softmax of its rows, as gpt-oss's ``sinks``.

    Takes numerics.attention.
    """
    num_experts: int = 0
    """Experts in each layer, in place of its MLP; 0 for none."""
    num_experts_per_tok: int = 0
    """Experts that take each token; at least 1 of model.num_experts."""
    norm_topk_prob: bool = True
    """Divide the weights of a token's experts by their sum."""
    router_aux_loss_coef: float = 0.001
    """Factor of the load-balancing loss of the experts, which is added to the loss that is trained.
    """
    shared_expert_intermediate_size: int = 0
    """Inner features of an MLP that takes every token beside the experts; 0 for none."""

    def __post_init__(self) -> None:
        """Raises:   ValueError: a size below 1; a number that is not positive and finite; a
        hidden_size that is no multiple of twice the heads; heads that are no multiple of
        num_key_value_heads; keys of experts without experts, or that do not fit them."""
        heads = "num_attention_heads", "num_key_value_heads"
        sizes = "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", *heads
        require_least("model", 1, self, *sizes)
        for key in ("rms_norm_eps", "rope_theta", "initializer_range"):
            text = f"model.{key} is positive and finite; got {getattr(self, key)}."
            require(0 < getattr(self, key) < math.inf, text)
        if self.head_size is not None and (self.head_size < 2 or self.head_size % 2):
            raise ValueError(
                f"model.head_size is even, and at least 2 (rotary pairs); got {self.head_size}."
            )
        if self.head_size is None and self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                "model.hidden_size is a multiple of 2 * num_attention_heads (rotary pairs); got "
                f"{self.hidden_size} and {self.num_attention_heads} heads."
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                "model.num_attention_heads is a multiple of num_key_value_heads; got "
                f"{self.num_attention_heads} and {self.num_key_value_heads}."
            )
        if self.attention_softcap is not None and not 0 < self.attention_softcap < math.inf:
            raise ValueError(
                "model.attention_softcap is positive and finite, or None; got "
                f"{self.attention_softcap}."
            )
        self._check_experts()
        matrices = self.num_hidden_layers * max(1, self.num_experts)
        if matrices > MATRICES:
            raise ValueError(
                f"model.num_hidden_layers times model.num_experts is at most {MATRICES:,}; got "
                f"{matrices:,}. Set fewer."
            )

    def _check_experts(self) -> None:
        counts = "num_experts", "num_experts_per_tok", "shared_expert_intermediate_size"
        require_least("model", 0, self, *counts)
        text = f"model.router_aux_loss_coef is finite and >= 0; got {self.router_aux_loss_coef}."
        require(0 <= self.router_aux_loss_coef < math.inf, text)
        if self.num_experts:
            if not 1 <= self.num_experts_per_tok <= self.num_experts:
                raise ValueError(
                    f"model.num_experts_per_tok is 1 to num_experts = {self.num_experts}; got "
                    f"{self.num_experts_per_tok}."
                )
            return
        unused = (*counts[1:], "norm_topk_prob", "router_aux_loss_coef")
        fields = type(self).__dataclass_fields__
        if set_keys := [key for key in unused if getattr(self, key) != fields[key].default]:
            raise ValueError(
                f"model.{set_keys[0]} needs experts; got {getattr(self, set_keys[0])} with "
                "model.num_experts 0. Set num_experts."
            )

    @property
    def head_dim(self) -> int:
        """The length of a head's query, key or value; even, as rotary embeddings need."""
        if self.head_size is not None:
            return self.head_size
        return self.hidden_size // self.num_attention_heads


def linear_shapes(config: LlamaConfig) -> dict[str, tuple[int, int]]:
    """Name -> [N, K] of every linear, in the order of the forward pass. A projection of a layer's
    experts is one of them, of which each expert has a weight of this shape (``experts_of``).
    Routers are none, nor is a tied lm_head, which is the embedding."""
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    q, kv = heads * config.head_dim, kv_heads * config.head_dim
    shared = config.shared_expert_intermediate_size
    shapes: dict[str, tuple[int, int]] = {}
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.self_attn.q_proj": (q, hidden),
            f"{layer}.self_attn.k_proj": (kv, hidden),
            f"{layer}.self_attn.v_proj": (kv, hidden),
            f"{layer}.self_attn.o_proj": (hidden, q),
        }
        mlps = {f"{layer}.mlp{EXPERTS}" if config.num_experts else f"{layer}.mlp": inner}
        mlps |= {f"{layer}.mlp{SHARED}": shared} if shared else {}
        for mlp, size in mlps.items():
            shapes |= {
                f"{mlp}.gate_proj": (size, hidden),
                f"{mlp}.up_proj": (size, hidden),
                f"{mlp}.down_proj": (hidden, size),
            }
    if config.tie_word_embeddings:
        return shapes
    return shapes | {"lm_head": (config.vocab_size, hidden)}


def experts_of(linear: str, config: LlamaConfig) -> int | None:
    """How many weights a linear has, if it is a projection of experts; None of any other."""
    return config.num_experts if config.num_experts and f"{EXPERTS}." in linear else None


def sinks_of(attention: str) -> str:
    """The name of the sinks of a layer's attention (A-28)."""
    return f"{attention}.sinks"


def is_sinks(name: str) -> bool:
    """Whether a parameter of that name has the sinks of a layer's attention (A-28)."""
    return name.split(".")[-1] == "sinks"


def is_router(name: str) -> bool:
    """Whether a name is a router's, or of its weight."""
    return name.removesuffix(".weight").endswith(f".mlp{ROUTER}")


def parameter_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter: matrices (the embedding, then the linears, each router
    before its experts), then norms. Those of experts are [E, N, K]."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for name, shape in linear_shapes(config).items():
        if name.endswith(f"{EXPERTS}.gate_proj"):
            router = name.removesuffix(f"{EXPERTS}.gate_proj") + ROUTER
            shapes[f"{router}.weight"] = (config.num_experts, config.hidden_size)
        experts = experts_of(name, config)
        shapes[f"{name}.weight"] = shape if experts is None else (experts, *shape)
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        for norm in ("q_norm", "k_norm") if config.qk_norm else ():
            shapes[f"{layer}.self_attn.{norm}.weight"] = (config.head_dim,)
        if config.attention_sinks:
            shapes[sinks_of(f"{layer}.self_attn")] = (config.num_attention_heads,)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}.{norm}.weight"] = (config.hidden_size,)
    return shapes | {"model.norm.weight": (config.hidden_size,)}


def stack_of(name: str) -> str:
    """The stack's name for a parameter or linear in one; other names unchanged."""
    return re.sub(r"^model\.layers\.\d+\.", f"{STACK}.", name)


class Weight(Protocol):
    """A float32 parameter read in pieces: an array, ``InitialWeight`` or file tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole parameter's."""
        ...

    def __getitem__(self, index, /) -> np.ndarray:
        """The piece at a tuple of slices; ... is the whole."""
        ...


@dataclass(frozen=True)
class InitialWeight:
    """A matrix of initial weights (M-6), drawn where read; of experts [E, N, K] the E stacked.

    Every row has numbers of its own: a piece costs its rows, and has the bits of the whole.

    place   among the names of ``parameter_shapes``.
    scale   the standard deviation.
    """

    shape: tuple[int, ...]
    place: int
    seed: int
    scale: float

    def __getitem__(self, index) -> np.ndarray:
        """float32 values at slices of the rows and the columns; ... is the whole."""
        if not isinstance(index, tuple) or len(index) != len(self.shape):
            index = index, ...
        *rows, columns = index
        row_indices = np.arange(math.prod(self.shape[:-1])).reshape(self.shape[:-1])[tuple(rows)]
        places, width = row_indices.ravel(), len(np.arange(self.shape[-1])[columns])
        piece = np.empty((len(places), width), np.float32)
        # NumPy draws outside the interpreter's lock
        parts = max(1, piece.shape[0] * self.shape[-1] // 2**22)
        split = np.array_split(piece, parts), np.array_split(places, parts)
        with ThreadPoolExecutor() as threads:
            list(threads.map(self._draw, *split, [columns] * parts))
        return piece.reshape(*row_indices.shape, width)

    def _draw(self, out: np.ndarray, places: np.ndarray, columns) -> None:
        bits = np.random.Philox(key=self.seed)
        generator, state = np.random.Generator(bits), bits.state
        for row, place in zip(out, places, strict=True):
            state["state"]["counter"][:] = 0, 0, place, self.place
            bits.state = state
            row[:] = (generator.standard_normal(self.shape[-1]) * self.scale)[columns]


def lazy_initial_weights(config: LlamaConfig, *, seed: int) -> dict[str, Weight]:
    """The weights that every backend starts from, by name in the order of ``parameter_shapes``
    (spec M-6, A-28): norms of ones, sinks of zeros. Matrices are drawn where they are read."""
    return {
        name: np.full(shape, not is_sinks(name), np.float32)
        if len(shape) == 1
        else InitialWeight(shape, i, seed, config.initializer_range)
        for i, (name, shape) in enumerate(parameter_shapes(config).items())
    }


def initial_weights(config: LlamaConfig, *, seed: int) -> dict[str, np.ndarray]:
    """``lazy_initial_weights`` as float32 arrays."""
    return {name: weight[...] for name, weight in lazy_initial_weights(config, seed=seed).items()}


def rotary_tables(config: LlamaConfig, length: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, float32 [length, head_dim], repeated for the rotate-half form (M-4)."""
    powers = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequency = config.rope_theta**-powers
    angle = np.outer(np.arange(length, dtype=np.float64), np.concatenate([frequency, frequency]))
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def check_weights(weights: Mapping[str, Weight], config: LlamaConfig) -> None:
    """ValueError unless weights are this model's: names and shapes; of arrays also float32 and
    finite values. Other weights are not read."""
    expected = parameter_shapes(config)
    if weights.keys() != expected.keys():
        missing = sorted(expected.keys() - weights.keys())
        extra = sorted(weights.keys() - expected.keys())
        raise ValueError(
            f"weights are those of parameter_shapes; missing {missing[:3]}, unknown {extra[:3]}."
        )
    for name, shape in expected.items():
        value = weights[name]
        dtype = value.dtype if isinstance(value, np.ndarray) else np.float32
        if value.shape != shape or dtype != np.float32:
            raise ValueError(f"{name} is float32 {list(shape)}; got {dtype} {list(value.shape)}.")
        if isinstance(value, np.ndarray):
            check_finite(name, value)


def check_finite(name: str, piece: np.ndarray, offset: Sequence[int] | None = None) -> None:
    """ValueError naming a weight's first value that is not finite; offset: of the piece in it."""
    if not np.isfinite(piece).all():
        index = np.unravel_index(np.flatnonzero(~np.isfinite(piece))[0], piece.shape)
        at = [int(i + start) for i, start in zip(index, offset or [0] * piece.ndim, strict=True)]
        raise ValueError(
            f"weights are finite; {name} holds {piece[index]} at {at}. Use a finite checkpoint."
        )


def check_tokens(tokens: np.ndarray, config: LlamaConfig) -> None:
    """ValueError unless tokens are integers [B, T] in the vocabulary."""
    tokens = np.asarray(tokens)
    if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"tokens are integers [B, T]; got {tokens.dtype} {list(tokens.shape)}.")
    if tokens.size == 0 or tokens.min() < 0 or tokens.max() >= config.vocab_size:
        span = f"{tokens.min()} to {tokens.max()}" if tokens.size else "none"
        raise ValueError(
            f"tokens are in [0, {config.vocab_size}); got {span}. Check model.vocab_size and data."
        )
