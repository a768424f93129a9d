"""Estimated memory of a device in training, from shapes alone, with the formula of each line.

The tests compare it with the tensors that PyTorch's autograd saves, within 2 %, and with the
temporary memory of XLA's programs for H200s, within 30 %. Not counted: CUDA context and libraries
(about a GiB), fragmentation, buffers of collectives, workspaces of GEMMs.
"""

import math
from collections.abc import Collection, Mapping

from fp8ref import llama
from fp8ref.estimate import attention
from fp8ref.train import train_state
from fp8ref.train.config import Config
from fp8ref.train.device_shapes import at_rest, copied, in_fp8, sharded, tokens, used
from fp8ref.train.train_state import FP8_BLOCK, FP8_SMALLEST

LOGITS = 4
"""Bytes of a logit: itself and its gradient, bfloat16."""

LOGITS_CHUNK, WIDE_LOGIT = 1 << 24, 16
"""PyTorch: the most logits that exist in float32 at a time (``train.torch.cross_entropy``), and bytes of each: itself, its
logarithmic softmax and the gradients of both."""

WORDS = 8192
"""JAX: the words whose logits exist at a time under ``parallel.loss = "chunked"`` (``train.jax.chunked_loss``)."""

SCORE, QUERIES = 10, 512
"""Bytes of an attention score, and the queries that chunked attention takes at a time
(``train.jax.forward_pass``)."""

OBSERVATION = 3 * 4
"""Bytes that a role's observation takes until the step's update: amax and two flags, float32."""


def largest(config: Config, backend: str) -> str:
    """The recipe of a schedule's phases that takes the most memory of a device; the first of equal ones."""
    return max(config.recipes, key=lambda recipe: sum(size for size, _ in lines(config, backend, recipe).values()))


def lines(config: Config, backend: str, recipe: str | None = None) -> dict[str, tuple[int, str]]:
    """{what: (bytes, formula)} of a device, in one of the config's recipes; None: the ``largest``.

    States of delayed scaling are those of all recipes, since phases keep them (T-9).
    """
    fp8_states = (_states(config, backend), "scales, histories and observations of delayed scaling")
    recipe = recipe or largest(config, backend)
    # In PyTorch phases of a schedule share one weight, and keep none in FP8.
    kept_in_fp8 = copied(config.under(recipe), backend) if backend == "jax" or len(config.recipes) == 1 else {}
    config = config.under(recipe)
    sizes = piece_sizes(config, backend)
    held = sum(piece for piece, _ in sizes.values())
    kept: dict[str, int] = {}  # of the training state, bytes by label
    for one in train_state.PER_PARAMETER:
        kept[one.label] = kept.get(one.label, 0) + sum(one.device_bytes(piece, config.optimizer, whole) for piece, whole in sizes.values())
    masters = next(one.label for one in train_state.PER_PARAMETER if one.name == train_state.MASTERS)
    layout, of_masters = config.optimizer.moment_layout, "4 bytes a parameter of the device's piece"
    if layout is not None and layout.keeps_master:
        own, of_masters = (
            kept.pop(masters),
            f"layout {layout.name}: {layout.master.fmt.bits // 8} bytes a parameter of the device's piece (O-14)",
        )
        masters = f"weights, {layout.master.fmt.name} masters"
        kept[masters] = own
    formulas = {masters: of_masters, "AdamW's moments": _moments_formula(config)}
    state = {label: (size, formulas.get(label, "4 bytes a parameter")) for label, size in kept.items()}
    if backend == "torch":
        gradients = (4 * held, "4 bytes a parameter, float32")
    elif config.data.microbatches > 1:
        gradients = (2 * held + sum_bytes(config, sizes), _gradients_formula(config))
    else:
        gradients = (2 * held, "2 bytes a parameter, bf16")
    activations, formula = _activations(config, backend)
    compute, how = _compute(config, backend, kept_in_fp8)
    scores = {"attention scores": _scores(config)} if backend == "jax" and config.parallel.attention != "cudnn" else {}
    if config.parallel.attention == "kernel":  # it keeps its scores on the chip
        scores = {}
    elif config.attention_variant is not None:
        scores = {"attention scores": attention.tile_bytes(config, config.attention_variant, backend)}
    if config.parallel.context > 1:
        scores["keys and values of all parts"] = attention.gathered_bytes(config)
    return {
        masters: state.pop(masters),
        "gradients": gradients,
        **state,
        "FP8 states": fp8_states,
        "weights in use": (compute, how),
        "activations": (activations, formula),
        **scores,
        "logits": _logits(config, backend),
    }


