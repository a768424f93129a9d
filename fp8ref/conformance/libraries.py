"""The registry of library casts and scales that are compared with the simulator.

``casts`` and ``scales`` are those of every installed library, bare, and fp8ref's own, for a
certificate. ``every_cast`` and ``every_scale`` are the rows of docs/libraries.md: these on a CPU,
and what libraries have besides. Below them is how each is called on NumPy arrays: a framework is
imported when a function of it is made, not with this module.
"""

import functools
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from fp8ref.conformance.arrays import as_numpy
from fp8ref.formats import E4M3FN, E5M2, E8M0FNU, FP8_FORMATS, Format
from fp8ref.sim import cast

Run = Callable[[np.ndarray], np.ndarray]
"""A library's cast or scale: float32 [n] -> codes uint8 [n], or what is made of amaxes [n]."""

OURS = ("fp8ref.jax", "fp8ref.jax gpu", "fp8ref.torch", "fp8ref.torch cuda", "fp8ref.torch cuda compiled")
"""fp8ref's own libraries.

They are held to the specification on every input, overflow and NaN included.
"""


@dataclass(frozen=True, kw_only=True)
class Function:
    """A cast, float32 [n] -> codes uint8 [n], or a scale, amax float32 [n] -> what ``made`` names.

    library    whose it is, and what it runs on if that is no CPU, such as ``torch cuda``.
    variant    which of several, if the library has more than one.
    call       what is called, as code.
    saturates  whether a cast is asked to saturate.
    made       by a scale: ``scale``, ``scale_inv`` or ``e8m0``, the code of the latter.
    slow       whether it takes one number at a time.
    """

    library: str
    fmt: Format
    run: Run = field(repr=False)
    variant: str = ""
    call: str = ""
    saturates: bool = False
    made: str = ""
    slow: bool = False


@functools.cache
def casts(fmt: Format) -> dict[str, Function]:
    """The bare casts of all installed libraries and fp8ref's own, by library.

    Raises:   ImportError: none is installed.
    """
    found = []
    if _installed("ml_dtypes"):
        found.append(Function(library="ml_dtypes", fmt=fmt, call="`x.astype(dtype)`", run=ml_dtypes_cast(fmt)))
    for suffix, run in _torch_devices():
        found.append(Function(library=f"torch{suffix}", fmt=fmt, call="`x.to(dtype)`", run=run(torch_cast(fmt))))
        if _installed("torchao"):
            ours = run(fp8ref_torch_cast(fmt))
            found.append(Function(library=f"fp8ref.torch{suffix}", fmt=fmt, call="`cast.encode(x, fmt)`", run=ours, saturates=True))
    if _installed("jax"):
        found.append(Function(library=f"jax{_jax_device()}", fmt=fmt, call="`x.astype(dtype)`, jitted", run=jax_cast(fmt)))
    if _installed("jax", "flax", "optax"):
        call = "`cast.encode(x, fmt)`, jitted"
        found.append(Function(library=f"fp8ref.jax{_jax_device()}", fmt=fmt, call=call, run=fp8ref_jax_cast(fmt), saturates=True))
    return _by_library(found)


@functools.cache
def scales(fmt: Format, policy: str) -> dict[str, Function]:
    """The scales of a policy that torchao has, or, where it has none, fp8ref.torch; and those of
    fp8ref.jax.

    Raises:   ImportError: none is installed.
    """
    found = []
    for suffix, run in _torch_devices() if _installed("torchao") else ():
        if policy != "torchao_mask":  # torchao has no such rounding
            scale = run(torchao_scale(fmt, power_of_two=policy == "torchao_pow2"))
            found.append(Function(library=f"torchao{suffix}", fmt=fmt, run=scale, made="scale"))
        else:
            found.append(Function(library=f"fp8ref.torch{suffix}", fmt=fmt, run=run(fp8ref_torch_scale(fmt, policy)), made="scale"))
    if _installed("jax", "flax", "optax"):
        found.append(Function(library=f"fp8ref.jax{_jax_device()}", fmt=fmt, run=fp8ref_jax_scale(fmt, policy), made="scale"))
    return _by_library(found)


