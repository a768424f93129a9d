"""Which tensors of attention have delayed scales (spec A-12, A-19)."""

import dataclasses

import pytest

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.spec.attention import delayed as attention_delayed
from fp8ref.spec.attention.variants import GRADIENT_ROLES, ROLES, VARIANTS
from fp8ref.spec.delayed import DELAYED


def test_a_variant_with_one_scale_for_a_tensor_has_states_of_all_roles():
    found = attention_delayed.casts(VARIANTS["cudnn"])
    assert list(found) == [*ROLES, *GRADIENT_ROLES]
    assert set(found.values()) == {(E4M3FN, DELAYED["delayed"])}


def test_formats_and_outputs_follow_the_variant():
    variant = dataclasses.replace(VARIANTS["cudnn"], gradient_fmt=E5M2, out=VARIANTS["mxfp8"].out)
    assert attention_delayed.roles(variant) == {
        "q": E4M3FN,
        "k": E4M3FN,
        "v": E4M3FN,
        "s": E4M3FN,
        "do": E5M2,
        "ds": E5M2,
    }
    assert "s" not in attention_delayed.roles(dataclasses.replace(VARIANTS["cudnn"], p_scale=1.0))
    assert "do" not in attention_delayed.roles(
        dataclasses.replace(VARIANTS["cudnn"], backward=None)
    )


@pytest.mark.parametrize("name", ["exact", "bf16", "fa3", "mxfp8", "fa3_paper"])
def test_other_scales_have_no_state(name):
    assert attention_delayed.roles(VARIANTS[name]) == {}
    with pytest.raises(ValueError, match=f"variant '{name}' has scales of .*Use 'cudnn'"):
        attention_delayed.casts(VARIANTS[name])
