"""How much faster than bfloat16 FP8 trains in JAX on one GPU.

Usage: python benchmarks/gpu/gpu_jax.py [--section NAME ...] [--budget SECONDS] [--resume]

    ceilings     large GEMMs, a copy, launches
    blocks:...   a step of four Llama-8B blocks at 1 x 8192, optimizer included, by each recipe;
                 Flax's FP8 next to it
    linear:...   forward and backward of a Llama-8B block's linears on 8,192 tokens, and their GEMMs
                 alone, for the ledger
    small        a step of a model an eighth as wide, where FP8 should lose
    profile      the four blocks' step by kind of kernel

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
from on_jax import blocks, ceilings, linears, profile
from on_jax.bench import Bench
from on_jax.clock import Blocked
from on_jax.variants import EXACT, FLAX, MINIMAL
from reporting import report
from reporting.report import OURS
from reporting.targets import Target

PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "flax",
    "optax",
    "nvidia-cublas",
    "nvidia-cudnn-cu13",
)
NEEDED = {"ceilings": 60, "linear": 150, "blocks": 180, "small": 150, "profile": 60}
TARGETS = (
    Target(section="blocks:tensorwise", name="fp8ref tensorwise", over="bf16", at_least=1.35),
    Target(section="blocks:rowwise", name="fp8ref rowwise", over="bf16", at_least=1.20),
    Target(section="blocks:tensorwise", name="fp8ref tensorwise", over=FLAX, at_least=1.15),
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
            FLAX,
            *([MINIMAL, EXACT] if recipe == "tensorwise" else []),
        ]
        found[f"blocks:{recipe}"] = functools.partial(
            blocks.run, config=of.blocks, tokens=of.tokens, variants=variants
        )
    for linear, section in report.LINEARS.items():
        found[section] = functools.partial(linears.run, shape=(of.tokens, *shapes[linear]))
    variants = ["bf16", "bf16 again", *(f"fp8ref {recipe}" for recipe in OURS), FLAX, MINIMAL]
    found["small"] = functools.partial(
        blocks.run, config=of.small, tokens=of.small_tokens, variants=variants
    )
    found["profile"] = profile.run
    return Suite(
        sections=found,
        needed=NEEDED,
        targets=TARGETS,
        of_floor=("tensorwise", "rowwise"),
        how="xla",
    )


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