def every_cast() -> Iterator[Function]:
    """Every cast of a library on a CPU, overflowing as the library does when it is not asked to do
    otherwise.
    """
    for fmt in FP8_FORMATS.values():
        yield from (f for name, f in casts(fmt).items() if " " not in name)  # a device stands behind a blank
    for fmt in (E4M3FN, E5M2):
        saturated, quantize = on_torch("cpu")(torchao_cast(fmt)), functools.partial(flax_cast, fmt=fmt)
        yield Function(library="torchao", variant="saturated", call="`to_fp8_saturated(x, dtype)`", fmt=fmt, run=saturated)
        yield Function(library="flax", variant="quantize", call="`fp8_ops.quantize(x, dtype, 1, float32)`", fmt=fmt, run=quantize)
        for saturate in (False, True):
            call = f"`encode_ndarray(fi, round_ndarray(fi, x, sat={saturate}))`"
            run = functools.partial(gfloat_cast, fmt=fmt, saturate=saturate)
            yield Function(library="gfloat", variant="sat" if saturate else "", call=call, fmt=fmt, run=run)


def every_scale() -> Iterator[Function]:
    """Every scale of a library on a CPU."""
    for fmt in (E4M3FN, E5M2):
        torchao = Function(library="torchao", fmt=fmt, made="scale", variant="amax_to_scale", call="`amax_to_scale(amax, dtype)`",
                           run=on_torch("cpu")(torchao_scale(fmt)))  # fmt: skip
        yield torchao
        yield replace(torchao, variant="amax_to_scale_pow2", call="`amax_to_scale(amax, dtype, round_scales_to_power_of_2=True)`",
                      run=on_torch("cpu")(torchao_scale(fmt, power_of_two=True)))  # fmt: skip
        for mode in ("floor", "rceil", "ceil", "even"):
            call = f"`to_mx(x, dtype, 32, {mode.upper()})`"
            yield replace(torchao, variant=f"mx_{mode}", call=call, run=on_torch("cpu")(torchao_mx_scale(fmt, mode)), made="e8m0")
        yield Function(library="flax", variant="compute_scale", call="`fp8_ops.compute_scale(amax, 1, max)`", fmt=fmt,
                       run=functools.partial(flax_scale, fmt=fmt), made="scale_inv")  # fmt: skip
        yield Function(library="gfloat", variant="compute_scale_amax", call="`compute_scale_amax(fi.emax, x)`", fmt=fmt,
                       run=functools.partial(gfloat_scale, fmt=fmt), made="e8m0", slow=True)  # fmt: skip
        for policy in ("torchao", "torchao_pow2", "torchao_mask", "mx_floor", "mx_rceil", "te_mxfp8"):
            ours = Function(library="fp8ref.torch", variant=policy, call=f"`scaling.scale_from_amax(amax, fmt, {policy!r})`", fmt=fmt,
                            run=on_torch("cpu")(fp8ref_torch_scale(fmt, policy)), made="scale")  # fmt: skip
            yield ours
            yield replace(ours, library="fp8ref.jax", run=fp8ref_jax_scale(fmt, policy))


def one_thread() -> None:
    """Give torch, where it is installed, one thread in this process, which is one of several."""
    if _installed("torch"):
        import torch

        torch.set_num_threads(1)


def _torch_devices() -> list[tuple[str, Callable[[Callable], Run]]]:
    """(suffix of the library's name, ``on_torch``): a CPU, and a GPU if there is one, there
    compiled too.
    """
    if not _installed("torch"):
        return []
    import torch

    found = [("", on_torch("cpu"))]
    if torch.cuda.is_available():
        found += [(" cuda", on_torch("cuda")), (" cuda compiled", on_torch("cuda", compiled=True))]
    return found


def _jax_device() -> str:
    import jax

    return "" if jax.default_backend() == "cpu" else f" {jax.default_backend()}"


def _installed(*modules: str) -> bool:
    return all(importlib.util.find_spec(m) is not None for m in modules)


def _by_library(found: list[Function]) -> dict[str, Function]:
    if not found:
        raise ImportError("a certificate compares libraries with the simulator; none is installed. Install fp8ref[all].")
    return {function.library: function for function in found}


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
