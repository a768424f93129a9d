"""How much faster than bfloat16 FP8 trains in JAX on one GPU.

Usage: python benchmarks/gpu/gpu_jax.py [--section NAME ...] [--budget SECONDS] [--resume]

    bits         codes and scales of fp8ref's kernels next to the simulator's, of all bfloat16
    kernels      the bandwidth that these kernels reach, and XLA's of the same operations
    profile      the four blocks' step by kind of kernel
    blocks:...   a step of four Llama-8B blocks at 1 x 8192, optimizer included, by each recipe;
                 Flax's FP8 next to it, with and without GEMMs in Triton, and qwix's
    shape:...    the same at 4 x 2048, and a step of a Llama-70B block
    ceilings     large GEMMs, a copy, launches
    linear:...   forward and backward of a Llama-8B block's linears on 8,192 tokens, and their GEMMs
                 alone, for the ledger
    small        a step of a model an eighth as wide, where FP8 should lose

Ratios are of one run: variants take turns, and times are medians of rows of calls, of random data.
A finished section is written at once, and --resume goes on with those that are missing, on the same
device and versions; all of them take more than one call of nine minutes. --dry runs every line but
the GPU's own on a CPU, at sizes too small to say anything; what it writes says so.
"""

import argparse
import functools
import os
import sys
from collections.abc import Callable

if "--dry" in sys.argv:  # before jax starts: what it finds then it keeps
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax

import command
from command import Suite
from fp8ref import jax as fj  # noqa: F401  says which extra is missing, before anything is measured
from fp8ref.spec import llama
from measuring import environment, results, sizes
from measuring.results import RefusedError, Results
from measuring.sizes import Sizes
from measuring.timing import Budget
from on_jax import blocks, ceilings, kernels, linears, profile
from on_jax.bench import Bench
from on_jax.clock import Blocked
from on_jax.variants import BY_TRITON, EXACT, FLAX, MINIMAL, OTHERS, PLAIN
from reporting import report
from reporting.report import OURS
from reporting.targets import Target

PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "flax",
    "jax-triton",
    "qwix",
    "optax",
    "nvidia-cublas",
    "nvidia-cudnn-cu13",
)
NEEDED = {
    "bits": 60,
    "kernels": 160,
    "profile": 60,
    "blocks": 220,
    "shape": 220,
    "ceilings": 60,
    "linear": 180,
    "small": 200,
}
TARGETS = (
    Target(section="blocks:tensorwise", name="fp8ref tensorwise", over="bf16", at_least=1.35),
    Target(section="blocks:delayed", name="fp8ref delayed", over="bf16", at_least=1.45),
    Target(section="blocks:rowwise", name="fp8ref rowwise", over="bf16", at_least=1.20),
    Target(section="blocks:delayed", name="fp8ref delayed", over=FLAX, at_least=1.0),
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
    for recipe in report.FIRST:
        found[f"blocks:{recipe}"] = _blocks(of, recipe)
    by_shape = ["bf16", "bf16 again", "fp8ref tensorwise", "fp8ref delayed", FLAX]
    found["shape:4x2048"] = functools.partial(
        blocks.run, config=of.blocks, shape=(4, of.tokens // 4), variants=by_shape
    )
    found["shape:70b"] = functools.partial(
        blocks.run, config=of.large, shape=(1, of.tokens), variants=by_shape
    )
    found["ceilings"] = ceilings.run
    for linear, section in report.LINEARS.items():
        found[section] = functools.partial(linears.run, shape=(of.tokens, *shapes[linear]))
    variants = ["bf16", "bf16 again", *(f"fp8ref {recipe}" for recipe in OURS), FLAX, MINIMAL]
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
        how="xla",
    )


def _blocks(of: Sizes, recipe: str) -> Callable[[Bench], dict]:
    """A section of blocks: a recipe and its peers."""
    peers = {"tensorwise": [*OTHERS, EXACT], "delayed": [FLAX, *BY_TRITON]}.get(recipe, [])
    ours = [f"fp8ref {recipe}", f"fp8ref {recipe}{PLAIN}"]
    variants = ["bf16", "bf16 again", *ours, *peers]
    return functools.partial(blocks.run, config=of.blocks, shape=(1, of.tokens), variants=variants)


def bench(given: argparse.Namespace) -> Bench:
    budget = Budget(given.budget)
    if given.dry:
        return Bench(
            dry=True,
            clock=Blocked(),
            sizes=sizes.dry(),
            budget=budget,
            attention=given.attention or "xla",
        )
    if jax.default_backend() != "gpu":
        raise RefusedError(
            f"this benchmark measures a GPU, and jax runs on {jax.default_backend()}. Run it on "
            "one, or its lines on a CPU by --dry --json FILE."
        )
    return Bench(
        dry=False,
        clock=Blocked(),
        sizes=sizes.full(),
        budget=budget,
        attention=given.attention or "cudnn",
    )


def main() -> int:
    parser = command.options(
        __doc__, list(suite(sizes.dry()).sections), results.KEPT / "gpu_jax.json"
    )
    parser.add_argument(
        "--attention",
        choices=["cudnn", "xla"],
        help="of every variant; by default cuDNN's, of a dry run XLA's",
    )
    given = parser.parse_args()
    try:
        known = bench(given)
        device = "cpu" if known.dry else jax.devices()[0].device_kind
        described = environment.describe(device, PACKAGES, dry=known.dry)
        described["flags"]["attention"] = known.attention
        kept = Results(given.json, described, resume=given.resume, overwrite=given.overwrite)
    except RefusedError as refused:
        print(refused, file=sys.stderr)
        return 2
    return command.execute(known, suite(known.sizes), kept, given.section)


if __name__ == "__main__":
    sys.exit(main())
