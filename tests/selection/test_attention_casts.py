"""Which operands of attention are cast (spec E-9)."""

import pytest

from fp8ref.selection import attention_casts


def test_an_operand_is_of_every_layer_or_of_those_that_a_pattern_names():
    given = ("layers.0/q", "p")
    assert attention_casts.of("cudnn", given, "model.layers.0.self_attn").roles == {"q", "p"}
    assert attention_casts.of("cudnn", given, "model.layers.1.self_attn").roles == {"p"}


@pytest.mark.parametrize(
    ("variant", "operands", "message"),
    [
        ("cudnn", ["x"], "q, k, v, p, do, ds; got 'x'"),
        ("mxfp8", ["q"], "one FP8 scale per tensor, and gradients; got 'mxfp8'"),
    ],
)
def test_what_cannot_be_cast_alone_is_refused(variant, operands, message):
    with pytest.raises(ValueError, match=message):
        attention_casts.of(variant, operands, "model.layers.0.self_attn")
