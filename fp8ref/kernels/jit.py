"""What a kernel is: Triton's, compiled for a GPU, or interpreted on a CPU with right casts.

launch = casts.cast(shape, strides, ...)
jit.interpret(launch, [*inputs, *outputs])
"""

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter

__all__ = ["Launch", "interpret"]

_lock = threading.Lock()
"""Of what interpretation patches in Triton's modules. JAX calls back in threads of its own."""

_LARGEST = {"fp8e4nv": 448.0, "fp8e5": 57344.0}
"""{Triton's name of an FP8 format: the magnitude at which cvt.rn.satfinite saturates}."""


Numbers = dict[str, int | float | bool]
"""Arguments of a kernel after its pointers, by name."""


Output = tuple[tuple[int, ...], str]
"""Shape and dtype of an output; dtypes are those of NumPy and FP8 formats by name, and "like", the
dtype of the first input. Codes are uint8 to a kernel."""


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    grid     its programs along each axis.
    numbers  its arguments after the pointers.
    outputs  what it writes into new memory, in the order of their pointers.
    warps    of a program.
    The arguments before are pointers: inputs, then outputs. Multiplications and additions stay
    apart: a launch is compiled with enable_fp_fusion=False.
    """

    kernel: triton.JITFunction
    grid: tuple[int, ...]
    numbers: Numbers = field(default_factory=dict, hash=False)
    outputs: tuple[Output, ...] = ()
    warps: int = 8

    @property
    def programs(self) -> int:
        """How many programs there are: the length of partial amaxes."""
        return int(np.prod(self.grid))

    def memory(self, first: str) -> list[Output]:
        """The outputs as a kernel writes them, with codes as uint8; first: the dtype of the first
        input."""
        kinds = {"like": first, "e4m3fn": "uint8", "e5m2": "uint8"}
        return [(shape, kinds.get(dtype, dtype)) for shape, dtype in self.outputs]


def interpret(launch: Launch, arrays: Sequence[np.ndarray], dtypes: Sequence[str]) -> None:
    """Run a launch on a CPU, program by program; it writes into its outputs.

    arrays   inputs, then outputs: NumPy arrays over the memory that the kernel addresses.
    dtypes   their dtypes by name, since NumPy's has no bfloat16.
    Order:   as compiled; casts round to nearest even and saturate, where Triton's own interpreter
             truncates (triton#8322).
    Threads: one at a time, since the interpreter keeps its state in Triton's modules.
    """
    pointers = [_pointer(x, dtype) for x, dtype in zip(arrays, dtypes, strict=True)]
    names = [name for name in launch.kernel.arg_names if name not in launch.numbers]
    arguments = dict(zip(names, pointers, strict=True)) | {
        name: value if _is_constant(launch.kernel, name) else interpreter._implicit_cvt(value)
        for name, value in launch.numbers.items()
    }
    builder, grid = interpreter.interpreter_builder, (*launch.grid, 1, 1)[:3]
    with _lock, _interpreting(), np.errstate(all="ignore"):
        builder.set_grid_dim(*grid)
        for place in itertools.product(*(range(n) for n in grid)):
            builder.set_grid_idx(*place)
            launch.kernel(*(arguments[name] for name in launch.kernel.arg_names))


def _is_constant(kernel: triton.JITFunction, name: str) -> bool:
    """Whether a kernel takes a number as a constant of its source."""
    return kernel.params[kernel.arg_names.index(name)].is_constexpr


def _pointer(x: np.ndarray, dtype: str) -> tl.tensor:
    """A pointer to an array's first element."""
    kind = tl.pointer_type(getattr(tl, dtype))
    address = np.array([x.__array_interface__["data"][0]], dtype=np.uint64)
    return tl.tensor(interpreter.TensorHandle(address, kind), kind)


@contextlib.contextmanager
def _interpreting() -> Iterator[None]:
    """Within it a call of a kernel's source interprets it, and casts are those of a GPU."""
    usual = interpreter._convert_float, triton.JITFunction.__call__
    interpreter._convert_float, triton.JITFunction.__call__ = _converted, _call
    try:
        yield
    finally:
        interpreter._convert_float, triton.JITFunction.__call__ = usual


def _call(kernel: triton.JITFunction, *args, **kwargs):
    """Interpret a kernel, or a function that one calls. What it patches in Triton's language is as
    before afterwards, so that kernels can still be compiled."""
    scope = interpreter._patch_lang(kernel.fn)
    try:
        return interpreter.InterpretedFunction(kernel.fn).rewrite()(*args, **kwargs)
    finally:
        scope.restore()


def _converted(x: np.ndarray, source: tl.dtype, target: tl.dtype, _rounding: object) -> np.ndarray:
    """Bits of x of one floating-point type as bits of another, rounded once to nearest even."""
    import ml_dtypes

    types = {
        "fp8e4nv": ml_dtypes.float8_e4m3fn,
        "fp8e5": ml_dtypes.float8_e5m2,
        "bf16": ml_dtypes.bfloat16,
        "fp16": np.float16,
        "fp32": np.float32,
        "fp64": np.float64,
    }
    wide = np.frombuffer(x.tobytes(), dtype=types[source.name]).astype(np.float32)  # exact
    bits, largest = np.dtype(f"uint{target.primitive_bitwidth}"), _LARGEST.get(target.name)
    if largest is None:
        return wide.astype(types[target.name]).view(bits).reshape(x.shape)
    codes = np.clip(wide, -largest, largest).astype(types[target.name]).view(bits)
    # cvt has one NaN
    return np.where(np.isnan(wide), np.uint8(0x7F), codes).reshape(x.shape)
