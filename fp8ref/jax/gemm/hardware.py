"""Simulated hardware for JAX: FP8 GEMMs by a function on the host, not XLA's dots (spec G-19).

    with hardware.simulating(sim_hardware.by_name("hopper")):  # fp8ref.sim.gemm.hardware
        y, _ = linear.apply(x, w, recipe="tensorwise")

``matmul`` calls a ``fp8ref.spec.hardware.Multiply`` back from the compiled program, with codes and
scales in host memory.
"""

import contextlib
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fp8ref.formats import BFLOAT16, E2M1FN, FLOAT16, FLOAT32, FP8_FORMATS
from fp8ref.jax.distributed import one_device, sharding
from fp8ref.jax.quantize import cast
from fp8ref.jax.quantize.scaling import Quantized
from fp8ref.shared.errors import require
from fp8ref.spec import support
from fp8ref.spec.hardware import Factor, Multiply

__all__ = ["active", "check_devices", "refuse", "simulating"]

SCOPE = "simulated"
"""The first word in the scope of a simulated GEMM, ``simulated:<plan>:<fast or slow>``."""

THREADS = 4
"""Threads of XLA's pool for each device of a mesh.

With fewer than two, the devices wait for each other forever (measured, jax 0.10).
"""

_ON_A_MESH = (
    "on a mesh, simulated hardware multiplies inside shard_map, each device its own pieces; under "
    "plain jit XLA would gather them all for one call. Set parallel.through to shard_map."
)

_CODES = {
    jnp.dtype(dtype): FP8_FORMATS[name]
    for name, dtype in cast.DTYPES.items()
    if name in FP8_FORMATS
}
_FORMATS = {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16}


_simulated = jax.make_user_context(default_value=None)


def simulating(multiply: Multiply | None):
    """In this context, multiply computes FP8 GEMMs of linears and attention. None changes nothing.

    Scope:    what is traced, or runs eagerly, in it: linears, contractions, Flax's hooks and
              attention by tiles, in both passes. What it cannot multiply is refused there: stacks
              of matrices, experts, attention without FP8 codes, or by cuDNN's kernel. jax.jit
              compiles a program for each multiply.
    """
    return contextlib.nullcontext() if multiply is None else _simulated(multiply)


def active() -> Multiply | None:
    """The function of the innermost context; None outside all contexts."""
    return _simulated.value


def refuse(name: str, why: str, instead: str = "") -> None:
    """ValueError, naming the layer, inside ``simulating``.

    why      what simulated hardware does, and what it got.
    instead  a remedy besides leaving the context.
    """
    if active() is not None:
        raise ValueError(
            f"{name}: simulated hardware {why}. Leave hardware.simulating for this layer{instead}."
        )


def check(x: Array, w: Array, mode: sharding.Mode, name: str) -> None:
    """ValueError for operands or devices that simulated hardware cannot multiply on."""
    if w.ndim > 2:
        raise ValueError(
            f"{name}: simulated hardware needs x [M, K] and w [N, K]; got a batch, {x.shape} and "
            f"{w.shape}. Take it out of hardware.simulating, or use linears."
        )
    try:
        devices = 1 if mode == "one" else jax.typeof(x).sharding.mesh.size
        check_devices(devices, mapped=mode != "jit", platform=jax.default_backend())
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def check_devices(devices: int, *, mapped: bool, platform: str) -> None:
    """ValueError if so many devices' callbacks would deadlock, or XLA would gather."""
    support.require("devices of simulated hardware", "jax", platform)
    if devices == 1:
        return
    if not mapped:
        raise ValueError(_ON_A_MESH)
    nproc, needed = os.environ.get("NPROC", ""), THREADS * devices
    if not nproc.isdigit() or int(nproc) < needed:
        raise ValueError(
            f"{devices} CPU devices that call back to the host need {needed} threads, or they "
            f"deadlock; NPROC is {nproc or 'not set'}. Set NPROC={needed} before jax starts."
        )


