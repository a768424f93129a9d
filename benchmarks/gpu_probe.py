"""What a GPU computes, recorded: its casts and scales, its instruction, and the GEMMs of PyTorch and JAX, each probed and kept bit for bit.

Recordings go to tests/evidence, where the tests compute them again; a table of what was found to benchmarks/results/gpu_probe.json and .md. What is
there already is not asked again: a run that was cut off goes on. --dry runs the same on a CPU, with small shapes, into another directory.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from fp8ref.run import progress

ROOT = Path(__file__).parents[1]
XLA = {"": "", "pinned": "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"}
SHAPES = ((64, 64, 256), (128, 128, 1024), (128, 128, 4096), (16, 4096, 4096), (1024, 1024, 4096), (4096, 4096, 4096), (8192, 8192, 8192))
DRY_SHAPES = ((64, 64, 256),)
PAIRS = (("e4m3fn", "e4m3fn"), ("e5m2", "e4m3fn"))


def asked(shapes: tuple[tuple[int, int, int], ...], *, dry: bool) -> Iterator[tuple[str, list[str], str]]:
    """(name, arguments of fp8ref, XLA's flags), the most wanted first."""
    yield "certificate", ["certify"], ""
    if not dry:
        yield "wgmma", ["probe", "wgmma"], ""
    for shape, formats in itertools.product(shapes, PAIRS[:1] if dry else PAIRS):
        if formats != PAIRS[0] and shape[2] not in (256, 4096):
            continue
        given = ["--shape", *map(str, shape), "--formats", *formats]
        named = f"{'x'.join(map(str, shape))}-{formats[0]}"
        for fast in (True,) if dry else (True, False):
            how, flag = ("fast", ["--fast-accum"]) if fast else ("slow", [])
            for out in ("float32", "bfloat16"):
                yield f"torch-scaled-mm-{how}-{out}-{named}", ["probe", "torch-scaled-mm", *given, *flag, "--out-dtype", out], ""
            if formats == PAIRS[0]:
                yield f"torch-rowwise-{how}-{named}", ["probe", "torch-rowwise", *given, *flag], ""
            for label, flags in XLA.items():
                yield f"jax-dot-{how}{'-' * bool(label)}{label}-{named}", ["probe", "jax-dot", *given, *flag], flags


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=480, help="seconds, after which nothing more is started (default 480)")
    parser.add_argument("--dry", action="store_true", help="on a CPU, to see that every line runs; needs --out")
    parser.add_argument(
        "--out", type=Path, help="instead of the repository: a directory for evidence/ and results/, such as one that outlives the machine"
    )
    known = parser.parse_args()
    if known.dry and not known.out:
        parser.error("--dry takes --out: what a CPU gives is no evidence of a GPU.")
    if not known.dry and not on_gpu():
        parser.error("no NVIDIA GPU is here. --dry --out DIR runs the same on a CPU.")
    evidence = known.out / "evidence" if known.out else ROOT / "tests" / "evidence"
    results = known.out / "results" if known.out else ROOT / "benchmarks" / "results"
    for folder in (evidence, results):
        folder.mkdir(parents=True, exist_ok=True)
    written = results / "gpu_probe.json"
    done = json.loads(written.read_text()) if written.exists() else {"dry": known.dry, "found": {}}
    begin = time.monotonic()
    todo = list(asked(DRY_SHAPES if known.dry else SHAPES, dry=known.dry))
    for name, arguments, flags in todo:
        if name in done["found"] or time.monotonic() - begin > known.budget:
            continue
        done["found"][name] = run(name, arguments, flags, evidence, results)
        written.write_text(json.dumps(done, indent=1) + "\n")
        progress.say(f"{time.monotonic() - begin:5.0f} s  {name}: {done['found'][name]['said']}")
    table = markdown(done)
    written.with_suffix(".md").write_text(table)
    print(table)
    left = [name for name, *_ in todo if name not in done["found"]]
    print(f"{len(done['found'])} of {len(todo)} done" + (f"; left for another run: {', '.join(left)}" if left else ""))
    return 0


def run(name: str, arguments: list[str], flags: str, evidence: Path, results: Path) -> dict:
    """One command of fp8ref in a process of its own, as XLA's flags are read once; its JSON is kept beside the table."""
    path = results / f"gpu_{name}.json" if name == "certificate" else results / "gpu_probe.tmp.json"
    keep = [] if name == "certificate" else ["--record", str(evidence / name)]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "COLUMNS": "200"}
    environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    command = [sys.executable, "-m", "fp8ref", *arguments, "--json", str(path), *keep]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    if ended.returncode not in (0, 1):
        return {"ok": False, "said": ended.stderr.strip().splitlines()[-1] if ended.stderr.strip() else f"exit code {ended.returncode}"}
    read = json.loads(path.read_text())
    said = ended.stdout.strip().splitlines()
    verdict = next((line for line in reversed(said) if "simulator" in line), said[-1])
    if name == "certificate":
        return {"ok": read["ok"], "said": "casts and scales in range as the simulator has them" if read["ok"] else verdict}
    path.unlink()
    if name == "wgmma":
        return {"ok": read["ok"], "said": verdict, "about": read["pairings"][0]["about"], "plan": read["pairings"][0]["plan"]}
    return {"ok": read["ok"], "said": verdict, "about": read["about"], "plan": read["plan"], "xla_flags": flags}


def markdown(done: dict) -> str:
    """The table of what was found."""
    keys = ("fused_width", "fraction_bits", "output_bits", "promotion", "split_k", "epilogue")
    lines = ["Dry run on a CPU: no evidence of a GPU.", ""] if done["dry"] else []
    lines += [f"| asked | {' | '.join(keys)} | bits |", f"|{'---|' * (len(keys) + 2)}"]
    for name, found in done["found"].items():
        plan = found.get("plan") or {}
        cells = ["-" if plan.get(key) is None else str(plan[key]) for key in keys]
        lines.append(f"| {name} | {' | '.join(cells)} | {found['said']} |")
    return "\n".join(lines) + "\n"


def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
