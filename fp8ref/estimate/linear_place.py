"""What the place of a linear in a Llama on a mesh means for the kernels that quantize its operands:
what it shares, gathers and sends, and what XLA computes a norm from.
"""

from collections.abc import Mapping

from fp8ref.estimate.kernels import Place
from fp8ref.recipe import ROLES, Gemm, Recipe, Role
from fp8ref.selection.linears import Decision
from fp8ref.spec import llama
from fp8ref.train.config.config import Config
from fp8ref.train.config.device_shapes import in_fp8, tokens


def of(
    decision: Decision, config: Config, backend: str, recipes: Mapping[str, Recipe] | None = None
) -> Place:
    """The place of a config's linear. recipes: of all linears by path; None: looked up."""
    keys, name = config.parallel, decision.path.split(".")[-1]
    parts: dict[Role, int] = (
        {"weight": keys.shards}
        if keys.shards > 1 and in_fp8(decision.recipe, config, backend)
        else {}
    )
    if backend != "jax":
        return Place(linear=name, parts=parts)
    if keys.sequence and decision.path.startswith("model.layers."):
        parts["input" if name in llama.COLUMN else "grad_output"] = keys.tensor
    # XLA quantizes an input once for linears that share it.
    first = llama.FIRST_READER.get(name, name)
    if recipes is None:
        recipes = {d.path: d.recipe for d in config.decisions()}
    shares = first != name and recipes[decision.path.removesuffix(name) + first] == decision.recipe
    sent: list[Gemm] = (
        ["grad_weight"] if keys.reduce_dtype == "bfloat16" and keys.sharing > 1 else []
    )
    if (
        name in llama.ROW
        and keys.tensor > 1
        and keys.reduce == "rounded"
        and keys.tensor_reduce_dtype != "float32"
    ):
        sent.append("output")
    cuts_sequences = keys.sequence and keys.tensor > 1
    return Place(
        linear=name,
        roles=tuple(role for role in ROLES if role != "input" or not shares),
        parts=parts,
        sent=tuple(sent),
        norm_bytes=_norm_bytes(decision.path, config),
        pieces=cuts_sequences
        and tokens(config) > config.data.sequence_length
        and "layers." in decision.path,
    )


def _norm_bytes(linear: str, config: Config) -> float:
    """Bytes an element of what XLA computes a norm's result from again. Until the first sum is in
    memory, that is rows of the embedding, of which no more are read than there are, and the
    bfloat16 outputs that are added to them: o's; and where the table was gathered in bfloat16,
    down's too."""
    keys = config.parallel
    rounded = keys.shards > 1 and keys.through == "shard_map"
    own = tokens(config) / (keys.tensor if keys.sequence else 1)
    rows = (2 if rounded else 4) * min(1.0, config.model.vocab_size / own)
    added = {("0", "q_proj"): 0, ("0", "gate_proj"): 1} | ({("1", "q_proj"): 2} if rounded else {})
    _, _, rest = linear.partition("layers.")
    outputs = added.get((rest.split(".")[0], linear.split(".")[-1]))
    return 4 if outputs is None else rows + 2 * outputs
