"""The function of a set of constants is made once, and only of constants that are theirs."""

import dataclasses

import pytest

from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variants import FULL, VARIANTS, Mask
from fp8ref.torch.attention import RankCall
from fp8ref.torch.attention import function as attention_function
from fp8ref.torch.attention.function import function, values


def made(variant="cudnn", mask=None, roles=((), ()), **change):
    if change:
        variant = Call(variant=variant, **change)
    return function(variant, values(variant), None if mask is None else values(mask), roles)


def test_equal_constants_have_one_function():
    assert made() is made() is made(VARIANTS["cudnn"]) is made(mask=Mask())
    assert made() is made(Call(variant="cudnn")) is made(RankCall(variant="cudnn"))
    others = [
        made("bf16"),
        made(mask=Mask(causal=True)),
        made(scale=0.5),
        made(arithmetic="stated"),
        made(roles=(("q",), ())),
        made(RankCall(variant="cudnn", amax_group="0")),
    ]
    assert len({made(), *others}) == 7


def test_values_are_all_of_a_variants_and_a_masks():
    """A field that were left out would not be compared."""
    plain = VARIANTS["fa3"]
    for field in dataclasses.fields(plain):
        if field.name == "source":
            continue
        other = dataclasses.replace(plain)
        object.__setattr__(
            other,
            field.name,
            VARIANTS["bf16"].tiles if field.name == "tiles" else VARIANTS["exact"].fmt,
        )
        assert values(other) != values(plain), field.name
    for mask in (Mask(causal=True), Mask(window=(1, None)), Mask(alignment="start")):
        assert values(mask) != values(FULL)
    call = RankCall(variant=plain)
    for field in dataclasses.fields(call):
        other = dataclasses.replace(call)
        object.__setattr__(other, field.name, {"variant": "bf16"}.get(field.name, "other"))
        assert values(other) != values(call), field.name


def test_a_variant_without_its_values_is_refused():
    """As dynamo hands one on that was made where it traces."""
    empty = object.__new__(type(VARIANTS["fa3"]))
    with pytest.raises(ValueError, match="made outside of compiled code"):
        function(empty, values(VARIANTS["fa3"]), None, ((), ()))
    empty = object.__new__(Call)
    with pytest.raises(ValueError, match="a Call is made outside of compiled code"):
        function(empty, values(Call(variant="fa3")), None, ((), ()))
    assert attention_function.values("fa3") == ()
