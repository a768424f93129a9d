"""Counts what would make the host wait for a device, or copy to it, of a step that runs on a CPU or
on the meta device.
"""

import sys
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = {
    "item",
    "tolist",
    "cpu",
    "numpy",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "nonzero",
    "equal",
    "allclose",
}
"""Methods that read a tensor's elements on the host."""

COPIES = {"tensor", "as_tensor", "from_numpy", "new_tensor"}
"""Functions that make tensors of numbers on the host."""

PACKAGE = Path(__file__).parents[3] / "fp8ref"


class Syncs(TorchFunctionMode):
    """Collects in ``found`` the calls of WAITS and COPIES that code of fp8ref makes, and indices
    that are lists.
    """

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        listed = name in ("__getitem__", "__setitem__") and any(
            isinstance(i, list) for i in (args[1] if isinstance(args[1], tuple) else [args[1]])
        )
        if name in WAITS | COPIES or listed:
            frame = sys._getframe(1)
            # torch's optimizers keep counts of steps on the host
            while (
                frame is not None
                and "torch/optim" not in frame.f_code.co_filename
                and "site-packages" in frame.f_code.co_filename
            ):
                frame = frame.f_back
            if frame is not None and frame.f_code.co_filename.startswith(str(PACKAGE)):
                self.found.append(
                    f"{name} in "
                    f"{Path(frame.f_code.co_filename).relative_to(PACKAGE)}:{frame.f_code.co_name}"
                )
        return func(*args, **(kwargs or {}))


class Ops(TorchDispatchMode):
    """Collects in ``found`` the operators that run; on the meta device those that copy from the
    host raise.
    """

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.found.append(func._schema.name.removeprefix("aten::"))
        tensors = [
            x
            for x in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(x, torch.Tensor)
        ]
        if isinstance(out, torch.Tensor) and out.is_meta and any(not x.is_meta for x in tensors):
            raise AssertionError(f"{func} copies from the host to the device")
        return out
