"""Where a linear is, by hand from the sizes in tests/helpers/models/sizes.py: 2 layers, 8 sequences of 32 tokens,
256 words.
"""

from helpers.models import sizes

from fp8ref.estimate import linear_place
from fp8ref.selection.rules import Rule


def place(path, recipe="tensorwise", backend="jax", kernels="plain", rules=None, **parallel):
    config = sizes.config(recipe, **parallel).replace(numerics={"kernels": kernels, "rules": rules})
    [decision] = [d for d in config.decisions() if d.path.endswith(path)]
    return linear_place.of(decision, config, backend)


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


def test_what_tritons_kernels_cast_in_one_pass_with_what_makes_it():
    """Of linears that read one input, all of one recipe."""
    assert place("1.mlp.up_proj", kernels="auto").fused
    assert not place("1.mlp.up_proj", kernels="auto", tensor=2).fused
    assert not place("1.mlp.up_proj").fused
    assert not place("1.mlp.up_proj", "rowwise", kernels="auto").fused  # no kernel of JAX's
    rules = (Rule(layers=("layers.1.mlp.gate_proj",), recipe="delayed"),)
    assert not place("1.mlp.down_proj", kernels="auto", rules=rules).fused
    assert place("1.self_attn.q_proj", kernels="auto", rules=rules).fused


def test_pytorch_frees_the_codes_of_a_weight_that_is_gathered():
    assert place("1.mlp.up_proj", backend="torch", kernels="auto", fsdp=2).freed
    assert not place("1.mlp.up_proj", backend="torch", kernels="auto").freed
