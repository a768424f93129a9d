"""Quantizers to e2m1fn of libraries, and with planted faults, through ``identify_quantizer``."""

import numpy as np
import pytest
import torch
from helpers.quantize.fp4_libraries import (
    four_over_six,
    torchao_mx,
    torchao_nvfp4,
    torchao_nvfp4_one_level,
    transformer_engine,
)

from fp8ref.conformance import identify_quantizer
from fp8ref.conformance.kit.subject import ConformanceError
from fp8ref.conformance.quantizer import whole_tensors
from fp8ref.formats import E2M1FN
from fp8ref.sim.quantize import packing, scaling


def simulated(x, *, policy="te_nvfp4", granularity="nvfp4_1x16", axis=-1, packed=True, **options):
    q = scaling.quantize(x, E2M1FN, granularity=granularity, policy=policy, axis=axis, **options)
    return {
        "codes": packing.pack(q.codes) if packed else q.codes,
        "scale_inv": q.scale_inv,
        "tensor_scale_inv": np.atleast_1d(q.tensor_scale_inv or 1),
    }


@pytest.mark.parametrize(
    ("function", "policy", "granularity"),
    [
        (torchao_nvfp4, "torchao_nvfp4", "nvfp4_1x16"),
        (torchao_nvfp4_one_level, "torchao_nvfp4_one_level", "nvfp4_1x16"),
        (transformer_engine, "te_nvfp4", "nvfp4_1x16"),
        (lambda x: transformer_engine(x, 16), "te_nvfp4", "nvfp4_16x16"),
        (lambda x: transformer_engine(x, row_scaled=True), "te_nvfp4_row", "nvfp4_1x16"),
        (
            lambda x: four_over_six(x, 1, "mae", 256, row_scaled=True)[:2],
            "te_nvfp4_row_4over6",
            "nvfp4_1x16",
        ),
        *(
            (
                lambda x, rows=rows, error=error, fast=fast: four_over_six(
                    x, rows, error, 256, fast_math=bool(fast)
                )[:2],
                f"te_nvfp4_4over6{'_mse' * (error == 'mse')}{fast}",
                f"nvfp4_{rows}x16",
            )
            for rows, error, fast in (
                (1, "mae", ""),
                (1, "mae", "_fast"),
                (16, "mae", "_fast"),
                (1, "mse", "_fast"),
            )
        ),
        *(
            (torchao_mx(mode), f"mx_{mode}", "mx_1x32")
            for mode in ("floor", "ceil", "even", "rceil")
        ),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_libraries_are_identified(function, policy, granularity):  # S-22, S-14
    outcome = identify_quantizer(function, E2M1FN, framework="torch", expect=policy)
    assert (outcome.ok, outcome.identified, outcome.named) == (True, True, True), outcome.message
    assert (outcome.found["policy"], outcome.found["granularity"], outcome.found["axis"]) == (
        policy,
        granularity,
        -1,
    )
    assert outcome.found["rounding"] == "nearest_even"
    assert outcome.found["packing"] == "low first"
    assert None not in outcome.found["scales"].values()
    if "nvfp4" in policy:  # a square is one along both axes; no other policy agrees
        others = {words.partition(" ")[0] for words in outcome.findings[2].others}
        assert others <= {policy}


def swapped(x):
    return {**simulated(x), "codes": (pairs := simulated(x)["codes"]) << 4 | pairs >> 4}


def without_tensor(x):  # the scale of the tensor is left out of the element's
    q = scaling.quantize(x, E2M1FN, granularity="nvfp4_1x16", policy="te_nvfp4")
    by = scaling.Scales(
        (1 / np.maximum(q.scale_inv, np.float32(2**-9))).astype(np.float32), q.scale_inv
    )
    return scaling.quantize_with(x, by, E2M1FN, granularity="nvfp4_1x16").codes


def one_block(x):
    codes = simulated(x, packed=False)["codes"].copy()
    codes[-1, -16:] ^= np.uint8(8) * (x[-1, -16:] != 0)
    return codes


@pytest.mark.parametrize(
    ("function", "identified", "named", "words"),
    [
        (lambda x: simulated(x, axis=0), True, True, "axis 0"),
        (lambda x: simulated(x, packed=False), True, True, "one a byte"),
        (lambda x: simulated(x, rounding="toward_zero"), True, False, "toward_zero"),
        (lambda x: simulated(x, rounding="nearest_away"), True, False, "nearest_away"),
        (swapped, True, False, "high first"),
        (without_tensor, False, False, "the nearest is"),
        (one_block, False, False, "the nearest is te_nvfp4 in nvfp4_1x16, axis -1"),
        (
            lambda x: {**simulated(x), "scale_inv": simulated(x)["scale_inv"] * np.float32(2)},
            False,
            False,
            "the nearest is te_nvfp4",
        ),
    ],
    ids=["axis", "bytes", "zero", "away", "swapped", "without tensor", "one block", "wrong scales"],
)
def test_planted_quantizers_are_named(function, identified, named, words):  # S-22, F-5, C-2
    outcome = identify_quantizer(function, E2M1FN, framework="numpy")
    assert (outcome.identified, outcome.named) == (identified, named), outcome.message
    assert words in outcome.summary
    assert bool(outcome.unlike) != identified


def test_stochastic_rounding_is_told_from_a_biased_one():  # C-2
    seeds = iter(range(10_000))
    fair = identify_quantizer(
        lambda x: simulated(x, rounding="stochastic", seed=next(seeds)), E2M1FN, framework="numpy"
    )
    assert (fair.ok, fair.found["rounding"]) == (True, "stochastic"), fair.message
    rng = np.random.default_rng(0)

    def biased(x):  # one code in sixteen is rounded toward zero
        codes = simulated(x, rounding="stochastic", seed=next(seeds), packed=False)["codes"]
        return np.where(
            rng.random(x.shape) < 1 / 16,
            simulated(x, rounding="toward_zero", packed=False)["codes"],
            codes,
        )

    outcome = identify_quantizer(biased, E2M1FN, framework="numpy")
    assert not outcome.identified
    assert "biased" in str(outcome.unlike[0])


def test_an_expected_policy_shows_where_it_differs():  # S-22
    outcome = identify_quantizer(torchao_nvfp4, E2M1FN, framework="torch", expect="te_nvfp4")
    assert not outcome.ok
    assert "of te_nvfp4 in nvfp4_1x16" in str(outcome.differences[0])
    assert identify_quantizer(
        lambda x: transformer_engine(x, 16),
        E2M1FN,
        framework="torch",
        expect="te_nvfp4",
        granularity="nvfp4_16x16",
    ).ok
    wrong = identify_quantizer(
        lambda x: transformer_engine(x, 16),
        E2M1FN,
        framework="torch",
        expect="te_nvfp4",
        granularity="nvfp4_1x16",
    )
    assert not wrong.ok
    high = identify_quantizer(swapped, E2M1FN, framework="numpy", expect="te_nvfp4")
    assert "in its high half" in str(high.differences[0])


def test_errors():
    with pytest.raises(
        ValueError, match="an expected granularity or axis needs an expected policy"
    ):
        identify_quantizer(simulated, E2M1FN, granularity="mx_1x32")
    with pytest.raises(ValueError, match="policy 'torchao' is not of e2m1fn blocks"):
        identify_quantizer(simulated, E2M1FN, framework="numpy", expect="torchao")
    with pytest.raises(
        ConformanceError, match=r"gives uint8 \[3\]; a quantizer to e2m1fn gives codes"
    ):
        identify_quantizer(lambda x: np.zeros(3, np.uint8), E2M1FN, framework="numpy")
    with pytest.raises(ConformanceError, match="gives a code 16; codes of e2m1fn are at most 15"):
        identify_quantizer(lambda x: np.full(x.shape, 16, np.uint8), E2M1FN, framework="numpy")
    values = identify_quantizer(
        lambda x: scaling.dequantize(
            scaling.quantize(x, E2M1FN, granularity="mx_1x32", policy="mx_floor")
        ),
        E2M1FN,
        framework="numpy",
    )
    assert values.ok
    assert values.found["policy"] == "mx_floor"
    candidates = whole_tensors.block_candidates()
    assert len({str(c) for c in candidates}) == len(candidates)
    assert torch.float4_e2m1fn_x2.itemsize == 1
