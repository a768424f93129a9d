"""The kind of a GEMM as the text that operators take."""

import pytest

from fp8ref.recipe import RECIPES
from fp8ref.torch.gemm.kind import GemmKind


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_a_text_gives_the_kind_back(recipe):
    for spec in RECIPES[recipe].gemms.values():
        kind = GemmKind.of(spec)
        assert GemmKind.parse(kind.text) == kind
        assert (kind.granularity_a, kind.granularity_b) == (spec.a.granularity, spec.b.granularity)
        assert (kind.accumulate, kind.epilogue) == (spec.accumulate, spec.epilogue)


def test_tensorwise_next_to_rowwise_is_rowwise():  # L-4
    pairs = ("rowwise", "tensorwise"), ("tensorwise", "rowwise"), ("rowwise", "rowwise")
    assert {GemmKind(*pair, "fast", "scale_then_round").scales for pair in pairs} == {"rowwise"}
