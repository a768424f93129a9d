"""Deviations of block scales have names, and each is shown once, by an ordinary number."""

import numpy as np
import planted_quantizers as planted
import pytest

from fp8ref.conformance import identify_quantizer
from fp8ref.formats import E4M3FN

NAMED = [
    (planted.eps_is_added, "its eps, 1e-12, is added to the amax, not the least amax", "= 1.52587890625e-05, then"),
    (planted.a_large_eps_is_added, "its eps, 1e-05, is added to the amax, not the least amax", "= 1, then"),
    (planted.block_amax_in_bfloat16, "its amax is rounded to bfloat16", "= 1.6"),
    (planted.block_scale_in_bfloat16, "its scale is rounded to bfloat16", "= 1.5, then"),
    (planted.stores_in_bfloat16,
     "its eps, 1e-10, is added to the amax, not the least amax, and the scale_inv that it returns is rounded to bfloat16, and its codes are of the float32 one",
     "= 1, then"),
    (planted.stores_the_ratio, "its scale_inv is amax / max, not the reciprocal of the scale", "= 1."),
    (planted.rounds_blocks_up, "its scale is rounded up to a power of two, not down", "= 1, then"),
]  # fmt: skip


@pytest.mark.grid(2)
@pytest.mark.parametrize(("function", "deviation", "shown"), NAMED, ids=[function.__name__ for function, *_ in NAMED])
def test_named_and_shown_once(function, deviation, shown):  # S-16
    found = identify_quantizer(function, E4M3FN, name="mine", expect="torchao")
    # COAT's codes are x * (1 / s): those of torchao and of its own scale_inv differ (S-17).
    nearest = "deepgemm_cpu" if function is planted.stores_in_bfloat16 else "torchao"
    assert (found.found["nearest_policy"], found.found["deviation"]) == (nearest, deviation)
    assert f"policy {nearest}, but {deviation}" in found.message
    assert len(found.differences) == 1, found.message
    assert shown in found.differences[0].input


def test_a_factor_is_shown_once():
    found = identify_quantizer(lambda x: planted.blocks(x, lambda amax: 1.5 * planted.torchao_scale(amax)), E4M3FN, expect="torchao")
    assert found.found["deviation"] == "its scale is about 1.5 times that policy's"
    assert [w.input for w in found.differences] == ["x [1, 128] = 1, then zeros"]


def test_without_a_name_other_finite_amaxes_are_not_shown_again():
    found = identify_quantizer(lambda x: planted.blocks(x, lambda amax: 448 / (amax + amax**2)), E4M3FN, expect="torchao")
    assert found.found["deviation"] is None
    finite = [w for w in found.differences if np.isfinite(float(w.input.split(" = ")[1].split(",")[0])) and " = 0," not in w.input]
    assert len(finite) == 1
