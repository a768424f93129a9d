"""The sentence of a study, each kind on data that has that fault, and causes that are tested."""

import math

import ml_dtypes
import numpy as np
import pytest

from fp8ref import study
from fp8ref.formats import E4M3FN
from fp8ref.policy import POLICIES
from fp8ref.recipe import CastSpec
from fp8ref.study import cast_rows
from fp8ref.study.cast_rows import Row


def normal(*shape, seed=0):
    x = np.random.default_rng(seed).standard_normal(shape)
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def said(x, recipes, name="0.up.input"):
    return study.judge(study.tensors({name: x}), recipes).sentence()


def test_elements_are_zeroed_by_an_outlying_token():
    x = normal(1024, 128)
    x[7] *= 30_000
    assert said(x, ["tensorwise", "rowwise"]) == (
        "tensorwise zeroes 15 % of 0.up.input because token 7 is 31,000x larger than the median "
        "token; rowwise does not (rowwise loses 5.7 % in the grad_weight GEMM)."
    )
    x[900] = x[7]
    assert "token 7 and 1 more are up to 31,000x larger" in said(x, ["tensorwise"])
    assert "because row 7 is 31,000x" in said(x[:256], ["tensorwise"], "0.up.weight")


def test_the_token_has_its_number_in_the_whole_tensor():
    x = normal(2048, 64)
    x[2000] *= 30_000  # of whose rows the blocks from 0, 640, 1280 and 1920 on are kept
    assert "because token 2000 is" in said(x, ["tensorwise"])


def test_elements_are_zeroed_by_an_outlying_column():
    x = normal(1024, 128)
    x[:, 5] *= 30_000
    text = said(x, ["rowwise_with_gw_hp", "mxfp8"])
    assert text.startswith("rowwise_with_gw_hp zeroes")
    assert "because column 5 is 2" in text
    assert "larger than the median column; mxfp8 loses" in text


def test_elements_are_zeroed_by_one_element():
    x = normal(512, 128)
    x[7, 5] = 1e6
    assert "because token 7 is" in said(x, ["tensorwise", "rowwise"])
    assert said(x, ["tensorwise"]).endswith("larger than the median token, in column 5.")


def test_no_cause_is_named_where_nothing_stands_out_or_the_loss_stays():
    x = np.exp2(20 * normal(512, 64))
    assert said(x, ["tensorwise"]) == "tensorwise zeroes 99 % of 0.up.input."
    wide = np.exp2(16 * normal(512, 64))
    wide[3] = 1e4  # stands out of few rows' amax, and costs nothing
    assert "because" not in said(wide, ["tensorwise"])
    one = study.tensors({"x": normal(128, 32)}).operands["x/input"]
    assert cast_rows.cause(one, "token", 0.5, lambda other: 0.0) == ""
    spiked = normal(128, 32)
    spiked[4] *= 1000
    one = study.tensors({"x": spiked}).operands["x/input"]
    assert cast_rows.cause(one, "token", 0.5, lambda other: 0.26) == ""
    assert cast_rows.cause(one, "token", 0.5, lambda other: 0.25).startswith(" because token 4 is")


def test_elements_are_clipped():
    x = normal(256, 64)
    recording = study.tensors({"x": x})
    operand = recording.operands["x/input"]
    small = study.recording.Operand(
        kept=operand.kept, amax=np.float32(1), columns=operand.columns, rows=256
    )
    recording.operands["x/input"] = small  # an amax of an earlier step
    casts = {
        "stale": CastSpec(fmt=E4M3FN, policy=POLICIES["torchao"]),
        "rows": CastSpec(fmt=E4M3FN, granularity="rowwise", policy=POLICIES["torchao"]),
    }
    text = study.judge(recording, casts).sentence()
    share = np.mean(np.abs(x) * 448 > 464)
    assert text.startswith(f"stale clips {100 * share:.2g} % of x; rows does not")


