"""The three implementations of quantize and encode behind one signature: float32 values in, (codes uint8, scale float32) out."""

import functools
from collections.abc import Callable

import numpy as np

from fp8ref.formats import Format
from fp8ref.recipe import CastSpec
from fp8ref.sim import cast, scaling

Quantize = Callable[..., tuple[np.ndarray, np.ndarray]]


def sim_quantize(x: np.ndarray, spec: CastSpec, *, axis: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    q = scaling.quantize(x.astype(np.float32), spec.fmt, granularity=spec.granularity, policy=spec.policy, axis=axis)
    return q.codes, q.scale


def jax_quantize(x: np.ndarray, spec: CastSpec, *, axis: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Compiled, as in training: XLA's rewrites are part of what is checked."""
    import jax
    import jax.numpy as jnp

    from fp8ref import jax as fj

    @jax.jit
    def run(x):
        q = fj.scaling.quantize(x, spec.fmt, granularity=spec.granularity, policy=spec.policy, axis=axis)
        return jax.lax.bitcast_convert_type(q.codes, jnp.uint8), q.scale

    codes, scale = run(jnp.asarray(x.astype(np.float32)).astype(dtype))
    return np.asarray(codes), np.asarray(scale)


def torch_quantize(x: np.ndarray, spec: CastSpec, *, axis: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    import torch

    from fp8ref import torch as ft

    value = torch.from_numpy(x.astype(np.float32)).to(getattr(torch, dtype))
    q = ft.scaling.quantize(value, spec.fmt, granularity=spec.granularity, policy=spec.policy, axis=axis)
    return q.codes.view(torch.uint8).numpy(), q.scale.numpy()


def sim_encode(x: np.ndarray, fmt: Format) -> np.ndarray:
    return cast.encode(x, fmt)


def jax_encode(x: np.ndarray, fmt: Format) -> np.ndarray:
    import jax

    from fp8ref import jax as fj

    return np.asarray(jax.jit(functools.partial(fj.cast.encode, fmt=fmt))(x))


def torch_encode(x: np.ndarray, fmt: Format) -> np.ndarray:
    import torch

    from fp8ref import torch as ft

    return ft.cast.encode(torch.from_numpy(x), fmt).numpy()


QUANTIZE: dict[str, Quantize] = {"sim": sim_quantize, "jax": jax_quantize, "torch": torch_quantize}
ENCODE: dict[str, Callable[[np.ndarray, Format], np.ndarray]] = {"sim": sim_encode, "jax": jax_encode, "torch": torch_encode}
