"""What share of a model the planned linears in FP8 are: one line for the console, and the
manifest's ``fp8``.
"""

import math
from collections.abc import Sequence

from fp8ref.selection.linears import Decision
from fp8ref.train.config.config import Config

SHOWN = 6
"""The most linears without FP8 that the line names."""


def of(config: Config, decisions: Sequence[Decision]) -> dict:
    """Linears in FP8, their shares of the model, and a line that says so; the variant of attention,
    if one is named; under ``adamw_states`` the layout of the moments too, and of masters that are
    stored.

    parameters       the share of parameters that are multiplied in FP8.
    multiplications  the share of a forward pass's: M N K of linears and of a tied head, of experts
                     those that take a token, and both products of attention, whole scores included.
    """
    model, length = config.model, config.data.sequence_length
    fp8 = [d for d in decisions if d.fp8]
    in_fp8 = sum(d.size for d in fp8)
    parameters = in_fp8 / sum(map(math.prod, config.shapes.parameters.values()))
    linears, times = model.tie_word_embeddings * model.vocab_size * model.hidden_size, 0
    for d in decisions:  # a token is multiplied by the weights of its own experts
        token_products = math.prod(d.shape) * (
            1 if d.experts is None else model.num_experts_per_tok
        )
        linears, times = linears + token_products, times + d.fp8 * token_products
    linears += model.num_experts * model.hidden_size * model.num_hidden_layers  # routers
    custom = config.architecture.kind != "llama"  # of what is no linear nothing is known
    attended = (
        (not custom)
        * 2
        * length
        * model.num_attention_heads
        * model.head_dim
        * model.num_hidden_layers
    )
    variant = config.numerics.attention
    attends, backward = bool(config.attention_in_fp8), config.numerics.attention_backward
    multiplications = (times + attends * attended) / (linears + attended)
    backward_note = f", backward in {backward}" * (backward != "own")
    recipes = ", ".join(dict.fromkeys(d.recipe.name for d in fp8))
    line = (
        f"{len(fp8)} of {len(decisions)} linears in FP8{f' ({recipes})' if fp8 else ''}, "
        f"{f'and attention ({variant}{backward_note}), ' * attends}"
    )
    line += (
        f"{parameters:.1%} of the parameters and {multiplications:.1%} of the "
        f"multiplications{' of linears' * custom}"
    )
    left_out = [f"{d.path} ({d.reason})" for d in decisions if not d.fp8]
    more = [f"and {len(left_out) - SHOWN} more"] * (len(left_out) > SHOWN)
    line += f". Not in FP8: {'; '.join([*left_out[:SHOWN], *more])}." if fp8 and left_out else "."
    report = {
        "linears": len(fp8),
        "parameters": parameters,
        "multiplications": multiplications,
        "summary": line,
    } | (
        ({"attention": variant} if variant else {})
        | ({"attention_backward": backward} if backward != "own" else {})
    )
    layout = config.optimizer.moment_layout
    if layout is None:
        return report
    sizes = [math.prod(shape) for shape in config.shapes.parameters.values()]
    kept = sum(size * layout.bytes_per_parameter(size) for size in sizes) / sum(sizes)
    summary = f"{line} AdamW's moments in layout {layout.name}: {kept:.2f} bytes a parameter."
    about = {"layout": layout.name, "bytes_per_parameter": kept}
    if layout.keeps_master:
        stored = sum(layout.master.stored_bytes(size) for size in sizes) / sum(sizes)
        summary = (
            summary.removesuffix(".") + f", and masters in {layout.master.fmt.name}: {stored:.2f}."
        )
        about |= {"master": layout.master.fmt.name, "bytes_per_master": stored}
    return report | {"summary": summary, "states": about}
