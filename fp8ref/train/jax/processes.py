"""Several processes of one run, each with devices of its own, through jax.distributed."""

import json
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from fp8ref.errors import ConfigError

ENVIRONMENT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
SHUTDOWN_SECONDS = 20  # that a process which failed alone waits for the others


class Processes:
    """Those of a run that ``join``ed; see ``fp8ref.train.processes``."""

    def __init__(self) -> None:
        self.first = jax.process_index() == 0

    def telling(self) -> AbstractContextManager:
        """Adds nothing."""
        return nullcontext()  # jax ends every process itself, and says which was lost

    def gather(self, value: Any) -> list:
        """Every process's value, of what JSON has, in order, in all of them."""
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        lengths = multihost_utils.process_allgather(np.int32(len(text)))
        texts = multihost_utils.process_allgather(np.pad(text, (0, lengths.max() - len(text))))
        return [json.loads(bytes(line[:length])) for line, length in zip(texts, lengths, strict=True)]


def join() -> Processes:
    """Meet the run's other processes; before anything asks jax for a device.

    Under Slurm, Open MPI, Kubernetes and on TPUs jax finds them itself. Elsewhere three variables say where: JAX_COORDINATOR_ADDRESS, host:port
    of the first process, JAX_NUM_PROCESSES and JAX_PROCESS_ID, from 0.
    Raises:   ConfigError: only some of the variables, values that are none, nobody to be found.
    """
    given = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    if given and len(given) < len(ENVIRONMENT):
        missing = ", ".join(name for name in ENVIRONMENT if name not in given)
        raise ConfigError(f"processes find each other by all of {', '.join(ENVIRONMENT)}; not set: {missing}.")
    address, count, index = (given.get(name) for name in ENVIRONMENT)
    try:
        jax.distributed.initialize(
            address,
            num_processes=int(count) if count else None,
            process_id=int(index) if index else None,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"--distributed meets a run's other processes, and found none: {error} Start it by srun or mpirun, or set "
            f"{', '.join(ENVIRONMENT)} for each process."
        ) from error
    return Processes()