def _gradients_formula(config: Config) -> str:
    of_sum = {"float32": 4, "bfloat16": 2}.get(config.parallel.accumulate_dtype)
    if of_sum is None:
        return "2 bytes a parameter, bf16; and the sum over parts: 1 of a linear's weight, in FP8, 4 of others"
    return f"{2 + of_sum} bytes a parameter: bf16, and the sum over parts in {config.parallel.accumulate_dtype}"


def sum_bytes(config: Config, sizes: Mapping[str, tuple[int, int]]) -> int:
    """Bytes of the sums over microbatches of parameters of these pieces."""
    dtype = config.parallel.accumulate_dtype
    if dtype == "float8_e4m3fn":
        linears = {f"{name}.weight" for name in llama.linear_shapes(config.model)}
        return sum(piece * (1 if name in linears else 4) for name, (piece, _) in sizes.items())
    return (2 if dtype == "bfloat16" else 4) * sum(piece for piece, _ in sizes.values())


def piece_sizes(config: Config, backend: str) -> dict[str, tuple[int, int]]:
    """{parameter: (elements of a device's piece, of all)}."""
    shapes = llama.parameter_shapes(config.model).items()
    return {name: (math.prod(at_rest(name, shape, config, backend)), math.prod(shape)) for name, shape in shapes}


def states(piece: int, whole: int, config: Config) -> int:
    """Bytes of all that is kept of a piece of this many elements of a parameter: its master, and AdamW's two moments."""
    return sum(one.device_bytes(piece, config.optimizer, whole) for one in train_state.PER_PARAMETER)


def _moments_formula(config: Config) -> str:
    if config.optimizer.kind == "adamw_fp8":
        return f"2 codes and 2 scales of {FP8_BLOCK}; float32 in pieces below {FP8_SMALLEST} or no multiple of {FP8_BLOCK} (T-6)"
    layout = config.optimizer.moment_layout
    if layout is not None:
        return f"layout {layout.name}: {layout.bytes_per_parameter(1 << 24):.4g} bytes a parameter; scales are whole on every device (O-11)"
    return "2 float32 a parameter"


def _states(config: Config, backend: str) -> int:
    """The saved states of delayed scaling, and an observation for each role."""
    found = train_state.fp8_states(config, backend)
    roles = sum(name.endswith(".amax_history") for name in found)
    return sum(tensor.nbytes for tensor in found.values()) + OBSERVATION * roles


def _compute(config: Config, backend: str, kept: Collection[str]) -> tuple[int, str]:
    """(bytes, formula) of bf16 copies, and of gathered weights and their gradients. kept: linears whose weights are kept in FP8."""
    model = config.model
    table = model.vocab_size * model.hidden_size
    # The table is used in float32. Only torch's whole-model compile gathers it in the compute dtype
    # (P-19).
    own, formula = _own(config, backend, kept)
    if not sharded(config, backend):
        return own, formula
    blocks: dict[str, int] = {}
    elements: dict[str, int] = {}
    for decision in config.decisions():
        block = ".".join(decision.path.split(".")[:3])
        size = (
            math.prod(used(decision.path, decision.shape, config))
            * (decision.experts or 1)
            // (config.parallel.expert if decision.experts else 1)
        )
        codes = decision.experts is None and in_fp8(decision.recipe, config, backend)
        elements[block] = elements.get(block, 0) + size
        blocks[block] = blocks.get(block, 0) + size * (1 if codes else 2)
    head, layer = blocks.pop("lm_head", 0), max(blocks.values())
    if backend == "jax":
        return own + layer + head + 4 * table + 6 * max(elements.values()), (
            f"{formula}; one layer, lm_head and the float32 table gathered; one block's gradients in bf16 and float32"
        )
    if config.parallel.compile == "model":
        whole = sum(blocks.values()) + head + 2 * table
        return whole + 6 * (sum(elements.values()) + table), "the whole model gathered, its gradients in bf16 and float32"
    one = max(elements.values())
    if config.optimizer.keeps_masters:
        return own + 2 * layer + head + 6 * table + 6 * one, (
            f"{formula}, of the shards; two layers, lm_head and the bf16 table gathered; the table's gradient, and the largest block's in bf16 and "
            "float32"
        )
    return 2 * layer + head + 8 * table + 6 * one, (
        "two layers, lm_head and the float32 table gathered; the table's gradient, and the largest block's in bf16 and float32"
    )


