"""Show what the passes of attention make to whoever watches, from compiled programs of one
device.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fp8ref.jax.attention import counts as attention_counts
from fp8ref.jax.attention.operands.heads import Heads
from fp8ref.jax.attention.operands.inputs import DeviceCall, Inputs
from fp8ref.shared import contexts
from fp8ref.spec.attention.products import Phase

_watcher: ContextVar[Callable | None] = ContextVar("fp8ref_jax_attention_watcher", default=None)


def watching(watcher: Callable) -> AbstractContextManager[None]:
    """In this context, attention that is traced calls watcher(layer, phase, arrays) when it runs.

    arrays  NumPy arrays of what the pass made, by ``<what>/<part>`` of ``attention.products.SHOWN``
            and ``PARTS``.
    """
    return contexts.setting(_watcher, watcher)


def watcher() -> Callable | None:
    """The watcher of this context."""
    return _watcher.get()


def show(call: DeviceCall, phase: Phase, arrays: dict[str, Array]) -> None:
    """Call the watcher when the program runs."""
    assert call.watcher is not None
    jax.debug.callback(functools.partial(call.watcher, call.layer, phase), arrays)


def forward_arrays(qkv: Inputs, result, call: DeviceCall) -> dict[str, Array]:
    """What a forward pass made, and of what softcap and sinks."""
    values = zip(("q", "k", "v"), qkv[:3], strict=True)
    shown: dict = {f"{role}/value": x.astype(jnp.float32) for role, x in values}
    shown |= {
        "s/value": result.scores,
        "p/scale": result.scale_p,
        "p/codes": result.p_codes,
        "o/value": result.o.astype(qkv.q.dtype).astype(jnp.float32),
        "softcap/value": None if call.softcap is None else jnp.float32(call.softcap),
        "sinks/value": None if qkv.sinks is None else qkv.sinks.astype(jnp.float32),
    }
    counted = _counted("p", result.amaxes.get("s"), result.counts, (2, 0, 1))
    return _present(shown) | _quantized(result.tensors) | counted


def backward_arrays(do: Array, grads, scale_p: Array) -> dict[str, Array]:
    """What a backward pass made; scale_p: of its probabilities."""
    matrices = grads.matrices
    shown = {
        "do/value": do.astype(jnp.float32),
        "p/scale": scale_p,
        "p/codes": matrices.get("p_codes"),
        "ds/value": matrices.get("ds"),
    }
    if "ds_codes" in matrices:
        shown |= {"ds/codes": matrices["ds_codes"], "ds/scale": grads.scale_ds.scale}
    values = {"dq/value": grads.dq, "dk/value": grads.dk, "dv/value": grads.dv}
    counted = _counted("ds", grads.amaxes.get("ds"), grads.counts, (3, 1, 2))
    return _present(shown | values) | _quantized(grads.tensors) | counted


def _counted(
    role: str, amax: Array | None, counts: Array | None, at: tuple[int, ...]
) -> dict[str, Array]:
    """Amax, elements, clipped and lost ones of P or dS, if the pass counts."""
    if counts is None:
        return {}
    assert amax is not None
    return {f"{role}/amax": amax, f"{role}/counts": attention_counts.numbers(counts)[np.array(at)]}


def _present(arrays: dict) -> dict[str, Array]:
    return {key: x for key, x in arrays.items() if x is not None}


def _quantized(tensors: dict[str, Heads]) -> dict[str, Array]:
    shown: dict[str, Array] = {}
    for role, x in tensors.items():
        if x.codes.dtype.itemsize == 1:
            codes = lax.bitcast_convert_type(x.codes, jnp.uint8)
            shown |= {f"{role}/scale": x.scale, f"{role}/codes": codes}
    return shown
