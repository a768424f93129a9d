"""Run a function whose loops have bodies of their own as one program, where nothing traces it."""

import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax

_NONE: Mapping[str, Callable] = MappingProxyType({})


def as_one_program(
    *static: str, unnamed: Mapping[str, Callable] = _NONE
) -> Callable[[Callable], Callable]:
    """Decorate a function, so that a call with arrays alone runs one program that is compiled once.

    Called eagerly, a ``lax.scan`` with a closure is compiled at each call, and XLA keeps 2 MB of
    it. Where a transformation traces an argument, the function is called as it is.

    static    names of its arguments that are no arrays; they are hashable.
    unnamed   of these, functions that take off whose call it is, such as a layer's name: what
              differs in that alone shares a program, which the process keeps.
    """

    def decorate(function: Callable) -> Callable:
        compiled = jax.jit(function, static_argnames=static)
        signature = inspect.signature(function)

        @functools.wraps(function)
        def run(*args: Any, **options: Any):
            if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((args, options))):
                return function(*args, **options)
            call = signature.bind(*args, **options)
            for name, take_off in unnamed.items():
                call.arguments[name] = take_off(call.arguments[name])
            return compiled(*call.args, **call.kwargs)

        return run

    return decorate
