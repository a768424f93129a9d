"""Run a launch of a Triton kernel on tensors, on their GPU or interpreted on a CPU, and make an
operator of PyTorch of it.

Operators are opaque to compilers: equal ones of a graph merge, a policy of checkpointing names
them, and a kernel is compiled as it was checked. What a launch takes and returns is stated by the
function of ``fp8ref.kernels`` that makes it.
"""

import ctypes
import functools
import inspect
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fp8ref.torch.quantize.cast import DTYPES

if TYPE_CHECKING:
    from fp8ref.kernels.jit import Launch


def run(launch: "Launch", *tensors: Tensor) -> None:
    """Run a launch on its inputs, then its outputs, which are tensors of one device."""
    # kernels know codes as uint8
    tensors = tuple(x.view(torch.uint8) if x.dtype.itemsize == 1 else x for x in tensors)
    if tensors[0].device.type == "cpu":
        from fp8ref.kernels import jit

        dtypes = [str(x.dtype).removeprefix("torch.") for x in tensors]
        jit.interpret(launch, [_first_byte(x) for x in tensors], dtypes)
        return
    with torch.cuda.device(tensors[0].device):
        launch.kernel[launch.grid](
            *tensors, num_warps=launch.warps, enable_fp_fusion=False, **dict(launch.numbers)
        )


def memory(launch: "Launch", like: Tensor) -> list[Tensor]:
    """New tensors for what a launch writes, on a tensor's device."""
    dtypes = DTYPES | {"like": like.dtype}
    return [
        like.new_empty(shape, dtype=dtypes.get(dtype) or getattr(torch, dtype))
        for shape, dtype in launch.outputs
    ]


def prepared(room: str, name: str, x: Tensor, options: str) -> "Launch":
    """The launch that a function of a module of ``fp8ref.kernels`` makes for a tensor of x's shape,
    and strides if it takes them; else x is contiguous. options: its other arguments, as JSON."""
    shape, strides = tuple(x.shape), x.stride()
    # a compiler's symbol has no hash; what its launch asks of it guards the graph
    sizes_are_numbers = all(type(n) is int for n in (*shape, *strides))
    prepare = _prepared if sizes_are_numbers else _prepared.__wrapped__
    return prepare(room, name, shape, strides, options)


@functools.lru_cache(maxsize=1024)
def _prepared(
    room: str, name: str, shape: tuple[int, ...], strides: tuple[int, ...], options: str
) -> "Launch":
    from fp8ref.kernels import casts, norms, rotary, swiglu

    rooms = {"casts": casts, "norms": norms, "rotary": rotary, "swiglu": swiglu}
    make = getattr(rooms[room], name)
    if "strides" in inspect.signature(make).parameters:
        make = functools.partial(make, strides=strides)
    else:
        assert torch.empty_strided(shape, strides, device="meta").is_contiguous(), name
    return make(shape, **json.loads(options))


def text(**options: bool | float | str) -> str:
    """Options as JSON, one text for equal ones."""
    return json.dumps(options, sort_keys=True)


def operator(room: str, name: str, *, called: str = "", **fixed: bool) -> Callable[..., Any]:
    """The operator of PyTorch of a function of a module of ``fp8ref.kernels``: it takes the
    launch's inputs, by whose first the launch is prepared, and the function's other arguments by
    name; it returns the outputs, one alone or a tuple.

    called   its name after fp8ref::; by default the function's, after that of its room.
    fixed    arguments of the function that the operator does not take.
    """

    def launched(tensors: list[Tensor], options: str) -> list[Tensor]:
        launch = prepared(room, name, tensors[0], options)
        assert all(x.is_contiguous() for x in tensors[1:]), name
        outputs = memory(launch, tensors[0])
        run(launch, *tensors, *outputs)
        return outputs

    def empty(tensors: list[Tensor], options: str) -> list[Tensor]:
        return memory(prepared(room, name, tensors[0], options), tensors[0])

    called = called or (name if room == "casts" else f"{room.removesuffix('s')}_{name}")
    schema = "(Tensor[] tensors, str options) -> Tensor[]"
    custom = torch.library.custom_op(f"fp8ref::{called}", launched, mutates_args=(), schema=schema)
    custom.register_fake(empty)

    def call(*tensors: Tensor, **options: bool | float | str) -> Any:
        outputs = custom(list(tensors), text(**fixed, **options))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return call


def _first_byte(x: Tensor) -> np.ndarray:
    """An array whose first byte is a tensor's. Not ``Tensor.numpy``, after which FSDP2 cannot free
    the tensor's memory."""
    return np.ctypeslib.as_array((ctypes.c_ubyte * 1).from_address(x.data_ptr()))
