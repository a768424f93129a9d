"""A device's step, linears and all else, in bfloat16 and as configured: what FP8 can gain is limited by what is not a linear.

All of it is an estimate at the same ceilings. What is not a linear is counted as fused kernels move it, eager PyTorch moves more. Left out:
collectives, which overlap or do not, the host, the loader, validation and checkpoints.
"""

import math
from dataclasses import dataclass

from fp8ref import llama
from fp8ref.estimate import linear_cost
from fp8ref.estimate.gpu_rates import Ceilings
from fp8ref.estimate.linear_cost import Ledger
from fp8ref.estimate.memory import LOGITS, moments
from fp8ref.recipe import RECIPES, Decision
from fp8ref.train.config import Config
from fp8ref.train.device_shapes import at_rest, tokens


@dataclass(frozen=True)
class Step:
    """Seconds by what takes them: linears in bfloat16; the same as configured, and without those that lose; the rest, what it is -> how long."""

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
        """The same with every linear that FP8 slows left in bfloat16."""
        return self._ratio(self.filtered)

    @property
    def limit(self) -> float:
        """The same if linears took no time at all (Amdahl)."""
        return self._ratio(0.0)

    def _ratio(self, linears: float) -> float:
        rest = sum(self.rest.values())
        return (self.bf16 + rest) / (linears + rest)


def with_tied(config: Config) -> list[Decision]:
    """The linears, and a tied head, which multiplies as one in high precision."""
    decisions = config.decisions()
    if not config.model.tie_word_embeddings:
        return decisions
    shape = (config.model.vocab_size, config.model.hidden_size)
    return [*decisions, Decision(path="lm_head", shape=shape, recipe=RECIPES["bf16"], reason="tied")]


def linears(config: Config, backend: str, ceilings: Ceilings) -> list[tuple[Decision, Ledger]]:
    """Every linear's, for one part of a batch; alike ones are counted once."""
    made: dict[tuple, Ledger] = {}
    found = []
    for decision in with_tied(config):
        key = (decision.path.split(".")[-1], decision.shape, decision.recipe.name)
        if key not in made:
            made[key] = linear_cost.of_decision(decision, config, backend, ceilings)
        found.append((decision, made[key]))
    return found


def of(config: Config, backend: str, ceilings: Ceilings) -> Step:
    """The prediction of one optimizer step of a device, all parts of its batch."""
    parts, again = config.data.microbatches, config.parallel.checkpointing == "full"
    bf16 = configured = filtered = 0.0
    forward: dict[tuple, Ledger] = {}
    for decision, whole in linears(config, backend, ceilings):
        spent = [whole]
        if again and decision.path.startswith("model.layers."):
            key = (decision.path.split(".")[-1], decision.shape)
            if key not in forward:
                forward[key] = linear_cost.of_decision(decision, config, backend, ceilings, gemms=("output",))
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
        "embedding and loss": 12 * count * model.hidden_size + 2 * LOGITS * logits,  # each of memory's arrays written and read
        # of every piece: norm of gradients, gradient, weight read and written, moments read and written, copy in bf16
        "AdamW": sum((4 + 4 + 8 + 6) * size + 2 * moments(size, config) for size in pieces),
    }
    if parts > 1:
        moved["sums of gradients over parts"] = 12 * parts * sum(pieces)
    found = {what: size / ceilings.bandwidth for what, size in moved.items()}
    return {"attention": layers * _attention(config, backend, ceilings)} | found


def _elementwise(config: Config) -> float:
    """Bytes a token and layer, bfloat16: forward both norms, rotations, both sums, SwiGLU; backward the same and sums of gradients."""
    keys, model = config.parallel, config.model
    h = model.hidden_size / (keys.tensor if keys.sequence else 1)
    a, kv, f = (n / keys.tensor for n in (model.hidden_size, model.num_key_value_heads * model.head_dim, model.intermediate_size))
    forward, backward = 18 * h + 4 * a + 4 * kv + 6 * f, 38 * h + 4 * a + 4 * kv + 10 * f
    return forward * (1 if keys.checkpointing == "none" else 2) + backward


def _attention(config: Config, backend: str, ceilings: Ceilings) -> float:
    """Seconds a layer. PyTorch and cuDNN: a fused kernel, two products forward and five backward, causal ones by half.

    XLA: all of every product, and scores in memory: float32 scores and bfloat16 probabilities, forward and backward 30 bytes each.
    """
    keys, model = config.parallel, config.model
    count, length = tokens(config) * config.data.microbatches, config.data.sequence_length
    product = 2 * count * length * model.hidden_size / keys.tensor
    again = keys.checkpointing == "full"
    if backend == "torch" or keys.attention == "cudnn":
        return product / 2 * (2 * (1 + again) + 5) / ceilings.attention
    scores = count * length * model.num_attention_heads / keys.tensor
    return 6 * product / ceilings.bf16 + 30 * scores / ceilings.bandwidth
