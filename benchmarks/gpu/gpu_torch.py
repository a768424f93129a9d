"""How much faster than bfloat16 FP8 trains in PyTorch on one GPU.

Usage: python benchmarks/gpu/gpu_torch.py [--section NAME ...] [--budget SECONDS] [--resume]

    ceilings     large GEMMs, a copy, launches
    blocks:...   a step of four Llama-8B blocks at 1 x 8192, optimizer included, by each recipe;
                 torchao used directly next to it
    linear:...   forward and backward of a Llama-8B block's linears on 8,192 tokens, and their GEMMs
                 alone, for the ledger
    small        a step of a model an eighth as wide, where FP8 should lose
    profile      the four blocks' step by kind of kernel

Ratios are of one run: variants take turns, and times are medians of CUDA events, of random data. A
finished section is written at once, and --resume goes on with those that are missing, on the same
device and versions; all of them take more than one call of nine minutes. --dry runs every line but
the GPU's own on a CPU, at sizes too small to say anything; what it writes says so.
"""

import argparse
import functools
import sys
from collections.abc import Callable

import torch

import command
from command import Suite
from fp8ref.spec import llama
from fp8ref.torch.gemm import gemm
from measuring import environment, results, sizes
from measuring.results import RefusedError, Results
from measuring.sizes import Sizes
from measuring.timing import Budget, Wall
from on_torch import blocks, ceilings, linears, profile
from on_torch.bench import Bench
from on_torch.clock import Events
from on_torch.variants import MINIMAL, TORCHAO
from reporting import estimates, report
from reporting.report import OURS
from reporting.targets import Target

PACKAGES = ("torch", "torchao", "triton", "nvidia-cublas", "nvidia-cudnn-cu13")
NEEDED = {"ceilings": 40, "linear": 120, "blocks": 150, "small": 150, "profile": 60}
TARGETS = (
    Target(section="blocks:tensorwise", name="fp8ref tensorwise", over="bf16", at_least=1.40),
    Target(section="blocks:rowwise", name="fp8ref rowwise", over="bf16", at_least=1.20),
    *(
        Target(section=f"blocks:{r}", name=f"fp8ref {r}", over=f"torchao {r}", at_least=1.0)
        for r in TORCHAO
    ),
)


def suite(of: Sizes) -> Suite:
    shapes = {
        name.rpartition(".")[2]: shape for name, shape in llama.linear_shapes(of.blocks).items()
    }
    found: dict[str, Callable[[Bench], dict]] = {"ceilings": ceilings.run}
    for recipe in OURS:
        variants = [
            "bf16",
            "bf16 again",
            f"fp8ref {recipe}",
            *([f"torchao {recipe}"] if recipe in TORCHAO else []),
        ]
        if recipe == "tensorwise":
            variants.append(MINIMAL)
        found[f"blocks:{recipe}"] = functools.partial(
            blocks.run, config=of.blocks, tokens=of.tokens, variants=variants
        )
    for linear, section in report.LINEARS.items():
        found[section] = functools.partial(linears.run, shape=(of.tokens, *shapes[linear]))
    variants = [
        "bf16",
        "bf16 again",
        *(f"fp8ref {recipe}" for recipe in OURS),
        "torchao tensorwise",
        MINIMAL,
    ]
    found["small"] = functools.partial(
        blocks.run, config=of.small, tokens=of.small_tokens, variants=variants
    )
    found["profile"] = profile.run
    return Suite(
        sections=found,
        needed=NEEDED,
        targets=TARGETS,
        of_floor=("tensorwise", "rowwise"),
        how="inductor",
    )


def bench(given: argparse.Namespace) -> Bench:
    torch.manual_seed(0)
    budget = Budget(given.budget)
    if given.dry:
        gemm.use_native_scaled_mm()  # as convert does
        torch.set_num_threads(1)  # matrices this small wait for threads longer than they take
        return Bench(
            device="cpu", clock=Wall(), sizes=sizes.dry(), backend="aot_eager", budget=budget
        )
    if not torch.cuda.is_available():
        raise RefusedError(
            "this benchmark measures a GPU, and torch sees none. Run it on one, or its lines on "
            "a CPU by --dry --json FILE."
        )
    if torch.cuda.get_device_capability() < (8, 9):
        raise RefusedError(
            f"FP8 GEMMs need compute capability 8.9; {torch.cuda.get_device_name()} has "
            f"{torch.cuda.get_device_capability()}."
        )
    return Bench(
        device="cuda", clock=Events(), sizes=sizes.full(), backend="inductor", budget=budget
    )


def main() -> int:
    given = command.options(
        __doc__, list(suite(sizes.dry()).sections), results.KEPT / "gpu_torch.json"
    ).parse_args()
    try:
        known = bench(given)
        device = "cpu" if known.dry else torch.cuda.get_device_name()
        described = environment.describe(device, PACKAGES, dry=known.dry)
        kept = Results(given.json, described, resume=given.resume, overwrite=given.overwrite)
    except RefusedError as refused:
        print(refused, file=sys.stderr)
        return 2
    code = command.execute(known, suite(known.sizes), kept, given.section)
    written = estimates.write(kept.data, given.json.parent)
    if written:
        print(f"fp8ref estimate takes what was reached here by --ceilings {written}")
    return code


if __name__ == "__main__":
    sys.exit(main())
