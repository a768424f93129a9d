"""Estimated time of a whole step. Parts that are not linears limit FP8's gain (Amdahl).

Operations other than linears are counted as fused kernels; eager PyTorch moves more bytes. Not
counted: collectives, which may overlap, the host, the loader, validation and checkpoints.
"""

import math
from dataclasses import dataclass

from fp8ref import llama
from fp8ref.estimate import roofline
from fp8ref.estimate.gpu_rates import Ceilings
from fp8ref.estimate.memory import LOGITS, moments
from fp8ref.estimate.roofline import Ledger
from fp8ref.linear_selection import Decision
from fp8ref.recipe import RECIPES
from fp8ref.train.config import Config
from fp8ref.train.device_shapes import at_rest, tokens


@dataclass(frozen=True)
class Step:
    """Seconds of a step.

    bf16        all linears in bfloat16.
    configured  the linears as configured.
    filtered    the same, with linears that FP8 makes slower in bfloat16.
    rest        {what: seconds} of everything else.
    """

    bf16: float
    configured: float
    filtered: float
    rest: dict[str, float]

    @property
    def ratio(self) -> float:
        """A step's time in bfloat16 by its time as configured."""
        return self._ratio(self.configured)

    @property
    def filtered_ratio(self) -> float:
        """The same ratio, with linears that FP8 makes slower left in bfloat16."""
        return self._ratio(self.filtered)

    @property
    def limit(self) -> float:
        """The same ratio, if linears took no time (Amdahl's limit)."""
        return self._ratio(0.0)

    def _ratio(self, linears: float) -> float:
        rest = sum(self.rest.values())
        return (self.bf16 + rest) / (linears + rest)


def with_tied(config: Config) -> list[Decision]:
    """The linears, with a tied lm_head too: it is a GEMM in high precision."""
    decisions = config.decisions()
    if not config.model.tie_word_embeddings:
        return decisions
    shape = (config.model.vocab_size, config.model.hidden_size)
    return [*decisions, Decision(path="lm_head", shape=shape, recipe=RECIPES["bf16"], reason="tied")]


def linears(config: Config, backend: str, ceilings: Ceilings) -> list[tuple[Decision, Ledger]]:
    """(linear, cost) for one microbatch. The cost of equal linears is computed once."""
    made: dict[tuple, Ledger] = {}
    found = []
    for decision in with_tied(config):
        key = (decision.path.split(".")[-1], decision.shape, decision.recipe.name)
        if key not in made:
            made[key] = roofline.of_decision(decision, config, backend, ceilings)
        found.append((decision, made[key]))
    return found


def of(config: Config, backend: str, ceilings: Ceilings) -> Step:
    """Predict one optimizer step of a device, all microbatches included."""
    parts, again = config.data.microbatches, config.parallel.checkpointing == "full"
    bf16 = configured = filtered = 0.0
    forward: dict[tuple, Ledger] = {}
    for decision, whole in linears(config, backend, ceilings):
        spent = [whole]
        if again and decision.path.startswith("model.layers."):
            key = (decision.path.split(".")[-1], decision.shape)
            if key not in forward:
                forward[key] = roofline.of_decision(decision, config, backend, ceilings, gemms=("output",))
            spent.append(forward[key])
        times = sum(one.bf16 for one in spent), sum(one.seconds for one in spent)
        loses = whole.ratio is not None and whole.ratio < 1
        bf16, configured, filtered = bf16 + times[0], configured + times[1], filtered + times[not loses]
    return Step(parts * bf16, parts * configured, parts * filtered, _rest(config, backend, ceilings))


def _rest(config: Config, backend: str, ceilings: Ceilings) -> dict[str, float]:
    keys, model, parts = config.parallel, config.model, config.data.microbatches
    count, layers = tokens(config) * parts, model.num_hidden_layers
    pieces = [math.prod(at_rest(name, shape, config, backend)) for name, shape in llama.parameter_shapes(model).items()]
    logits = count // (keys.tensor if keys.sequence and backend == "jax" else 1) * model.vocab_size
    moved = {
        "norms, rotations, SwiGLU, sums": count * layers * _elementwise(config),
        "embedding and loss": 12 * count * model.hidden_size
        + 2 * LOGITS[backend] * logits,  # each array of the memory estimate is written and read once
        # bytes an element: gradient read for the norm and again for the update, weight read and
        # written, bf16 copy made; moments read and written
        "AdamW": sum((4 + 4 + 8 + 6) * size + 2 * moments(size, config) for size in pieces),
    }
    if parts > 1:
        of_sum = 4 if keys.accumulate_dtype == "float32" else 2
        moved["sums of gradients over parts"] = (4 + 2 * of_sum) * parts * sum(pieces)
    found = {what: size / ceilings.bandwidth for what, size in moved.items()}
    return {"attention": layers * _attention(config, backend, ceilings)} | found


def _elementwise(config: Config) -> float:
    """Bytes a token and layer of norms, rotations, residual sums and SwiGLU, in bfloat16."""
    keys, model = config.parallel, config.model
    h = model.hidden_size / (keys.tensor if keys.sequence else 1)
    a, kv, f = (n / keys.tensor for n in (model.hidden_size, model.num_key_value_heads * model.head_dim, model.intermediate_size))
    forward, backward = 18 * h + 4 * a + 4 * kv + 6 * f, 38 * h + 4 * a + 4 * kv + 10 * f
    return forward * (1 if keys.checkpointing == "none" else 2) + backward


def _attention(config: Config, backend: str, ceilings: Ceilings) -> float:
    """Seconds of attention in a layer.

    PyTorch and cuDNN: a fused kernel with two products forward and five backward, of which
    causality skips half. XLA: whole products, six of them, and scores in memory: float32 scores and
    bfloat16 probabilities, 30 bytes each in both passes. Its backward pass computes scores again in
    chunks and under selective checkpointing, and also attention's output under full.
    """
    keys, model = config.parallel, config.model
    count, length = tokens(config) * config.data.microbatches, config.data.sequence_length
    product = 2 * count * length * model.hidden_size / keys.tensor
    if backend == "torch" or keys.attention == "cudnn":
        again = keys.checkpointing == "full" or (keys.checkpointing == "selective" and backend == "jax")
        return product / 2 * (2 * (1 + again) + 5) / ceilings.attention
    scores = count * length * model.num_attention_heads / keys.tensor
    products = 6 + {"none": 0, "selective": 1, "full": 2}[keys.checkpointing] + (keys.attention == "chunked")
    return products * product / ceilings.bf16 + 30 * products / 6 * scores / ceilings.bandwidth
