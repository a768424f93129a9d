"""Several processes of one run, a device each, through torch.distributed."""

import datetime
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import distributed

from fp8ref.run.config import ConfigError
from fp8ref.run.processes import LostProcessError

ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets


class Processes:
    """Those of a run that ``join``ed; see ``fp8ref.run.processes``."""

    def __init__(self, timeout: datetime.timedelta) -> None:
        self.timeout, self.first = timeout, distributed.get_rank() == 0

    @contextmanager
    def telling(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, distributed.DistError) and "gloo" not in str(error).lower():
                raise
            seconds = int(self.timeout.total_seconds())
            raise LostProcessError(
                f"process {distributed.get_rank()}: another process of the run ended, or did not answer within {seconds} s (parallel.timeout_s); "
                f"what it said itself is why. Here it showed as: {str(error).splitlines()[0]}"
            ) from error

    def gather(self, value: Any) -> list:
        told: list = [None] * distributed.get_world_size()
        distributed.all_gather_object(told, json.dumps(value))
        return [json.loads(text) for text in told]


def join(timeout_s: int) -> Processes:
    """Meet the run's other processes, each of which torchrun started; on GPUs by NCCL, else by gloo.

    Raises:   ConfigError: variables that torchrun sets and nobody set, values that are none, processes that do not come within timeout_s.
    """
    missing = [name for name in ENVIRONMENT if name not in os.environ]
    if missing:
        raise ConfigError(
            f"--distributed is for processes that torchrun starts: torchrun --nproc-per-node 2 -m fp8ref train ...; not set: {', '.join(missing)}."
        )
    # Of results that are views, and of gathers in two steps: nothing here writes into results, and whole weights are fetched rarely.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    gpu, timeout = torch.cuda.is_available(), datetime.timedelta(seconds=timeout_s)
    if gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        distributed.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", timeout=timeout)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"the run's processes did not meet: {error} Start all of them, with one MASTER_ADDR and MASTER_PORT.") from error
    return Processes(timeout)


def leave(code: int) -> NoReturn:
    """End this process with an exit code, at once: an interpreter that ends by itself may abort in gloo's threads after all went well."""
    if code == 0 and distributed.is_initialized():
        distributed.barrier()  # none is gone while another still asks it for something
        distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
