"""How each library's casts, scales and quantizers are called on NumPy arrays.

Casts are float32 [n] -> codes uint8 [n], scales are amax float32 [n] -> scale, scale_inv or e8m0
code [n]. A framework is imported when a function of it is made, not with this module.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np

from fp8ref.conformance.arrays import as_numpy
from fp8ref.formats import E8M0FNU, FORMATS, Format
from fp8ref.recipe import CastSpec
from fp8ref.sim import cast, scaling

Run = Callable[[np.ndarray], np.ndarray]
"""A library's cast or scale: float32 [n] -> codes uint8 [n], or what is made of amaxes [n]."""


def on_torch(device: str, *, compiled: bool = False) -> Callable[[Callable], Run]:
    """How a function of a tensor, which gives one, runs on arrays."""
    import torch

    def run(function: Callable) -> Run:
        used = torch.compile(function, dynamic=True) if compiled else function
        return lambda x: used(torch.from_numpy(x).to(device)).cpu().numpy()

    return run


def on_jax(function: Callable) -> Run:
    """A function of a JAX array, which gives one, as a function of NumPy's; jitted, as it is in
    training.
    """
    import jax

    compiled = jax.jit(function)
    return lambda x: np.asarray(compiled(x))


def ml_dtypes_cast(fmt: Format) -> Run:
    """NumPy's astype to ml_dtypes' dtype."""
    import ml_dtypes

    dtype = getattr(ml_dtypes, f"float8_{fmt}")

    def encode(x: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            return x.astype(dtype).view(np.uint8)

    return encode


def torch_cast(fmt: Format) -> Callable:
    """For ``on_torch``."""
    import torch

    dtype = getattr(torch, f"float8_{fmt}")
    return lambda x: x.to(dtype).view(torch.uint8)


def jax_cast(fmt: Format) -> Run:
    """astype to JAX's dtype, jitted."""
    import jax
    import jax.numpy as jnp

    dtype = getattr(jnp, f"float8_{fmt}")
    return on_jax(lambda x: jax.lax.bitcast_convert_type(x.astype(dtype), jnp.uint8))


def fp8ref_torch_cast(fmt: Format) -> Callable:
    """For ``on_torch``."""
    from fp8ref.torch import cast

    return lambda x: cast.encode(x, fmt)


def fp8ref_jax_cast(fmt: Format) -> Run:
    """fp8ref.jax's cast.encode, jitted."""
    from fp8ref.jax import cast

    return on_jax(lambda x: cast.encode(x, fmt))


def torchao_cast(fmt: Format) -> Callable:
    """For ``on_torch``: to_fp8_saturated."""
    import torch
    from torchao.float8.float8_utils import to_fp8_saturated

    dtype = getattr(torch, f"float8_{fmt}")
    return lambda x: to_fp8_saturated(x, dtype).view(torch.uint8)


def flax_cast(x: np.ndarray, fmt: Format) -> np.ndarray:
    """fp8_ops.quantize under a scale of 1, not jitted."""
    import jax.numpy as jnp
    from flax.linen import fp8_ops

    return as_numpy(fp8_ops.quantize(jnp.asarray(x), getattr(jnp, f"float8_{fmt}"), jnp.float32(1), jnp.float32))


def gfloat_cast(x: np.ndarray, fmt: Format, saturate: bool) -> np.ndarray:
    """gfloat's round_ndarray and encode_ndarray, from float64."""
    import gfloat  # type: ignore[import-untyped]

    info = _gfloat_info(fmt)
    return gfloat.encode_ndarray(info, gfloat.round_ndarray(info, x.astype(np.float64), sat=saturate)).astype(np.uint8)


def _gfloat_info(fmt: Format):
    from gfloat import formats

    return {"e4m3fn": formats.format_info_ocp_e4m3, "e5m2": formats.format_info_ocp_e5m2}[fmt.name]


def torchao_scale(fmt: Format, *, power_of_two: bool = False) -> Callable:
    """For ``on_torch``: amax_to_scale."""
    import torch
    from torchao.float8.float8_utils import amax_to_scale

    dtype = getattr(torch, f"float8_{fmt}")
    return lambda amax: amax_to_scale(amax, dtype, round_scales_to_power_of_2=power_of_two)


def torchao_mx_scale(fmt: Format, mode: str) -> Callable:
    """For ``on_torch``: the e8m0 codes of to_mx."""
    import torch
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    dtype = getattr(torch, f"float8_{fmt}")

    def codes(amax):
        blocks = torch.nn.functional.pad(amax[:, None], (0, 31))  # [n, 32]: an amax and 31 zeros
        return to_mx(blocks, dtype, 32, ScaleCalculationMode(mode))[0].view(torch.uint8).reshape(-1)

    return codes


def flax_scale(amax: np.ndarray, fmt: Format) -> np.ndarray:
    """fp8_ops.compute_scale, flax's scale_inv, not jitted."""
    import jax.numpy as jnp
    from flax.linen import fp8_ops

    return as_numpy(fp8_ops.compute_scale(jnp.asarray(amax), jnp.float32(1), jnp.float32(fmt.max)))


def gfloat_scale(amax: np.ndarray, fmt: Format) -> np.ndarray:
    """compute_scale_amax, one amax at a time, as e8m0 codes."""
    from gfloat.block import compute_scale_amax  # type: ignore[import-untyped]

    emax = _gfloat_info(fmt).emax
    return cast.encode(np.array([compute_scale_amax(emax, np.full(1, a)) for a in amax], np.float64), E8M0FNU)


def fp8ref_torch_scale(fmt: Format, policy: str) -> Callable:
    """For ``on_torch``."""
    from fp8ref.torch import scaling

    return lambda amax: scaling.scale_from_amax(amax, fmt, policy)


def fp8ref_jax_scale(fmt: Format, policy: str) -> Run:
    """fp8ref.jax's scaling.scale_from_amax, jitted."""
    from fp8ref.jax import scaling

    return on_jax(lambda amax: scaling.scale_from_amax(amax, fmt, policy))


class Quantizer(Protocol):
    """A quantizer and a cast, of NumPy arrays.

    Shapes:   x float32 of any shape, of axis the reduced one; codes uint8 of its shape; scale
              float32 of ``granularity.scale_shape``.
    """

    def quantize(self, x: np.ndarray, spec: CastSpec, *, axis: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
        """The codes and scale of x, first rounded to ``dtype``, the tensor's hp dtype."""
        ...

    def encode(self, x: np.ndarray, fmt: Format) -> np.ndarray:
        """The codes of the bare cast, saturating, from float32."""
        ...


def quantizers(names: Iterable[str]) -> dict[str, Quantizer]:
    """Fresh quantizers of these names: "sim", "jax", "torch"."""
    classes: dict[str, Callable[[], Quantizer]] = {"sim": _SimQuantizer, "jax": _JaxQuantizer, "torch": _TorchQuantizer}
    return {name: classes[name]() for name in names}


class _SimQuantizer:
    def quantize(self, x: np.ndarray, spec: CastSpec, *, axis: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
        x = cast.round_to(x, FORMATS[dtype])
        q = scaling.quantize(x, spec.fmt, granularity=spec.granularity, policy=spec.policy, axis=axis)
        return q.codes, q.scale

    def encode(self, x: np.ndarray, fmt: Format) -> np.ndarray:
        return cast.encode(x, fmt)


class _JaxQuantizer:
    """Compiled, as in training: XLA's rewrites are part of what is compared. Each (spec, axis) is
    compiled once a shape.
    """

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
        return fp8ref_jax_cast(fmt)(x)


class _TorchQuantizer:
    """Eager, on the CPU."""

    def quantize(self, x: np.ndarray, spec: CastSpec, *, axis: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
        import torch

        from fp8ref.torch import scaling

        value = torch.from_numpy(np.ascontiguousarray(x, np.float32)).to(getattr(torch, dtype))
        q = scaling.quantize(value, spec.fmt, granularity=spec.granularity, policy=spec.policy, axis=axis)
        return q.codes.view(torch.uint8).numpy(), q.scale.numpy()

    def encode(self, x: np.ndarray, fmt: Format) -> np.ndarray:
        return on_torch("cpu")(fp8ref_torch_cast(fmt))(x)
