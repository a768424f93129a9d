"""Build a user's Flax NNX model by an import path (spec T-10)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fp8ref.jax import flax as fj
from fp8ref.shared.errors import ConfigError, require
from fp8ref.train.config import user_model
from fp8ref.train.config.sections import ArchitectureConfig
from fp8ref.train.config.user_model import Shapes
from fp8ref.train.jax.custom import probe


def build(keys: ArchitectureConfig, vocab_size: int, *, seed: int) -> nnx.Module:
    """The model, with its own initial weights from this seed, in float32.

    ``source`` is an import path of a function or class; it is called with vocab_size= and rngs=.
    Raises:   ConfigError: it cannot be imported or made; grouped linears; variables of random
              numbers or batch statistics, which have no place in a step.
    """
    try:
        model = user_model.imported(keys.source or "")(vocab_size=vocab_size, rngs=nnx.Rngs(seed))
    except ConfigError:
        raise
    except Exception as error:  # whatever a user's code raises
        raise ConfigError(
            f"architecture.source {keys.source!r} cannot be made: {type(error).__name__}: {error}"
        ) from error
    text = f"architecture.source {keys.source!r} makes an nnx.Module; got {type(model).__name__}."
    require(isinstance(model, nnx.Module), text, ConfigError)
    for path, layer in nnx.iter_graph(model, graph=True):
        if isinstance(layer, fj.GroupedLinear):
            raise ConfigError(
                f"architecture.source {keys.source!r} has a GroupedLinear "
                f"({'.'.join(map(str, path))}), of which a config plans no recipe. Use an "
                "nnx.Linear for each expert."
            )
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        if isinstance(variable, nnx.RngState | nnx.BatchStat):
            raise ConfigError(
                f"architecture.source {keys.source!r} has {'.'.join(map(str, path))} of type "
                f"{type(variable).__name__}, which a step has no place for. Make it without "
                "dropout and batch norms."
            )
        value = variable.get_value()
        if isinstance(variable, nnx.Param) and jnp.issubdtype(value.dtype, jnp.floating):
            variable.set_value(value.astype(jnp.float32))
    return model


def shapes(keys: ArchitectureConfig, vocab_size: int, length: int) -> Shapes:
    """As ``architecture.shapes``.

    length    tokens of a sequence, of the pass that is traced.
    Raises:   ConfigError: as ``build`` and ``probe.heads``; a model without linears.
    """
    model = build(keys, vocab_size, seed=0)
    linears: dict[str, tuple[int, int]] = {
        row.path: (row.shape[0], row.shape[1])
        for row in fj.report(model).rows
        if row.shape is not None and row.kind in ("Linear", "LinearGeneral", "Einsum")
    }
    if not linears:
        raise ConfigError(
            f"architecture.source {keys.source!r} has no nnx.Linear, which is what a recipe "
            "converts."
        )
    could = [path for path, (n, _) in linears.items() if n == vocab_size]
    return Shapes(
        kind=f"{type(model).__module__}.{type(model).__qualname__}",
        parameters={
            name: tuple(value.shape)
            for name, value in parameters(nnx.state(model, nnx.Param)).items()
        },
        linears=linears,
        heads=probe.heads(model, f"architecture.source {keys.source!r}", could, vocab_size, length),
    )


def parameters(tree) -> dict[str, Any]:
    """{dotted path: array} of a state of parameters, in its order."""
    # the path without what a Variable adds to it
    return {
        ".".join(str(part.key) for part in path if hasattr(part, "key")): value
        for path, value in jax.tree_util.tree_leaves_with_path(tree)
    }
