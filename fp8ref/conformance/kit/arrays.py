"""Convert arrays between NumPy, PyTorch and JAX bit for bit; import only what is used."""

from typing import Any

import numpy as np

__all__ = ["as_numpy"]


def numpy_dtype(dtype: str) -> np.dtype:
    """NumPy's dtype of a name; bfloat16 is ml_dtypes', and an ImportError without it."""
    if dtype != "bfloat16":
        return np.dtype(dtype)
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError(
            "arrays of bfloat16 need ml_dtypes. Install it with: pip install 'fp8ref[conformance]'"
        ) from error
    return np.dtype(ml_dtypes.bfloat16)


def as_numpy(x: Any) -> np.ndarray:
    """A NumPy copy of an array of NumPy, JAX or PyTorch.

    FP8 arrays become uint8 codes. PyTorch's bfloat16 becomes float32, which holds it exactly.
    """
    return named(x)[0]


def named(x: Any) -> tuple[np.ndarray, str]:
    """``as_numpy`` of x, and the name of x's dtype, such as ``float8_e4m3fn`` or ``bfloat16``."""
    if hasattr(x, "detach"):
        return _read_torch(x)
    if isinstance(x, np.ma.MaskedArray) and np.any(x.mask):
        raise ValueError(
            f"every element counts; got an array with {int(np.sum(x.mask))} masked ones. Use "
            "x.filled(...), or x.data for all of them."
        )
    array = np.array(x)  # a copy, which no later call writes to
    name = array.dtype.name
    return array.view(np.uint8) if name.startswith(
        ("float8_", "float6_", "float4_")
    ) else array, name


def _read_torch(x: Any) -> tuple[np.ndarray, str]:
    import torch

    name = str(x.dtype).removeprefix("torch.")
    x = x.detach().cpu().resolve_conj().resolve_neg()
    if name.startswith(("float8_", "float4_")):
        x = x.contiguous().view(torch.uint8)
    elif name == "bfloat16":
        x = x.float()
    return np.array(x.numpy()), name


def equal(a: np.ndarray | np.floating, b: np.ndarray | np.floating) -> Any:
    """Where numbers are equal, or both are NaN."""
    return (a == b) | (np.isnan(a) & np.isnan(b))


def same_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where float32 numbers have the same bits, or both are NaN."""
    return (a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))


def as_torch(x: np.ndarray, device: str = "cpu") -> Any:
    """A tensor with the bits of a NumPy array, which may be ml_dtypes' bfloat16.

    Bits are reinterpreted, since torch's own conversion to bfloat16 makes every NaN negative.
    """
    import torch

    x = np.array(x)  # PyTorch writes where NumPy may not
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(x).to(device)


def as_jax(x: np.ndarray) -> Any:
    """A JAX array with the bits of a NumPy array."""
    import jax.numpy as jnp

    return jnp.asarray(x)


def written(x: Any) -> bytes:
    """An array's bytes, to tell whether a function wrote to it; b"" for JAX's, immutable ones.

    Torch itself reads its tensors: NumPy refuses those with gradients, of FP8 and of bfloat16.
    """
    if hasattr(x, "detach"):
        import torch

        x = x.detach().cpu().contiguous().reshape(-1)
        return x.view(torch.uint8).numpy().tobytes() if x.numel() else b""
    return b"" if type(x).__module__.startswith("jax") else x.tobytes()
