"""The scaled GEMMs of PyTorch and JAX by name, and any other as ``module:function``."""

import importlib
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from fp8ref.conformance.gemm.scaled_gemm import OUT_DTYPES, ScaledGemm
from fp8ref.conformance.kit.subject import parameters
from fp8ref.shared.errors import one_of
from fp8ref.sim.quantize.scaling import Quantized

KNOWN = ("torch-scaled-mm", "torch-rowwise", "jax-dot")  # names of the libraries' GEMMs


def named(
    name: str, *, fast: bool = False, out_dtype: str | None = None, granularity: str | None = None
) -> ScaledGemm:
    """The scaled GEMM of a name in KNOWN, or of ``module:function``.

    fast       use the library's fast accumulation.
    out_dtype  that the library rounds to: by default float32, and bfloat16 for torch-rowwise, which
               has no other on a GPU.
    Raises:    ValueError: an unknown name or dtype, a missing function, an unused option.
               ImportError: the framework is not installed.
    """
    if ":" in name:
        if fast or out_dtype:
            raise ValueError(
                f"--fast-accum and --out-dtype apply to {', '.join(KNOWN)}; {name} has its own. "
                "Leave them out."
            )
        return _custom(name, granularity or "tensorwise")
    if name not in KNOWN:
        raise ValueError(
            f"a probe takes one of {', '.join(KNOWN)}, wgmma, or module:function; got {name!r}."
        )
    if granularity:
        raise ValueError(
            f"--granularity applies to module:function; {name} has its own. Leave it out."
        )
    if out_dtype is not None:
        one_of("--out-dtype", out_dtype, OUT_DTYPES)
    if name == "jax-dot":
        return _jax_dot(fast, out_dtype or "float32")
    rowwise = name == "torch-rowwise"
    return _torch(name, fast, out_dtype or ("bfloat16" if rowwise else "float32"), rowwise)


def _torch(name: str, fast: bool, out_dtype: str, rowwise: bool) -> ScaledGemm:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    out = getattr(torch, out_dtype)

    def on_device(q: Quantized) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = getattr(torch, f"float8_{q.fmt.name}")
        codes = torch.from_numpy(q.codes).to(device).view(dtype)
        return codes, torch.from_numpy(q.scale_inv).to(device)

    def function(a: Quantized, b: Quantized, bias=None) -> torch.Tensor:
        (codes_a, scale_a), (codes_b, scale_b) = on_device(a), on_device(b)
        added = None if bias is None else torch.from_numpy(bias).to(device, out)
        # [M, K] x [N, K] -> [M, N]
        return torch._scaled_mm(
            codes_a,
            codes_b.t(),
            scale_a=scale_a,
            scale_b=scale_b.t() if rowwise else scale_b,
            bias=added,
            out_dtype=out,
            use_fast_accum=fast,
        )

    about = {
        "torch": torch.__version__,
        "accumulate": "fast" if fast else "slow",
        "out_dtype": out_dtype,
        **_torch_device(torch, device),
    }
    granularity = "rowwise" if rowwise else "tensorwise"
    # cuBLASLt takes no bias with a float32 result
    return ScaledGemm(
        name=name,
        function=function,
        granularity=granularity,
        bias=out_dtype != "float32",
        about=about,
    )


def _torch_device(torch: Any, device: str) -> dict[str, str]:
    if device == "cpu":
        return {"device": "cpu"}
    return {
        "device": torch.cuda.get_device_name(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "cuda": str(torch.version.cuda),
    }


def _jax_dot(fast: bool, out_dtype: str) -> ScaledGemm:
    import jax
    import jax.numpy as jnp
    from jax import lax

    from fp8ref.jax.gemm import gemm
    from fp8ref.jax.quantize.scaling import Quantized as Operand

    accumulate = "fast" if fast else "slow"

    @jax.jit
    def multiply(a: Operand, b: Operand) -> jax.Array:
        return gemm.matmul(a, b, accumulate=accumulate, out_dtype=jnp.dtype(out_dtype))

    def operand(q: Quantized) -> Operand:
        return Operand(
            codes=lax.bitcast_convert_type(jnp.asarray(q.codes), jnp.dtype(f"float8_{q.fmt.name}")),
            scale=jnp.asarray(q.scale),
            scale_inv=jnp.asarray(q.scale_inv),
            fmt=q.fmt,
            granularity=q.granularity,
            axis=q.axis,
        )

    def function(a: Quantized, b: Quantized) -> jax.Array:
        return multiply(operand(a), operand(b))

    about = {
        "jax": jax.__version__,
        "accumulate": accumulate,
        "precision": str(gemm.PRECISION[accumulate]),
        "out_dtype": out_dtype,
    }
    about["device"] = jax.devices()[0].device_kind
    about["xla_flags"] = os.environ.get("XLA_FLAGS", "")
    return ScaledGemm(name="jax-dot", function=function, about=about)


def _custom(name: str, granularity: str) -> ScaledGemm:
    function = load(name)
    one_of("--granularity", granularity, ("tensorwise", "rowwise"))
    return ScaledGemm(
        name=name,
        function=function,
        granularity=granularity,
        bias="bias" in parameters(function),
        about={"numpy": version("numpy")},
    )


def load(name: str) -> Callable:
    """Import the function that ``module:function`` names; the working directory is searched too.

    Raises:   ValueError: there is none, or its module raises on import.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError(
            f"a function is named as module:function, such as mykernel:scaled_mm; got {name!r}."
        )
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)  # stays there, for imports inside the function
    try:
        loaded: Any = importlib.import_module(module)
        for part in attribute.split("."):
            loaded = getattr(loaded, part)
    except (Exception, SystemExit) as error:  # a custom module may raise anything
        raise ValueError(
            f"{name} cannot be imported from {here} ({type(error).__name__}: {error}). Name "
            "module:function."
        ) from error
    # optax's transformations
    if not callable(loaded) and not (hasattr(loaded, "init") and hasattr(loaded, "update")):
        raise ValueError(f"{name} is a {type(loaded).__name__}; a function is needed.")
    return loaded
