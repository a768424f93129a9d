"""Layouts of which some parts alone are narrow (spec O-1)."""

import pytest

from fp8ref.formats import FLOAT32
from fp8ref.spec.states import layouts as states
from fp8ref.spec.states import parts as layout_parts


@pytest.mark.parametrize(
    "name", [name for name in (*states.LAYOUTS, *states.WITH_MASTERS) if name != "float32"]
)
def test_each_part_alone_is_as_the_layout_has_it_and_the_others_are_float32(name):
    whole = states.by_name(name)
    parts = layout_parts.narrow(whole)
    assert layout_parts.by_name(layout_parts.named(whole, parts)) == states.Layout(
        **vars(whole) | {"name": f"{name}/{'+'.join(parts)}"}
    )
    for part in parts:
        alone = layout_parts.by_name(f"{name}/{part}")
        assert getattr(alone, part) == getattr(whole, part)
        assert all(
            getattr(alone, other).fmt == FLOAT32 for other in layout_parts.PARTS if other != part
        )
    assert layout_parts.narrow(layout_parts.by_name(f"{name}/none")) == ()


@pytest.mark.parametrize("name", ["te/x", "te/m+m", "te/master", "te/"])
def test_parts_that_a_layout_has_not_are_refused(name):
    with pytest.raises(ValueError, match="layout 'te' has the narrow parts m, v"):
        layout_parts.by_name(name)
