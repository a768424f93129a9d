"""Ranks of a gloo group, each a process of one thread, for the tests of what is distributed."""

import importlib.util
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import connection, get_context
from pathlib import Path
from types import ModuleType

# Ranks are forked from a server that has imported torch and never run it: each starts in a moment, with no threads in it.
CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["pytest", "torch._dynamo", "torch.distributed.fsdp", "torchao.float8.float8_tensor_parallel"])


def run(n: int, function: Callable, *args, timeout: float = 120) -> list:
    """function(*args) on n ranks, in the default process group: what each returned, by rank.

    function  at the top level of its file; it, args and results are pickled.
    Raises:   RuntimeError with the traceback of the first rank that raised; the other ranks are then ended. TimeoutError.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes = [CONTEXT.Pipe(duplex=False) for _ in range(n)]
        where = (function.__code__.co_filename, function.__name__)
        processes = [CONTEXT.Process(target=_rank, args=(r, n, folder, where, args, pipes[r][1]), daemon=True) for r in range(n)]
        for process, (_, theirs) in zip(processes, pipes, strict=True):
            process.start()
            theirs.close()  # so that a rank that dies shows as the end of its pipe
        try:
            return _results([ours for ours, _ in pipes], timeout)
        finally:
            for process in processes:
                process.terminate()
                process.join()


def forked(function: Callable, *args):
    """A process that runs function(*args) and meets no others by itself; function at the top level of its file. Not started."""
    return CONTEXT.Process(target=_call, args=((function.__code__.co_filename, function.__name__), args), daemon=True)


def _call(where: tuple[str, str], args: tuple) -> None:
    getattr(_module(where[0]), where[1])(*args)


def _results(pipes: list[connection.Connection], timeout: float) -> list:
    found: dict[connection.Connection, object] = {}
    while len(found) < len(pipes):
        ready = connection.wait([p for p in pipes if p not in found], timeout)
        if not ready:
            raise TimeoutError(f"ranks {[r for r, p in enumerate(pipes) if p not in found]} gave no result in {timeout} s.")
        for pipe in ready:
            assert isinstance(pipe, connection.Connection)
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                ok, value = False, "it ended without a result"
            if not ok:
                raise RuntimeError(f"rank {pipes.index(pipe)}: {value}")
            found[pipe] = value
    return [found[p] for p in pipes]


def _rank(rank: int, n: int, folder: str, where: tuple[str, str], args: tuple, pipe: connection.Connection) -> None:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    try:
        distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=n)
        message = pickle.dumps((True, getattr(_module(where[0]), where[1])(*args)))
        distributed.barrier()
        distributed.destroy_process_group()
    except BaseException:
        message = pickle.dumps((False, traceback.format_exc()))
    pipe.send_bytes(message)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo can abort when an interpreter ends


def _module(file: str) -> ModuleType:
    """A test file as a module: pytest gives it a name that no import finds."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
