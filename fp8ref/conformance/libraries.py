"""The casts and scales that a certificate examines: those of each library that is installed, bare, and fp8ref's own."""

import functools
import importlib.util
from collections.abc import Callable

import numpy as np

from fp8ref.formats import Format

# Held to the specification on every input, overflow and NaN included
OURS = ("fp8ref.jax", "fp8ref.jax gpu", "fp8ref.torch", "fp8ref.torch cuda", "fp8ref.torch cuda compiled")
Encode = Callable[[np.ndarray], np.ndarray]


@functools.cache
def casts(fmt: Format) -> dict[str, tuple[Encode, bool]]:
    """For each subject, float32 [n] -> codes uint8 [n], and whether it is asked to saturate."""
    found: dict[str, tuple[Encode, bool]] = {}
    if _installed("ml_dtypes"):
        found["ml_dtypes"] = _ml_dtypes(fmt), False
    for suffix, run in _torchs():
        found[f"torch{suffix}"] = run(_torch(fmt)), False
        if _installed("torchao"):
            found[f"fp8ref.torch{suffix}"] = run(_fp8ref_torch(fmt)), True
    if _installed("jax"):
        found[f"jax{_jax_device()}"] = _jax(fmt), False
    if _installed("jax", "flax", "optax"):
        found[f"fp8ref.jax{_jax_device()}"] = _fp8ref_jax(fmt), True
    return _require(found)


@functools.cache
def scales(fmt: Format, policy: str) -> dict[str, Encode]:
    """For each subject, amax float32 [n] -> scale float32 [n]."""
    found: dict[str, Encode] = {}
    for suffix, run in _torchs() if _installed("torchao") else ():
        if policy != "torchao_mask":  # torchao has no such rounding
            found[f"torchao{suffix}"] = run(_torchao_scale(fmt, policy))
        else:
            found[f"fp8ref.torch{suffix}"] = run(_torch_scale(fmt, policy))
    if _installed("jax", "flax", "optax"):
        found[f"fp8ref.jax{_jax_device()}"] = _jax_scale(fmt, policy)
    return _require(found)


def one_thread() -> None:
    """For a process of several: torch, where it is installed, takes one thread."""
    if _installed("torch"):
        import torch

        torch.set_num_threads(1)


def _installed(*modules: str) -> bool:
    return all(importlib.util.find_spec(m) is not None for m in modules)


def _require(found: dict) -> dict:
    if not found:
        raise ImportError("a certificate compares libraries with the simulator; none is installed. Install fp8ref[all].")
    return found


def _ml_dtypes(fmt: Format) -> Encode:
    import ml_dtypes

    dtype = getattr(ml_dtypes, f"float8_{fmt.name}")

    def encode(x: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            return x.astype(dtype).view(np.uint8)

    return encode


def _torchs() -> list[tuple[str, Callable[[Callable], Encode]]]:
    """(suffix, how a function of tensors is run on arrays): on a CPU, and on a GPU if there is one, there compiled too."""
    if not _installed("torch"):
        return []
    import torch

    found = [("", on("cpu"))]
    if torch.cuda.is_available():
        found += [(" cuda", on("cuda")), (" cuda compiled", on("cuda", compiled=True))]
    return found


def on(device: str, *, compiled: bool = False) -> Callable[[Callable], Encode]:
    """How a function of a tensor, which gives one, is run on arrays."""
    import torch

    def run(function: Callable) -> Encode:
        used = torch.compile(function, dynamic=True) if compiled else function
        return lambda x: used(torch.from_numpy(x).to(device)).cpu().numpy()

    return run


def _jax_device() -> str:
    import jax

    return "" if jax.default_backend() == "cpu" else f" {jax.default_backend()}"


def _torch(fmt: Format) -> Callable:
    import torch

    dtype = getattr(torch, f"float8_{fmt.name}")
    return lambda x: x.to(dtype).view(torch.uint8)


def _jax(fmt: Format) -> Encode:
    import jax
    import jax.numpy as jnp

    dtype = getattr(jnp, f"float8_{fmt.name}")
    compiled = jax.jit(lambda x: jax.lax.bitcast_convert_type(x.astype(dtype), jnp.uint8))
    return lambda x: np.asarray(compiled(x))


def _fp8ref_torch(fmt: Format) -> Callable:
    from fp8ref.torch import cast

    return lambda x: cast.encode(x, fmt)


def _fp8ref_jax(fmt: Format) -> Encode:
    import jax

    from fp8ref.jax import cast

    compiled = jax.jit(lambda x: cast.encode(x, fmt))
    return lambda x: np.asarray(compiled(x))


def _torchao_scale(fmt: Format, policy: str) -> Callable:
    import torch
    from torchao.float8.float8_utils import amax_to_scale

    dtype, power_of_two = getattr(torch, f"float8_{fmt.name}"), policy == "torchao_pow2"
    return lambda amax: amax_to_scale(amax, dtype, round_scales_to_power_of_2=power_of_two)


def _torch_scale(fmt: Format, policy: str) -> Callable:
    from fp8ref.torch import scaling

    return lambda amax: scaling.scale_from_amax(amax, fmt, policy)


def _jax_scale(fmt: Format, policy: str) -> Encode:
    import jax

    from fp8ref.jax import scaling

    compiled = jax.jit(lambda amax: scaling.scale_from_amax(amax, fmt, policy))
    return lambda amax: np.asarray(compiled(amax))
