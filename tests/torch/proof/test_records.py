import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fp8ref.torch.proof import records
from fp8ref.torch.proof.records import GemmRecord, GemmTrace


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float8_e4m3fn, "f8e4m3fn"),
        (torch.float8_e5m2, "f8e5m2"),
        (torch.float8_e8m0fnu, "f8e8m0fnu"),
        (torch.bfloat16, "bf16"),
        (torch.float16, "f16"),
        (torch.float32, "f32"),
        (torch.float64, "f64"),
        (torch.uint8, "u8"),
    ],
    ids=str,
)
def test_types_have_their_names_of_hlo(dtype, name):
    assert records.type_name(dtype) == name


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        (((), ()), "tensorwise"),
        (((1,), (1,)), "tensorwise"),
        (((16, 1), (1, 32)), "rowwise"),
        (((), (1, 32)), "rowwise"),
        (((16, 1), ()), "rowwise"),
        (((16, 32),), "rowwise"),
        (((),), "tensorwise"),
    ],
    ids=str,
)
def test_granularity_is_of_the_shapes_of_scales(shapes, expected):
    assert records.granularity(*(torch.ones(shape) for shape in shapes)) == expected


def test_a_gemm_names_itself():
    fp8 = GemmRecord("mlp.up_proj", "grad_input", "f8e5m2", "f8e4m3fn", "slow", "rowwise")
    assert (fp8.name, str(fp8), fp8.fp8) == (
        "mlp.up_proj/grad_input",
        "f8e5m2 x f8e4m3fn, slow, rowwise",
        True,
    )
    plain = GemmRecord("0", "output", "bf16", "bf16", None, None)
    assert (plain.name, str(plain), plain.fp8) == ("0/output", "bf16 x bf16", False)
    assert not GemmRecord("0", "output", "f8e4m3fn", "bf16", None, None).fp8
    assert not GemmRecord("0", "output", "bf16", "f8e4m3fn", None, None).fp8


def test_what_nobody_needs_and_nothing_made_is_pruned():
    gemm = GemmRecord("made", "grad_input", "bf16", "bf16", None, None)
    unwanted = {"0/grad_input", "made/grad_input", "shared/grad_weight"}
    assert GemmTrace(
        "here", [gemm], wanted={"shared/grad_weight", "1/grad_input"}, unwanted=unwanted
    ).pruned == {"0/grad_input"}


class Wrapped(nn.Module):
    """A linear in a compiled block in a checkpointed one, and a plain one."""

    def __init__(self):
        super().__init__()
        self.block = checkpoint_wrapper(
            nn.Sequential(torch.compile(nn.Sequential(nn.Linear(4, 4)), backend="eager"), nn.ReLU())
        )
        self.head = nn.Linear(4, 2)


def test_linears_have_the_names_they_had_before_wrapping():
    model = Wrapped()
    assert dict(records.linears(model)) == {
        "block.0.0": model.block._checkpoint_wrapped_module[0]._orig_mod[0],
        "head": model.head,
    }
    assert (
        records.unwrapped("_orig_mod.layers._checkpoint_wrapped_module.0._orig_mod.up")
        == "layers.0.up"
    )
    assert records.unwrapped("") == ""
    assert records.unwrapped("my_orig_mod.up") == "my_orig_mod.up"


def test_arguments_have_names_wherever_they_stand():
    a, b, one = torch.zeros(16, 16), torch.zeros(16, 16), torch.ones(())
    found = records.arguments(
        records.SCALED_MM, (a, b, one), {"scale_b": 2 * one, "use_fast_accum": True}
    )
    assert list(found) == ["self", "mat2", "scale_a", "scale_b", "use_fast_accum"]
    assert found["self"] is a
    assert found["mat2"] is b
    assert (found["scale_a"], found["scale_b"], found["use_fast_accum"]) == (1, 2, True)


@pytest.mark.parametrize("op", records.OPERANDS_AT, ids=str)
def test_operands_are_where_the_schema_has_the_factors(op):
    """Of mm and _scaled_mm self and mat2, of addmm mat1 and mat2: self is added. fp8ref's own take
    a and b, or codes of them.
    """
    names = [argument.name for argument in op._schema.arguments]
    own = next(
        ({a, b} for a, b in (("codes_a", "codes_b"), ("a", "b")) if {a, b} <= {*names}), None
    )
    factors = own or {"mat2", "mat1" if "mat1" in names else "self"}
    assert {names[i] for i in records.OPERANDS_AT[op]} == factors
    assert list(records.OPERANDS_AT[op]) == sorted(records.OPERANDS_AT[op])
