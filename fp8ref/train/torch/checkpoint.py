"""PyTorch's checkpoint store: torch.distributed.checkpoint in safetensors (spec K-2).

dcp, its usual short name, lets each rank write its own shards.

Only tensors are written: torch would pickle anything else, and nothing here reads a pickle.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import distributed
from torch.distributed import ProcessGroup
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from fp8ref.shared import files
from fp8ref.shared.errors import ConfigError
from fp8ref.train.run import train_state

COPYING = StagingOptions(
    use_pinned_memory=False,
    use_shared_memory=False,
    use_async_staging=False,
    use_non_blocking_copy=False,
)
"""How a save copies tensors to the host: at once, into memory neither pinned nor shared."""

SHARDING = "DCP_SHARDING_INFO"
"""The key in a file's metadata where dcp records which part of each tensor the file holds."""


class Store:
    """Writes and reads tensors by name; every rank has one."""

    def __init__(self) -> None:
        self._group: ProcessGroup | None = None
        if distributed.is_initialized():
            # A group apart: a thread writes while training uses the others. gloo: on the host.
            self._group = distributed.new_group(backend="gloo")

    def save(self, directory: Path, tensors: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """Begin to write copies of tensors; the result waits until every rank's part is written."""
        stager = DefaultStager(COPYING)
        staged = stager.stage(dict(tensors))
        stager.close()
        writer = dcp.HuggingFaceStorageWriter(str(directory), save_distributed=True)
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")

        def write() -> None:
            _be_quiet()
            with _as_os_error():
                dcp.save(staged, storage_writer=writer, process_group=self._group)

        pending = thread.submit(write)
        thread.shutdown(wait=False)
        return lambda: pending.result()

    @torch.no_grad()
    def load(self, directory: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Read a state into tensors in place, whatever mesh wrote it.

        mu becomes 1 where only ``tensors`` has it, and is not read where only the state does (K-2).
        Raises:   ConfigError: another model's or recipe's tensors; FP8 moments of another mesh.
        """
        _be_quiet()
        reader = dcp.HuggingFaceStorageReader(str(directory))
        try:
            entries = reader.read_metadata().state_dict_metadata.items()
            saved = {name: tuple(entry.size) for name, entry in entries}  # type: ignore[union-attr]
        except Exception as error:
            # dcp and safetensors raise all kinds of errors for headers that dcp did not write
            raise ConfigError(
                f"{directory} cannot be read ({error}). Put its files back."
            ) from error
        mine = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        train_state.check_saved(
            saved, mine, "model, recipe, optimizer and, under adamw_fp8, parallel.* keys"
        )
        with _as_os_error():
            dcp.load(
                {name: tensor for name, tensor in tensors.items() if name in saved},
                storage_reader=reader,
                process_group=self._group,
            )
        for name in tensors.keys() - saved.keys():  # mu alone
            tensors[name].fill_(1)


def weights(
    directory: Path, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, np.ndarray]]:
    """The weights of a saved state, one after the other: (name, float32 array), in this process.

    A header is read once, a tensor when it is asked for; stored masters as their worth (O-14).
    Raises:   ConfigError: saved weights of other names or shapes, or with parts missing.
    """
    # {tensor: {offsets of a part: its file}}
    parts: dict[str, dict[tuple[int, ...], safe_open]] = {}
    with contextlib.ExitStack() as stack:
        for path in sorted(directory.glob("*.safetensors")):
            file = stack.enter_context(safe_open(path, framework="np"))
            try:
                begins = files.parse_json((file.metadata() or {})[SHARDING])
                for key in file.keys():  # noqa: SIM118, no mapping
                    parts.setdefault(key, {})[tuple(begins[key]["saved_offsets"])] = file
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"{path} does not say which parts of tensors it holds ({error}). Put the "
                    "file back."
                ) from error
        for name, shape in shapes.items():
            value, filled = np.empty(shape, np.float32), 0
            key = f"{train_state.MASTERS}.{name}"
            scales = parts.get(f"{key}.scale_inv", {}).values()
            scale_inv = next((file.get_tensor(f"{key}.scale_inv") for file in scales), None)
            key = key if key in parts else f"{key}.codes"
            for begin, file in parts.get(key, {}).items():
                part = file.get_tensor(key)
                if key.endswith(".codes"):
                    part = train_state.weight(part, scale_inv)
                else:
                    train_state.check_master(name, part.dtype)
                place = tuple(slice(i, i + n) for i, n in zip(begin, part.shape, strict=True))
                if value[place].shape != part.shape:
                    raise ConfigError(
                        f"{name} is {list(shape)} here and larger in the checkpoint. Load a "
                        "state of the same model."
                    )
                value[place] = part
                filled += part.size
            if filled != value.size:
                raise ConfigError(
                    f"{name} has {value.size} elements here, of which the checkpoint holds "
                    f"{filled}. Load a state of the same model."
                )
            yield name, value


@contextmanager
def _as_os_error() -> Iterator[None]:
    """In this context dcp's CheckpointException becomes an OSError with the first rank's cause.

    dcp's own is a BaseException, which ``except Exception`` would not catch.
    """
    try:
        yield
    except dcp.CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise OSError(f"{cause}" + f" (process {rank})" * distributed.is_initialized()) from error


def _be_quiet() -> None:
    """Hide dcp's warning that torch.distributed is not initialized, as in a run of one process."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
