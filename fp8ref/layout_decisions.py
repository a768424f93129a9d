"""A layout of optimizer states as text, which is saved beside states (SEMANTICS O-1).

Two layouts of one name may differ: ``dataclasses.replace`` keeps the name. Codes of one are then other
moments under the other, of the same dtypes and shapes.
"""

import dataclasses
import json
from typing import Any

from fp8ref.states import Layout


def written(layout: Layout) -> str:
    """Every decision of a layout that changes bits, as JSON: all fields but the name and the source."""
    fields = dataclasses.asdict(layout)
    for moment in ("m", "v", "master"):
        fields[moment]["fmt"] = fields[moment]["fmt"]["name"]
    return json.dumps({key: value for key, value in fields.items() if key not in ("name", "source")})


def differences(layout: Layout, saved: str) -> list[str]:
    """What a layout has otherwise than the one that was ``written``, such as "m.block = 128, saved 256".

    Raises:   ValueError: text that was not written here.
    """
    mine, theirs = _flat(json.loads(written(layout))), _flat(json.loads(saved))
    return [
        f"{key} = {mine.get(key)!r}, saved {theirs.get(key)!r}"
        for key in dict.fromkeys((*mine, *theirs))
        if mine.get(key) != theirs.get(key) or (key in mine) != (key in theirs)
    ]


def _flat(fields: dict[str, Any]) -> dict[str, Any]:
    """{dotted key: value}."""
    found: dict[str, Any] = {}
    for key, value in fields.items():
        found |= {f"{key}.{field}": x for field, x in value.items()} if isinstance(value, dict) else {key: value}
    return found
