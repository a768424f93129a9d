"""The kernels of ``fp8ref.kernels`` alone in PyTorch: their bits, and the bandwidth that they and
inductor's kernels of the same operations reach.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from fp8ref.kernels.jit import Launch
from fp8ref.torch.kernels import launch as launches
from measuring import kernel_cases, timing
from measuring.kernel_cases import Case, Typed
from on_torch.bench import Bench

FORMATS = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def codes(x: torch.Tensor, fmt: str) -> torch.Tensor:
    limit = kernel_cases.LARGEST[fmt]
    return x.clamp(-limit, limit).to(FORMATS[fmt])


OPERATIONS = kernel_cases.Operations(
    float32=torch.Tensor.float,
    bfloat16=torch.Tensor.bfloat16,
    codes=codes,
    amax=lambda x, axes: x.abs().amax(axes, keepdim=True),
    transposed=lambda x: x.t().contiguous(),
    silu=torch.nn.functional.silu,
    reshaped=torch.reshape,
)


def bits(bench: Bench) -> dict:
    """How many codes and scales differ from the simulator's."""

    def run(launch: Launch, inputs: list[np.ndarray], outputs: Sequence[Typed]) -> list[np.ndarray]:
        tensors = [_tensor(x).to(bench.device) for x in inputs]
        results = [_empty(bench, *typed) for typed in outputs]
        launches.run(launch, *tensors, *results)
        return [x.cpu().numpy() for x in results]

    return {"rows": [], "bits": kernel_cases.bits(run, bench.sizes.exact)}


def run(bench: Bench) -> dict:
    """As ``kernel_cases.timed``; inductor compiles the plain operations."""

    def calls(case: Case) -> kernel_cases.Calls:
        count = timing.sets(case.bytes)
        sets = [_inputs(bench, case) for _ in range(count)]
        outputs = [[_empty(bench, *typed) for typed in case.outputs] for _ in range(count)]
        plain, operations = bench.compiled(called), functools.partial(case.plain, OPERATIONS)
        return (
            lambda i: launches.run(case.launch, *sets[i % count], *outputs[i % count]),
            lambda i: plain(operations, *sets[i % count]),
            1,
        )

    shapes = [(bench.sizes.tokens, columns) for columns in bench.sizes.kernel_columns]
    return kernel_cases.timed(bench, shapes, calls)


def called(function: Callable, *tensors: torch.Tensor):
    return function(*tensors)


def _inputs(bench: Bench, case: Case) -> list[torch.Tensor]:
    return [
        bench.random(*shape)
        if dtype == "bfloat16"
        else torch.full(shape, float(kernel_cases.SCALE), device=bench.device)
        for shape, dtype in case.inputs
    ]


def _empty(bench: Bench, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device=bench.device)


def _tensor(x: np.ndarray) -> torch.Tensor:
    """NumPy's bfloat16 is none of torch's."""
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)
