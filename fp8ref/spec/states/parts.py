"""Layouts of optimizer states of which some parts alone are narrow, by name (spec O-1).

by_name("te/v").v            # as te has it; m is float32
by_name("msamp_o2/none")     # all in float32, in the order of operations of msamp_o2
"""

import dataclasses

from fp8ref.formats import FLOAT32
from fp8ref.spec.states import layouts
from fp8ref.spec.states.layouts import Layout, Moment

PARTS = ("m", "v", "master")
"""What a layout stores of a parameter."""

NONE = "none"
"""The name of no part."""


def by_name(layout: str) -> Layout:
    """The layout of a name of ``states``, or of ``NAME/PART+PART``: those parts, others float32.

    Raises:   ValueError: an unknown layout, or a part that the layout has not narrower than
              float32.
    """
    name, slash, suffix = layout.partition("/")
    whole = layouts.by_name(name)
    if not slash:
        return whole
    parts = () if suffix == NONE else tuple(suffix.split("+"))
    if any(part not in narrow(whole) for part in parts) or len(set(parts)) < len(parts):
        raise ValueError(
            f"layout {name!r} has the narrow parts {', '.join(narrow(whole)) or NONE}; got "
            f"{layout!r}. Join parts with +, or use {name}/{NONE}."
        )
    m, v, master = (getattr(whole, part) if part in parts else Moment() for part in PARTS)
    ragged = whole.ragged or (m.block is None and v.block is None)
    return dataclasses.replace(whole, name=layout, ragged=ragged, m=m, v=v, master=master)


def narrow(layout: Layout) -> tuple[str, ...]:
    """The parts that a layout stores in less than float32."""
    return tuple(part for part in PARTS if getattr(layout, part).fmt != FLOAT32)


def named(layout: Layout, parts: tuple[str, ...]) -> str:
    """The name of those parts of a whole layout."""
    return f"{layout.name}/{'+'.join(parts) or NONE}"
