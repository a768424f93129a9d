"""What a config trains: the trainer's own Llama, or a model of the user's (spec T-10).

A user's model is built by its framework, ``{jax,torch}/custom/build.py``. This module says what all
of the trainer needs to know of it: the names and shapes of its parameters and linears.
"""

import functools
import hashlib
import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

from fp8ref.recipe import RECIPES
from fp8ref.shared import files
from fp8ref.shared.errors import ConfigError
from fp8ref.spec import llama
from fp8ref.spec.llama import LlamaConfig
from fp8ref.train.config import user_model
from fp8ref.train.config.base import Sections
from fp8ref.train.config.sections import ArchitectureConfig
from fp8ref.train.config.user_model import Shapes

BACKEND = {"transformers": "torch", "torch": "torch", "nnx": "jax"}
"""{kind of a user's model: the backend that trains it}."""


def shapes(config: Sections) -> Shapes:
    """Of the model that a config trains.

    Raises:   ConfigError: a user's model that cannot be built, or that the trainer cannot train.
    """
    keys = config.architecture
    if keys.kind == "llama":
        head = () if config.model.tie_word_embeddings else ("lm_head",)
        pair = llama.parameter_shapes(config.model), llama.linear_shapes(config.model)
        return Shapes(kind="llama", parameters=pair[0], linears=pair[1], heads=head)
    return _custom(
        keys, config.model.vocab_size, config.data.sequence_length, described(config).get("sha256")
    )


@functools.lru_cache(maxsize=4)
def _custom(keys: ArchitectureConfig, vocab_size: int, length: int, sha256: str | None) -> Shapes:
    """sha256: of the source, so that another content of it is another model."""
    try:
        library = importlib.import_module(f"fp8ref.train.{BACKEND[keys.kind]}.custom.build")
    except ImportError as error:
        raise ConfigError(
            f"architecture.kind {keys.kind!r} needs {error.name}. Install the extra of its backend."
        ) from error
    return library.shapes(keys, vocab_size, length)


def described(config: Sections) -> dict[str, Any]:
    """What architecture.source holds (T-10); {} of the trainer's own model.

    Returns:  {"sha256": that of config.json of transformers, or of the source of the function and
              of the module that the import path names, without what they import; "config": the
              content of config.json}. No sha256 where a module has no source file.
    Raises:   ConfigError: it cannot be read or imported.
    """
    keys = config.architecture
    if keys.kind == "llama":
        return {}
    if keys.kind == "transformers":
        try:
            held = files.read_bytes(user_model.config_file(keys))
        except (OSError, ValueError) as error:
            raise ConfigError(user_model.no_configuration(keys, error)) from error
        return {
            "sha256": hashlib.sha256(held).hexdigest(),
            "config": user_model.configuration(keys),
        }
    source = keys.source or ""
    factory = user_model.imported(source)
    modules = [source.partition(":")[0]]
    if inspect.isroutine(factory) or inspect.isclass(factory):
        modules.append(factory.__module__)
    paths = dict.fromkeys(getattr(sys.modules.get(name), "__file__", None) for name in modules)
    held = b"\0".join(Path(path).read_bytes() for path in paths if path and Path(path).is_file())
    return {"sha256": hashlib.sha256(held).hexdigest()} if held else {}


def faults(config: Sections) -> list[str]:
    """The error messages for keys that a user's model does not take (T-10); none of own Llama."""
    keys = config.architecture
    if keys.kind == "llama":
        return []
    default = LlamaConfig(vocab_size=config.model.vocab_size)
    values = vars(config.model).items()
    own = [key for key, value in values if value != getattr(default, key)]
    parallel, numerics, nnx = config.parallel, config.numerics, keys.kind == "nnx"
    kind = f"architecture.kind {keys.kind!r}"
    scheduled = dict.fromkeys(recipe for _, recipe in numerics.schedule or ())
    states = [name for name in scheduled if name in RECIPES and RECIPES[name].delayed]
    no_part = "has layers that the trainer does not know"
    own_attention = "has attention of its own"
    last = "has a last linear that the trainer does not know"
    wrong = {
        "of model.* takes vocab_size alone, as its own configuration says the rest; got "
        f"model.{', model.'.join(own)}": bool(own),
        f"is for one device, whose linears no plan cuts; got parallel of {parallel.devices}": (
            parallel.devices > 1
        ),
        f"{no_part}; got parallel.checkpointing {parallel.checkpointing!r}": (
            parallel.checkpointing != "none"
        ),
        f"{no_part}; got parallel.compile {parallel.compile!r}": parallel.compile != "none",
        f"{no_part}; got parallel.scan": parallel.scan,
        "is for one device, which exchanges no gradients; got parallel.reduce_mu "
        f"{parallel.reduce_mu!r}": parallel.reduce_mu != "one",
        f"{last}; got parallel.loss {parallel.loss!r}": parallel.loss != "whole",
        f"{own_attention}; got parallel.attention {parallel.attention!r}": (
            parallel.attention != "xla"
        ),
        f"{own_attention}; got numerics.attention {numerics.attention!r}": (
            numerics.attention is not None
        ),
        f"has float32 masters; optimizer.layout {config.optimizer.layout!r} stores narrower "
        "ones": config.optimizer.keeps_masters,
        "keeps one recipe's states of delayed scaling; numerics.schedule has "
        f"{', '.join(states)}": nnx and len(states) > 1,
        "sums gradients in float32; got parallel.accumulate_dtype "
        f"{parallel.accumulate_dtype!r}": parallel.accumulate_dtype != "float32",
        f"has initial weights of its own; got run.init_from {config.run.init_from!r}": (
            nnx and config.run.init_from is not None
        ),
    }
    return [f"{kind} {text}. Leave it out." for text, is_so in wrong.items() if is_so]


def check_backend(config: Sections, backend: str) -> None:
    """ConfigError unless a backend trains the config's model."""
    kind = config.architecture.kind
    if kind != "llama" and BACKEND[kind] != backend:
        raise ConfigError(
            f"architecture.kind {kind!r} is trained by --backend {BACKEND[kind]}; got {backend}."
        )


def require_llama(config: Sections, who: str) -> None:
    """ConfigError for a user's model, which ``who`` does not take."""
    if config.architecture.kind != "llama":
        raise ConfigError(
            f"{who} takes the trainer's own Llama, whose layers it knows; got architecture.kind "
            f"{config.architecture.kind!r}. Leave out architecture.*."
        )
