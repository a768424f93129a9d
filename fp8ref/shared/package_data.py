"""Read the package's own tables: TOML beside the module that uses it."""

from pathlib import Path
from typing import Any


def tables(module: str, name: str) -> dict[str, Any]:
    """The tables of NAME.toml beside a module, named by its ``__file__``.

    The package wrote them, so they are not checked; ``files.read_toml`` reads TOML from outside.
    """
    import tomllib

    return tomllib.loads(Path(module).with_name(f"{name}.toml").read_text(encoding="utf-8"))
