"""What a training step does outside its linears: the bytes that its kernels move, and their time.

Norms, rotations, SwiGLU, attention, the embedding, the loss and AdamW, counted as fused kernels;
eager PyTorch moves more bytes. Attention also multiplies.
"""

from fp8ref.estimate import kernels
from fp8ref.estimate.activations import WORDS, first_recipes
from fp8ref.estimate.gpu_rates import Ceilings
from fp8ref.estimate.memory import piece_sizes, states, sum_bytes
from fp8ref.recipe import Recipe
from fp8ref.spec import llama
from fp8ref.spec.llama import EXPERTS
from fp8ref.train.config.config import Config
from fp8ref.train.config.device_shapes import tokens

LOGITS = {"jax": 4, "torch": 4 + 6 * 4}
"""{backend: bytes a logit}: of the arrays that the loss writes and reads once. Logits and their
gradient in bfloat16; in PyTorch, a part at a time, also float32 logits and their logarithmic
softmax, both in the forward and the backward pass, and the gradients of both."""


ROUTER = 67 / 989.4
"""A router's products are of float32 (M-8), outside of tensor cores: that rate by bfloat16's, of an
H100's and an H200's data sheet.
"""

OF_COPY = {"jax": 34, "torch": 38}
"""{backend: bytes}: of an element of a token's copy for an expert, that are read and written to
sort it, bring its result back and weigh that, in both passes: the copy in float32, written and
read; the sorted row in bfloat16; the result, its sorted form and its weighted sum's float32."""


def seconds(config: Config, backend: str, ceilings: Ceilings) -> dict[str, float]:
    """{what: seconds} of an optimizer step of a device, all microbatches included."""
    moves = moved(config, backend).items()
    times = {purpose: size / ceilings.bandwidth for purpose, size in moves}
    times["attention"] += config.model.num_hidden_layers * _products_of_attention(
        config, backend, ceilings
    )
    if config.model.num_experts:
        model, rows = config.model, tokens(config) * config.data.microbatches
        products = 3 * 2 * rows * model.hidden_size * model.num_experts
        times["routers' products"] = model.num_hidden_layers * products / (ROUTER * ceilings.bf16)
    return times


