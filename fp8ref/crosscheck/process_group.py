"""Run a function on ranks of a gloo process group on this machine's CPU, one thread in each."""

import datetime
import logging
import os
import pickle
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import connection, get_context

from fp8ref.shared import parents as parent_process
from fp8ref.shared.errors import ConfigError

CONTEXT = get_context("forkserver")
"""The context of multiprocessing in which ranks start.

Ranks are forked from a server that has imported their modules and runs nothing. A rank then starts
in a moment, and inherits no thread: forking a process with threads can deadlock.
"""

PRELOADED = ["fp8ref.crosscheck.fsdp_run", "torch._dynamo", "torch.distributed.fsdp"]
"""The modules that the server imports."""

CONTEXT.set_forkserver_preload(PRELOADED)


class RankError(RuntimeError):
    """A rank failed. The message has its number and its traceback, unless it died or hung."""


def run(
    n: int, function: Callable, *args, timeout_s: int = 600, patience_s: float | None = None
) -> list:
    """Call function(*args) on n ranks in the default process group; return the results by rank.

    function    at the top level of a module; it, args and results are pickled.
    timeout_s   for one collective.
    patience_s  without a result of any rank; None: no limit.
    Raises:     ConfigError: a rank raised one. RankError: a rank raised something else or died, or
                gave no result in time. The other ranks are then ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes = [CONTEXT.Pipe() for _ in range(n)]
        processes = [
            CONTEXT.Process(
                target=_rank, args=(rank, n, folder, timeout_s, theirs, function, args), daemon=True
            )
            for rank, (_, theirs) in enumerate(pipes)
        ]
        try:
            for process, (_, theirs) in zip(processes, pipes, strict=True):
                process.start()
                theirs.close()  # if a rank dies, its pipe ends
            return _results([ours for ours, _ in pipes], patience_s)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.terminate()
                    process.join()


def _results(pipes: list[connection.Connection], patience_s: float | None) -> list:
    values: dict[connection.Connection, object] = {}
    while len(values) < len(pipes):
        ready = connection.wait([p for p in pipes if p not in values], patience_s)
        if not ready:
            raise RankError(
                f"ranks {[rank for rank, p in enumerate(pipes) if p not in values]}: no result "
                f"within {patience_s} s"
            )
        for pipe in ready:
            assert isinstance(pipe, connection.Connection)
            try:
                kind, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                kind, value = "failed", "it ended without a result"
            if kind != "done":
                raise (ConfigError if kind == "refused" else RankError)(
                    f"rank {pipes.index(pipe)}: {value}"
                )
            values[pipe] = value
    return [values[p] for p in pipes]


def _rank(
    rank: int,
    n: int,
    folder: str,
    timeout_s: int,
    pipe: connection.Connection,
    function: Callable,
    args: tuple,
) -> None:
    parent_process.follow_parent()
    # before torch looks for a GPU: gloo ranks compute on the CPU
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    # FSDP2 warns of results that are views, and DTensor of gathers in two steps. Nothing here
    # writes into results, and whole weights are rarely fetched.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    try:
        timeout = datetime.timedelta(seconds=timeout_s)
        distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=n, timeout=timeout
        )
        # Not pipe.send: torch would share the tensors' memory, which is gone with the rank.
        message, done = pickle.dumps(("done", function(*args))), True
        distributed.barrier()  # no rank leaves while another still needs it
        distributed.destroy_process_group()
    except ConfigError as error:
        message, done = pickle.dumps(("refused", str(error))), False
    except BaseException:
        message, done = pickle.dumps(("failed", traceback.format_exc())), False
    pipe.send_bytes(message)
    if not done:
        pipe.poll(None)  # wait to be ended: if it left, others would fail too and hide the cause
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo can abort as the interpreter exits
