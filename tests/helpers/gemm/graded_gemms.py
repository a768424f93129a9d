"""GEMMs with faults that are known, for the kit to grade: functions of Quantized a and b."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fp8ref.formats import BFLOAT16, FLOAT16, FLOAT32
from fp8ref.sim.gemm import gemm
from fp8ref.sim.quantize import cast, scaling


def values(q):
    """The numbers of the codes."""
    return cast.decode(q.codes, q.fmt)


def finish(acc, a, b, out=FLOAT32):
    """A float32 sum under scales, rounded once."""
    return stored(acc * a.scale_inv * b.scale_inv.T, out)


def stored(x, out):
    """x in the output dtype: as NumPy's float32 or float16, or ml_dtypes' bfloat16."""
    import ml_dtypes

    return x.astype(
        {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[out.name]
    )


def correct(a, b):
    return finish(values(a) @ values(b).T, a, b)


def to_bfloat16(a, b):
    return finish(values(a) @ values(b).T, a, b, BFLOAT16)


def split_k(a, b):
    return finish(
        sum(
            x @ y.T
            for x, y in zip(*(np.array_split(values(q), 4, axis=1) for q in (a, b)), strict=True)
        ),
        a,
        b,
    )


def tf32(a, b):
    """Operands rounded to TF32, as a tensor core reads float32: FP8 numbers are numbers of TF32."""
    x, y = ((values(q).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for q in (a, b))
    return finish(x @ y.T, a, b)


def narrow(fmt, every, promotion=None, parts=1):
    """An accumulator of a format, rounded after each ``every`` of K, added to a float32 after each
    ``promotion``.
    """

    def function(a, b):
        x, y = values(a), values(b)
        total = np.zeros((len(x), len(y)), np.float32)
        for own in np.array_split(np.arange(x.shape[1]), parts):
            for chain in np.array_split(
                own, range(promotion, len(own), promotion) if promotion else 1
            ):
                acc = np.zeros_like(total)
                for k in range(0, len(chain), every):
                    some = chain[k : k + every]
                    acc = cast.round_to(acc + x[:, some] @ y[:, some].T, fmt)
                total = total + acc
        return finish(total, a, b)

    return function


def partials(fmt, parts):
    """Split-K whose parts are stored, and added, in a format."""

    def function(a, b):
        total = np.float32(0)
        for x, y in zip(*(np.array_split(values(q), parts, axis=1) for q in (a, b)), strict=True):
            total = cast.round_to(total + cast.round_to(x @ y.T, fmt), fmt)
        return finish(total, a, b)

    return function


def without(part):
    """K without a part of it: a function of K that gives a slice."""

    def function(a, b):
        x, y = values(a).copy(), values(b)
        x[:, part(x.shape[1])] = 0
        return finish(x @ y.T, a, b)

    return function


def repeated(a, b):
    x, y = values(a), values(b)
    return finish(x @ y.T + x[:, :64] @ y[:, :64].T, a, b)


def with_scales(of):
    """Other scales: a function of (a, b) that gives two."""

    def function(a, b):
        left, right = of(a, b)
        with np.errstate(all="ignore"):
            return values(a) @ values(b).T * left * right.T

    return function


def swapped(a, b):
    if len(a.codes) != len(b.codes):
        raise ValueError("square results alone")
    return values(a) @ values(b).T * b.scale_inv * a.scale_inv.T


def transposed(a, b):
    y = values(b)
    return finish(values(a) @ y.reshape(y.shape[::-1]), a, b)


def tile(of):
    """A wrong tile at rows 32 to 63 and columns 16 to 47: of(a, b) of that part."""

    def function(a, b):
        out = correct(a, b)
        out[32:64, 16:48] = of(a, b)[32:64, 16:48]
        return out

    return function


def path(scale=None, via=None, out=BFLOAT16, first=None):
    """Roundings on the way to the output."""

    def function(a, b):
        if first is not None:
            x, y = (cast.round_to(values(q) * q.scale_inv, first) for q in (a, b))
            return stored(x @ y.T, out)
        acc = values(a) @ values(b).T
        if scale == "rounded":
            acc = cast.round_to(acc, out)
        with np.errstate(over="ignore"):
            x = acc * a.scale_inv * b.scale_inv.T
            return stored(x if via is None else cast.round_to(x, via), out)

    return function


def biased(how, out=BFLOAT16):
    """A bias, added in one of three places."""

    def function(a, b, bias):
        acc, added = values(a) @ values(b).T, cast.round_to(bias, out)
        if how == "before scales":
            return finish(acc + added, a, b, out)
        scaled = acc * a.scale_inv * b.scale_inv.T
        return stored(
            cast.round_to(scaled, out) + added if how == "after rounding" else scaled + added, out
        )

    return function


def flushed(a, b):
    """Subnormal codes are zeros."""
    x, y = (
        np.where(np.abs(values(q)) < q.fmt.smallest_normal, np.float32(0), values(q))
        for q in (a, b)
    )
    return finish(x @ y.T, a, b)


def blocks(shift):
    """Scales of 1x128 blocks, those of a shifted along K."""

    def function(a, b):
        x, y = (
            values(q) * scaling.spread(np.roll(q.scale_inv, step, axis=1), q.codes.shape, q.blocks)
            for q, step in ((a, shift), (b, 0))
        )
        return x @ y.T

    return function


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A GEMM, its verdict, and a part of the cause in words; '' if it has none."""

    function: Callable[..., Any]
    verdict: str
    cause: str = ""
    options: dict[str, Any] = field(default_factory=dict)


ROWWISE = {"granularity": "rowwise"}

