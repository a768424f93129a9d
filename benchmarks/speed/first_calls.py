"""What the first call of a simulator's function costs: python benchmarks/speed/first_calls.py

Seconds of processor time, the median of three new processes each: of few elements, which compile
nothing; with FP8REF_COMPILE=always and kernels on disk; and with an empty folder of kernels.
Importing fp8ref.sim comes before, and has a row of its own.
"""

import os
import statistics
import subprocess
import sys
import tempfile

from rich.console import Console
from rich.table import Table

SETUP = """
import sys, time
begun = time.process_time()
import numpy as np
from fp8ref.formats import BFLOAT16, E4M3FN
from fp8ref.sim.quantize import cast, scaling
from fp8ref.sim.gemm import gemm
imported = time.process_time() - begun
x = np.ones((64, 128), np.float32)
one = np.float32(1)
q = scaling.Quantized(cast.encode_plain(x, E4M3FN), one, one, E4M3FN, "tensorwise", -1)
begun = time.process_time()
CALL
print(imported, time.process_time() - begun)
"""
CALLS = {
    "cast.encode": "cast.encode(x, E4M3FN)",
    "cast.encode, stochastic": "cast.encode(x, E4M3FN, rounding='stochastic', seed=1)",
    "scaling.quantize": "scaling.quantize(x, E4M3FN, granularity='rowwise')",
    "gemm.matmul, exact": "gemm.matmul(q, q)",
    "gemm.matmul, hopper_fast, to bfloat16": "gemm.matmul(q, q, accumulate='hopper_fast', out_dtype=BFLOAT16)",
}
ROUNDS = 3


def seconds(call: str, folder: str, compiled: str) -> tuple[float, float]:
    """(of the imports, of the call), in a new process."""
    env = os.environ | {"NUMBA_CACHE_DIR": folder, "FP8REF_COMPILE": compiled}
    done = subprocess.run(
        [sys.executable, "-c", SETUP.replace("CALL", call)],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    imported, taken = (float(v) for v in done.stdout.split())
    return imported, taken


def main() -> None:
    rows: dict[str, list[list[float]]] = {name: [[], [], []] for name in CALLS}
    imports = []
    for _ in range(ROUNDS):
        for name, call in CALLS.items():
            with tempfile.TemporaryDirectory() as folder:
                # the second of them finds the kernels of the first
                for i, compiled in ((0, ""), (2, "always"), (1, "always")):
                    imported, taken = seconds(call, folder, compiled)
                    rows[name][i].append(taken)
                    imports.append(imported)
    table = Table("first call", "few elements", "kernels on disk", "no kernels on disk")
    for name, columns in rows.items():
        table.add_row(name, *(f"{statistics.median(taken):.2f} s" for taken in columns))
    table.add_row("imports before it", *[f"{statistics.median(imports):.2f} s"] * 3)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
