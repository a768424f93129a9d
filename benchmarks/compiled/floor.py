"""The fewest bytes that a Llama-8B block must move outside its GEMMs and attention, by recipe, next
to those that compiled programs move (aot_torch.json), and the speed of a step that this predicts
from what an H100 took for the rest (gpu_torch.json): python benchmarks/compiled/floor.py

Each tensor is read once by whoever makes its codes, twice if its scale needs the amax of all of it
first, and its codes are written in both orders. The speed, of bf16's, is a prediction: kernels at
85 % of the measured bandwidth, everything else as measured.
"""

import json
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results"
TOKENS, HIDDEN, INNER, KEYS, BLOCKS = 8192, 4096, 14336, 1024, 4
WEIGHTS = HIDDEN * (2 * HIDDEN + 2 * KEYS + 3 * INNER)
ADAMW = 14  # bytes of a parameter: weight and moments twice, gradient, all bfloat16
SHARE = 0.85  # of the bandwidth that a copy reaches
# (tensor, elements, bytes of an element that one pass reads and writes, and that another one reads)
PARTS = (
    ("norm of attention's input, and the sum before", TOKENS * HIDDEN, 8, 2),
    ("RoPE of q and k", TOKENS * (HIDDEN + KEYS), 4, 0),
    ("attention's output", TOKENS * HIDDEN, 4, 2),
    ("norm of the MLP's input, and the sum before", TOKENS * HIDDEN, 8, 2),
    ("SwiGLU", TOKENS * INNER, 6, 4),
    ("weights", WEIGHTS, 4, 2),
    ("gradient of the output", TOKENS * HIDDEN, 2, 2),
    ("gradients of SwiGLU", TOKENS * INNER, 10, 6),
    ("gradient of the MLP's norm, and of attention's output", TOKENS * HIDDEN, 12, 2),
    ("gradients of RoPE and v", TOKENS * (HIDDEN + 2 * KEYS), 4, 2),
    ("gradient of attention's norm", TOKENS * HIDDEN, 12, 0),
)
SHOWN = ("delayed", "tensorwise_pow2", "blockwise", "tensorwise", "rowwise_native")
TWICE = ("tensorwise", "rowwise_native")
"""Recipes whose scales need the amax first: of the others, delayed scaling knows its scales, powers
of two are guessed and here always right, and a tile has the amax of its own blocks."""

COUNTED = ("torchao", "fp8ref, Linear", "fp8ref, kernels")
HEADS = ("recipe", "floor", "torchao", "plain operations", "kernels", "at the floor", "as counted")
# what ``PARTS`` stand for, of reporting/breakdown.py
CASTS = ("cast (fp8ref)", "cast/amax (triton)", "other (triton)", "cast/amax (other)")


def least(recipe: str) -> float:
    """Bytes of a block."""
    return sum(n * (once + again * (recipe in TWICE)) for _, n, once, again in PARTS)


def counted() -> dict[tuple[str, str], int]:
    """{(recipe, whose linears): bytes of the sectors that a compiled block touches}."""
    rows = json.loads((RESULTS / "aot_torch.json").read_text())["rows"]
    return {
        (row["recipe"], row["who"]): sum(row["sectors"])
        for row in rows
        if row["shape"] == [1, TOKENS]
    }


def rates() -> tuple[float, float, float]:
    """Of an H100: seconds of bf16's step of four blocks; of a step in FP8 without its casts; bytes
    a second."""
    found = json.loads((RESULTS / "gpu_torch.json").read_text())
    profile, steps = (
        {row["name"]: row for row in found["sections"][name]["rows"]}
        for name in ("profile", "blocks:tensorwise")
    )
    kinds = profile["fp8ref tensorwise"]["kinds"]
    fixed = sum(seconds for kind, seconds in kinds.items() if kind not in CASTS)
    return steps["bf16"]["seconds"], fixed, found["ceilings"]["bandwidth"]


def markdown() -> str:
    """The table of one block in PyTorch."""
    bf16, fixed, bandwidth = rates()
    moved = counted()

    def speed(size: float | None) -> str:
        return f"{bf16 / (fixed + BLOCKS * size / (SHARE * bandwidth)):.2f}" if size else "-"

    lines = [HEADS, ("---",) * len(HEADS)]
    for recipe in SHOWN:
        found = [moved.get((recipe, who)) for who in COUNTED]
        sizes = [f"{size / 1e9:.2f}" if size else "-" for size in (least(recipe), *found)]
        lines.append((f"`{recipe}`", *sizes, speed(least(recipe)), speed(found[-1])))
    return _table(lines)


def markdown_jax() -> str:
    """The table of four blocks with AdamW in JAX; Flax scales by earlier steps, as ``delayed``."""
    lines = [("linears", "floor", "counted"), ("---",) * 3]
    for row in json.loads((RESULTS / "aot.json").read_text())["blocks"]:
        name = row["linears"]
        recipe = name.split()[1].rstrip(",") if name.startswith("fp8ref") else "delayed"
        adamw = (ADAMW - 2 * (recipe in TWICE)) * WEIGHTS  # which takes amaxes of weights
        floor = BLOCKS * (least(recipe) + adamw) / 1e9
        lines.append((name, "-" if name == "bf16" else f"{floor:.1f}", f"{row['gb']:.1f}"))
    return _table(lines)


def filled(page: str) -> str:
    """A page with the tables in the places of its two comments, as docs/scripts/hooks.py shows
    it.
    """
    for comment, table in (("floor", markdown()), ("floor, JAX", markdown_jax())):
        page = page.replace(f"<!-- {comment} -->\n", table)
    return page


def _table(lines: list[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    print(markdown(), markdown_jax(), sep="\n", end="")
