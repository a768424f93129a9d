"""How the casts and scales of libraries are called on NumPy arrays.

A framework is imported when a function of it is made, not with this module.
"""

from collections.abc import Callable

import numpy as np

from fp8ref.conformance.kit.arrays import as_numpy
from fp8ref.formats import E8M0FNU, Format
from fp8ref.sim.quantize import cast

Run = Callable[[np.ndarray], np.ndarray]
"""A library's cast or scale: float32 [n] -> codes uint8 [n], or what is made of amaxes [n]."""


def on_torch(device: str, *, compiled: bool = False) -> Callable[[Callable], Run]:
    """How a function of a tensor, which gives one, runs on arrays."""
    import torch

    def run(function: Callable) -> Run:
        if not compiled:
            return lambda x: function(torch.from_numpy(x).to(device)).cpu().numpy()
        used = torch.compile(function, dynamic=True)

        def called(x: np.ndarray) -> np.ndarray:
            # lengths vary; formats' numbers are constants: torch 2.11 cannot shift them as symbols
            with torch._dynamo.config.patch(specialize_int=True):
                return used(torch.from_numpy(x).to(device)).cpu().numpy()

        return called

    return run


def on_jax(function: Callable) -> Run:
    """A function of a JAX array, jitted as in training, as a function of NumPy's."""
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
    from fp8ref.torch.quantize import cast

    return lambda x: cast.encode(x, fmt)


def fp8ref_jax_cast(fmt: Format) -> Run:
    """fp8ref.jax's cast.encode, jitted."""
    from fp8ref.jax.quantize import cast

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

    return as_numpy(
        fp8_ops.quantize(jnp.asarray(x), getattr(jnp, f"float8_{fmt}"), jnp.float32(1), jnp.float32)
    )


def gfloat_cast(x: np.ndarray, fmt: Format, saturate: bool) -> np.ndarray:
    """gfloat's round_ndarray and encode_ndarray, from float64."""
    import gfloat  # type: ignore[import-untyped]

    info = _gfloat_info(fmt)
    return gfloat.encode_ndarray(
        info, gfloat.round_ndarray(info, x.astype(np.float64), sat=saturate)
    ).astype(np.uint8)


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


def torchao_adamw_scale(amax):
    """For ``on_torch``: the scale of quantize_fp8, of blocks of one amax."""
    from torchao.optim.subclass_fp8 import quantize_fp8

    return quantize_fp8(amax[:, None], 1)[1]


def flax_scale(amax: np.ndarray, fmt: Format) -> np.ndarray:
    """fp8_ops.compute_scale, flax's scale_inv, not jitted."""
    import jax.numpy as jnp
    from flax.linen import fp8_ops

    return as_numpy(fp8_ops.compute_scale(jnp.asarray(amax), jnp.float32(1), jnp.float32(fmt.max)))


def gfloat_scale(amax: np.ndarray, fmt: Format) -> np.ndarray:
    """compute_scale_amax, one amax at a time, as e8m0 codes."""
    from gfloat.block import compute_scale_amax  # type: ignore[import-untyped]

    emax = _gfloat_info(fmt).emax
    return cast.encode(
        np.array([compute_scale_amax(emax, np.full(1, a)) for a in amax], np.float64), E8M0FNU
    )


def fp8ref_torch_scale(fmt: Format, policy: str) -> Callable:
    """For ``on_torch``."""
    from fp8ref.torch.quantize import scaling

    return lambda amax: scaling.scale_from_amax(amax, fmt, policy)


def fp8ref_jax_scale(fmt: Format, policy: str) -> Run:
    """fp8ref.jax's scaling.scale_from_amax, jitted."""
    from fp8ref.jax.quantize import scaling

    return on_jax(lambda amax: scaling.scale_from_amax(amax, fmt, policy))