PLANTED = {
    # the four of the kit's first users
    "float32": Planted(function=correct, verdict="right"),
    "a bfloat16 accumulator": Planted(
        function=narrow(BFLOAT16, 64),
        verdict="imprecise",
        cause="a bfloat16 accumulator, rounded every 64 of K",
    ),
    "K without its end": Planted(
        function=without(lambda k: slice(k - 32, k)),
        verdict="wrong",
        cause="the last 32 of K dropped",
    ),
    "scale in the place of scale_inv": Planted(
        function=with_scales(lambda a, b: (a.scale, b.scale)),
        verdict="wrong",
        cause="scale of a in the place of scale_inv, and scale of b",
    ),
    # and more
    "split-K": Planted(function=split_k, verdict="right"),
    "tf32": Planted(function=tf32, verdict="right"),
    "bfloat16 outputs": Planted(function=to_bfloat16, verdict="right"),
    "promotion": Planted(
        function=narrow(BFLOAT16, 16, promotion=128),
        verdict="imprecise",
        cause="rounded every 16 of K, promoted to float32 every 128 of K",
    ),
    "sums of blocks in bfloat16": Planted(
        function=narrow(BFLOAT16, 128, promotion=128),
        verdict="imprecise",
        cause="sums of every 128 of K rounded to bfloat16, added in float32",
    ),
    "split-K with an accumulator": Planted(
        function=narrow(BFLOAT16, 32, parts=4),
        verdict="imprecise",
        cause="a bfloat16 accumulator, rounded every 32 of K, in 4 parts of K (split-K)",
    ),
    "split-K in bfloat16": Planted(
        function=partials(BFLOAT16, 4),
        verdict="imprecise",
        cause="sums of parts rounded to bfloat16, in 4 parts of K (split-K) and added in bfloat16",
    ),
    "a float16 accumulator": Planted(
        function=narrow(FLOAT16, 32),
        verdict="wrong",
        cause="a float16 accumulator, rounded every 32 of K",
    ),
    "hopper_fast": Planted(
        function=lambda a, b: gemm.matmul(a, b, accumulate="hopper_fast"),
        verdict="imprecise",
        cause="the accumulation of hopper_fast",
    ),
    "a part of split-K dropped": Planted(
        function=without(lambda k: slice(k // 4 * 3, k)),
        verdict="wrong",
        cause="part 3 of 0 to 3 equal parts of K dropped",
    ),
    "K repeated": Planted(
        function=repeated, verdict="wrong", cause="the first 64 of K added twice"
    ),
    "scales swapped": Planted(
        function=swapped, verdict="wrong", cause="scales swapped", options=ROWWISE
    ),
    "a scale twice": Planted(
        function=with_scales(lambda a, b: (a.scale_inv**2, b.scale_inv)),
        verdict="wrong",
        cause="scale_inv of a twice",
        options=ROWWISE,
    ),
    "a scale of rows for all": Planted(
        function=with_scales(lambda a, b: (a.scale_inv, b.scale_inv[:1])),
        verdict="wrong",
        cause="the first scale_inv of b for all",
        options=ROWWISE,
    ),
    "scales of blocks, one too late": Planted(
        function=blocks(1),
        verdict="wrong",
        cause="scale_inv of a of the previous block of K",
        options={"granularity": "blockwise_1x128"},
    ),
    "b transposed": Planted(function=transposed, verdict="wrong", cause="b transposed"),
    "a tile of zeros": Planted(
        function=tile(lambda a, b: 0 * correct(a, b)),
        verdict="wrong",
        cause="a wrong tile, rows 32 to 63, columns 16 to 47: zeros",
    ),
    "a tile without the end of K": Planted(
        function=tile(without(lambda k: slice(k - 64, k))),
        verdict="wrong",
        cause="rows 32 to 63, columns 16 to 47: the last 64 of K dropped",
    ),
    "bfloat16 by way of float16": Planted(
        function=path(via=FLOAT16),
        verdict="wrong",
        cause="double rounding: the output is rounded to float16 first",
    ),
    "float32 by way of bfloat16": Planted(
        function=path(via=BFLOAT16, out=FLOAT32),
        verdict="imprecise",
        cause="double rounding: the output is rounded to bfloat16 first",
    ),
    "float32 cut off to bfloat16": Planted(
        function=lambda a, b: (correct(a, b).view(np.uint32) & np.uint32(0xFFFF0000)).view(
            np.float32
        ),
        verdict="imprecise",
        cause="double rounding: the output is rounded to bfloat16 first; outputs are rounded "
        "toward zero",
    ),
    "an accumulator every 48": Planted(
        function=narrow(BFLOAT16, 48),
        verdict="imprecise",
        cause="a bfloat16 accumulator, rounded every 48 of K",
    ),
    "the sum rounded before scales": Planted(
        function=path(scale="rounded"),
        verdict="right",
        cause="double rounding: the sum is rounded to the output dtype before it is scaled",
    ),
    "dequantized to bfloat16": Planted(
        function=path(first=BFLOAT16, out=FLOAT32),
        verdict="imprecise",
        cause="operands are dequantized and rounded to bfloat16",
    ),
    "a bias before scales": Planted(
        function=biased("before scales"), verdict="wrong", cause="the bias added before both scales"
    ),
    "a bias after the rounding": Planted(
        function=biased("after rounding"),
        verdict="right",
        cause="the bias is added after the rounding",
    ),
    "a bias before the rounding": Planted(function=biased("before rounding"), verdict="right"),
    "subnormal codes flushed": Planted(
        function=flushed,
        verdict="wrong",
        cause="subnormal codes of a are taken for 0, and subnormal codes of b",
    ),
}
"""GEMMs by name, with what the kit has to say."""
