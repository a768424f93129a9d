"""How much faster than bfloat16 FP8 trains in PyTorch on one GPU.

Usage: python benchmarks/gpu/gpu_torch.py [--section NAME ...] [--budget SECONDS] [--resume]

    bits         codes and scales of fp8ref's kernels next to the simulator's, of all bfloat16
    kernels      the bandwidth that these kernels reach, and inductor's of the same operations
    profile      the four blocks' step by kind of kernel
    blocks:...   a step of four Llama-8B blocks at 1 x 8192, optimizer included, by each recipe;
                 torchao and Transformer Engine used directly next to it
    shape:...    the same at 4 x 2048, and a step of a Llama-70B block
    ceilings     large GEMMs, a copy, launches
    linear:...   forward and backward of a Llama-8B block's linears on 8,192 tokens, and their GEMMs
                 alone, for the ledger
    graphs:...   the blocks, and a model an eighth as wide, as CUDA graphs
    small        a step of a model an eighth as wide, where FP8 should lose

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
from on_torch import blocks, ceilings, kernels, linears, profile
from on_torch.bench import Bench
from on_torch.clock import Events
from on_torch.variants import CUDA_GRAPHS, MINIMAL, PLAIN, TORCHAO, TRANSFORMER_ENGINE
from reporting import estimates, report
from reporting.report import OURS
from reporting.targets import Target

PACKAGES = (
    "torch",
    "torchao",
    "triton",
    "transformer-engine",
    "nvidia-cublas",
    "nvidia-cudnn-cu13",
)
NEEDED = {
    "bits": 40,
    "kernels": 160,
    "profile": 60,
    "blocks": 180,
    "shape": 200,
    "ceilings": 40,
    "linear": 150,
    "graphs": 200,
    "small": 200,
}
TARGETS = (
    Target(section="blocks:tensorwise", name="fp8ref tensorwise", over="bf16", at_least=1.35),
    Target(section="blocks:delayed", name="fp8ref delayed", over="bf16", at_least=1.45),
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
    found: dict[str, Callable[[Bench], dict]] = {
        "bits": kernels.bits,
        "kernels": kernels.run,
        "profile": profile.run,
    }
    for recipe in (*report.FIRST, "blockwise"):
        found[f"blocks:{recipe}"] = _blocks(of, recipe)
    by_shape = ["bf16", "bf16 again", "fp8ref tensorwise", "fp8ref delayed", "torchao tensorwise"]
    by_shape += TRANSFORMER_ENGINE
    found["shape:4x2048"] = functools.partial(
        blocks.run, config=of.blocks, shape=(4, of.tokens // 4), variants=by_shape
    )
    found["shape:70b"] = functools.partial(
        blocks.run, config=of.large, shape=(1, of.tokens), variants=by_shape
    )
    found["ceilings"] = ceilings.run
    recorded = ["bf16", "bf16 again"]
    recorded += [f"{name}{CUDA_GRAPHS}" for name in ("bf16", "fp8ref tensorwise", "fp8ref delayed")]
    for name, config, tokens in (
        ("blocks", of.blocks, of.tokens),
        ("small", of.small, of.small_tokens),
    ):
        found[f"graphs:{name}"] = functools.partial(
            blocks.run, config=config, shape=(1, tokens), variants=recorded
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
        blocks.run, config=of.small, shape=(1, of.small_tokens), variants=variants
    )
    for recipe in OURS[len(report.FIRST) :]:
        found[f"blocks:{recipe}"] = _blocks(of, recipe)
    return Suite(
        sections=found,
        needed=NEEDED,
        targets=TARGETS,
        of_floor=("tensorwise", "rowwise"),
        how="inductor",
    )


def _blocks(of: Sizes, recipe: str) -> Callable[[Bench], dict]:
    """A section of blocks: a recipe and its peers."""
    variants = ["bf16", "bf16 again", f"fp8ref {recipe}", f"fp8ref {recipe}{PLAIN}"]
    variants += [f"torchao {recipe}"] if recipe in TORCHAO else []
    variants += [MINIMAL] if recipe == "tensorwise" else []
    variants += [name for name in TRANSFORMER_ENGINE if name.endswith(f" {recipe}")]
    return functools.partial(blocks.run, config=of.blocks, shape=(1, of.tokens), variants=variants)


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
