"""A training state on disk, as torch.distributed.checkpoint writes it in safetensors: every rank its own pieces (SEMANTICS K-2).

Tensors only: what else torch would write beside them it would pickle, and nothing here reads a pickle.
"""

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from fp8ref.errors import ConfigError
from fp8ref.torch import delayed
from fp8ref.train.torch import optimizer

COPYING = StagingOptions(use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False)
SHARDING = "DCP_SHARDING_INFO"  # the key of a file's metadata under which dcp says what part of each tensor it holds


class Store:
    """Of one model, its parameters by name and their optimizer."""

    def __init__(self, model: nn.Module, params: Mapping[str, nn.Parameter], built: torch.optim.Optimizer) -> None:
        """params: the sharded ones; FSDP2 puts others in their places while they are gathered, after an evaluation for instance."""
        self._model, self._params, self._optimizer = model, params, built
        self._group: ProcessGroup | None = None
        if distributed.is_initialized():
            # of its own, for a thread that writes while training goes on; dcp's own messages are no tensors of a GPU
            self._group = distributed.new_group(backend="gloo")

    def save(self, directory: Path) -> Callable[[], None]:
        """Copy the state to host memory, and begin to write it; the result waits until every rank's is written."""
        optimizer.begin(self._optimizer)
        stager = DefaultStager(COPYING)
        staged = stager.stage(self._tensors())
        stager.close()
        writer = dcp.HuggingFaceStorageWriter(str(directory), save_distributed=True)
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")

        def write() -> None:
            _be_quiet()
            with _told():
                dcp.save(staged, storage_writer=writer, process_group=self._group)

        pending = thread.submit(write)
        thread.shutdown(wait=False)
        return lambda: pending.result()

    @torch.no_grad()
    def load(self, directory: Path, step: int) -> None:
        """Read the state after so many steps into the model and its optimizer, however the ranks that wrote it were arranged.

        Raises:   ConfigError: another model's or recipe's tensors; moments in FP8 that lie as another arrangement's (T-6).
        """
        optimizer.begin(self._optimizer, step)
        _be_quiet()
        reader = dcp.HuggingFaceStorageReader(str(directory))
        tensors = self._tensors()
        self._check(reader, tensors)
        with _told():
            dcp.load(tensors, storage_reader=reader, process_group=self._group)
        delayed.forget(self._model)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """The very tensors that training writes, by name."""
        found = {f"model.{name}": p.detach() for name, p in self._params.items()}
        names = {id(p): name for name, p in self._params.items()}
        for p, key, moment in optimizer.moments(self._optimizer):
            for part, tensor in _plain(moment).items():
                found[f"{key}.{names[id(p)]}{part}"] = tensor
        for name, state in delayed.states(self._model):
            found |= {f"fp8.{name}.{key}": getattr(state, key) for key in delayed.DelayedState._fields}
        return found

    def _check(self, reader: dcp.StorageReader, tensors: dict[str, torch.Tensor]) -> None:
        saved = {name: tuple(found.size) for name, found in reader.read_metadata().state_dict_metadata.items()}  # type: ignore[union-attr]
        mine = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        other_ranks = {name for name in saved if ".rank" in name}
        for name in sorted((saved.keys() - other_ranks) ^ (mine.keys() - other_ranks)):
            where = "is not in the checkpoint" if name in mine else "is in the checkpoint, and not in this model"
            raise ConfigError(f"{name} {where}. Load a state of the same model, recipe, optimizer and, under adamw_fp8, parallel.* keys.")
        for name, shape in mine.items():
            if saved[name] != shape:
                raise ConfigError(
                    f"{name} is {list(shape)} here and {list(saved[name])} in the checkpoint. Load a state of the same model."
                )


def weights(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, np.ndarray]]:
    """The weights alone, one after the other: float32 by name, in this process. Every file's header is read once, a tensor when it is asked for.

    Raises:   ConfigError: tensors of other names or shapes, or parts that leave something out.
    """
    parts: dict[str, dict[tuple[int, ...], safe_open]] = {}  # of a tensor, where each begins and the file it is in
    with contextlib.ExitStack() as files:
        for path in sorted(directory.glob("*.safetensors")):
            file = files.enter_context(safe_open(path, framework="np"))
            begins = json.loads(file.metadata()[SHARDING])
            for key in file.keys():  # noqa: SIM118, no mapping
                parts.setdefault(key, {})[tuple(begins[key]["saved_offsets"])] = file
        for name, shape in shapes.items():
            value, filled = np.empty(shape, np.float32), 0
            for begin, file in parts.get(f"model.{name}", {}).items():
                part = file.get_tensor(f"model.{name}")
                place = tuple(slice(i, i + n) for i, n in zip(begin, part.shape, strict=True))
                if value[place].shape != part.shape:
                    raise ConfigError(f"{name} is {list(shape)} here and larger in the checkpoint. Load a state of the same model.")
                value[place] = part
                filled += part.size
            if filled != value.size:
                raise ConfigError(
                    f"{name} has {value.size} elements here, of which the checkpoint holds {filled}. Load a state of the same model."
                )
            yield name, value


def _plain(moment: torch.Tensor) -> dict[str, torch.Tensor]:
    """Suffix -> tensor: a moment itself; of torchao's in FP8, which lies in blocks of each rank's own piece, that rank's codes and scales."""
    local = optimizer.local(moment)
    if not optimizer.in_fp8(local):
        return {"": moment}
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    return {f".rank{rank}.codes": local.codes.view(torch.uint8), f".rank{rank}.scale": local.scale}  # type: ignore[attr-defined]


@contextmanager
def _told() -> Iterator[None]:
    """What dcp raises, which is no Exception and holds those of ranks, is an OSError that says the first of them."""
    try:
        yield
    except dcp.CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise OSError(f"{cause}" + f" (process {rank})" * distributed.is_initialized()) from error


def _be_quiet() -> None:
    """dcp warns of every process that is alone."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
