"""Bytes that a forward pass leaves for its backward pass: activations, scores and logits."""

from fp8ref.estimate import kernels
from fp8ref.recipe import Recipe
from fp8ref.train.config.config import Config
from fp8ref.train.config.device_shapes import tokens

LOGITS = 4  # bytes of a logit: itself and its gradient, bfloat16

LOGITS_CHUNK, WIDE_LOGIT = 1 << 24, 16
"""PyTorch: the most logits that exist in float32 at a time (``train.torch.cross_entropy``), and
bytes of each: itself, its logarithmic softmax and the gradients of both."""

WORDS = 8192
"""JAX: the words whose logits exist at a time under loss chunked (``train.jax.chunked_loss``)."""

SCORE, CHUNKED_SCORE, QUERIES = 16, 10, 512
"""Bytes of an attention score by XLA: float32 scores and their gradient, probabilities and their
gradient in bfloat16, each in two orders; in chunks, float32 scores and gradient, and bfloat16
probabilities. And the queries that chunked attention takes at a time (``train.jax.forward_pass``).
"""


def kept(config: Config, backend: str) -> tuple[int, str]:
    """(bytes, formula) of what layers and the last norm keep for the backward pass."""
    keys, model = config.parallel, config.model
    count, layers = tokens(config), model.num_hidden_layers
    h = model.hidden_size / (keys.tensor if keys.sequence else 1)
    # the last norm's input and output, in bf16; eagerly also what it computes with in float32
    last = (4 if backend == "jax" or keys.compile != "none" else 10) * h
    norm_formula = f"{last / h:.0f} H"
    if keys.checkpointing == "none":
        whole = [_layer(config, backend, recipe) for recipe in first_recipes(config)]
        size = count * (sum(layer for layer, _ in whole) + last)
        formulas = " or ".join(dict.fromkeys(formula for _, formula in whole))
        return int(size), f"tokens x (layers x {formulas} + {norm_formula}) bytes"
    if keys.checkpointing == "full":
        return int(
            count * (layers * 2 * h + last)
        ), f"tokens x (layers x 2 H + {norm_formula}) bytes"
    # the layer's input, and the results of seven products and of attention
    a, kv, f, _ = _features(config, backend)
    each = 2 * (h + 2 * a + 2 * kv + 2 * f + (1 + max(model.num_experts_per_tok, 1)) * h)
    return int(
        count * (layers * each + last)
    ), f"tokens x (layers x 2 (3 H + 2 A + 2 KV + 2 F) + {norm_formula}) bytes"


def layer_activations(config: Config, backend: str) -> tuple[int, str]:
    """(bytes, formula) of all activations of the largest layer."""
    whole, formula = max(_layer(config, backend, recipe) for recipe in first_recipes(config))
    return int(tokens(config) * whole), f"tokens x {formula} bytes"


def first_recipes(config: Config) -> list[Recipe]:
    """The recipe of each layer's first linear, which stands for the layer."""
    return [d.recipe for d in config.decisions() if d.path.endswith("q_proj")]


def _features(config: Config, backend: str) -> tuple[float, float, float, int]:
    """A device's features of queries, of keys and values, inner; a token's expert copies."""
    keys, model = config.parallel, config.model
    attended = model.num_attention_heads * model.head_dim
    inner = model.intermediate_size
    # Where devices have experts of their own, JAX has buffers for all rows of all of them.
    copies = model.num_experts_per_tok * (keys.expert if backend == "jax" else 1)
    if model.num_experts:  # a token's own experts, and the shared one
        inner = inner * copies + model.shared_expert_intermediate_size
    a, kv, f = (
        n / keys.tensor for n in (attended, model.num_key_value_heads * model.head_dim, inner)
    )
    return a, kv, f, copies


def _layer(config: Config, backend: str, recipe: Recipe) -> tuple[float, str]:
    """(bytes a token, formula) of a layer's activations."""
    keys, model = config.parallel, config.model
    h = model.hidden_size / (keys.tensor if keys.sequence else 1)
    a, kv, f, copies = _features(config, backend)
    own_amax = recipe.grad_weight.fp8 and recipe.shared
    if kernels.fuses(recipe, config, backend) and not model.num_experts:
        # bf16: the inputs of both norms; q, k, v; attention's output; gate and up. Codes of what
        # linears read, transposed
        layer, formula = 6 * h + 5 * a + 4 * kv + 5 * f, "(6 H + 5 A + 4 KV + 5 F)"
    elif backend == "torch" and keys.compile != "none" and own_amax:
        # inductor casts anew what linears read, by its own amax, and keeps what it makes it of
        layer, formula = 4 * (h + a + kv + f), "4 (H + A + KV + F)"
    elif backend == "jax" or keys.compile != "none":
        # bf16: the inputs of both norms and what they give; q, k, v; attention's output; gate, up
        # and their product
        layer = 2 * (4 * h + 2 * a + 2 * kv + 3 * f)
        formula = "2 (4 H + 2 A + 2 KV + 3 F)"
    else:
        # eager autograd keeps float32 too: two of each norm; gate, its SiLU and up
        layer, formula = (
            2 * (2 * h + 2 * a + 2 * kv + f) + 16 * h + 12 * f,
            "2 (2 H + 2 A + 2 KV + F) + 16 H + 12 F",
        )
    if model.num_experts:
        # copies of a token for its experts in bf16, and what they give: in bf16 by XLA, widened by
        # autograd
        copy_bytes = 4 if backend == "jax" else 6
        layer += copy_bytes * copies * h
        formula = f"{formula} + {copy_bytes} k H"
    return layer, formula


def scores(config: Config) -> tuple[int, str]:
    """(bytes, formula) of one layer's attention scores, which XLA writes."""
    keys, model = config.parallel, config.model
    length, chunked = config.data.sequence_length, keys.attention == "chunked"
    queries, each = (min(length, QUERIES), CHUNKED_SCORE) if chunked else (length, SCORE)
    heads = tokens(config) // length * model.num_attention_heads // keys.tensor
    elements = heads * queries * length
    return (
        each * elements,
        f"{each} bytes each, of {queries:,} queries at a time: float32 scores and gradient, "
        "bf16 probabilities",
    )


def logits(config: Config, backend: str) -> tuple[int, str]:
    """(bytes, formula) of logits and their gradient."""
    if backend == "jax" and config.parallel.loss == "chunked":
        own = tokens(config) // (config.parallel.tensor if config.parallel.sequence else 1)
        words = min(config.model.vocab_size, WORDS)
        return LOGITS * own * words + 8 * own * config.model.hidden_size, (
            f"{LOGITS} bytes each, of {words:,} words at a time; the gradient of the last "
            "linear's input, 8 bytes each in float32"
        )
    count = tokens(config) * config.model.vocab_size
    formula = f"{LOGITS} bytes each: bf16 logits and their gradient"
    if backend == "jax":
        return LOGITS * count // (
            config.parallel.tensor if config.parallel.sequence else 1
        ), formula
    wide = min(count, LOGITS_CHUNK)
    return (
        LOGITS * count + WIDE_LOGIT * wide,
        f"{formula}; {WIDE_LOGIT} of {wide:,} at a time, in float32",
    )
