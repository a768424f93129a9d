import ml_dtypes
import numpy as np
import pytest

from fp8ref.conformance.inputs import cast_inputs, dtypes
from fp8ref.formats import E2M1FN, E4M3FN, E5M2, FP8_FORMATS
from fp8ref.sim.quantize import cast


@pytest.mark.parametrize("fmt", FP8_FORMATS.values(), ids=str)
def test_edges_hold_every_number_every_tie_and_overflow(fmt):
    values = cast_inputs.edges(fmt)
    numbers = (
        np.arange(256, dtype=np.uint8)
        .view(getattr(ml_dtypes, f"float8_{fmt.name}"))
        .astype(np.float64)
    )
    finite = np.unique(np.abs(numbers[np.isfinite(numbers)]))
    assert np.isin(finite, values).all()
    assert np.isin((finite[1:] + finite[:-1]) / 2, values).all()
    assert (np.abs(values[np.isfinite(values)]) > fmt.max).sum() >= 6
    assert np.isnan(values).any()
    assert np.isinf(values).any()


def test_edges_and_16_bit_values_have_every_tie_and_its_neighbors():
    for fmt in (E4M3FN, E5M2):
        inputs = set(cast_inputs.edges_and_16_bit(fmt).view(np.uint32).tolist())
        values = np.unique(cast.decode(np.arange(256, dtype=np.uint8), fmt))
        values = values[np.isfinite(values)]
        ties = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
        for point in (
            ties,
            np.nextafter(ties, np.float32(np.inf)),
            np.nextafter(ties, np.float32(-np.inf)),
            values,
        ):
            assert set(point.view(np.uint32).tolist()) <= inputs | {0x80000000}
        assert {0x7F800000, 0xFF800000, 0x80000000, 0} <= inputs


@pytest.mark.parametrize("source", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("fmt", [*cast_inputs.CAST_FORMATS.values(), E2M1FN], ids=str)
def test_every_tie_is_asked_with_both_neighbors(fmt, source):
    """The tie of zero and the smallest number too: 0.25000006 of e2m1fn is 0.5 (tt-metal#51971)."""
    numbers = np.append(
        cast.decode(np.arange(fmt.max_code + 1, dtype=np.uint8), fmt).astype(np.float64), 0.0
    )
    numbers[-1] = 2 * numbers[-2] - numbers[-3]
    kind = dtypes.by_name(source)
    middle = dtypes.bits((numbers[1:] + numbers[:-1]) / 2, kind)
    asked = cast_inputs.identifying(fmt, source)
    found = set(dtypes.bits(asked[~np.isnan(asked)], kind).tolist())
    counts = [
        len({int(b) + side for b in middle if int(b) + side < kind.infinity} & found)
        for side in (-1, 0, 1)
    ]
    wanted = [sum(int(b) + side < kind.infinity for b in middle) for side in (-1, 0, 1)]
    assert counts == wanted
    assert {int(b) | kind.sign for b in middle if int(b) < kind.infinity} <= found
