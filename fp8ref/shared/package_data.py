"""Read the package's own tables: TOML beside the module that uses it."""

from pathlib import Path
from typing import Any


def tables(module: str, name: str) -> dict[str, Any]:
    """The tables of NAME.toml beside a module, named by its ``__file__``; arrays are tuples.

    A table has the keys of the one that it is ``like``, besides its own.

    The package wrote them, so they are not checked; ``files.read_toml`` reads TOML from outside.
    """
    import tomllib

    text = Path(module).with_name(f"{name}.toml").read_text(encoding="utf-8")
    loaded = tomllib.loads(text)
    return {key: _frozen(_whole(loaded, key)) for key in loaded}


def _whole(loaded: dict[str, Any], key: str) -> Any:
    value = loaded[key]
    if not isinstance(value, dict) or "like" not in value:
        return value
    own = {inner: value[inner] for inner in value if inner != "like"}
    return _whole(loaded, value["like"]) | own


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _frozen(inner) for key, inner in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
