"""Write docs/agreement.md, all policies against all: python docs/scripts/agreement.py"""

from pathlib import Path

import numpy as np

from fp8ref.checkpoints import rule as rules
from fp8ref.policy import POLICIES

PAGE = Path(__file__).parents[1] / "agreement.md"

SHAPE = (2048, 1024)

HEAD = """# Do two libraries quantize a weight to the same bytes?

Each policy of a library quantized the same {elements:,} normal weights, of standard deviations
from 0.02 to 0.04, in blocks of 128x128, to e4m3fn. A number is the share of codes that differ, in
millionths. Policies in one line made the same codes and the same scales of these weights; `0` in
the table means equal codes and other scales. Amax floors do not show here, as no block is that
small: `fp8ref agree vllm_block flashinfer_block` names them. See
[Make trainer and engine agree](how-to/agree.md).

The page is written by `python docs/scripts/agreement.py`.
"""


def written() -> str:
    """The page."""
    parts = [HEAD.format(elements=SHAPE[0] * SHAPE[1])]
    for dtype in ("float32", "bfloat16"):
        parts += [f"\n## Weights in {dtype}\n", table(dtype)]
    return "\n".join(parts)


def table(dtype: str) -> str:
    """Families of equal policies, and the shares of codes in which they differ."""
    random = np.random.default_rng(0)
    # amaxes of all mantissas: of one size of weights they would be nearly equal
    sizes = np.exp2(random.uniform(0, 1, (SHAPE[0] // 128, 1, 1)))
    x = random.standard_normal((len(sizes), 128, SHAPE[1])) * 0.02 * sizes
    x = x.reshape(SHAPE)
    families: dict[tuple[bytes, bytes], list[str]] = {}
    for name in POLICIES:
        q = rules.by_name(f"{name}_block:{dtype}").quantize(x)
        families.setdefault((q.codes.tobytes(), q.scale_inv.tobytes()), []).append(name)
    codes = [np.frombuffer(key[0], np.uint8) for key in families]
    lines = [
        f"{i}. {', '.join(f'`{name}`' for name in names)}"
        for i, names in enumerate(families.values(), 1)
    ]
    numbers = range(1, len(codes) + 1)
    lines += ["", f"| | {' | '.join(map(str, numbers))} |", "|---|" + "---:|" * len(codes)]
    for i, row in zip(numbers, codes, strict=True):
        shares = (f"{1e6 * np.mean(row != column):,.0f}" for column in codes)
        cells = ["-" if i == j else share for j, share in zip(numbers, shares, strict=True)]
        lines.append(f"| {i} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
