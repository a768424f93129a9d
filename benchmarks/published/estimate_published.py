"""Predictions of fp8ref.estimate next to what others measured on H100s: python
benchmarks/published/estimate_published.py

Nothing here is fitted. Every row is predicted from the ceilings of fp8ref/estimate/gpu_rates.py;
those of Meta's H100s, of 500 W and slower memory, from rates that were published of that card, and
from the usual shares of its peaks next to them, to show what hangs on the rates.
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fp8ref.estimate import kernels, roofline
from fp8ref.estimate.gpu_rates import COPY, PUBLISHED, ROWWISE, Ceilings
from fp8ref.recipe import RECIPES, Gemm
from fp8ref.selection import linears as linear_selection
from fp8ref.train.config import config as configs

H100 = PUBLISHED["h100"]
# torchao 0.18, testing/training/roofline_utils.py: "2.4 TB per second, custom to Meta's H100
# variant". That torchtitan's runs below are on it follows from pytorch/torchtitan commit 7a04053:
# 47.65 GiB are 50.16 %, so the card has 95.
SHARES = dataclasses.replace(H100, bandwidth=COPY * 2.4e12)
# Its GEMMs: "H100 500W", 8192 x 8192 x 8192, bf16 585.23 TFLOP/s, "fp8 row gemm only" 1125.51:
# github.com/pytorch/FBGEMM/pull/2546
META = dataclasses.replace(SHARES, bf16=585.23e12, fp8=1125.51e12 / ROWWISE, fp8_rowwise=1125.51e12)
TORCHAO = "github.com/pytorch/ao, torchao/float8/README.md"
# The table of the log says 1.38x and 1.08x, which are its quotients forward (2.00 ms by 1.45 and by
# 1.84); forward and backward are 4.79 ms by 4.06 and by 4.55. A backward pass of two GEMMs in the
# 2.79 ms that bfloat16's takes would run at 1040 TFLOP/s, above the card's peak of 990, so these
# rows take it that grad_input was not asked for.
NANOCHAT = "github.com/karpathy/nanochat, dev/LOG.md, 2026-02-02"
# tokens a second and GPU: TORCHAO
LLAMA_BF16, LLAMA = (6150, {"tensorwise": 7689.5, "rowwise": 6768})
RESCALED = "github.com/pytorch/ao/pull/2185, 'tensorwise w/ rescale', fast accumulation"


@dataclass(frozen=True)
class Row:
    what: str
    recipe: str
    published: float  # bfloat16's time by FP8's
    predicted: float
    source: str

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def linear(
    recipe: str,
    m: int,
    k: int,
    n: int,
    *,
    ceilings: Ceilings,
    gemms: Sequence[Gemm] = kernels.GEMMS,
    how: kernels.Fusion = "inductor",
):
    """bfloat16's time by FP8's of a linear of M tokens, K features in and N out."""
    sizes = [size for size in roofline.sizes_of(m, n, k) if size[0] in gemms]
    return roofline.gemms_ledger(RECIPES[recipe], sizes, how, ceilings).ratio


def rows(meta: Ceilings = META) -> list[Row]:
    return [*_torchao(meta), *_rescaled(meta), *_nanochat(), *_llama(meta)]


def _torchao(meta: Ceilings) -> list[Row]:
    """Forward and backward, compiled; its examples in words. Its tables are pictures."""
    return [
        Row(
            f"linear {m} x {k} x {n}",
            "tensorwise",
            published,
            linear("tensorwise", m, k, n, ceilings=meta),
            TORCHAO,
        )
        for (m, k, n), published in {(1024, 2048, 1024): 0.80, (4096, 8192, 16384): 1.39}.items()
    ]


def _rescaled(meta: Ceilings) -> list[Row]:
    shapes = {
        (16384, 8192, 1280): 1.112,
        (16384, 1024, 8192): 1.426,
        (16384, 8192, 7168): 1.730,
        (16384, 3584, 8192): 1.711,
    }
    return [
        Row(
            f"linear {m} x {k} x {n}",
            "rowwise",
            was,
            linear("rowwise", m, k, n, ceilings=meta),
            RESCALED,
        )
        for (m, k, n), was in shapes.items()
    ]


def _nanochat() -> list[Row]:
    made = []
    for recipe, how, forward, both in (
        ("tensorwise", "inductor", 2.00 / 1.45, 4.79 / 4.06),
        ("rowwise", "inductor", 2.00 / 1.84, 4.79 / 4.55),
        ("rowwise", "eager", 2.00 / 2.89, 4.79 / 21.86),
    ):
        for what, gemms, published in (
            ("forward", ("output",), forward),
            ("and grad_weight", ("output", "grad_weight"), both),
        ):
            predicted = linear(recipe, 65536, 1664, 6656, gemms=gemms, ceilings=H100, how=how)
            eager = ", eager" * (how == "eager")
            made.append(
                Row(f"65536 x 1664 x 6656 {what}{eager}", recipe, published, predicted, NANOCHAT)
            )
    return made


def _llama(meta: Ceilings) -> list[Row]:
    """Tokens a second of one step of one sequence of 8192 a GPU, FSDP over 8, compiled by blocks;
    matrix products kept, of the rest all made again.

    Its tensorwise run gathers weights in FP8, its rowwise one in bfloat16; ours do too. What the
    ratio says of the parts is limited: a step in bfloat16 is predicted much shorter than it was
    (main prints it). torchtitan makes every second product again, and its collectives and its host
    are not predicted.
    """
    made = []
    for recipe, tokens in LLAMA.items():
        predicted = roofline.predict_step(_llama_config(recipe), "torch", meta).ratio
        made.append(
            Row("a step of Llama 3 8B, 8 x H100", recipe, tokens / LLAMA_BF16, predicted, TORCHAO)
        )
    return made


def _llama_config(recipe: str) -> configs.Config:
    base = configs.load("llama-8b")
    base = base.replace(
        data={"batch_size": 8, "microbatches": 1},
        parallel={"checkpointing": "selective", "compile": "block"},
    )
    return base.replace(numerics={"recipe": recipe, "kernels": "plain"})


def verdicts(recipe: str) -> dict[tuple[int, int, int], tuple[bool, float]]:
    """[M, K, N] -> whether torchao's auto filter converts such a weight on an H100, and the ratio
    predicted: powers of two, 1024 to 16384.
    """
    lengths = [1024 << i for i in range(5)]
    found = {}
    for k in lengths:
        for n in lengths:
            # a large linear next to it, since a plan that converts nothing is refused
            converts = linear_selection.select(
                {"it": (n, k), "large": (65536, 65536)},
                recipe,
                filter_fqns=["auto_filter_small_kn"],
            )[0].fp8
            found |= {
                (m, k, n): (converts, linear(recipe, m, k, n, ceilings=META)) for m in lengths
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE")
    known = parser.parse_args()
    print(
        "| what, M x K x N | recipe | published | predicted | error | with 78 % of the peak |\n"
        "|---|---|---|---|---|---|"
    )
    found = rows()
    for row, other in zip(found, rows(SHARES), strict=True):
        shares = "" if other == row else f"{other.predicted:.2f}"
        print(
            f"| {row.what} | {row.recipe} | {row.published:.2f} | {row.predicted:.2f} | "
            f"{100 * row.error:+.0f} % | {shares} |"
        )
    whole = {
        recipe: linear(recipe, 65536, 1664, 6656, ceilings=H100)
        for recipe in ("tensorwise", "rowwise")
    }
    print(
        "\nnanochat's linear, of all three products: "
        + ", ".join(f"{recipe} {ratio:.2f} predicted" for recipe, ratio in whole.items())
    )
    made = roofline.predict_step(_llama_config("tensorwise"), "torch", META)
    seconds = made.bf16 + sum(made.rest.values())
    print(
        f"Llama 3 8B in bfloat16: {8192 / seconds:,.0f} tokens a second and GPU predicted, "
        f"{LLAMA_BF16:,} published"
    )
    for recipe in ("tensorwise", "rowwise"):
        known_by = verdicts(recipe)
        agree = sum(converts == (ratio > 1) for converts, ratio in known_by.values())
        keeps = [ratio for converts, ratio in known_by.values() if not converts]
        gains = [ratio for converts, ratio in known_by.values() if converts]
        print(
            f"torchao's thresholds, {recipe}: agree on {agree} of {len(known_by)} shapes; "
            f"predicted where it filters {min(keeps):.2f} to {max(keeps):.2f}, where it "
            f"converts {min(gains):.2f} to {max(gains):.2f}"
        )
    if known.json:
        known.json.write_text(
            json.dumps([dataclasses.asdict(row) | {"error": row.error} for row in found], indent=1)
            + "\n"
        )


if __name__ == "__main__":
    main()
