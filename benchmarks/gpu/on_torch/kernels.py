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
from measuring.kernel_cases import PLAIN, Case, Typed
from on_torch.bench import Bench

FORMATS = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class Operations:
    """As ``kernel_cases.Operations``."""

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16()

    def codes(self, x: torch.Tensor, fmt: str) -> torch.Tensor:
        limit = kernel_cases.LARGEST[fmt]
        return x.clamp(-limit, limit).to(FORMATS[fmt])

    def amax(self, x: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
        return x.abs().amax(tuple(axes), keepdim=True)

    def transposed(self, x: torch.Tensor) -> torch.Tensor:
        return x.t().contiguous()

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x)

    def reshaped(self, x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return x.reshape(shape)


def bits(bench: Bench) -> dict:
    """How many codes and scales differ from the simulator's."""

    def run(launch: Launch, inputs: list[np.ndarray], outputs: Sequence[Typed]) -> list[np.ndarray]:
        tensors = [_tensor(x).to(bench.device) for x in inputs]
        results = [_empty(bench, *typed) for typed in outputs]
        launches.run(launch, *tensors, *results)
        return [x.cpu().numpy() for x in results]

    return {"rows": [], "bits": kernel_cases.bits(run, bench.sizes.exact)}


def run(bench: Bench) -> dict:
    """Rows of launches and of inductor's kernels: seconds, and bytes that must move a second."""
    rows = []
    for columns in bench.sizes.kernel_columns:
        for case in kernel_cases.cases((bench.sizes.tokens, columns)):
            name = f"{case.name}, {bench.sizes.tokens} x {columns}"
            measured = bench.timed({name: launched(bench, case), name + PLAIN: plain(bench, case)})
            rows += kernel_cases.rates(case, timing.rows(measured, name + PLAIN))
            torch._dynamo.reset()
    return {"rows": [], "kernels": rows}


def launched(bench: Bench, case: Case) -> timing.Call:
    sets = [
        (*_inputs(bench, case), *(_empty(bench, *typed) for typed in case.outputs))
        for _ in range(timing.sets(case.bytes))
    ]
    return lambda i: launches.run(case.launch, *sets[i % len(sets)])


def plain(bench: Bench, case: Case) -> timing.Call:
    sets = [_inputs(bench, case) for _ in range(timing.sets(case.bytes))]
    compiled = bench.compiled(called)
    operations: Callable = functools.partial(case.plain, Operations())
    return lambda i: compiled(operations, *sets[i % len(sets)])


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