def test_inf_and_nan_come_first():
    x = normal(256, 64)
    x[3, 4] = np.inf
    text = said(x, ["tensorwise", "mxfp8"], "w")
    assert text.startswith("w holds 1 Inf. tensorwise zeroes 99 % of w; mxfp8 loses 0.")
    text = said(x, ["blockwise"], "w")
    assert text == "w holds 1 Inf. blockwise turns rows of w in the grad_weight GEMM into NaN."
    x[5, 6:8] = np.nan
    assert said(x, ["mxfp8"], "w").startswith("w holds 1 Inf and 2 NaN. ")
    nothing = np.full((64, 64), np.nan, np.float32)
    assert said(nothing, ["tensorwise"], "w") == "w is all NaN; there is nothing to judge."
    zeros = np.zeros((64, 64), np.float32)
    zeros[1, 1] = np.nan
    assert said(zeros, ["tensorwise"], "w") == (
        "w holds 1 NaN and no other number but 0; there is nothing to judge."
    )
    arrays = dict.fromkeys("wvuz", nothing) | {"fine": normal(64, 64)}
    text = study.judge(study.tensors(arrays), ["rowwise"]).sentence()
    assert text.startswith("w is all NaN; there is nothing to judge; v is all NaN;")
    assert "; 2 more hold Inf or NaN. No cast of these" in text
    long = normal(2048, 64)
    long[200] = np.inf  # the blocks from 0, 640, 1280 and 1920 on are kept
    assert said(long, ["rowwise"], "w").startswith("w holds Inf or NaN in rows that were not kept.")
    long[0, 0] = np.nan
    assert said(long, ["rowwise"], "w").startswith(
        "w holds 1 NaN in the 512 of 2,048 rows that were kept."
    )


def row(recipe, **numbers):
    given = {"gemm": "output", "role": "input", "layer": "a", "sqnr": 30.0, "median": 30.0}
    return Row(recipe=recipe, **(given | {"low": 30.0, "lost": 0.0, "clipped": 0.0} | numbers))


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (
            [row("t", low=12.0), row("r", low=29.0)],
            "t leaves 5 % of the rows of the input of a at 12 dB of SQNR or less; r keeps 29 dB.",
        ),
        (
            [row("t", low=12.0), row("r", low=15.0)],
            "Every recipe leaves 5 % of the rows of the input of a below 20 dB of SQNR: t at 12 "
            "dB, r at 15 dB.",
        ),
        (
            [row("t", lost=0.0002), row("r", low=25.4)],
            "No cast of these recipes zeroes or clips more than 0.02 % of a tensor, and 95 % of "
            "the rows keep 25 dB or more.",
        ),
        (
            [row("t", low=math.inf)],
            "No cast of these recipes zeroes or clips an element, and every row is exact.",
        ),
        (
            [row("t", low=-math.inf), row("r", low=-math.inf), row("m")],
            "t and r turn rows of the input of a into NaN: it holds NaN or Inf.",
        ),
        (
            [row("t", lost=0.3), row("r", lost=0.25)],
            "t zeroes 30 % of the input of a; no other recipe does much better.",
        ),
        (
            [row(name, lost=0.3) for name in "abcdef"] + [row("g", lost=0.02)],
            "a, b, c and 3 more zero 30 % of the input of a; g loses 2 %.",
        ),
        (
            [row("t", lost=0.01), row("t", gemm="grad_weight", lost=0.4)],
            "t zeroes 40 % of the input of a in the grad_weight GEMM.",
        ),
        (
            [row("t", lost=0.016), row("r", lost=0.0059), row("m", lost=0.0004)],
            "t zeroes 1.6 % of the input of a; m zeroes 0.04 %.",
        ),
        (
            [row("t", lost=0.5), row("m", lost=0.0004), row("n"), row("o", clipped=0.0006)],
            "t zeroes 50 % of the input of a; m, n and o clip 0.06 % or less.",
        ),
        (
            [row("t", low=26.7), row("t", gemm="output", low=50.0, lost=0.001)],
            "No cast of these recipes zeroes or clips more than 0.1 % of a tensor, and 95 % of "
            "the rows keep 27 dB or more.",
        ),
        (
            [row("t", lost=0.001), row("t", gemm="grad_weight", low=12.0)],
            "t leaves 5 % of the rows of the input of a in the grad_weight GEMM at 12 dB of SQNR "
            "or less.",
        ),
        (
            [row("t", low=math.inf, worst_rows=(3,))],
            "No cast of these recipes zeroes or clips an element, and 95 % of the rows are exact.",
        ),
        ([], "No operand was cast."),
    ],
)
def test_every_kind_in_words(rows, text):
    assert study.Judged(rows=tuple(rows)).sentence() == text
