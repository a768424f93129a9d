"""A training state on disk, as orbax writes it: every process its own devices' pieces, and no pickle (SEMANTICS K-2)."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as orbax

from fp8ref.run.config import ConfigError


class Store:
    """Of trees of arrays, whatever mesh they lie on."""

    def __init__(self) -> None:
        self._writer = orbax.AsyncCheckpointer(orbax.StandardCheckpointHandler())

    def save(self, directory: Path, tree: Any) -> Callable[[], None]:
        """Copy a tree to host memory, and begin to write it; the result waits until every process's part is written."""
        self._writer.save(directory.absolute(), args=orbax.args.StandardSave(tree))
        return self._writer.wait_until_finished

    def load(self, directory: Path, like: Any) -> Any:
        """The tree, on the devices and with the types of another one.

        Raises:   ConfigError: a tree of other names, shapes or types.
        """
        saved = _arrays(self._writer.metadata(directory.absolute()).item_metadata.tree)
        mine = _arrays(like)
        for name in sorted(saved.keys() ^ mine.keys()):
            where = "is not in the checkpoint" if name in mine else "is in the checkpoint, and not in this model"
            raise ConfigError(f"{name} {where}. Load a state of the same model and recipe.")
        for name, value in mine.items():
            if tuple(saved[name].shape) != value.shape:
                raise ConfigError(
                    f"{name} is {list(value.shape)} here and {list(saved[name].shape)} in the checkpoint. Load a state of the same model."
                )
        abstract = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=v.sharding), like)
        return self._writer.restore(directory.absolute(), args=orbax.args.StandardRestore(abstract))


def weights(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, np.ndarray]]:
    """The weights alone, one after the other: float32 by name, in this process."""
    reader = orbax.PyTreeCheckpointer()
    for name, shape in shapes.items():
        like = {"model": {name: np.empty(shape, np.float32)}}
        as_numpy = {"model": {name: orbax.RestoreArgs(restore_type=np.ndarray)}}
        arguments = orbax.args.PyTreeRestore(item=like, restore_args=as_numpy, partial_restore=True)
        yield name, reader.restore(directory.absolute(), args=arguments)["model"][name]


def _arrays(tree: Any) -> dict[str, Any]:
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {".".join(str(getattr(part, "key", part)) for part in path): leaf for path, leaf in found}
