"""Multi-process runs in JAX, through jax.distributed: each process has its own devices."""

import json
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from fp8ref.shared.errors import ConfigError

ENVIRONMENT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
"""The variables by which processes find each other, where no cluster tells jax."""

SHUTDOWN_SECONDS = 20
"""How long a process that failed alone waits for the others."""


class Processes:
    """The processes that ``join`` connected, as ``fp8ref.train.run.processes.Processes``."""

    def __init__(self) -> None:
        self.first = jax.process_index() == 0

    def naming_lost_processes(self) -> AbstractContextManager:
        """Does nothing: jax itself ends every process, and names the one that was lost."""
        return nullcontext()

    def gather(self, value: Any) -> list:
        """All processes' values, in their order: an all-gather of JSON."""
        # process_allgather takes arrays of one shape: pad the texts to the longest
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        lengths = multihost_utils.process_allgather(np.int32(len(text)))
        texts = multihost_utils.process_allgather(np.pad(text, (0, lengths.max() - len(text))))
        return [
            json.loads(bytes(line[:length])) for line, length in zip(texts, lengths, strict=True)
        ]


def join() -> Processes:
    """Connect to the run's other processes. Call it before anything asks jax for a device.

    Under Slurm, Open MPI, Kubernetes and on TPUs jax finds them itself. Elsewhere set three
    variables: JAX_COORDINATOR_ADDRESS (host:port of the first process), JAX_NUM_PROCESSES and
    JAX_PROCESS_ID, from 0.
    Raises:   ConfigError: only some of the variables, or invalid ones; no other process.
    """
    variables = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    if variables and len(variables) < len(ENVIRONMENT):
        missing = ", ".join(name for name in ENVIRONMENT if name not in variables)
        raise ConfigError(
            f"processes find each other by all of {', '.join(ENVIRONMENT)}; not set: {missing}."
        )
    address, count, index = (variables.get(name) for name in ENVIRONMENT)
    try:
        jax.distributed.initialize(
            address,
            num_processes=int(count) if count else None,
            process_id=int(index) if index else None,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"--distributed needs the run's other processes, and found none: {error} Start it "
            f"by srun or mpirun, or set {', '.join(ENVIRONMENT)} for each process."
        ) from error
    return Processes()
