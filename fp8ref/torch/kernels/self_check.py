"""The self-check of kernels, by the launches of PyTorch (M-11)."""

import numpy as np
import torch

from fp8ref.spec import kernels
from fp8ref.torch.kernels import launch

__all__ = ["failure"]


def failure(device: torch.device) -> str:
    """As ``fp8ref.kernels.self_check.failure``, of launches on a device. A kernel that does not
    compile or run is a failure too."""
    from fp8ref.kernels import self_check

    def run(each, inputs, outputs) -> list[np.ndarray]:
        bits = [torch.from_numpy(x.view(f"i{x.itemsize}")) for x in inputs]
        dtypes = [getattr(torch, x.dtype.name) for x in inputs]
        tensors = [x.view(dtype).to(device) for x, dtype in zip(bits, dtypes, strict=True)]
        results = [
            torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
            for shape, dtype in outputs
        ]
        launch.run(each, *tensors, *results)
        # NumPy has no bfloat16
        return [(x.view(torch.int16) if x.itemsize == 2 else x).cpu().numpy() for x in results]

    try:
        return self_check.failure(run)
    except Exception as error:  # whatever a compiler or a driver raises
        return kernels.broken(error)
