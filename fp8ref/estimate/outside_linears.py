"""What a training step does outside its linears: the bytes that its kernels move, and their time.

Norms, rotations, SwiGLU, attention, the embedding, the loss and AdamW, counted as fused kernels;
eager PyTorch moves more bytes. Attention also multiplies.
"""

from dataclasses import dataclass

from fp8ref.estimate import kernels
from fp8ref.estimate.activations import WORDS
from fp8ref.estimate.gpu_rates import Ceilings
from fp8ref.estimate.memory import piece_sizes, states, sum_bytes
from fp8ref.recipe import Recipe
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
    times = {purpose: size / ceilings.bandwidth for purpose, size in moved(config, backend).items()}
    times["attention"] += config.model.num_hidden_layers * _products_of_attention(
        config, backend, ceilings
    )
    if config.model.num_experts:
        model = config.model
        products = (
            3
            * 2
            * tokens(config)
            * config.data.microbatches
            * model.hidden_size
            * model.num_experts
        )
        times["routers' products"] = model.num_hidden_layers * products / (ROUTER * ceilings.bf16)
    return times


def moved(config: Config, backend: str) -> dict[str, float]:
    """{what: bytes} that kernels other than GEMMs and collectives read and write, beside those that
    quantize.
    """
    keys, model, parts = config.parallel, config.model, config.data.microbatches
    count = tokens(config) * parts
    own = count // (keys.tensor if keys.sequence and backend == "jax" else 1)
    firsts = [d.recipe for d in config.decisions() if d.path.endswith("q_proj")]  # of each layer
    embedding = 12 * count if backend == "torch" else _residual(firsts[0]).once * own
    bytes_moved = {
        "attention": model.num_hidden_layers * _scores(config, backend),
        "norms, rotations, SwiGLU, sums": count
        * sum(_elementwise(config, backend, recipe) for recipe in firsts),
        "embedding and loss": embedding * model.hidden_size
        + 2 * LOGITS[backend] * own * model.vocab_size,
        "AdamW": _update(config, backend),
    }
    if keys.loss == "chunked":  # each part's float32 gradient is added to the sum
        chunks = -(-model.vocab_size // WORDS)
        bytes_moved["embedding and loss"] += 12 * chunks * own * model.hidden_size
    if backend == "jax":
        if joined := parts * sum(_joined_weights(config, recipe) for recipe in firsts):
            bytes_moved["weights of q, k and v, joined"] = joined
        if keys.tensor > 1 and keys.reduce == "rounded":
            added = sum(_added(config, recipe) for recipe in firsts)
            bytes_moved["grad_inputs, added before their sum"] = count * added
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
    fusion, gathered = kernels.fusion(config, backend), config.parallel.shards > 1
    copied = sum(
        piece
        for name, (piece, _) in held.items()
        if name not in recipes
        or EXPERTS in name
        or kernels.copies_weight(recipes[name], fusion, name.split(".")[-2], gathered=gathered)
    )
    master = 2 if config.optimizer.keeps_masters else 4
    return (master + 2) * copied + sum(
        2 * _gradient(name, config, backend) * piece + 2 * states(piece, whole, config)
        for name, (piece, whole) in held.items()
    )


def _widened(config: Config) -> float:
    """Bytes of gradients that GEMMs write in bfloat16, and a kernel of its own widens before
    devices sum them (P-9)."""
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
    summed = keys.fsdp * keys.data > 1 or config.data.microbatches > 1 or keys.reduce != "rounded"
    return 4 if backend == "torch" or summed or not name.endswith("proj.weight") else 2


def _arranged(config: Config, backend: str) -> float:
    """Bytes of kernels that put pieces of several sequences in order, where JAX cuts each over
    tensor (benchmarks/results/aot.md): after a gather, and an operand's rows before its products
    are scattered; of bfloat16 alone, as FP8's are among those that quantize."""
    keys, model = config.parallel, config.model
    if (
        backend == "torch"
        or not keys.sequence
        or keys.tensor == 1
        or tokens(config) == config.data.sequence_length
    ):
        return 0
    again = keys.checkpointing == "full"
    heads, key_features = (
        n * model.head_dim / keys.tensor
        for n in (model.num_attention_heads, model.num_key_value_heads)
    )
    mlp_features = model.intermediate_size / keys.tensor
    scattered = {
        "q_proj": heads,
        "k_proj": key_features,
        "v_proj": key_features,
        "gate_proj": mlp_features,
        "up_proj": mlp_features,
        "o_proj": heads,
    }
    elements = 0.0
    for decision in config.decisions():
        last, gemms = decision.path.split(".")[-1], decision.recipe.gemms
        output_bytes, input_bytes, weight_bytes = (
            1 if gemms[which].fp8 else 2 for which in kernels.GEMMS
        )
        if last in ("q_proj", "gate_proj"):
            elements += model.hidden_size * (
                2 * (1 + again) * (output_bytes == 2) + 2 * (weight_bytes == 2)
            )
        if last in ("o_proj", "down_proj"):
            elements += model.hidden_size * 2 * (2 in (input_bytes, weight_bytes))
        wide = output_bytes if last == "o_proj" else input_bytes
        elements += scattered.get(last, 0) * (
            2 * (1 + again * (last == "o_proj")) if wide == 2 else 0
        )
    return 2 * tokens(config) * elements


@dataclass(frozen=True)
class Residual:
    """What XLA's kernels of norms and residual sums read and write, in bytes an element of the
    hidden state, as compiled for an H200 (benchmarks/results/aot.md): a layer's in both passes, and
    those of the last norm, of its gradient and of the embedding's.

    Measured, not derived: fitted to the programs of two blocks of 4096 features in those tables,
    whose first layer reads rows of the embedding where a later one reads a residual, and whose
    amaxes and casts read residuals in place of a bfloat16 input. For comparison, the kernels of the
    second layer under tensorwise (2 is an array in bfloat16, 4 in float32; what is read, and
    written after the arrow):

        forward   attention's norm: 2, 2 and the table -> 4; the MLP's: 4, 2 -> 4; both again by an
                  amax, 4, and by casts
        backward  the MLP's norm: 2, 4, 2; 4, 2, 2 -> 2, 4; 4. Attention's: 4, 2, 2, 2 -> 2; 2, 4, 2
                  -> 2, 4; 4

    Rows of three blocks of 2048 features hold them to a program that they were not fitted to.
    """

    forward: float
    backward: float
    once: float


RESIDUALS = {
    # A norm is read for its sum of squares and again for its bfloat16 result.
    "bf16": Residual(19, 43, 48.5),
    # It is read for its sum of squares alone: the amax and the cast compute it again, and are
    # counted with those that quantize.
    "tensorwise": Residual(9, 50, 46.5),
    # Its bfloat16 result is written with the first amax, and the residual in float32 by each sum.
    "rowwise": Residual(20, 51, 44.5),
}
"""By what q, k and v of a layer take."""


def _residual(recipe: Recipe) -> Residual:
    """recipe: of a layer's q_proj, here and below."""
    spec = recipe.output
    if spec.a is None or not kernels.multiplies_fp8(spec, "jax"):
        return RESIDUALS["bf16"]
    return RESIDUALS["rowwise" if spec.a.granularity == "rowwise" else "tensorwise"]


def joins_heads(config: Config, recipe: Recipe) -> bool:
    """Whether XLA multiplies q, k and v's one input by their joined weights, so that what reads one
    of the results reads all three. A scale of a whole tensor, inside its GEMM, keeps them apart,
    and so do pieces of sequences that are gathered in bfloat16."""
    spec = recipe.output
    if spec.a is None or not kernels.multiplies_fp8(spec, "jax"):
        return not (config.parallel.sequence and config.parallel.tensor > 1)
    return spec.rowwise


def _heads(config: Config, recipe: Recipe) -> tuple[float, float]:
    """Bytes a token and layer of XLA's kernels between q, k and v's linears, attention's products
    and o, in both passes: rotations, and the orders in which products want queries, keys, values
    and their gradients."""
    model, tensor = config.model, config.parallel.tensor
    a, kv = (
        n * model.head_dim / tensor for n in (model.num_attention_heads, model.num_key_value_heads)
    )
    # queries rotated; keys rotated by two kernels, between them in float32; values
    # all three, by each of the four kernels and again by keys' in the backward pass
    read = 2 * (a + 2 * kv) if joins_heads(config, recipe) else 0
    forward = 4 * read + (2 if read else 4) * a + (12 if read else 18) * kv
    backward = 18 * a + 6 * kv + (read + 6 * kv if read else 8 * kv)
    if not recipe.output.fp8:
        forward += 4 * a  # attention's output, in the order of tokens: else its cast writes that
    if not recipe.grad_weight.fp8:
        # gradients of values; of all three, joined
        backward += 4 * kv + (4 * (a + 2 * kv) if read else 0)
    return forward, backward


def _added(config: Config, recipe: Recipe) -> float:
    """Bytes a token and layer of the kernels that add the grad_inputs of linears that share an
    input, before devices sum them over tensor: gate's and up's, and in FP8 those of q, k and v,
    which in bfloat16 are one product. The norm's kernel then reads one sum."""
    keys, h = config.parallel, config.model.hidden_size
    own = h / (keys.tensor if keys.sequence else 1)
    several = (2, 3) if recipe.grad_input.fp8 else (2,)
    return sum(2 * (n + 1) * h - 2 * (n - 1) * own for n in several)


def _joined_weights(config: Config, recipe: Recipe) -> float:
    """Bytes of the kernel that joins the weights of a layer's q, k and v in bfloat16; under plain
    jit, where devices sum the joined gradient in float32 (P-9), also of the three that part it,
    each of which reads all of it."""
    if not joins_heads(config, recipe) or recipe.output.fp8:
        return 0
    keys, model = config.parallel, config.model
    heads = (
        (model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim / keys.tensor
    )
    parted = 3 * 4 + 4 if keys.through == "jit" and keys.sharing > 1 else 0
    return (2 + 2 + parted) * model.hidden_size * heads


def _elementwise(config: Config, backend: str, recipe: Recipe) -> float:
    """Bytes a token and layer of norms, rotations, residual sums and SwiGLU: in bfloat16, each
    fused to one kernel; by XLA as compiled for an H200 (benchmarks/results/aot.md), with residual
    sums in float32 and several kernels to a norm."""
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
    if backend == "jax":
        residual, heads = _residual(recipe), _heads(config, recipe)
        forward, backward = (
            residual.forward * h + heads[0] + 6 * f,
            residual.backward * h + heads[1] + 10 * f,
        )
    else:
        forward, backward = 18 * h + 4 * a + 4 * kv + 6 * f, 38 * h + 4 * a + 4 * kv + 10 * f
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
    keys = config.parallel
    scores = (
        tokens(config)
        * config.data.microbatches
        * config.data.sequence_length
        * config.model.num_attention_heads
        / keys.tensor
    )
    return 40 * _products(config) / 6 * scores


def _products_of_attention(config: Config, backend: str, ceilings: Ceilings) -> float:
    """Seconds of attention's products in a layer.

    PyTorch and cuDNN: a fused kernel with two products forward and five backward, of which
    causality skips half. XLA: whole products.
    """
    keys, model = config.parallel, config.model
    product = (
        2
        * tokens(config)
        * config.data.microbatches
        * config.data.sequence_length
        * model.num_attention_heads
        * model.head_dim
        / keys.tensor
    )
    if backend == "torch" or keys.attention == "cudnn":
        again = keys.checkpointing == "full" or (
            keys.checkpointing == "selective" and backend == "jax"
        )
        return product / 2 * (2 * (1 + again) + 5) / ceilings.attention
    return _products(config) * product / ceilings.bf16


def _products(config: Config) -> int:
    """Whole products of attention by XLA: six. Its backward pass computes scores again in chunks
    and under selective checkpointing, and also attention's output under full."""
    keys = config.parallel
    return (
        6
        + {"none": 0, "selective": 1, "full": 2}[keys.checkpointing]
        + (keys.attention == "chunked")
    )
