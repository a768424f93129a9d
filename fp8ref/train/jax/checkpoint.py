"""JAX's checkpoint store: orbax, each process its own shards, no pickle (spec K-2)."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as orbax
import tensorstore

from fp8ref.shared import files
from fp8ref.shared.errors import ConfigError
from fp8ref.train.run import train_state

INDEX_BYTES = 2**26
"""The bytes of tensorstore's cache for the index that all tensors of a checkpoint share."""


class Store:
    """Writes and reads nested dicts of arrays, sharded over any mesh."""

    def __init__(self) -> None:
        self._writer = orbax.AsyncCheckpointer(orbax.StandardCheckpointHandler())

    def save(self, directory: Path, tree: Any) -> Callable[[], None]:
        """Copy a tree to host memory and begin to write it.

        Returns a function that waits for all processes.
        """
        self._writer.save(directory.absolute(), args=orbax.args.StandardSave(tree))
        return self._writer.wait_until_finished

    def load(self, directory: Path, like: Any) -> Any:
        """Read a tree, with the shardings and dtypes of ``like``.

        mu is 1 where only ``like`` has it, and is dropped where only the saved tree does (K-2).
        Raises:   ConfigError: the saved tree has other names or shapes.
        """
        try:
            tree = dict(self._writer.metadata(directory.absolute()).item_metadata.tree)
        except Exception as error:
            # orbax raises all kinds of errors for metadata that it did not write
            raise ConfigError(
                f"{directory} cannot be read ({' '.join(str(error).split())}). Put its files back."
            ) from error
        # shapes alone: what was made for ``like`` is let go
        like = jax.tree.map(
            lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=v.sharding), like
        )
        target = dict(like)
        saved_mu, own_mu = tree.pop(train_state.MU, {}), target.pop(train_state.MU, {})
        saved, mine = (
            {name: tuple(value.shape) for name, value in train_state.flat(of).items()}
            for of in (tree, target)
        )
        train_state.check_saved(saved, mine, "model and recipe")
        if saved_mu:  # all are read, as scalars that every device holds, like the count
            whole = like[train_state.COUNT].sharding
            scalar = jax.ShapeDtypeStruct((), np.float32, sharding=whole)
            target[train_state.MU] = dict.fromkeys(saved_mu, scalar)
        try:
            restored = self._writer.restore(
                directory.absolute(), args=orbax.args.StandardRestore(target)
            )
        except (OSError, jax.errors.JaxRuntimeError):  # nothing is known of the files
            raise
        except Exception as error:  # as of its metadata
            raise ConfigError(
                f"{directory} cannot be read ({' '.join(str(error).split())}). Put its files back."
            ) from error
        read = restored.pop(train_state.MU, {})
        if own_mu:
            restored[train_state.MU] = {
                name: read[name] if name in read else jnp.ones(v.shape, v.dtype, device=v.sharding)
                for name, v in own_mu.items()
            }
        return restored


def filled(
    like: Mapping[str, Any], arrays: Mapping[str, np.ndarray], prefix: str = ""
) -> dict[str, Any]:
    """A tree like ``like``, with its dtypes and shardings, of arrays by names joined by dots."""

    def of(name: str, value: jax.Array) -> jax.Array:
        array = np.asarray(arrays[name])
        dtype = value.dtype
        array = array.view(dtype) if array.dtype == np.uint8 else array.astype(dtype)
        assert array.shape == value.shape, (name, array.shape, value.shape)
        return jax.device_put(array, value.sharding)

    return {
        key: filled(value, arrays, f"{prefix}{key}.")
        if isinstance(value, Mapping)
        else of(f"{prefix}{key}", value)
        for key, value in like.items()
    }


def weights(
    directory: Path, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, np.ndarray]]:
    """The weights of a saved state, one after the other: (name, float32 array), in this process.

    By tensorstore, on which orbax is built: orbax itself would read its metadata again for every
    array. Of stored masters, what they are worth (O-14).
    Raises:   ConfigError: the saved weights have other names or shapes.
    """
    try:
        metadata = files.read_object(directory / "_METADATA")
        saved = {
            tuple(entry["key"] for entry in value["key_metadata"])
            for value in metadata["tree_metadata"].values()
        }
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{directory / '_METADATA'} is not orbax's ({error}). Put the file back."
        ) from error
    folder = {"driver": "file", "path": f"{directory.absolute()}/"}
    base = {"driver": "ocdbt", "base": folder}
    # caches the database's index, which all tensors share
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": INDEX_BYTES}})

    def read(name: str, shape: tuple[int, ...]) -> np.ndarray:
        spec = {
            "driver": "zarr3" if metadata.get("use_zarr3") else "zarr",
            "kvstore": {**base, "path": f"{train_state.MASTERS}.{name}/"},
            "fill_missing_data_reads": False,
        }
        array = tensorstore.open(spec, context=context, open=True, read=True).result()
        if array.shape != shape:
            raise ConfigError(
                f"{name} is {list(shape)} here and {list(array.shape)} in the checkpoint. Load "
                "a state of the same model."
            )
        return array.read().result()

    for name, shape in shapes.items():
        if (train_state.MASTERS, name) in saved:
            value = read(name, shape)
            train_state.check_master(name, value.dtype)
            yield name, value
        elif (train_state.MASTERS, f"{name}.codes") in saved:
            codes = read(f"{name}.codes", shape)
            yield name, train_state.weight(codes, read(f"{name}.scale_inv", ()))
        else:
            raise ConfigError(f"{name} is not in the checkpoint. Load a state of the same model.")
