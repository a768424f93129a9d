"""The registry of library casts and scales that are compared with the simulator.

``casts`` and ``scales`` are those of every installed library, bare, and fp8ref's own, for a
certificate. ``every_cast`` and ``every_scale`` are the rows of docs/libraries.md: these on a CPU,
and what libraries have besides. ``functions`` has how each is called on NumPy arrays.
"""

import functools
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field, replace

from fp8ref.conformance.libraries import cuda_header
from fp8ref.conformance.libraries.functions import (
    Run,
    flax_cast,
    flax_scale,
    fp8ref_jax_cast,
    fp8ref_jax_scale,
    fp8ref_torch_cast,
    fp8ref_torch_scale,
    gfloat_cast,
    gfloat_scale,
    jax_cast,
    ml_dtypes_cast,
    on_torch,
    torch_cast,
    torchao_adamw_scale,
    torchao_cast,
    torchao_mx_scale,
    torchao_scale,
)
from fp8ref.conformance.libraries.transcriptions import TRANSCRIPTIONS
from fp8ref.formats import E4M3FN, E5M2, FP8_FORMATS, Format

OURS = (
    "fp8ref.jax",
    "fp8ref.jax gpu",
    "fp8ref.torch",
    "fp8ref.torch cuda",
    "fp8ref.torch cuda compiled",
)
"""fp8ref's own libraries.

They are held to the specification on every input, overflow and NaN included.
"""

CUDA_HEADER = "cuda_fp8.hpp"
"""The library of the rows that are compiled from CUDA's header, where one is installed."""


@dataclass(frozen=True)
class Function:
    """A cast, float32 [n] -> codes uint8 [n], or a scale, amax float32 [n] -> what ``made`` names.

    library    whose it is, and what it runs on if that is no CPU, such as ``torch cuda``.
    variant    which of several, if the library has more than one.
    call       what is called, as code.
    saturates  whether a cast is asked to saturate.
    made       by a scale: ``scale``, ``scale_inv`` or ``e8m0``, the code of the latter.
    slow       whether it takes one number at a time.
    source     the file that has it, in the library's package; of a transcription repository, file
               and commit.
    transcribed
               whether the library's source was transcribed, and is not run.
    """

    library: str
    fmt: Format
    run: Run = field(repr=False)
    _: KW_ONLY
    variant: str = ""
    call: str = ""
    saturates: bool = False
    made: str = ""
    slow: bool = False
    source: str = ""
    transcribed: bool = False


@functools.lru_cache(maxsize=64)
def casts(fmt: Format) -> dict[str, Function]:
    """The bare casts of all installed libraries and fp8ref's own, by library.

    Raises:   ImportError: none is installed.
    """
    functions = []
    if _installed("ml_dtypes"):
        functions.append(Function("ml_dtypes", fmt, ml_dtypes_cast(fmt), call="`x.astype(dtype)`"))
    for suffix, run in _torch_devices():
        functions.append(
            Function(f"torch{suffix}", fmt, run(torch_cast(fmt)), call="`x.to(dtype)`")
        )
        if _installed("torchao"):
            ours = run(fp8ref_torch_cast(fmt))
            functions.append(
                Function(
                    f"fp8ref.torch{suffix}", fmt, ours, call="`cast.encode(x, fmt)`", saturates=True
                )
            )
    if _installed("jax"):
        functions.append(
            Function(f"jax{_jax_device()}", fmt, jax_cast(fmt), call="`x.astype(dtype)`, jitted")
        )
    if _installed("jax", "flax", "optax"):
        call = "`cast.encode(x, fmt)`, jitted"
        functions.append(
            Function(
                f"fp8ref.jax{_jax_device()}", fmt, fp8ref_jax_cast(fmt), call=call, saturates=True
            )
        )
    return _by_library(functions)


@functools.lru_cache(maxsize=64)
def scales(fmt: Format, policy: str) -> dict[str, Function]:
    """The scales of a policy that torchao has, or, where it has none, fp8ref.torch; and those of
    fp8ref.jax.

    Raises:   ImportError: none is installed.
    """
    functions = []
    for suffix, run in _torch_devices() if _installed("torchao") else ():
        if policy != "torchao_mask":  # torchao has no such rounding
            scale = run(torchao_scale(fmt, power_of_two=policy == "torchao_pow2"))
            functions.append(Function(f"torchao{suffix}", fmt, scale, made="scale"))
        else:
            functions.append(
                Function(
                    f"fp8ref.torch{suffix}", fmt, run(fp8ref_torch_scale(fmt, policy)), made="scale"
                )
            )
    if _installed("jax", "flax", "optax"):
        functions.append(
            Function(f"fp8ref.jax{_jax_device()}", fmt, fp8ref_jax_scale(fmt, policy), made="scale")
        )
    return _by_library(functions)