def moved(config: Config, backend: str) -> dict[str, float]:
    """{what: bytes} of kernels other than GEMMs, collectives, and those that quantize."""
    keys, model, parts = config.parallel, config.model, config.data.microbatches
    count = tokens(config) * parts
    own = count // (keys.tensor if keys.sequence and backend == "jax" else 1)
    bytes_moved = {
        "attention": model.num_hidden_layers * _scores(config, backend),
        "norms, rotations, SwiGLU, sums": count
        * sum(_elementwise(config, backend, recipe) for recipe in first_recipes(config)),
        "embedding and loss": 12 * own * model.hidden_size
        + 2 * LOGITS[backend] * own * model.vocab_size,
        "AdamW": _update(config, backend),
    }
    if keys.loss == "chunked":  # each part's float32 gradient is added to the sum
        chunks = -(-model.vocab_size // WORDS)
        bytes_moved["embedding and loss"] += 12 * chunks * own * model.hidden_size
    if arranged := parts * _arranged(config, backend):
        bytes_moved["pieces of sequences, put in order"] = arranged
    if parts > 1:
        held = piece_sizes(config, backend)
        bytes_moved["sums of gradients over parts"] = parts * (
            4 * sum(piece for piece, _ in held.values()) + 2 * sum_bytes(config, held)
        )
    if backend == "jax" and (widened := parts * _widened(config)):
        bytes_moved["gradients in float32, for their sums"] = widened
    return bytes_moved


def _update(config: Config, backend: str) -> float:
    """Bytes of AdamW: a gradient read for the norm and again for the update; master and moments
    read and written; a bf16 copy made of the master."""
    held = piece_sizes(config, backend)
    recipes = {f"{d.path}.weight": d.recipe for d in config.decisions()}
    copied = sum(
        piece
        for name, (piece, _) in held.items()
        if name not in recipes
        or EXPERTS in name
        or kernels.copies_weight(recipes[name], config, backend)
    )
    master = 2 if config.optimizer.keeps_masters else 4
    return (master + 2) * copied + sum(
        2 * _gradient(name, config, backend) * piece + 2 * states(piece, whole, config)
        for name, (piece, whole) in held.items()
    )


def _widened(config: Config) -> float:
    """Bytes of gradients that a kernel widens from bfloat16 before devices sum them (P-9)."""
    keys = config.parallel
    rounded = keys.reduce == "rounded" and keys.through == "shard_map"
    if not rounded or keys.reduce_dtype != "float32" or keys.sharing == 1:
        return 0
    return (2 + 4) * sum(
        min(keys.shards * piece, whole // (1 if "experts" not in name else keys.expert))
        for name, (piece, whole) in piece_sizes(config, "jax").items()
    )


def _gradient(name: str, config: Config, backend: str) -> int:
    """Bytes an element of a gradient that AdamW reads: of a linear's weight by XLA as its GEMM has
    written it, unless it was summed.
    """
    keys = config.parallel
    shared = keys.fsdp * keys.data > 1 or config.data.microbatches > 1
    summed = shared or keys.reduce != "rounded"
    return 4 if backend == "torch" or summed or not name.endswith("proj.weight") else 2


def _arranged(config: Config, backend: str) -> float:
    """Bytes of kernels that put pieces of several sequences in order, where JAX cuts each over
    tensor: of the linears' inputs and gradients after a gather, and of results before their sum is
    scattered. A gather is of codes or of bfloat16, and read and written once for each GEMM."""
    keys, model = config.parallel, config.model
    if (
        backend == "torch"
        or not keys.sequence
        or keys.tensor == 1
        or tokens(config) == config.data.sequence_length
    ):
        return 0
    again = 1 + (keys.checkpointing == "full")
    elements = 0.0
    for decision in config.decisions():
        name = decision.path.split(".")[-1]
        output, grad_input, grad_weight = (
            1 if decision.recipe.gemms[which].fp8 else 2 for which in kernels.GEMMS
        )
        features = decision.shape[0] / keys.tensor
        if name in ("q_proj", "gate_proj"):
            elements += model.hidden_size * (again * output + grad_weight)
        if name in llama.ROW:
            elements += model.hidden_size * (grad_input + grad_weight)
            features = decision.shape[1] / keys.tensor
        if "layers." in decision.path:
            elements += features * (again * output if name in llama.ROW else grad_input)
    return 2 * tokens(config) * elements


def _elementwise(config: Config, backend: str, recipe: Recipe) -> float:
    """Bytes a token and layer of norms, rotations, residual sums and SwiGLU in bfloat16, each fused
    to one kernel: recipe is of the layer's first linear. Where Triton kernels cast what these
    kernels make, they write codes in both orders, as many bytes."""
    keys, model = config.parallel, config.model
    h = model.hidden_size / (keys.tensor if keys.sequence else 1)
    a, kv, f = (
        n / keys.tensor
        for n in (
            model.num_attention_heads * model.head_dim,
            model.num_key_value_heads * model.head_dim,
            model.intermediate_size,
        )
    )
    if model.num_experts:  # SwiGLU of a token's own experts, and of the shared one
        f = f * model.num_experts_per_tok + model.shared_expert_intermediate_size
    heads = 4 * (a + kv)
    if backend == "jax" and keys.attention != "cudnn":
        heads += 4 * (2 * a + 2 * kv)  # XLA's products take queries, keys and values by heads
    forward, backward = 18 * h + heads + 6 * f, 38 * h + heads + 10 * f
    if kernels.fuses(recipe, config, backend):
        # A kernel sums the residual and norms, 8 H. Backward a sum of the gradients of two linears'
        # input, 6 H, and of three, 8 H; a norm's gradient reads it, the residual and its gradient.
        forward = 2 * 8 * h + heads + 6 * f
        backward = (6 + 8 + 2 * 8) * h + heads + 10 * f
    copies = OF_COPY[backend] * model.num_experts_per_tok * h / 2
    forward, backward = forward + copies, backward + copies
    return forward * (1 if keys.checkpointing == "none" else 2) + backward


def _scores(config: Config, backend: str) -> float:
    """Bytes of attention in a layer, where XLA keeps scores in memory: float32 scores and bfloat16
    probabilities, transposed for each product, 40 bytes each in both passes, and more where they
    are computed again. Fused attention reads and writes its operands and results alone, which are
    counted with what makes them."""
    if backend == "torch" or config.parallel.attention == "cudnn":
        return 0
    return 40 * _products(config) / 6 * _all_scores(config)


def _all_scores(config: Config) -> float:
    """Scores of a layer's attention on a device, of all microbatches, hidden ones too."""
    heads = config.model.num_attention_heads / config.parallel.tensor
    return tokens(config) * config.data.microbatches * config.data.sequence_length * heads


def _products_of_attention(config: Config, backend: str, ceilings: Ceilings) -> float:
    """Seconds of attention's products in a layer.

    PyTorch and cuDNN: a fused kernel with two products forward and five backward, of which
    causality skips half. XLA: whole products.
    """
    keys, product = config.parallel, 2 * _all_scores(config) * config.model.head_dim
    if backend == "torch" or keys.attention == "cudnn":
        again = keys.checkpointing == "full" or (
            keys.checkpointing == "selective" and backend == "jax"
        )
        return product / 2 * (2 * (1 + again) + 5) / ceilings.attention
    return _products(config) * product / ceilings.bf16


def _products(config: Config) -> int:
    """Whole products of attention by XLA: six. Its backward pass computes scores again in chunks
    and under selective checkpointing, and also attention's output under full."""
    keys, again = config.parallel, {"none": 0, "selective": 1, "full": 2}
    return 6 + again[keys.checkpointing] + (keys.attention == "chunked")
