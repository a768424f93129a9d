"""The implementations of quantize and encode behind one signature: float32 values in, codes uint8 and scale float32 out."""

from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np

from fp8ref.formats import FORMATS, Format
from fp8ref.recipe import CastSpec
from fp8ref.sim import cast, scaling


class Quantizer(Protocol):
    """quantize first rounds x to ``dtype``, the tensor's hp dtype; encode is the bare cast, saturating, from float32.

    Shapes:   x float32 of any shape, of axis the reduced one; codes uint8 of its shape; scale float32 of ``granularity.scale_shape``.
    """

    def quantize(self, x: np.ndarray, spec: CastSpec, *, axis: int, dtype: str) -> tuple[np.ndarray, np.ndarray]: ...
    def encode(self, x: np.ndarray, fmt: Format) -> np.ndarray: ...


class Sim:
    """The simulator's."""

    def quantize(self, x: np.ndarray, spec: CastSpec, *, axis: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
        x = cast.round_to(x, FORMATS[dtype])
        q = scaling.quantize(x, spec.fmt, granularity=spec.granularity, policy=spec.policy, axis=axis)
        return q.codes, q.scale

    def encode(self, x: np.ndarray, fmt: Format) -> np.ndarray:
        return cast.encode(x, fmt)


class Jax:
    """Compiled, as in training: XLA's rewrites are part of what is checked. Each way of quantising is compiled once a shape."""

    def __init__(self) -> None:
        self._compiled: dict[tuple, Callable] = {}

    def quantize(self, x: np.ndarray, spec: CastSpec, *, axis: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
        import jax
        import jax.numpy as jnp

        from fp8ref.jax import scaling

        def run(x):
            q = scaling.quantize(x, spec.fmt, granularity=spec.granularity, policy=spec.policy, axis=axis)
            return jax.lax.bitcast_convert_type(q.codes, jnp.uint8), q.scale

        compiled = self._compiled.setdefault((spec, axis), jax.jit(run))
        codes, scale = compiled(jnp.asarray(x, jnp.float32).astype(dtype))
        return np.asarray(codes), np.asarray(scale)

    def encode(self, x: np.ndarray, fmt: Format) -> np.ndarray:
        import jax

        from fp8ref.jax import cast

        return np.asarray(jax.jit(lambda x: cast.encode(x, fmt))(x))


class Torch:
    """PyTorch's, eager, on the CPU."""

    def quantize(self, x: np.ndarray, spec: CastSpec, *, axis: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
        import torch

        from fp8ref.torch import scaling

        value = torch.from_numpy(np.ascontiguousarray(x, np.float32)).to(getattr(torch, dtype))
        q = scaling.quantize(value, spec.fmt, granularity=spec.granularity, policy=spec.policy, axis=axis)
        return q.codes.view(torch.uint8).numpy(), q.scale.numpy()

    def encode(self, x: np.ndarray, fmt: Format) -> np.ndarray:
        import torch

        from fp8ref.torch import cast

        return cast.encode(torch.from_numpy(x), fmt).numpy()


def create(names: Iterable[str]) -> dict[str, Quantizer]:
    """Fresh quantizers of these names: "sim", "jax", "torch"."""
    classes: dict[str, Callable[[], Quantizer]] = {"sim": Sim, "jax": Jax, "torch": Torch}
    return {name: classes[name]() for name in names}
