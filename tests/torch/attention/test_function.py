"""The function of a set of constants is made once, and only of constants that are theirs."""

import dataclasses

import pytest

from fp8ref.spec.attention.variants import FULL, VARIANTS, Mask
from fp8ref.torch.attention import function as attention_function
from fp8ref.torch.attention.function import function, values


def made(variant="cudnn", mask=FULL, **change):
    options = {
        "scale": None,
        "seed": 0,
        "arithmetic": "fast",
        "groups": (None, None),
        "roles": ((), ()),
    } | change
    return function(variant, values(variant), values(mask), **options)


def test_equal_constants_have_one_function():
    assert made() is made() is made(VARIANTS["cudnn"]) is made(mask=Mask())
    others = [
        made("bf16"),
        made(mask=Mask(causal=True)),
        made(scale=0.5),
        made(arithmetic="stated"),
        made(roles=(("q",), ())),
    ]
    assert len({made(), *others}) == 6


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


def test_a_variant_without_its_values_is_refused():
    """As dynamo hands one on that was made where it traces."""
    empty = object.__new__(type(VARIANTS["fa3"]))
    with pytest.raises(ValueError, match="made outside of what is compiled"):
        function(empty, values(VARIANTS["fa3"]), values(FULL), None, 0, "fast", None, ((), ()))
    assert attention_function.values("fa3") == ()
