"""Read the package's own tables: TOML beside the module that uses it."""

from pathlib import Path
from typing import Any


def tables(module: str, name: str) -> dict[str, Any]:
    """The tables of NAME.toml beside a module, named by its ``__file__``; arrays are tuples.

    The package wrote them, so they are not checked; ``files.read_toml`` reads TOML from outside.
    """
    import tomllib

    text = Path(module).with_name(f"{name}.toml").read_text(encoding="utf-8")
    return {key: _frozen(value) for key, value in tomllib.loads(text).items()}


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _frozen(inner) for key, inner in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
