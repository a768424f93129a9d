"""Multi-process runs in PyTorch, through torch.distributed: each process has one device."""

import contextlib
import datetime
import json
import logging
import os
import re
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import distributed
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fp8ref.shared.errors import ConfigError, LostProcessError
from fp8ref.torch.model.parallel import AXES
from fp8ref.train.config import checks as config_checks
from fp8ref.train.config import device_shapes
from fp8ref.train.config.config import Config
from fp8ref.train.torch.failure_reporting import FailureStore

ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables that torchrun sets."""


class Processes:
    """The processes that ``join`` connected, as ``fp8ref.train.run.processes.Processes``."""

    def __init__(self, failures: FailureStore, timeout_s: int) -> None:
        self._failures = failures
        self._timeout_s = timeout_s
        self.first = distributed.get_rank() == 0

    @contextmanager
    def naming_lost_processes(self) -> Iterator[None]:
        """In this context, torch's error about a lost process becomes a LostProcessError."""
        try:
            yield
        except LostProcessError:
            raise
        except BaseException as error:
            if not _lost(error):
                self._failures.report(error)
                raise
            why = self._failures.diagnose(
                waited=re.search("timed? ?out", str(error), re.IGNORECASE) is not None,
                timeout_s=self._timeout_s,
            )
            # drop gloo's source location and its advice, which do not help a user
            shown = re.sub(r"^\[\S*\] ", "", str(error).splitlines()[0]).split(". ")[0]
            raise LostProcessError(
                f"process {distributed.get_rank()} stops: {why}. Start all processes again. The "
                f"error here was: {shown}"
            ) from error

    def gather(self, value: Any) -> list:
        """All processes' values, in their order: an all-gather of JSON."""
        texts: list = [None] * distributed.get_world_size()
        distributed.all_gather_object(texts, json.dumps(value))
        return [json.loads(text) for text in texts]


def join(timeout_s: int) -> Processes:
    """Connect to the run's other processes, which torchrun started: by NCCL on GPUs, else by gloo.

    Raises:   ConfigError: a variable of torchrun is not set, or has an invalid value; a process
              does not answer within timeout_s.
    """
    missing = [name for name in ENVIRONMENT if name not in os.environ]
    if missing:
        raise ConfigError(
            "--distributed is for processes that torchrun starts: torchrun --nproc-per-node 2 "
            f"-m fp8ref train ...; not set: {', '.join(missing)}."
        )
    rank, ranks, port = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    numbers = all(text.isdecimal() for text in (rank, ranks, port))
    if not numbers or int(rank) >= int(ranks) or int(port) >= 2**16:
        raise ConfigError(
            f"RANK must be below WORLD_SIZE, and MASTER_PORT must be a port; got {rank}, "
            f"{ranks} and {port}. torchrun sets all of them."
        )
    # Both warnings are harmless: no module's results are written, and gathers are rare.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    gpu, timeout = torch.cuda.is_available(), datetime.timedelta(seconds=timeout_s)
    if gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # init_device_mesh gives groups torch's default timeout, half an hour: change it
    distributed_c10d.default_pg_timeout = timeout
    distributed_c10d.default_pg_nccl_timeout = timeout if distributed.is_nccl_available() else None
    _reach(timeout_s)
    try:
        store, index, count = next(distributed.rendezvous("env://", timeout=timeout))
        by_first = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        failures = FailureStore(store, index, count, kept_by_first=by_first)
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if gpu else "gloo",
            store=distributed.PrefixStore("groups", store),
            rank=index,
            world_size=count,
            timeout=timeout,
        )
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the run's processes did not connect: {error} Start all processes, with one "
            "MASTER_ADDR and MASTER_PORT."
        ) from error
    return Processes(failures, timeout_s)


def _reach(timeout_s: int) -> None:
    """Wait until process 0 listens. torch would print pages of C++ frames if it does not."""
    address = (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    until = time.monotonic() + timeout_s
    why = ""
    while os.environ["RANK"] != "0" and time.monotonic() < until:
        try:
            socket.create_connection(address, timeout_s).close()
            return
        except OSError as error:
            why = str(error)
            time.sleep(0.1)
    if why:
        raise ConfigError(
            f"process 0 does not listen at MASTER_ADDR {address[0]}, MASTER_PORT {address[1]} "
            f"within {timeout_s} s (parallel.timeout_s): {why}. Start all processes, with one "
            "MASTER_ADDR and MASTER_PORT."
        )


def _lost(error: BaseException) -> bool:
    """Whether torch raised this DistError, or gloo's RuntimeError, as a process is gone."""
    return isinstance(error, distributed.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    )


def leave(code: int) -> NoReturn:
    """End this process now with this exit code: a normal exit may abort in gloo's threads."""
    if code == 0 and distributed.is_initialized():
        # another process is gone; this one is done either way
        with contextlib.suppress(RuntimeError):
            distributed.barrier()  # no process may end while another still communicates with it
            distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def mesh_of(config: Config) -> DeviceMesh | None:
    """The device mesh data x fsdp x expert x tensor of ``join``'s processes; expert only above 1.

    None for one process. Ranks that share sequences are of fsdp (P-26), context many in a row.

    Raises:   ConfigError: config.parallel asks for another number of processes, or they cannot
              share the batch evenly, or a sequence; or, under adamw_fp8, the rows of a parameter.
    """
    keys = config.parallel
    axes = tuple(axis for axis in AXES if axis != "expert" or keys.expert > 1)
    sizes = tuple(getattr(keys, axis) * (keys.context if axis == "fsdp" else 1) for axis in axes)
    ranks = distributed.get_world_size() if distributed.is_initialized() else 1
    if keys.devices != ranks:
        raise ConfigError(
            f"parallel asks for {keys.mesh} = {keys.devices} processes; there are {ranks}. "
            f"Start as many: torchrun --nproc-per-node {keys.devices} -m fp8ref train ... "
            "--distributed."
        )
    if config.data.batch_size % (keys.batch_parts * config.data.microbatches):
        raise ConfigError(config.data.indivisible(keys.batch_keys, "processes"))
    if faults := config_checks.uncut_sequences(config) + device_shapes.unequal_pieces(config):
        raise ConfigError(faults[0])
    if ranks == 1:
        return None
    return init_device_mesh(_kind(), sizes, mesh_dim_names=axes)


def context_of(config: Config) -> ProcessGroup | None:
    """The ranks that share this rank's sequences, in the order of tokens (A-24); None: none."""
    keys = config.parallel
    if keys.context == 1:
        return None
    mesh = init_device_mesh(
        _kind(),
        (keys.data * keys.fsdp, keys.context, keys.tensor),
        mesh_dim_names=("batch", "context", "tensor"),
    )
    return mesh.get_group("context")


def _kind() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
