"""What converting a model costs in PyTorch on a CPU, next to torchao used directly: python
benchmarks/speed/torch_cpu.py [--json FILE]

A step, forward and backward, of one stack of linears in bfloat16: torchao's own conversion, and
fp8ref's by several recipes. A pair of steps is run back to back, the one that comes first taking
turns, and a ratio is the median over all pairs of this one run: torchao's time by fp8ref's, so that
1 is as fast. Then an FP8 step of one linear next to one in bfloat16 and one in float32, in
processor time of one thread. Then what the proof at a run's start takes next to the step that it
watches. A CPU has no FP8 kernels, and multiplies codes as float32 numbers: these times say what is
around the GEMMs, and nothing of a GPU.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torchao.float8 import Float8LinearConfig, Float8LinearRecipeName, convert_to_float8_training

from fp8ref import torch as ft
from fp8ref.torch import proof
from fp8ref.torch.gemm import gemm

RECIPES = tuple(name.value for name in Float8LinearRecipeName)
ASKED = 0.98
LINEARS, PROOF_SECONDS = 200, 10.0
FP8_RECIPES = (*RECIPES, "delayed", "blockwise", "mxfp8")
TIMES_BF16 = 3.0


def stack(width: int, layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(m for _ in range(layers) for m in (nn.Linear(width, width, bias=False), nn.ReLU()))
    ).bfloat16()


def stepping(model: nn.Module, x: torch.Tensor) -> Callable[[], float]:
    """One step, and the seconds it took."""

    def step() -> float:
        model.zero_grad()
        start = time.perf_counter()
        model(x).sum().backward()
        return time.perf_counter() - start

    return step


def paired(theirs: Callable[[], float], ours: Callable[[], float], pairs: int) -> list[float]:
    """theirs / ours of each pair of neighbors."""
    ratios = []
    for i in range(pairs):
        first, second = (theirs, ours) if i % 2 else (ours, theirs)
        seconds = {first: first()}
        seconds[second] = second()
        ratios.append(seconds[theirs] / seconds[ours])
    return ratios


def measure(width: int, tokens: int, layers: int, pairs: int) -> list[dict]:
    x, rows = torch.randn(tokens, width, dtype=torch.bfloat16), []
    for recipe in RECIPES:
        direct = convert_to_float8_training(
            stack(width, layers), config=Float8LinearConfig.from_recipe_name(recipe)
        )
        theirs, ours = stepping(direct, x), stepping(ft.convert(stack(width, layers), recipe), x)
        paired(theirs, ours, 5)
        ratios = paired(theirs, ours, pairs)
        low, median, high = statistics.quantiles(ratios, n=4)
        rows.append(
            {
                "recipe": recipe,
                "pairs": pairs,
                "ratio": median,
                "quartiles": [low, high],
                "at_least": ASKED,
            }
        )
    return rows


def next_to_unconverted(tokens: int, shape: tuple[int, int], repetitions: int) -> list[dict]:
    """Processor time of a step of one linear in FP8, next to bfloat16 and float32."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {"bf16": [], "float32": []}
    seconds |= {recipe: [] for recipe in FP8_RECIPES}
    steps = {}
    for name in seconds:
        linear = nn.Linear(shape[1], shape[0], bias=False)
        model = nn.Sequential(linear if name == "float32" else linear.bfloat16())
        dtype = linear.weight.dtype
        if name in FP8_RECIPES:
            model = ft.convert(model, name)
        x = torch.randn(tokens, shape[1], dtype=dtype).requires_grad_()
        steps[name] = model, x, torch.randn(tokens, shape[0], dtype=dtype)
    for i in range(repetitions + 2):
        for name, (model, x, grad_output) in steps.items():
            start = time.process_time()
            model(x).backward(grad_output)
            if i > 1:  # the first two warm up
                seconds[name].append(time.process_time() - start)
    torch.set_num_threads(threads)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    return [
        {
            "recipe": recipe,
            "milliseconds": 1e3 * median[recipe],
            "times_bf16": median[recipe] / median["bf16"],
            "times_float32": median[recipe] / median["float32"],
            "at_most": TIMES_BF16,
        }
        for recipe in FP8_RECIPES
    ]


def start_up(linears: int) -> dict:
    """Seconds that watching a step of so many linears, and judging it, adds to the step."""
    model, x = (
        ft.convert(stack(64, linears), "tensorwise"),
        torch.randn(64, 64, dtype=torch.bfloat16),
    )
    step = stepping(model, x)
    step()
    plain = step()
    start = time.perf_counter()
    with proof.trace_eager(model) as seen:
        step()
    names = {name: "tensorwise" for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    missing = proof.missing(seen, names)
    return {
        "linears": linears,
        "seconds": time.perf_counter() - start - plain,
        "at_most": PROOF_SECONDS,
        "missing": len(missing),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to FILE")
    parser.add_argument("--quick", action="store_true", help="sizes too small to say anything")
    known = parser.parse_args()
    sizes = (64, 64, 2, 3) if known.quick else (512, 512, 4, 200)
    # as convert does: torch's oneDNN kernel would hide everything else (fp8ref.torch.gemm.gemm)
    gemm.use_native_scaled_mm()
    rows, proving = measure(*sizes), start_up(5 if known.quick else LINEARS)
    unconverted = next_to_unconverted(
        *((64, (128, 128), 3) if known.quick else (2048, (384, 128), 50))
    )
    table = Table("recipe", "pairs", "torchao's time / fp8ref's", "quartiles", "asked")
    for row in rows:
        quartiles = " to ".join(f"{q:.3f}" for q in row["quartiles"])
        table.add_row(
            row["recipe"],
            str(row["pairs"]),
            f"{row['ratio']:.3f}",
            quartiles,
            f">= {row['at_least']}",
        )
    console = Console()
    console.print(table)
    table = Table("recipe", "FP8 step's time / bf16's", "/ float32's", "asked")
    for row in unconverted:
        ratios = (f"{row[name]:.2f}x" for name in ("times_bf16", "times_float32"))
        table.add_row(row["recipe"], *ratios, f"<= {row['at_most']}")
    console.print(table)
    console.print(
        f"the proof of {proving['linears']} linears adds {proving['seconds']:.1f} s (asked: at "
        f"most {proving['at_most']:.0f})"
    )
    if known.json:
        result = {
            "machine": platform.platform(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "rows": rows,
            "next_to_unconverted": unconverted,
            "proof": proving,
        }
        known.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
