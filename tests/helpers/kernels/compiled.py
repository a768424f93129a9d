"""A launch compiled for a GPU that is not here: its PTX, and what its machine code needs."""

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fp8ref.kernels.jit import Launch

TYPES = {
    "bfloat16": "*bf16",
    "float16": "*fp16",
    "float32": "*fp32",
    "int32": "*i32",
    "uint8": "*u8",
}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Compiled:
    """local: bytes of a thread's local memory, which spills take; shared: of a program's."""

    ptx: str
    registers: int
    local: int
    shared: int


def compiled(
    launch: Launch, dtypes: Sequence[str], capability: int, *, contracts: bool = False
) -> Compiled:
    """Compile a launch for a compute capability, 90 or 100, as the backends do.

    dtypes     of its pointers, which are aligned to 16 bytes as a framework's tensors are.
    contracts  whether products and sums may be contracted.
    """
    names, kernel = launch.kernel.arg_names, launch.kernel
    pointers = iter(dtypes)
    signature, constants, attributes = {}, {}, {}
    for place, name in enumerate(names):
        value = launch.numbers.get(name)
        if name not in launch.numbers:
            signature[name], attributes[place,] = TYPES[next(pointers)], [["tt.divisibility", 16]]
        elif kernel.params[place].is_constexpr or value is None or value == 1:
            signature[name], constants[place,] = "constexpr", value
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0:
                attributes[place,] = [["tt.divisibility", 16]]
    assert next(pointers, None) is None, "more dtypes than pointers"
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": launch.warps, "enable_fp_fusion": contracts}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    usage = _usage(made.asm["cubin"])
    return Compiled(made.asm["ptx"], usage["REG"], usage["LOCAL"] + usage["STACK"], usage["SHARED"])


def _usage(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [TOOLS / "cuobjdump", "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {key: int(value) for key, value in re.findall(r"([A-Z]+):(\d+)", text)}
