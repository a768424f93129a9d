"""Run one launch of a Triton kernel on tensors: on their GPU, or interpreted on a CPU."""

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from fp8ref.kernels.jit import Launch

__all__ = ["run"]


def run(launch: "Launch", *tensors: torch.Tensor) -> None:
    """Run a launch on its inputs, then its outputs, which are tensors of one device."""
    # kernels know codes as uint8
    tensors = tuple(x.view(torch.uint8) if x.dtype.itemsize == 1 else x for x in tensors)
    if tensors[0].device.type == "cpu":
        from fp8ref.kernels import jit

        dtypes = [str(x.dtype).removeprefix("torch.") for x in tensors]
        jit.interpret(launch, [_memory(x) for x in tensors], dtypes)
        return
    with torch.cuda.device(tensors[0].device):
        launch.kernel[launch.grid](
            *tensors, num_warps=launch.warps, enable_fp_fusion=False, **dict(launch.numbers)
        )


def _memory(x: torch.Tensor) -> np.ndarray:
    """An array whose first byte is a tensor's. Not ``Tensor.numpy``, after which FSDP2 cannot free
    the tensor's memory."""
    return np.ctypeslib.as_array((ctypes.c_ubyte * 1).from_address(x.data_ptr()))
