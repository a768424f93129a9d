"""Where a linear is, by hand from the sizes in tests/helpers/models/sizes.py: 2 layers, 8 sequences of 32 tokens,
256 words.
"""

import pytest
from helpers.models import sizes

from fp8ref.estimate import linear_place


def place(path, recipe="tensorwise", sequences=8, **parallel):
    config = sizes.config(recipe, **parallel).replace(data={"batch_size": sequences})
    [decision] = [d for d in config.decisions() if d.path.endswith(path)]
    return linear_place.of(decision, config, "jax")


@pytest.mark.parametrize(
    ("path", "one", "gathered"),
    [
        # 256 words of 1,024 tokens, in float32; of 512 in bfloat16
        ("0.self_attn.q_proj", 4 / 4, 2 / 2),
        ("0.mlp.gate_proj", 4 / 4 + 2, 2 / 2 + 2),  # and o's output
        ("1.self_attn.q_proj", 4, 2 / 2 + 2 + 2),  # and down's
        ("1.mlp.gate_proj", 4, 4),
    ],
)
def test_what_a_norm_is_computed_from(path, one, gathered):
    assert place(path, sequences=32).norm_bytes == one
    assert place(path, sequences=32, fsdp=2).norm_bytes == gathered


def test_no_more_rows_of_a_table_are_read_than_there_are_tokens():
    assert place("0.self_attn.q_proj", sequences=2).norm_bytes == 4


def test_linears_that_share_an_input():
    """up's is gate's, cast once; under delayed scaling too (H-9)."""
    for recipe in ("tensorwise", "delayed"):
        assert "input" not in place("1.mlp.up_proj", recipe).roles
        assert "input" in place("1.mlp.gate_proj", recipe).roles


def test_what_is_sent():
    """Gradients that are summed in bfloat16, and outputs of o and down over tensor, but for float32
    sums (P-9).
    """
    assert place("1.mlp.down_proj", tensor=2).sent == ("output",)
    assert (
        place("1.mlp.down_proj", tensor=2, tensor_reduce_dtype="float32").sent
        == place("1.mlp.up_proj", tensor=2).sent
        == ()
    )
    assert place("1.mlp.up_proj", fsdp=2, reduce_dtype="bfloat16").sent == ("grad_weight",)


def test_pieces_of_several_sequences():
    assert place("1.mlp.up_proj", tensor=2, sequence=True).pieces
    assert not place("1.mlp.up_proj", tensor=2).pieces
    assert not place("1.mlp.up_proj", data=8, tensor=2, sequence=True).pieces  # of one sequence
