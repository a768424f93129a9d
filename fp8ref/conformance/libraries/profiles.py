"""The registry of library casts and scales that are compared with the simulator.

``casts`` and ``scales`` are those of every installed library, bare, and fp8ref's own, for a
certificate. ``every_cast`` and ``every_scale`` are the rows of docs/libraries.md: these on a CPU,
and what libraries have besides. ``functions`` has how each is called on NumPy arrays.
"""

import functools
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from functools import partial

from fp8ref.conformance.libraries import cuda_header, functions
from fp8ref.conformance.libraries.functions import Run, on_torch
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

    @property
    def row(self) -> str:
        """Its name in tables, such as ``torchao/mx_even/e5m2``."""
        return "/".join(filter(None, (self.library, self.variant, self.fmt.name)))


@functools.lru_cache(maxsize=64)
def casts(fmt: Format) -> dict[str, Function]:
    """The bare casts of all installed libraries and fp8ref's own, by library.

    Raises:   ImportError: none is installed.
    """
    casts: dict[str, Function] = {}

    def add(library: str, run: Run, call: str) -> None:
        ours = library.startswith("fp8ref.")
        casts[library] = Function(library, fmt, run, call=call, saturates=ours)

    if _installed("ml_dtypes"):
        add("ml_dtypes", functions.ml_dtypes_cast(fmt), "`x.astype(dtype)`")
    for suffix, run in _torch_devices():
        add(f"torch{suffix}", run(functions.torch_cast(fmt)), "`x.to(dtype)`")
        if _installed("torchao"):
            ours = run(functions.fp8ref_torch_cast(fmt))
            add(f"fp8ref.torch{suffix}", ours, "`cast.encode(x, fmt)`")
    if _installed("jax"):
        add(f"jax{_jax_device()}", functions.jax_cast(fmt), "`x.astype(dtype)`, jitted")
    if _installed("jax", "flax", "optax"):
        ours = functions.fp8ref_jax_cast(fmt)
        add(f"fp8ref.jax{_jax_device()}", ours, "`cast.encode(x, fmt)`, jitted")
    return _some(casts)


@functools.lru_cache(maxsize=64)
def scales(fmt: Format, policy: str) -> dict[str, Function]:
    """The scales of a policy of torchao, or of fp8ref.torch where it has none; and fp8ref.jax's.

    Raises:   ImportError: none is installed.
    """
    runs: dict[str, Run] = {}
    for suffix, run in _torch_devices() if _installed("torchao") else ():
        if policy != "torchao_mask":  # torchao has no such rounding
            scale = functions.torchao_scale(fmt, power_of_two=policy == "torchao_pow2")
            runs[f"torchao{suffix}"] = run(scale)
        else:
            runs[f"fp8ref.torch{suffix}"] = run(functions.fp8ref_torch_scale(fmt, policy))
    if _installed("jax", "flax", "optax"):
        runs[f"fp8ref.jax{_jax_device()}"] = functions.fp8ref_jax_scale(fmt, policy)
    return _some({name: Function(name, fmt, run, made="scale") for name, run in runs.items()})


def every_cast() -> Iterator[Function]:
    """Every cast of an installed library on a CPU, overflowing as the library does by default."""
    for fmt in FP8_FORMATS.values():
        # a device stands behind a blank
        yield from (f for name, f in casts(fmt).items() if " " not in name)
    for fmt in (E4M3FN, E5M2):
        if _installed("torch", "torchao"):
            run = on_torch("cpu")(functions.torchao_cast(fmt))
            call, file = "`to_fp8_saturated(x, dtype)`", "float8/float8_utils.py"
            yield Function("torchao", fmt, run, variant="saturated", call=call, source=file)
        if _installed("jax", "flax"):
            run = partial(functions.flax_cast, fmt=fmt)
            call, file = "`fp8_ops.quantize(x, dtype, 1, float32)`", "linen/fp8_ops.py"
            yield Function("flax", fmt, run, variant="quantize", call=call, source=file)
        for saturate in (False, True) if _installed("gfloat") else ():
            run = partial(functions.gfloat_cast, fmt=fmt, saturate=saturate)
            variant, file = "sat" if saturate else "", "round_ndarray.py"
            call = f"`encode_ndarray(fi, round_ndarray(fi, x, sat={saturate}))`"
            yield Function("gfloat", fmt, run, variant=variant, call=call, source=file)
    formats = (E4M3FN, E5M2) if cuda_header.available() else ()
    for fmt, (mode, variant) in itertools.product(formats, (("NOSAT", ""), ("SATFINITE", "sat"))):
        run = partial(cuda_header.encode, fmt=fmt, saturate=variant == "sat")
        call, file = f"`__nv_cvt_float_to_fp8(x, __NV_{mode}, kind)`", "include/cuda_fp8.hpp"
        yield Function(CUDA_HEADER, fmt, run, variant=variant, call=call, source=file)


