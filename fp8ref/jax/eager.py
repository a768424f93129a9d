"""Run a function whose loops have bodies of their own as one program, where nothing traces it."""

import functools
from collections.abc import Callable
from typing import Any

import jax


def as_one_program(*static: str) -> Callable[[Callable], Callable]:
    """Decorate a function, so that a call with arrays alone runs one program that is compiled once.

    Called eagerly, a ``lax.scan`` with a closure is compiled at each call, and XLA keeps 2 MB of it.
    Where a transformation traces an argument, the function is called as it is.

    static    names of its arguments that are no arrays; they are hashable.
    """

    def decorate(function: Callable) -> Callable:
        compiled = jax.jit(function, static_argnames=static)

        @functools.wraps(function)
        def run(*args: Any, **options: Any):
            leaves = jax.tree.leaves((args, options))
            traced = any(isinstance(x, jax.core.Tracer) for x in leaves)
            return (function if traced else compiled)(*args, **options)

        return run

    return decorate
