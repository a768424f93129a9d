"""Host memory while a trainer makes its initial weights: python
benchmarks/training/initial_memory.py llama-70b --processes 64

This process makes the shards of one of so many. PyTorch: in a group that sends nothing (torch's
fake process group). JAX (--backend jax): the others are processes that join and wait, with one
device each. Prints the bytes of the float32 shards, and what this process held at most beyond what
it began with: all of it, and NumPy's arrays, from which shards are copied to devices.

--check: afterwards it compares each shard, bit for bit, with the same rows of the whole matrix as
one process draws it. --rank chooses another rank than the first, so that ranks too large to stand
beside each other are checked one after the other.
"""

import argparse
import math
import re
import resource
import socket
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np

import fp8ref.configs
from fp8ref.spec import llama
from fp8ref.train.config import config as configs
from fp8ref.train.config.config import Config

GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "config", help="a packaged config, such as llama-8b, whose weights are cut over fsdp alone"
    )
    parser.add_argument("--backend", choices=("torch", "jax"), default="torch")
    parser.add_argument("--processes", type=int, default=64, help="as many as hold a shard each")
    parser.add_argument("--rank", type=int, default=0, help="which of them this process is")
    parser.add_argument(
        "--check", action="store_true", help="compare the shards with one process's weights"
    )
    given = parser.parse_args()
    config = configs.load(Path(fp8ref.configs.__file__).parent / f"{given.config}.toml")
    parallel = {
        "data": 1,
        "fsdp": given.processes,
        "tensor": 1,
        "sequence": False,
        "amax_scope": "global",
        "checkpointing": "none",
    }
    config = config.replace(
        parallel=parallel, data={"batch_size": given.processes, "microbatches": 1}
    )
    begin = (in_torch if given.backend == "torch" else in_jax)(config, given.rank)
    before = resident()
    tracemalloc.start()
    start = time.perf_counter()
    shards, made = begin()
    seconds = time.perf_counter() - start
    arrays = tracemalloc.get_traced_memory()[1]
    # Of this program alone: getrusage's figure is at least that of the process that started it.
    counted = re.search(r"^VmHWM:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert counted is not None
    most = int(counted[1]) * 1024
    parameters = sum(math.prod(shape) for shape in llama.parameter_shapes(config.model).values())
    print(
        f"{given.config}, {parameters / 1e9:.1f} billion parameters, {given.backend}, cut in "
        f"{given.processes}: {seconds:.0f} s"
    )
    print(f"float32 shards                {shards / GIB:8.3f} GiB")
    print(f"most that the process held    {(most - before) / GIB:8.3f} GiB more than before")
    print(f"of NumPy's arrays             {arrays / GIB:8.3f} GiB")
    if given.check:
        tracemalloc.stop()
        compared, differ = check(config, made, given.rank)
        print(f"rank {given.rank} against one process:  {differ:,} of {compared:,} elements differ")


def check(config: Config, made: dict, rank: int) -> tuple[int, int]:
    """How many elements of a rank's shards were compared with the rows of whole matrices, and how
    many differ; frees the shards.
    """
    weights = llama.lazy_initial_weights(config.model, seed=config.run.seed)
    compared = differ = 0
    for name in list(made):
        shard, whole = made.pop(name), weights[name][...]
        # FSDP2 cuts as torch.chunk does; JAX cuts evenly, but no vector
        rows = -(-len(whole) // config.parallel.devices)
        mine = whole if shard.shape == whole.shape else whole[rank * rows : (rank + 1) * rows]
        assert shard.shape == mine.shape, (name, shard.shape, mine.shape)
        compared, differ = (
            compared + shard.size,
            differ + int((shard.view(np.uint32) != mine.view(np.uint32)).sum()),
        )
    return compared, differ


def in_torch(config: Config, rank: int):
    """A function that makes one rank's model; it returns the bytes of its shards, and them."""
    import torch
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from fp8ref.train.torch.processes import mesh_of
    from fp8ref.train.torch.step import Step

    distributed.init_process_group(
        "fake", store=FakeStore(), rank=rank, world_size=config.parallel.devices
    )

    def begin() -> tuple[int, dict]:
        weights = llama.lazy_initial_weights(config.model, seed=config.run.seed)
        step = Step(config, weights, mesh_of(config), torch.device("cpu"), None)
        made = {name: p.detach().to_local().numpy() for name, p in step.params.items()}
        return sum(shard.nbytes for shard in made.values()), made

    return begin


JOIN = """
import sys, jax
jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), initialization_timeout=1800)
jax.devices()
sys.stdin.read()
"""
"""The program of a process that joins, and waits until its standard input ends."""


def in_jax(config: Config, rank: int):
    """A function that makes one process's shards; it returns their bytes, and them."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        where = f"localhost:{free.getsockname()[1]}"
    count = config.parallel.devices
    others = [
        subprocess.Popen(
            [sys.executable, "-c", JOIN, where, str(count), str(other)], stdin=subprocess.PIPE
        )
        for other in range(count)
        if other != rank
    ]
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.distributed.initialize(where, count, rank, initialization_timeout=1800)
    from fp8ref.train.jax.mesh import Layout

    layout = Layout(config)

    def begin() -> tuple[int, dict]:
        weights = llama.lazy_initial_weights(config.model, seed=config.run.seed)
        placed = {
            name: layout.put(weight, layout.parameter(name, weight.shape))
            for name, weight in weights.items()
        }
        made = {
            name: np.asarray(array.addressable_shards[0].data)
            for name, array in jax.block_until_ready(placed).items()
        }
        for other in others:
            other.stdin.close()  # type: ignore[union-attr]
        return sum(shard.nbytes for shard in made.values()), made

    return begin


def resident() -> int:
    """Bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    main()
