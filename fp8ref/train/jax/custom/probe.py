"""One traced pass of a user's Flax NNX model: what makes its logits, what a step loses (T-10)."""

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from fp8ref.shared.errors import ConfigError

_PRODUCTS = ("dot_general", "ragged_dot", "conv_general_dilated", "gather", "scan", "while", "cond")
"""Primitives behind which nothing makes the logits: products, look-ups, and loops of products."""


def heads(
    model: nnx.Module, name: str, candidates: Sequence[str], vocab_size: int, length: int
) -> tuple[str, ...]:
    """Those linears that make the logits: no other product is between their outputs and the logits.

    A trace of tokens [1, length] says which; nothing is computed. The model is used up.
    name      of the model, for messages.
    Raises:   ConfigError: the pass fails, gives other logits, or changes an unsaved variable.
    """
    for path, layer in list(nnx.iter_graph(model, graph=True)):
        if (layer_name := ".".join(map(str, path))) in candidates:
            layer.__class__ = _naming(type(layer), layer_name)
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    inputs = (params, rest, jax.ShapeDtypeStruct((1, length), jnp.int32))
    names = [
        ".".join(map(str, path))
        for path, variable in nnx.to_flat_state(rest)
        for _ in jax.tree.leaves(variable.get_value())
    ]

    def run(params, rest, tokens):
        copy = nnx.merge(graph, params, rest)
        try:
            out = copy(tokens)
        except Exception as error:  # whatever a user's code raises
            raise ConfigError(
                f"{name} fails on tokens {list(tokens.shape)}, int32: {type(error).__name__}: "
                f"{error}"
            ) from error
        after = dict(nnx.to_flat_state(nnx.state(copy)))
        return logits_of(out, tokens, vocab_size), [
            after[path].get_value() for path, _ in nnx.to_flat_state(rest)
        ]

    jaxpr = jax.make_jaxpr(run)(*inputs).jaxpr
    first = len(jax.tree.leaves(params))
    pairs = zip(names, jaxpr.invars[first:-1], jaxpr.outvars[1:], strict=True)
    if changed := [of for of, before, after in pairs if _source(jaxpr, after) is not before]:
        raise ConfigError(
            f"{name} changes {', '.join(changed[:3])} in its forward pass, which a checkpoint "
            "would not have. Compute it anew in each pass, or leave it as it is."
        )
    reached, _ = _reached(jaxpr, [0], candidates)
    return tuple(path for path in candidates if path in reached)


def logits_of(out, tokens: jax.Array, vocab_size: int) -> jax.Array:
    """The logits [B, T, V] of what a model returned.

    Raises:   ConfigError: of another shape.
    """
    if not isinstance(out, jax.Array) or out.shape != (*tokens.shape, vocab_size):
        got = out.shape if isinstance(out, jax.Array) else type(out).__name__
        raise ConfigError(
            f"a model returns logits [B, T, V] = {(*tokens.shape, vocab_size)} of tokens [B, "
            f"T]; got {got}."
        )
    return out


def _naming(kind: type, path: str) -> type:
    """A class of layers whose output bears a name in a trace."""

    def call(self, *args, **kwargs):
        return checkpoint_name(kind.__call__(self, *args, **kwargs), path)

    return type(kind.__name__, (kind,), {"__call__": call})


def _source(jaxpr: core.Jaxpr, var) -> core.Var | None:
    """The input that a variable is, also through programs within; None if it is none."""
    eqns = {out: (eqn, i) for eqn in jaxpr.eqns for i, out in enumerate(eqn.outvars)}
    while not isinstance(var, core.Literal) and var in eqns:
        eqn, i = eqns[var]
        inner = _inner(eqn)
        if inner is None or (source := _source(inner, inner.outvars[i])) is None:
            return None
        var = eqn.invars[inner.invars.index(source)]
    return None if isinstance(var, core.Literal) else var


def _inner(eqn) -> core.Jaxpr | None:
    """The program of an equation that takes what the equation does; None if there is none."""
    for value in eqn.params.values():
        program = value.jaxpr if isinstance(value, core.ClosedJaxpr) else value
        if isinstance(program, core.Jaxpr) and len(program.invars) == len(eqn.invars):
            return program
    return None


def _reached(
    jaxpr: core.Jaxpr, outputs: Iterable[int], candidates: Sequence[str]
) -> tuple[set[str], list[int]]:
    """(names, indexes of inputs) from which some outputs of a program come without a product."""
    eqns = {var: (eqn, i) for eqn in jaxpr.eqns for i, var in enumerate(eqn.outvars)}
    reached: set[str] = set()
    seen, todo = set(), [jaxpr.outvars[i] for i in outputs]
    while todo:
        var = todo.pop()
        if isinstance(var, core.Literal) or var in seen:
            continue
        seen.add(var)
        if var not in eqns:
            continue
        eqn, i = eqns[var]
        if eqn.primitive.name == "name" and eqn.params["name"] in candidates:
            reached.add(eqn.params["name"])
        elif eqn.primitive.name in _PRODUCTS:
            continue
        elif inner := _inner(eqn):
            names, inputs = _reached(inner, [i], candidates)
            reached |= names
            todo += [eqn.invars[k] for k in inputs]
        else:
            todo += eqn.invars
    return reached, [k for k, var in enumerate(jaxpr.invars) if var in seen]
