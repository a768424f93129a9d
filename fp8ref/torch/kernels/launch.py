"""Run one launch of a Triton kernel on tensors: on their GPU, or interpreted on a CPU."""

from typing import TYPE_CHECKING

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

        # NumPy has no bfloat16: the interpreter reads memory by the dtypes' names.
        arrays = [x.detach().view(_SAME_SIZE[x.dtype.itemsize]).numpy() for x in tensors]
        jit.interpret(launch, arrays, [str(x.dtype).removeprefix("torch.") for x in tensors])
        return
    with torch.cuda.device(tensors[0].device):
        launch.kernel[launch.grid](
            *tensors, num_warps=launch.warps, enable_fp_fusion=False, **dict(launch.numbers)
        )


_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""{bytes of an element: an integer dtype that NumPy has}."""