def every_cast() -> Iterator[Function]:
    """Every cast of a library on a CPU, overflowing as the library does by default."""
    for fmt in FP8_FORMATS.values():
        # a device stands behind a blank
        yield from (f for name, f in casts(fmt).items() if " " not in name)
    for fmt in (E4M3FN, E5M2):
        saturated = on_torch("cpu")(torchao_cast(fmt))
        quantize = functools.partial(flax_cast, fmt=fmt)
        yield Function(
            "torchao",
            fmt,
            saturated,
            variant="saturated",
            call="`to_fp8_saturated(x, dtype)`",
            source="float8/float8_utils.py",
        )
        yield Function(
            "flax",
            fmt,
            quantize,
            variant="quantize",
            call="`fp8_ops.quantize(x, dtype, 1, float32)`",
            source="linen/fp8_ops.py",
        )
        for saturate in (False, True):
            call = f"`encode_ndarray(fi, round_ndarray(fi, x, sat={saturate}))`"
            run = functools.partial(gfloat_cast, fmt=fmt, saturate=saturate)
            yield Function(
                "gfloat",
                fmt,
                run,
                variant="sat" if saturate else "",
                call=call,
                source="round_ndarray.py",
            )
    if cuda_header.available():
        for fmt, saturate in itertools.product((E4M3FN, E5M2), (False, True)):
            call = (
                f"`__nv_cvt_float_to_fp8(x, {'__NV_SATFINITE' if saturate else '__NV_NOSAT'}, "
                "kind)`"
            )
            yield Function(
                CUDA_HEADER,
                fmt,
                functools.partial(cuda_header.encode, fmt=fmt, saturate=saturate),
                variant="sat" if saturate else "",
                call=call,
                source="include/cuda_fp8.hpp",
            )


def every_scale() -> Iterator[Function]:
    """Every scale of a library on a CPU."""
    for fmt in (E4M3FN, E5M2):
        yield from _torchao_scales(fmt)
        yield from _other_scales(fmt)


def _torchao_scales(fmt: Format) -> Iterator[Function]:
    torchao = Function(
        "torchao",
        fmt,
        on_torch("cpu")(torchao_scale(fmt)),
        made="scale",
        variant="amax_to_scale",
        call="`amax_to_scale(amax, dtype)`",
        source="float8/float8_utils.py",
    )
    yield torchao
    yield replace(
        torchao,
        variant="amax_to_scale_pow2",
        call="`amax_to_scale(amax, dtype, round_scales_to_power_of_2=True)`",
        run=on_torch("cpu")(torchao_scale(fmt, power_of_two=True)),
    )
    for mode in ("floor", "rceil", "ceil", "even"):
        call = f"`to_mx(x, dtype, 32, {mode.upper()})`"
        yield replace(
            torchao,
            variant=f"mx_{mode}",
            call=call,
            run=on_torch("cpu")(torchao_mx_scale(fmt, mode)),
            made="e8m0",
            source="prototype/mx_formats/mx_tensor.py",
        )
    if fmt is E4M3FN:  # the format of AdamWFp8's moments
        yield replace(
            torchao,
            variant="adamw_fp8",
            call="`quantize_fp8(x, block)`",
            run=on_torch("cpu")(torchao_adamw_scale),
            made="scale_inv",
            source="optim/subclass_fp8.py",
        )


def _other_scales(fmt: Format) -> Iterator[Function]:
    yield Function(
        "flax",
        fmt,
        functools.partial(flax_scale, fmt=fmt),
        variant="compute_scale",
        call="`fp8_ops.compute_scale(amax, 1, max)`",
        made="scale_inv",
        source="linen/fp8_ops.py",
    )
    yield Function(
        "gfloat",
        fmt,
        functools.partial(gfloat_scale, fmt=fmt),
        variant="compute_scale_amax",
        call="`compute_scale_amax(fi.emax, x)`",
        made="e8m0",
        slow=True,
        source="block.py",
    )
    for transcription in TRANSCRIPTIONS:
        yield Function(
            transcription.library,
            fmt,
            transcription.of(fmt),
            variant=transcription.variant,
            call=transcription.call,
            made=transcription.made,
            source=transcription.source,
            transcribed=True,
        )
    for policy in (
        "torchao",
        "torchao_pow2",
        "torchao_mask",
        "mx_floor",
        "mx_rceil",
        "te_mxfp8",
        "te_mxfp8_2.13",
    ):
        ours = Function(
            "fp8ref.torch",
            fmt,
            on_torch("cpu")(fp8ref_torch_scale(fmt, policy)),
            variant=policy,
            call=f"`scaling.scale_from_amax(amax, fmt, {policy!r})`",
            made="scale",
        )
        yield ours
        yield replace(ours, library="fp8ref.jax", run=fp8ref_jax_scale(fmt, policy))


def one_thread() -> None:
    """Give torch, where it is installed, one thread in this process, which is one of several."""
    if _installed("torch"):
        import torch

        torch.set_num_threads(1)


def _torch_devices() -> list[tuple[str, Callable[[Callable], Run]]]:
    """(suffix of the library's name, ``on_torch``): a CPU, and a GPU, compiled there too."""
    if not _installed("torch"):
        return []
    import torch

    devices = [("", on_torch("cpu"))]
    if torch.cuda.is_available():
        devices += [
            (" cuda", on_torch("cuda")),
            (" cuda compiled", on_torch("cuda", compiled=True)),
        ]
    return devices


def _jax_device() -> str:
    import jax

    return "" if jax.default_backend() == "cpu" else f" {jax.default_backend()}"


def _installed(*modules: str) -> bool:
    return all(importlib.util.find_spec(m) is not None for m in modules)


def _by_library(functions: list[Function]) -> dict[str, Function]:
    if not functions:
        raise ImportError(
            "a certificate compares libraries with the simulator; none is installed. Install "
            "fp8ref[all]."
        )
    return {function.library: function for function in functions}
