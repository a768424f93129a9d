"""Time and memory of `fp8ref audit` on a made checkpoint of FP8 blocks, MXFP8 and NVFP4.

    python benchmarks/speed/audit.py --gigabytes 20 --folder /tmp/audit   # removed afterwards

Prints a line of JSON: GB, seconds, MB/s, and the largest resident memory of the process in MiB.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from fp8ref.checkpoints import rule as rules
from fp8ref.formats import E4M3FN
from fp8ref.sim.quantize import cast, packing

CHILD = """
import pathlib, re, sys
from fp8ref import cli
code = cli.main(["audit", sys.argv[1], "--json", sys.argv[2]])
# ru_maxrss would be that of the process that started this one, if it was larger
status = pathlib.Path("/proc/self/status").read_text()
print(code, int(re.search(r"VmHWM:\\s+(\\d+)", status)[1]) // 1024)
"""


def store(name: str, rule: str, x: np.ndarray) -> dict[str, np.ndarray]:
    """A weight as libraries store it."""
    fmt = E4M3FN if "nv" not in rule else None
    q = rules.by_name(rule, fmt).quantize(x)
    if rule == "torchao_nvfp4_nv":
        return {
            f"{name}.weight": packing.pack(q.codes),
            f"{name}.weight_scale": cast.encode(q.scale_inv, E4M3FN).view(ml_dtypes.float8_e4m3fn),
            f"{name}.weight_scale_2": np.asarray(q.tensor_scale_inv, np.float32),
        }
    codes = q.codes.view(ml_dtypes.float8_e4m3fn)
    if rule == "te_mxfp8_mx":
        return {
            f"{name}.weight": codes,
            f"{name}.weight_scale": q.scale_inv.astype(ml_dtypes.float8_e8m0fnu),
        }
    return {f"{name}.weight": codes, f"{name}.weight_scale_inv": q.scale_inv}


def make(folder: Path, gigabytes: float) -> float:
    """Write shards of about 1 GB; returns the gigabytes written."""
    random = np.random.default_rng(0)
    x = (random.standard_normal((8192, 8192)) * 0.02).astype(np.float32)
    kinds = ("deepseek_v3_block", "te_mxfp8_mx", "torchao_nvfp4_nv")
    weights = [store("weight", rule, x) for rule in kinds]
    places, written, shard = {}, 0, 0
    while written < gigabytes * 1e9:
        tensors = {}
        for i in range(16):
            module = f"model.layers.{shard * 16 + i}.mlp.up_proj"
            # three of five weights in blocks of 128x128
            held = weights[(0, 1, 0, 2, 0)[i % 5]]
            tensors |= {
                key.replace("weight.", f"{module}.", 1): value for key, value in held.items()
            }
        file = f"model-{shard:05}.safetensors"
        save_file(tensors, folder / file)
        places |= dict.fromkeys(tensors, file)
        written, shard = written + (folder / file).stat().st_size, shard + 1
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    config = {"quantization_config": {"quant_method": "unknown"}}
    (folder / "config.json").write_text(json.dumps(config))
    return written / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=20)
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True)
    try:
        size = make(folder, arguments.gigabytes)
        begin = time.perf_counter()
        words = [sys.executable, "-c", CHILD, str(folder), str(folder / "audit.json")]
        out = subprocess.run(words, check=True, capture_output=True, text=True).stdout
        seconds = time.perf_counter() - begin
        code, mebibytes = map(int, out.splitlines()[-1].split())
        figures = {"GB": size, "s": seconds, "MB/s": 1000 * size / seconds, "MiB": mebibytes}
        print(json.dumps({key: round(value, 1) for key, value in figures.items()} | {"exit": code}))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