def _own(config: Config, backend: str, kept: Collection[str]) -> tuple[int, str]:
    """(bytes, formula) of what a device computes with of its own pieces, beside the masters."""
    shapes = llama.parameter_shapes(config.model)
    pieces = {name: math.prod(at_rest(name, shape, config, backend)) for name, shape in shapes.items()}
    if not config.optimizer.keeps_masters:
        of_pieces = "of the pieces" if sharded(config, backend) else "of all but the embedding table"
        return 2 * sum(size for name, size in pieces.items() if name != llama.EMBEDDING), f"bf16 copies {of_pieces}"
    # FSDP2 gathers from shards that stay bf16
    beside = 2 if backend == "torch" and sharded(config, backend) else 0
    size = sum(piece * (1 + beside if name.removesuffix(".weight") in kept else 2) for name, piece in pieces.items())
    return size, "bf16 weights" if not kept else f"{1 + beside} bytes of each weight in FP8 (O-16), 2 of others in bf16"


def _activations(config: Config, backend: str) -> tuple[int, str]:
    """(bytes, formula) of activations of one microbatch that are kept for the backward pass."""
    keys, model = config.parallel, config.model
    count, layers = tokens(config), model.num_hidden_layers
    h = model.hidden_size / (keys.tensor if keys.sequence else 1)
    attended, inner = model.num_attention_heads * model.head_dim, model.intermediate_size
    # Where devices have experts of their own, JAX has buffers for all rows of all of them.
    copies = model.num_experts_per_tok * (keys.expert if backend == "jax" else 1)
    if model.num_experts:  # a token's own experts, and the shared one
        inner = inner * copies + model.shared_expert_intermediate_size
    a, kv, f = (n / keys.tensor for n in (attended, model.num_key_value_heads * model.head_dim, inner))
    if backend == "jax" or keys.compile != "none":
        # bf16: the inputs of both norms and what they give; q, k, v; attention's output; gate, up
        # and their product
        layer, formula = 2 * (4 * h + 2 * a + 2 * kv + 3 * f), "2 (4 H + 2 A + 2 KV + 3 F)"
    else:
        # eager autograd keeps float32 too: two of each norm; gate, its SiLU and up
        layer, formula = 2 * (2 * h + 2 * a + 2 * kv + f) + 16 * h + 12 * f, "2 (2 H + 2 A + 2 KV + F) + 16 H + 12 F"
    if model.num_experts:
        # copies of a token for its experts in bf16, and what they give: in bf16 by XLA, widened by autograd
        of_copy = 4 if backend == "jax" else 6
        layer, formula = layer + of_copy * copies * h, f"{formula} + {of_copy} k H"
    if keys.checkpointing == "full":
        return int(count * (layers * 2 * h + layer)), f"tokens x (layers x 2 H + one layer's {formula}) bytes"
    if keys.checkpointing == "selective":
        # the layer's input, and the results of seven products and of attention
        kept = 2 * (h + 2 * a + 2 * kv + 2 * f + (1 + max(model.num_experts_per_tok, 1)) * h)
        return int(count * (layers * kept + layer)), f"tokens x (layers x 2 (3 H + 2 A + 2 KV + 2 F) + one layer's {formula}) bytes"
    return int(count * layers * layer), f"tokens x layers x {formula} bytes"


def _scores(config: Config) -> tuple[int, str]:
    """(bytes, formula) of one layer's attention scores, which XLA writes."""
    keys, model = config.parallel, config.model
    length = config.data.sequence_length
    queries = min(length, QUERIES) if keys.attention == "chunked" else length
    elements = tokens(config) // length * model.num_attention_heads // keys.tensor * queries * length
    return SCORE * elements, f"{SCORE} bytes each, of {queries:,} queries at a time: float32 scores and gradient, bf16 probabilities"


def _logits(config: Config, backend: str) -> tuple[int, str]:
    if backend == "jax" and config.parallel.loss == "chunked":
        own = tokens(config) // (config.parallel.tensor if config.parallel.sequence else 1)
        words = min(config.model.vocab_size, WORDS)
        return LOGITS * own * words + 8 * own * config.model.hidden_size, (
            f"{LOGITS} bytes each, of {words:,} words at a time; the gradient of the last linear's input, 8 bytes each in float32"
        )
    count = tokens(config) * config.model.vocab_size
    formula = f"{LOGITS} bytes each: bf16 logits and their gradient"
    if backend == "jax":
        return LOGITS * count // (config.parallel.tensor if config.parallel.sequence else 1), formula
    wide = min(count, LOGITS_CHUNK)
    return LOGITS * count + WIDE_LOGIT * wide, f"{formula}; {WIDE_LOGIT} of {wide:,} at a time, in float32"