def matmul(
    a: Quantized, b: Quantized, *, by: Multiply, accumulate: str, epilogue: str, out_dtype
) -> Array:
    """[M, K] x [N, K] -> [M, N] of out_dtype by a function on the host; an operand of axis 0, or
    -2, is [K, M].

    Shapes:   matrices of native float8 codes; scale_inv (), one for each row, or of blocks.
    Order:    that of the function: XLA touches neither sum, scales nor rounding.
    Threads:  a separate thread calls the function: the threads of XLA's callbacks flush subnormal
              numbers to zero.
    """
    axes = tuple(q.axis % 2 for q in (a, b) if isinstance(q.axis, int))
    shape = a.codes.shape[1 - axes[0]], b.codes.shape[1 - axes[1]]
    require(
        E2M1FN not in (a.fmt, b.fmt),
        f"simulated hardware multiplies FP8 codes; got {a.fmt} x {b.fmt}. Leave "
        "hardware.simulating for this linear (R-9).",
    )
    kinds = tuple((_CODES[jnp.dtype(q.codes.dtype)], q.granularity) for q in (a, b))
    out_dtype = jnp.dtype(out_dtype)

    def multiplied(codes: tuple, scales: tuple) -> np.ndarray:
        factors = (
            Factor(np.asarray(c).view(np.uint8), np.asarray(s), *kind)
            if axis == 1
            else Factor(np.asarray(c).view(np.uint8).T, np.asarray(s).T, *kind)
            for c, s, axis, kind in zip(codes, scales, axes, kinds, strict=True)
        )
        product = by(
            *factors,
            accumulate=accumulate,  # type: ignore[arg-type]
            epilogue=epilogue,
            out_dtype=_FORMATS[out_dtype.name],
        )
        return _narrowed(product, out_dtype)

    result, scales = jax.ShapeDtypeStruct(shape, out_dtype), (a.scale_inv, b.scale_inv)
    with jax.named_scope(f"{SCOPE}:{by.name}:{accumulate}"):
        return _called(multiplied, result, (a.codes, b.codes), scales)


def batched_matmul(a: Array, b: Array, *, by: Multiply, accumulate: str) -> Array:
    """[n, M, K] x [n, N, K] -> float32 [n, M, N] of native float8 codes, each of the n products by
    a function on the host, as ``matmul``.
    """
    one, shape = np.ones((), np.float32), (a.shape[0], a.shape[1], b.shape[1])
    fmts = [_CODES[x.dtype] for x in (a, b)]

    def multiplied(codes: tuple, _: tuple) -> np.ndarray:
        pairs = zip(*(np.asarray(x).view(np.uint8) for x in codes), strict=True)
        factors = (
            [Factor(codes, one, fmt, "tensorwise") for codes, fmt in zip(pair, fmts, strict=True)]
            for pair in pairs
        )
        products = [
            by(*pair, accumulate=accumulate, epilogue="scale_then_round", out_dtype=FLOAT32)  # type: ignore[arg-type]
            for pair in factors
        ]
        return np.stack(products)

    with jax.named_scope(f"{SCOPE}:{by.name}:{accumulate}"):
        return _called(multiplied, jax.ShapeDtypeStruct(shape, jnp.float32), (a, b), ())


def _called(
    multiplied: Callable[[tuple, tuple], np.ndarray],
    result: jax.ShapeDtypeStruct,
    codes: tuple[Array, Array],
    scales: tuple[Array, ...],
) -> Array:
    """The host's result of codes and scales of one device."""
    thread = _thread()

    def on_host(codes: tuple, scales: tuple) -> np.ndarray:
        return thread.submit(multiplied, codes, scales).result()

    if not getattr(jax.typeof(codes[0]).sharding.mesh, "manual_axes", ()):
        # a mesh that only the inputs or shardings of a jit bring
        codes = one_device.check(codes[0], _ON_A_MESH), one_device.check(codes[1], _ON_A_MESH)
    out = jax.pure_callback(on_host, result, codes, scales, vmap_method="sequential")
    return sharding.varying_as(out, *codes, *scales)


def _narrowed(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """float32 values of dtype, in dtype; a bfloat16 is the upper half of its float32."""
    if dtype == jnp.bfloat16:
        return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16).view(dtype)
    return values.astype(dtype)


@functools.cache
def _thread() -> ThreadPoolExecutor:
    """One thread, started while tracing: XLA's threads flush subnormals."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="fp8ref-simulated")
    thread.submit(int).result()
    return thread
