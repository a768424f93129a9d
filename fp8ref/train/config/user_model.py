"""A user's model: its source, imported only if trusted, and its configuration (spec T-10)."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8ref.shared import files
from fp8ref.shared.errors import ConfigError
from fp8ref.train.config.sections import ArchitectureConfig

_NAMES_CODE = (
    *("auto_map", "attn_implementation", "experts_implementation"),
    *("custom_pipelines", "trust_remote_code"),
)
"""Keys of config.json that name code, next to private ones, such as _attn_implementation."""


_TRUSTED: set[str] = set()
"""The modules that ``imported`` may import: their code runs on import."""


def trust(source: str) -> None:
    """Let this process import, and call, what an import path ``package.module:name`` names.

    A config or a run directory may come from a stranger, so nothing is imported before.
    """
    _TRUSTED.add(source.partition(":")[0])


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """A model's parameters and linears.

    kind        the class that was built, for the manifest.
    parameters  {name: shape}, each once, where modules share it.
    linears     {path: (N, K)} of what a recipe may convert, in the model's order.
    heads       the linears of the logits, in high precision unless fp8_fqns names them.
    """

    kind: str
    parameters: Mapping[str, tuple[int, ...]]
    linears: Mapping[str, tuple[int, int]]
    heads: tuple[str, ...]


def config_file(keys: ArchitectureConfig) -> Path:
    """config.json of kind 'transformers'."""
    path = Path(keys.source or "")
    return path / "config.json" if path.is_dir() else path


def configuration(keys: ArchitectureConfig) -> dict[str, Any]:
    """The content of config.json of kind 'transformers'.

    Raises:   ConfigError: it cannot be read, or is no JSON object.
    """
    try:
        return files.read_object(config_file(keys))
    except (OSError, ValueError) as error:
        raise ConfigError(no_configuration(keys, error)) from error


def no_configuration(keys: ArchitectureConfig, error: Exception) -> str:
    """The message for a config.json of kind 'transformers' that cannot be read."""
    return (
        f"architecture.source {keys.source!r} is no configuration of transformers ({error}). "
        "Name a directory with config.json, or the file."
    )


def imported(source: str):
    """What an import path ``package.module:name`` names.

    Raises:   ConfigError: a module that ``trust`` was not called for; no such module or name.
    """
    module, _, name = source.partition(":")
    if module not in _TRUSTED:
        raise ConfigError(
            f"architecture.source {source!r} is code, which would be imported and called. Read "
            "it, then add --trust; in Python, call "
            f"fp8ref.train.config.user_model.trust({source!r})."
        )
    try:
        target = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
    except Exception as error:  # whatever a user's code raises
        raise ConfigError(
            f"architecture.source {source!r} cannot be imported ({type(error).__name__}: "
            f"{error}). Name module:function, of a module on PYTHONPATH."
        ) from error
    return target


def without_code(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json without keys by which transformers imports code: kernels, modules of a hub."""

    def kept(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {
                key: kept(child)
                for key, child in value.items()
                if not (key.startswith("_") or key in _NAMES_CODE)
            }
        return [kept(child) for child in value] if isinstance(value, list) else value

    return kept(config)
