"""What reading a batch of shards costs: python benchmarks/data.py [--quick]

Step 10^7 next to step 1, and what opening many shards costs.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from fp8ref.llama import LlamaConfig
from fp8ref.train.config import Config
from fp8ref.train.data.loader import Batches, open_batches
from fp8ref.train.sections import DataConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="sizes too small to say anything")
    reads, files = (20, 4) if parser.parse_args().quick else (500, 1000)
    with tempfile.TemporaryDirectory() as root:
        source = Path(root, "few")
        source.mkdir()
        for i, part in enumerate(np.random.default_rng(0).integers(32, 127, (40, 100_000)).astype("<u2")):
            part.tofile(source / f"{i}.bin")
        near, far = turns(opened(source), reads)
        seconds = many_shards(Path(root, "many"), files)
    print(f"a batch near step 1 read in {near * 1e6:.0f} us, near step 10^7 in {far * 1e6:.0f} us: {far / near:.2f}x")
    print(f"{files} shards of 1 GiB opened in {seconds[0]:.2f} s, a batch of them read in {seconds[1] * 1e3:.2f} ms")


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
    main()
