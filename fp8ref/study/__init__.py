"""Study what FP8 would do to your tensors or your model: where an error arises, by layer and cast.

    from fp8ref import study

    recording = study.tensors({"layer.input": x, "layer.weight": w})   # or study.read_file(path)
    judged = study.judge(recording)                       # every tensor, by the casts of every
                                                          recipe
    judged.print()

    with study.record(model) as recording:               # hooks on every linear of a PyTorch or
                                                         Flax NNX model
        model(**batch).loss.backward()                    # one step, as you run it
    judged = study.judge(recording)
    depth = study.depth(model, lambda m: m(**batch).logits)   # the model again, under each recipe
    attention = study.judge_attention(recording)          # every layer's attention, by every
    variant
    states = study.judge_states(gradients)                # layouts of optimizer states, on the
                                                          gradients of some steps
    study.write_page("study.html", judged, depth, attention=attention, states=states)

``record`` and ``depth`` need the model's own framework and no other, ``tensors`` and ``judge`` need
NumPy, and ``write_page`` the extra [train].
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from fp8ref.study import recording as recordings
from fp8ref.study.attention_error import JudgedAttention
from fp8ref.study.attention_error import judge as judge_attention
from fp8ref.study.cast_error import Judged, judge
from fp8ref.study.depth_error import Depth
from fp8ref.study.own_tensors import read_file, tensors
from fp8ref.study.recording import Recording, read
from fp8ref.study.state_error import JudgedStates, judge_states

if TYPE_CHECKING:
    from fp8ref.recipe import Recipe

__all__ = [
    "Depth",
    "Judged",
    "JudgedAttention",
    "JudgedStates",
    "Recording",
    "attention",
    "depth",
    "judge",
    "judge_attention",
    "judge_states",
    "read",
    "read_file",
    "record",
    "tensors",
    "write_page",
]


def record(model, *, rows: int = 512, layers: str = "*", heads: int = 4, tokens: int = 512):
    """A context that records the operands of a model's linears, input, weight and grad_output, and
    of its attention, q, k, v and do.

    model     a torch.nn.Module or flax.nnx.Module. It runs in the context as it does elsewhere,
              with the same bits; its hooks are removed at the end.
    rows      the most tokens, and rows of a weight, that are kept of a tensor: whole blocks of 128,
              evenly spaced. Amaxes are those of the whole tensor.
    layers    a pattern of names of linears (fnmatch), such as "*.mlp.*".
    heads, tokens
              the most query heads of a layer's attention, of the first sequence, with the keys and
              values that they read, and its first tokens; heads 0: attention is not recorded. In
              PyTorch that of scaled_dot_product_attention, in Flax of jax.nn.dot_product_attention,
              which nnx.MultiHeadAttention calls.
    Yields:   the Recording. Of a layer that is called several times, the first call is kept.
    Raises:   ValueError: another kind of model; rows that are no multiple of 128; a pattern that
              matches no linear; negative heads, or no tokens.
    """
    recordings.check_attention(heads, tokens)
    return framework(model).record(model, rows=rows, layers=layers, heads=heads, tokens=tokens)


def attention(
    model,
    run: Callable,
    variants: Sequence[str] | None = None,
    *,
    heads: int = 4,
    tokens: int = 512,
) -> JudgedAttention:
    """Run a model once, and its attention by each variant of ``fp8ref.spec.attention.variants`` on
    the q, k and v that it had.

    run       run(model): one forward pass, seen as in ``record``: a layer's first call.
    variants  names; None: all.
    heads, tokens
              as in ``record``.
    Raises:   ValueError: no call of attention; an unknown variant; no heads or tokens.
    """
    recordings.check_attention(heads, tokens, least=1)
    return judge_attention(
        framework(model).attention(model, run, heads=heads, tokens=tokens), variants
    )


def depth(
    model,
    run: Callable,
    recipes: Sequence["str | Recipe"] | None = None,
    *,
    rows: int = 512,
    **options,
) -> Depth:
    """Run a model in high precision, and a copy of it under each recipe, and compare.

    run       run(model) -> logits or another tensor of floats, the same each time.
    recipes   names or Recipes; None: all in FP8 that the backend converts the model to.
    rows      as in ``record``: the tokens of a linear's input that are compared.
    options   of ``convert``, such as ``filter_fqns``.
    Memory:   one copy of the model at a time, and ``rows`` of every linear's input.
    Raises:   ValueError: as ``record`` and ``convert``; a run that is not the same twice.
    """
    return framework(model).depth(model, run, recipes, rows=rows, options=options)


def write_page(
    out: Path | str,
    judged: Judged,
    depth: Depth | None = None,
    *,
    attention: JudgedAttention | None = None,
    states: JudgedStates | None = None,
) -> None:
    """One HTML page of all of them, without links to elsewhere, with a script for values on hover.

    Raises:   ImportError: matplotlib or jinja2, of the extra [train], is missing.
    """
    from fp8ref.study import page

    page.write(Path(out), judged, depth, attention=attention, states=states)


def framework(model) -> ModuleType:
    """``torch_model`` or ``nnx_model`` of this room, by what is imported: a model of torch has
    imported torch.

    Raises:   ValueError: neither a torch.nn.Module nor a flax.nnx.Module.
    """
    for package, kind, name in (
        ("torch", "nn.Module", "torch_model"),
        ("flax.nnx", "Module", "nnx_model"),
    ):
        attribute: object = sys.modules.get(package)
        for part in kind.split("."):
            attribute = getattr(attribute, part, None)
        if isinstance(attribute, type) and isinstance(model, attribute):
            return importlib.import_module(f"fp8ref.study.{name}")
    raise ValueError(
        f"a study takes a torch.nn.Module or a flax.nnx.Module; got {type(model).__name__}. "
        "Layers of linen are not seen, in nnx.bridge.ToNNX neither: study the model in NNX, or "
        "give its tensors to study.tensors."
    )
