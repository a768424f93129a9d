"""What reading a batch costs: python benchmarks/data.py [--quick]

Step 10^7 next to step 1, the hash of the first 1,000 global batches read by 1, 2 and 8 processes, each its own rows, and what opening
many shards costs; of text, shards and Parquet. Exits with 1 where a hash differs.
"""

import argparse
import hashlib
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
from rich.console import Console
from rich.table import Table

from fp8ref.llama import LlamaConfig
from fp8ref.run.config import Config
from fp8ref.run.data.loader import Batches, open_batches
from fp8ref.run.sections import DataConfig

PROCESSES = (1, 2, 8)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="sizes too small to say anything")
    quick = parser.parse_args().quick
    steps, reads, files = (20, 20, 4) if quick else (1000, 500, 1000)
    table = Table("source", "step 1, us", "step 10^7, us", "ratio", *(f"hash of {steps} steps, {n}" for n in PROCESSES))
    equal = True
    with tempfile.TemporaryDirectory() as root:
        for kind in ("text", "shards", "parquet"):
            source = Path(root, kind)
            source.mkdir()
            write(kind, source)
            batches = opened(source)
            near, far = turns(batches, reads)
            hashes = [digest([opened(source) for _ in range(n)], steps) for n in PROCESSES]
            equal &= len(set(hashes)) == 1
            table.add_row(kind, f"{near * 1e6:.0f}", f"{far * 1e6:.0f}", f"{far / near:.2f}x", *(h[:12] for h in hashes))
        seconds = many_shards(Path(root, "many"), files)
    Console(width=140).print(table)
    print(f"{files} shards of 1 GiB opened in {seconds[0]:.2f} s, a batch of them read in {seconds[1] * 1e3:.2f} ms")
    return 0 if equal else 1


def write(kind: str, folder: Path) -> None:
    """Four million tokens, all bytes of text."""
    parts = np.random.default_rng(0).integers(32, 127, (40, 100_000)).astype(np.uint8)
    for i, part in enumerate(parts):
        if kind == "text":
            (folder / f"{i}.txt").write_bytes(part.tobytes())
        elif kind == "shards":
            part.astype("<u2").tofile(folder / f"{i}.bin")
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": [part.tobytes().decode() for part in parts]}), folder / "a.parquet")


def opened(source: Path, vocab_size: int = 256) -> Batches:
    return open_batches(
        Config(model=LlamaConfig(vocab_size=vocab_size), data=DataConfig(source=str(source), sequence_length=256, batch_size=32))
    )


def turns(batches: Batches, reads: int) -> tuple[float, float]:
    """Median seconds of a step near 1 and of one near 10^7, which take turns and read other windows each time."""
    seconds: dict[int, list[float]] = {1: [], 10**7: []}
    for i in range(reads):
        for first, of in seconds.items():
            start = time.perf_counter()
            batches.step(first + i)
            of.append(time.perf_counter() - start)
    return statistics.median(seconds[1]), statistics.median(seconds[10**7])


def digest(processes: list[Batches], steps: int) -> str:
    """SHA-256 of the global batches that so many processes read together."""
    n, hashed = len(processes), hashlib.sha256()
    for step in range(steps):
        for rank, batches in enumerate(processes):
            hashed.update(batches.step(step, slice(rank * 32 // n, (rank + 1) * 32 // n)).tobytes())
    return hashed.hexdigest()


def many_shards(folder: Path, files: int) -> tuple[float, float]:
    """Seconds to open shards of a GiB, holes that take no disk, and to read a batch."""
    folder.mkdir()
    for i in range(files):
        with (folder / f"{i:04}.bin").open("wb") as file:
            file.truncate(2**30)
    start = time.perf_counter()
    batches = opened(folder, vocab_size=2**16)
    middle = time.perf_counter()
    batches.step(0)
    return middle - start, time.perf_counter() - middle


if __name__ == "__main__":
    sys.exit(main())
