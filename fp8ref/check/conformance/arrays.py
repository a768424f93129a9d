"""Arrays of NumPy and those of frameworks, bit for bit; no framework is imported unless it is asked for."""

import numpy as np


def as_numpy(x) -> np.ndarray:
    """An array of NumPy, JAX or PyTorch as NumPy's: FP8 as the codes' uint8, PyTorch's bfloat16 as float32, which holds it exactly."""
    if hasattr(x, "detach"):
        import torch

        x = x.detach().cpu().contiguous()
        if x.dtype.itemsize == 1 and x.dtype.is_floating_point:
            x = x.view(torch.uint8)
        x = (x.float() if x.dtype == torch.bfloat16 else x).numpy()
    x = np.asarray(x)
    return x.view(np.uint8) if x.dtype.name.startswith("float8_") else x


def as_torch(x: np.ndarray):
    """A tensor with the bits of a NumPy array, bfloat16 of ml_dtypes included."""
    import torch

    x = np.ascontiguousarray(x)
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())  # PyTorch writes where NumPy may not


def as_jax(x: np.ndarray):
    """A JAX array with the bits of a NumPy array."""
    import jax.numpy as jnp

    return jnp.asarray(x)
