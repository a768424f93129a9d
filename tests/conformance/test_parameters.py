"""Parameters have readable ids, whole sets and the simulator's answers."""

import ml_dtypes
import numpy as np
import pytest

from fp8ref.conformance import parameters, require
from fp8ref.conformance.inputs import kinds
from fp8ref.conformance.vectors.cast import Cast
from fp8ref.formats import E4M3FN, E5M2


@pytest.mark.parametrize(
    ("x", "codes"),
    [*parameters.casts(E4M3FN, source="bfloat16", count=50), *parameters.casts(E5M2, count=50)],
)
def test_casts_come_with_their_codes(x, codes, request):
    fmt = E4M3FN if "e4m3fn" in request.node.name else E5M2
    require.require_cast(x, codes, fmt)
    assert x.dtype == (ml_dtypes.bfloat16 if "bfloat16" in request.node.name else np.float32)


def test_every_input_of_a_set_is_in_one_of_the_blocks():
    made = parameters.casts(E4M3FN, count=77)
    assert sum(len(p.values[0]) for p in made) == len(Cast(format="e4m3fn", count=77).inputs())
    assert [p.id for p in made if "tie" in p.id] == [
        "e4m3fn-float32-tie",
        "e4m3fn-float32-next_to_a_tie",
    ]


@pytest.mark.parametrize("made", ["scale", "scale_inv", "e8m0"])
def test_scales(made):
    found = parameters.scales(E5M2, "mx_floor", made=made, count=10)
    assert {p.id for p in found} <= {
        f"e5m2-mx_floor-{kind.replace(' ', '_')}" for kind in kinds.AMAXES
    }
    for p in found:
        require.require_scales(*p.values, E5M2, policy="mx_floor", made=made)


def test_quantizers():
    found = parameters.quantizers(E4M3FN, granularity="rowwise", axis=0, shape=(5, 3))
    assert found[5].id == "e4m3fn-rowwise-zero_lines-5"
    assert found[5].values[1].scale.shape == (1, 3)
    for p in found:
        x, q = p.values
        require.require_quantized(x, q.codes, E4M3FN, scale=q.scale, granularity="rowwise", axis=0)


@pytest.mark.parametrize("asked", [parameters.casts, parameters.scales, parameters.quantizers])
def test_a_format_has_a_name(asked):
    for by_name, of_format in zip(asked("e4m3fn"), asked(E4M3FN), strict=True):
        assert by_name.id == of_format.id
    with pytest.raises(ValueError, match=r"got 'e4m3'\. Did you mean 'e4m3fn'"):
        asked("e4m3")
