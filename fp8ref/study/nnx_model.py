"""Record a Flax NNX model's linears by hooks of theirs, and run copies of it under recipes."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from fp8ref.jax import flax as fj
from fp8ref.jax.flax import nnx as nnx_hooks
from fp8ref.recipe import Recipe
from fp8ref.selection.report import quiet
from fp8ref.study import depth_error, flax_attention
from fp8ref.study import recording as recordings
from fp8ref.study.depth_error import Depth, Seen
from fp8ref.study.recording import Recording


@contextlib.contextmanager
def record(
    model: nnx.Module, *, rows: int, layers: str, heads: int = 0, tokens: int = 0
) -> Iterator[Recording]:
    """As ``fp8ref.study.record``. Traced functions report from inside the compiled program."""
    linears = {
        ".".join(map(str, path)) or type(model).__name__: layer
        for path, layer in nnx.iter_graph(model, graph=True)
        if isinstance(layer, nnx.Linear | nnx.LinearGeneral | nnx.Einsum)
    }
    names = recordings.chosen(linears, layers, rows)
    recording = Recording(framework="flax", chosen=tuple(names))
    attributes = {
        name: "einsum_op" if isinstance(linears[name], nnx.Einsum) else "dot_general"
        for name in names
    }
    before = {name: getattr(linears[name], attributes[name]) for name in names}

    def set_hook(name: str, hook) -> None:
        setattr(
            linears[name],
            attributes[name],
            nnx.data(hook) if isinstance(hook, nnx.Module) else nnx.static(hook),
        )

    try:
        for name in names:
            keep = functools.partial(_keep, recording, name, rows)
            hook = functools.partial(
                _einsum if attributes[name] == "einsum_op" else _dot_general, before[name], keep
            )
            set_hook(name, hook)
        with (
            flax_attention.record(model, recording, heads=heads, tokens=tokens)
            if heads
            else contextlib.nullcontext()
        ):
            yield recording
        jax.effects_barrier()
    finally:
        for name in names:
            set_hook(name, before[name])


def depth(
    model: nnx.Module,
    run: Callable,
    recipes: Sequence[str | Recipe] | None,
    *,
    rows: int,
    options: dict,
) -> Depth:
    """As ``fp8ref.study.depth``.

    Raises:   ValueError: as there.
    """

    def under(recipe: Recipe) -> Seen:
        if recipe.delayed:
            raise ValueError(
                "delayed scaling takes amaxes of steps before, which one forward pass has not. "
                "Use 'tensorwise'."
            )
        with quiet():
            converted = fj.convert(nnx.clone(model), recipe, **options)
        return seen(converted, len(nnx_hooks.hooks(converted)))

    def seen(model: nnx.Module, in_fp8: int = 0) -> Seen:
        with record(model, rows=rows, layers="*") as recording:
            out = run(model)
        if not isinstance(out, jax.Array) or not jnp.issubdtype(out.dtype, jnp.floating):
            raise ValueError(
                f"run gives an array of floats, such as logits; got {type(out).__name__}."
            )
        return Seen(recordings.inputs(recording), np.asarray(out, np.float32), in_fp8)

    return depth_error.compare(seen(model), seen(model), under, recipes)


def attention(model: nnx.Module, run: Callable, *, heads: int, tokens: int) -> Recording:
    """What one forward pass has of attention."""
    recording = Recording(framework="flax")
    with flax_attention.record(model, recording, heads=heads, tokens=tokens):
        run(model)
    return recording


def _dot_general(
    inner: Callable | None,
    keep: Callable,
    x,
    w,
    dimension_numbers,
    precision=None,
    preferred_element_type=None,
    **more,
):
    """``dot_general`` of a layer that reports x, w and the gradient of its result as rows."""
    product: Callable = functools.partial(
        inner or lax.dot_general,
        dimension_numbers=dimension_numbers,
        precision=precision,
        preferred_element_type=preferred_element_type,
        **more,
    )
    (x_dims, w_dims), (batch, _) = dimension_numbers
    if batch:  # not a linear
        return product(x, w)
    return _reporting(product, keep, x, w, tuple(x_dims), tuple(w_dims))


def _einsum(inner: Callable, keep: Callable, subscripts: str, x, w, **more):
    """The same of an einsum."""
    product = functools.partial(inner, subscripts, **more)
    left, out = subscripts.replace(" ", "").split("->")
    # a letter for each dim of ...
    dots = "".join(map(chr, range(x.ndim - len(left.split(",")[0].replace("...", "")))))
    a, b = (term.replace("...", dots) for term in left.split(","))
    out = out.replace("...", dots)
    contracted = [letter for letter in a if letter in b]
    # not a linear
    if (
        not contracted
        or len(set(a + b)) != len(a + b) - len(contracted)
        or set(out) != set(a + b) - set(contracted)
    ):
        return product(x, w)
    # rows, then the dims of N
    order = tuple(out.index(letter) for letter in a + b if letter not in contracted)
    x_dims, w_dims = (tuple(term.index(letter) for letter in contracted) for term in (a, b))
    return _reporting(product, keep, x, w, x_dims, w_dims, order)


def _reporting(
    product: Callable,
    keep: Callable,
    x,
    w,
    x_dims: tuple[int, ...],
    w_dims: tuple[int, ...],
    order: tuple[int, ...] | None = None,
):
    """product(x, w), whose operands and gradient are handed to ``keep`` as rows.

    x_dims, w_dims: the contracted dims. order: the result's dims, x's first; None: as is.
    """
    if not x.size:
        return product(x, w)
    n = w.size // math.prod(w.shape[d] for d in w_dims)

    @jax.custom_vjp
    def reporting(x, w):
        return product(x, w)

    def forward(x, w):
        return product(x, w), (x, w)

    def backward(saved, grad):
        gradient = (grad if order is None else grad.transpose(order)).reshape(-1, n)
        # the input says of which call it is
        jax.debug.callback(keep, input=_rows(saved[0], x_dims), grad_output=gradient)
        return jax.vjp(product, *saved)[1](grad)

    reporting.defvjp(forward, backward)
    jax.debug.callback(keep, input=_rows(x, x_dims), weight=_rows(w, w_dims))
    return reporting(x, w)


def _rows(x, contracted: tuple[int, ...]):
    """[rows, contracted], the other dims first."""
    kept = [d for d in range(x.ndim) if d not in contracted]
    return x.transpose(*kept, *contracted).reshape(-1, math.prod(x.shape[d] for d in contracted))


def _keep(recording: Recording, name: str, rows: int, **operands: jax.Array) -> None:
    """Record operands of a layer by role; of calls with another input than the first nothing."""
    kept_operands = {
        f"{name}/{role}": recordings.kept(np.asarray(x).astype(np.float32), rows)
        for role, x in operands.items()
    }
    first = recording.operands.get(f"{name}/input")
    if first is None or np.array_equal(
        kept_operands[f"{name}/input"].kept, first.kept, equal_nan=True
    ):
        recording.operands |= {
            key: operand for key, operand in kept_operands.items() if key not in recording.operands
        }
