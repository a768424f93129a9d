"""What share of a model is in FP8, as planned: a line for the console, the manifest's ``fp8``."""

import math
from collections.abc import Sequence
from typing import Any

from fp8ref.selection.linears import Decision
from fp8ref.train.config.config import Config

SHOWN = 6  # the most linears without FP8 that the line names


def of(config: Config, decisions: Sequence[Decision]) -> dict:
    """Linears in FP8, their shares of the model, and a line that says so; the variant of attention,
    if one is named; under ``adamw_states`` the layout of the moments too, and of masters that are
    stored.

    parameters       the share of parameters that are multiplied in FP8.
    multiplications  the share of a forward pass's: M N K of linears and of a tied head, of experts
                     those that take a token, and both products of attention, whole scores included.
    """
    parameters, multiplications = _shares(config, decisions)
    variant, backward = config.numerics.attention, config.numerics.attention_backward
    line = _line(config, decisions, parameters, multiplications)
    report: dict[str, Any] = {
        "linears": sum(d.fp8 for d in decisions),
        "parameters": parameters,
        "multiplications": multiplications,
        "summary": line,
    }
    if variant:
        report["attention"] = variant
    if backward != "own":
        report["attention_backward"] = backward
    layout = config.optimizer.moment_layout
    if layout is None:
        return report
    sizes = [math.prod(shape) for shape in config.shapes.parameters.values()]
    kept = sum(size * layout.bytes_per_parameter(size) for size in sizes) / sum(sizes)
    summary = f"{line} AdamW's moments in layout {layout.name}: {kept:.2f} bytes a parameter"
    about = {"layout": layout.name, "bytes_per_parameter": kept}
    if layout.keeps_master:
        stored = sum(layout.master.stored_bytes(size) for size in sizes) / sum(sizes)
        summary += f", and masters in {layout.master.fmt.name}: {stored:.2f}"
        about |= {"master": layout.master.fmt.name, "bytes_per_master": stored}
    return report | {"summary": f"{summary}.", "states": about}


def _shares(config: Config, decisions: Sequence[Decision]) -> tuple[float, float]:
    """The shares of parameters and of multiplications in FP8, as ``of`` defines them."""
    model, length = config.model, config.data.sequence_length
    in_fp8 = sum(d.size for d in decisions if d.fp8)
    parameters = in_fp8 / sum(map(math.prod, config.shapes.parameters.values()))
    linears, times = model.tie_word_embeddings * model.vocab_size * model.hidden_size, 0
    for d in decisions:  # a token is multiplied by the weights of its own experts
        matrices = 1 if d.experts is None else model.num_experts_per_tok
        token_products = math.prod(d.shape) * matrices
        linears, times = linears + token_products, times + d.fp8 * token_products
    linears += model.num_experts * model.hidden_size * model.num_hidden_layers  # routers
    features = model.num_attention_heads * model.head_dim * model.num_hidden_layers
    # of what is no linear of a user's model nothing is known
    attended = 0 if _custom(config) else 2 * length * features
    in_fp8_attention = attended if config.attention_in_fp8 else 0
    return parameters, (times + in_fp8_attention) / (linears + attended)


def _line(
    config: Config, decisions: Sequence[Decision], parameters: float, multiplications: float
) -> str:
    variant, backward = config.numerics.attention, config.numerics.attention_backward
    backward_note = f", backward in {backward}" * (backward != "own")
    attention = f"and attention ({variant}{backward_note}), " * bool(config.attention_in_fp8)
    fp8 = [d for d in decisions if d.fp8]
    by_hardware = config.numerics.products not in ("auto", "emulated")
    in_fp4 = " in FP4" if by_hardware else " in emulated FP4"
    names = (d.recipe.name + in_fp4 * d.recipe.emulated for d in fp8)
    recipes = ", ".join(dict.fromkeys(names))
    left_out = [f"{d.path} ({d.reason})" for d in decisions if not d.fp8]
    more = [f"and {len(left_out) - SHOWN} more"] * (len(left_out) > SHOWN)
    reasons = "; ".join([*left_out[:SHOWN], *more])
    rest = f". Not in FP8: {reasons}." if fp8 and left_out else "."
    return (
        f"{len(fp8)} of {len(decisions)} linears in FP8{f' ({recipes})' if fp8 else ''}, "
        f"{attention}{parameters:.1%} of the parameters and {multiplications:.1%} of the "
        f"multiplications{' of linears' * _custom(config)}{rest}"
    )


def _custom(config: Config) -> bool:
    return config.architecture.kind != "llama"
