"""A layout of optimizer states as text, which is saved beside states (spec O-1).

Two layouts of one name may differ: ``dataclasses.replace`` keeps the name. Codes of one are then
other moments under the other, of the same dtypes and shapes.
"""

import dataclasses
import functools
import json
from typing import Any

from fp8ref.shared import files
from fp8ref.spec.states.layouts import Layout

BYTES = 1024
"""The length of every layout's text where it is an array, so that any two can be compared."""


@functools.lru_cache(maxsize=64)
def written(layout: Layout) -> str:
    """A layout's decisions as JSON: all fields but the name and the source."""
    fields = dataclasses.asdict(layout)
    for moment in ("m", "v", "master"):
        fields[moment]["fmt"] = fields[moment]["fmt"]["name"]
    return json.dumps(
        {key: value for key, value in fields.items() if key not in ("name", "source")}
    )


def in_bytes(layout: Layout) -> bytes:
    """``written`` in ASCII, and spaces up to BYTES."""
    text = written(layout).encode("ascii").ljust(BYTES)
    assert len(text) == BYTES, f"the text of layout {layout.name!r} has {len(text)} bytes"
    return text


def check(layout: Layout, saved: str) -> None:
    """ValueError unless a state was made under these decisions, naming what differs."""
    try:
        unlike = differences(layout, saved)
    except ValueError as error:
        raise ValueError(
            f"a state holds the decisions of its layout as text; got {saved[:40]!r}. Use init "
            "(O-17)."
        ) from error
    if unlike:
        raise ValueError(
            f"layout {layout.name!r} has {'; '.join(unlike)}. States of another layout are not "
            "converted: use the old layout, or a new name for a changed one."
        )


def differences(layout: Layout, saved: str) -> list[str]:
    """What a layout has unlike the one ``written``, such as "m.block = 128, saved 256".

    Raises:   ValueError: text that was not written here.
    """
    parsed = files.parse_json(saved)
    if not isinstance(parsed, dict):
        raise ValueError("it is no JSON object")
    mine, theirs = _flat(json.loads(written(layout))), _flat(parsed)
    return [
        f"{key} = {mine.get(key)!r}, saved {theirs.get(key)!r}"
        for key in dict.fromkeys((*mine, *theirs))
        if mine.get(key) != theirs.get(key) or (key in mine) != (key in theirs)
    ]


def _flat(fields: dict[str, Any]) -> dict[str, Any]:
    """{dotted key: value}."""
    flat_fields: dict[str, Any] = {}
    for key, value in fields.items():
        inner = value.items() if isinstance(value, dict) else ()
        flat_fields |= {f"{key}.{field}": x for field, x in inner}
        if not isinstance(value, dict):
            flat_fields[key] = value
    return flat_fields