def every_scale() -> Iterator[Function]:
    """Every scale of ``library_scales``, of transcriptions, and of fp8ref."""
    for fmt in (E4M3FN, E5M2):
        yield from library_scales(fmt)
        yield from _other_scales(fmt)


def library_scales(fmt: Format) -> Iterator[Function]:
    """Every scale of an installed library on a CPU."""
    if _installed("torch", "torchao"):
        yield from _torchao_scales(fmt)
    if _installed("jax", "flax"):
        run, name = partial(functions.flax_scale, fmt=fmt), "compute_scale"
        call, file = "`fp8_ops.compute_scale(amax, 1, max)`", "linen/fp8_ops.py"
        yield Function("flax", fmt, run, variant=name, call=call, made="scale_inv", source=file)
    if _installed("gfloat"):
        run, name = partial(functions.gfloat_scale, fmt=fmt), "compute_scale_amax"
        call, file = "`compute_scale_amax(fi.emax, x)`", "block.py"
        yield Function(
            "gfloat", fmt, run, variant=name, call=call, made="e8m0", slow=True, source=file
        )


def _torchao_scales(fmt: Format) -> Iterator[Function]:
    utils, mx = "float8/float8_utils.py", "prototype/mx_formats/mx_tensor.py"
    amax_to_scale = "`amax_to_scale(amax, dtype)`"
    powers = "`amax_to_scale(amax, dtype, round_scales_to_power_of_2=True)`"
    scale = functions.torchao_scale
    rows: list[tuple[str, str, Callable, str, str]] = [
        ("amax_to_scale", amax_to_scale, scale(fmt), "scale", utils),
        ("amax_to_scale_pow2", powers, scale(fmt, power_of_two=True), "scale", utils),
    ]
    for mode in ("floor", "rceil", "ceil", "even"):
        call = f"`to_mx(x, dtype, 32, {mode.upper()})`"
        rows.append((f"mx_{mode}", call, functions.torchao_mx_scale(fmt, mode), "e8m0", mx))
    if fmt is E4M3FN:  # the format of AdamWFp8's moments
        call, file = "`quantize_fp8(x, block)`", "optim/subclass_fp8.py"
        rows.append(("adamw_fp8", call, functions.torchao_adamw_scale, "scale_inv", file))
    for variant, call, function, kind, source in rows:
        run = on_torch("cpu")(function)
        yield Function("torchao", fmt, run, variant=variant, call=call, made=kind, source=source)


def _other_scales(fmt: Format) -> Iterator[Function]:
    for library, variant, call, source, kind, scale in TRANSCRIPTIONS:
        yield Function(
            library,
            fmt,
            scale(fmt),
            variant=variant,
            call=call,
            made=kind,
            source=source,
            transcribed=True,
        )
    powers = ("torchao", "torchao_pow2", "torchao_mask")
    for policy in (*powers, "mx_floor", "mx_rceil", "te_mxfp8", "te_mxfp8_2.13"):
        call = f"`scaling.scale_from_amax(amax, fmt, {policy!r})`"
        torch = on_torch("cpu")(functions.fp8ref_torch_scale(fmt, policy))
        runs = {"torch": torch, "jax": functions.fp8ref_jax_scale(fmt, policy)}
        for name, run in runs.items():
            yield Function(f"fp8ref.{name}", fmt, run, variant=policy, call=call, made="scale")


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


def _some(by_library: dict[str, Function]) -> dict[str, Function]:
    if not by_library:
        raise ImportError(
            "a certificate compares libraries with the simulator; none is installed. Install "
            "fp8ref[all]."
        )
    return by_library
