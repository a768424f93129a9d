"""One linear of a Llama-8B block, forward and backward, compiled, by every variant; and each GEMM
of it alone, for the ledger.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from fp8ref.recipe import RECIPES, REDUCED_AXES, Gemm, GemmSpec
from fp8ref.torch import delayed
from measuring import rounding, timing
from on_torch.bench import Bench
from on_torch.variants import ALL, BY_NVIDIA, compiled, convert
from reporting import ledger
from reporting.report import OURS

DTYPES = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
Passes = Callable[[int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def run(bench: Bench, shape: tuple[int, int, int]) -> dict:
    """shape: (M, N, K) of x [M, K] by w [N, K].

    Rows of linears, ``speedup`` over bfloat16, and of GEMMs.
    """
    errors, passes = {}, {}
    accuracy: dict[str, list[float]] = {}
    inputs = Inputs(bench, shape)
    expected: Sequence[torch.Tensor] | None = None
    for name in ALL:
        try:
            forward_backward = inputs.passes(name)
            found = forward_backward(0)
            expected = expected or found
            accuracy[name] = rounding.check(differences(found, expected), rounding.LINEAR)
            passes[name] = forward_backward
        except Exception as error:  # the others are still to be measured
            errors[name] = timing.message(error)
            inputs.clear()
    measured = bench.timed(passes)
    measured.errors.update(errors)
    rows = timing.rows(measured, "bf16")
    del passes
    gemms = timing.rows(bench.timed(products(bench, shape)), "output bf16")
    return {"shape": list(shape), "rows": rows, "gemms": gemms, "relative_errors": accuracy}


class Inputs:
    """What a linear is given: sets of inputs and gradients that are rotated, and one weight."""

    def __init__(self, bench: Bench, shape: tuple[int, int, int]) -> None:
        m, n, k = shape
        self.bench, self.weight = bench, bench.random(n, k, scale=k**-0.5)
        self.count = timing.sets(2 * m * (k + n))
        self.xs = [bench.random(m, k).requires_grad_() for _ in range(self.count)]
        self.gs = [bench.random(m, n, scale=1e-3) for _ in range(self.count)]

    def clear(self) -> None:
        """No gradients of inputs, which a pass that broke off would have left to the next
        variant's.
        """
        for x in self.xs:
            x.grad = None

    def passes(self, variant: str) -> Passes:
        """i -> (output, grad_input, grad_weight), of the i-th inputs."""
        n, k = self.weight.shape
        linear = nn.Linear(k, n, bias=False, device="meta")
        linear.weight = nn.Parameter(self.weight)
        model = convert(nn.Sequential(linear), variant)
        forward = compiled(self.bench, called, variant)

        def forward_backward(i: int):
            x, g = self.xs[i % self.count], self.gs[i % self.count]
            y = forward(model, x)
            y.backward(g)
            made = y.detach(), x.grad, model[0].weight.grad
            x.grad = model[0].weight.grad = None
            return made

        # scales of what they will see, or gradients would round to zeros
        for i in range(2 if any(delayed.states(model)) or variant in BY_NVIDIA else 0):
            forward_backward(i)
            delayed.update(model)
        return forward_backward


def called(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def differences(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> list[float]:
    """Relative ones, in the Frobenius norm."""
    return [
        ((a.float() - b.float()).norm() / b.float().norm()).item()
        for a, b in zip(found, expected, strict=True)
    ]


def products(bench: Bench, shape: tuple[int, int, int]) -> dict[str, timing.Call]:
    """Every GEMM that a recipe runs on a linear of this shape, once each, by
    ``ledger.gemm_name``.
    """
    found: dict[str, timing.Call] = {}
    for recipe in ("bf16", *OURS):
        for which, spec in RECIPES[recipe].gemms.items():
            if ledger.gemm_name(which, spec) not in found:
                found[ledger.gemm_name(which, spec)] = product(bench, shape, which, spec)
    return found


def product(bench: Bench, shape: tuple[int, int, int], which: Gemm, spec: GemmSpec) -> timing.Call:
    m, n, k = ledger.dims(which, *shape)
    count = timing.sets(2 * (m * k + n * k + m * n))
    # as nn.Linear has them: what is reduced is a tensor's first axis in part of the GEMMs
    if spec.a is None or spec.b is None:
        first, second = REDUCED_AXES[which]
        pairs = [
            (
                bench.random(*((m, k) if first else (k, m))),
                bench.random(*((n, k) if second else (k, n))),
            )
            for _ in range(count)
        ]
        return lambda i: (
            _lines(pairs[i % count][0], first) @ _lines(pairs[i % count][1], second).t()
        )
    types = [DTYPES[cast.fmt.name] for cast in (spec.a, spec.b)]
    codes = [
        (bench.codes(m, k, dtype=types[0]), bench.codes(n, k, dtype=types[1])) for _ in range(count)
    ]
    by_rows = spec.rowwise and spec.epilogue == "scale_then_round"
    rows, columns = (
        torch.rand(s, device=bench.device) * 1e-3 + 1e-3
        for s in (((m, 1), (1, n)) if by_rows else ((), ()))
    )

    def multiply(i: int) -> torch.Tensor:
        a, b = codes[i % count]
        fast = spec.accumulate == "fast"
        return torch._scaled_mm(
            a, b.t(), scale_a=rows, scale_b=columns, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    return multiply


def _lines(x: torch.Tensor, axis: int) -> torch.Tensor:
    return x if axis else x.t()
