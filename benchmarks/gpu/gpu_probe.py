"""What a GPU computes, recorded: its casts and scales, its instruction, and the GEMMs of PyTorch
and JAX, each probed and kept bit for bit.

Recordings go to tests/evidence/DEVICE, where the tests compute them again; a table of what was
found to benchmarks/results/gpu_probe.json and .md. What is there already, of this device and these
versions, is not asked again: a run that was cut off goes on, with what failed last. --dry runs the
same on a CPU, with small shapes, into another directory.
"""

import argparse
import concurrent.futures
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from fp8ref.shared import console
from measuring import environment
from measuring.results import LEFT, RefusedError, Results

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "torchao", "jax", "jaxlib", "nvidia-cublas")
XLA = {"": "", "pinned": "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"}
SHAPES = (
    (64, 64, 256),
    (128, 128, 1024),
    (128, 128, 4096),
    (16, 4096, 4096),
    (1024, 1024, 4096),
    (4096, 4096, 4096),
    (8192, 8192, 8192),
)
DRY_SHAPES = ((64, 64, 256),)
PAIRS = (("e4m3fn", "e4m3fn"), ("e5m2", "e4m3fn"))
LONGEST = 240  # seconds of one question, after which it counts as failed


def asked(
    shapes: tuple[tuple[int, int, int], ...], *, dry: bool
) -> Iterator[tuple[str, list[str], str]]:
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
                yield (
                    f"torch-scaled-mm-{how}-{out}-{named}",
                    ["probe", "torch-scaled-mm", *given, *flag, "--out-dtype", out],
                    "",
                )
            if formats == PAIRS[0]:
                yield f"torch-rowwise-{how}-{named}", ["probe", "torch-rowwise", *given, *flag], ""
            for label, flags in XLA.items():
                yield (
                    f"jax-dot-{how}{'-' * bool(label)}{label}-{named}",
                    ["probe", "jax-dot", *given, *flag],
                    flags,
                )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=480,
        help="seconds, after which nothing more is started (default 480)",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="questions that are asked at once, each by a process of its own (default 1)",
    )
    parser.add_argument(
        "--dry", action="store_true", help="on a CPU, to see that every line runs; needs --out"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="instead of the repository: a directory for evidence/ and results/, such as one "
        "that outlives the machine",
    )
    known = parser.parse_args()
    if known.dry and not known.out:
        parser.error("--dry takes --out: what a CPU gives is no evidence of a GPU.")
    device = gpu()
    if not known.dry and device is None:
        parser.error("no NVIDIA GPU is here. --dry --out DIR runs the same on a CPU.")
    evidence = (known.out / "evidence" if known.out else ROOT / "tests" / "evidence") / (
        device or "cpu"
    ).lower().replace(" ", "-")
    results = known.out / "results" if known.out else ROOT / "benchmarks" / "results"
    evidence.mkdir(parents=True, exist_ok=True)
    try:
        kept = Results(
            results / "gpu_probe.json",
            environment.describe(device or "cpu", PACKAGES, dry=known.dry),
            resume=True,
        )
    except RefusedError as refused:
        print(refused, file=sys.stderr)
        return 2
    begin = time.monotonic()
    questions = list(asked(DRY_SHAPES if known.dry else SHAPES, dry=known.dry))
    # what failed comes last
    todo = sorted((q for q in questions if not kept.finished(q[0])), key=lambda q: kept.tried(q[0]))

    def ask(question: tuple[str, list[str], str]) -> tuple[str, dict] | None:
        left = known.budget - (time.monotonic() - begin)
        return (
            (question[0], run(*question, evidence, results, min(LONGEST, left + 60)))
            if left > 0
            else None
        )

    with concurrent.futures.ThreadPoolExecutor(known.jobs) as pool:
        for asking in concurrent.futures.as_completed(
            [pool.submit(ask, question) for question in todo]
        ):
            if (found := asking.result()) is None:
                continue
            name, answer = found
            kept.put(name, answer)
            kept.write(markdown(kept.data))
            console.say(f"{time.monotonic() - begin:5.0f} s  {name}: {answer['said']}")
    kept.write(markdown(kept.data))
    print(markdown(kept.data))
    untried = [name for name, *_ in questions if not kept.tried(name)]
    failed = [name for name, *_ in questions if kept.tried(name) and not kept.finished(name)]
    print(
        f"{len(questions) - len(untried) - len(failed)} of {len(questions)} done",
        *(f"failed: {name}" for name in failed),
        sep="\n",
    )
    if untried:
        print(f"left for another run: {', '.join(untried)}")
    return 1 if failed else LEFT if untried else 0


def run(
    name: str, arguments: list[str], flags: str, evidence: Path, results: Path, seconds: float
) -> dict:
    """One command of fp8ref in a process of its own, as XLA's flags are read once; a certificate's
    JSON is kept next to the table.
    """
    path = (
        results / f"gpu_{name}.json"
        if name == "certificate"
        else results / f"gpu_probe_{name}.tmp.json"
    )
    path.unlink(missing_ok=True)  # what a process that was killed left
    keep = [] if name == "certificate" else ["--record", str(evidence / name)]
    variables = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "COLUMNS": "200"}
    variables["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    command = [sys.executable, "-m", "fp8ref", *arguments, "--json", str(path), *keep]
    try:
        ended = subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return broken(name, f"did not end within {seconds:.0f} s")
    # 1: no plan has all of the bits; or it crashed, and wrote nothing
    if ended.returncode not in (0, 1) or not path.exists():
        lines = ended.stderr.strip().splitlines()
        return broken(name, lines[-1] if lines else f"exit code {ended.returncode}")
    read = json.loads(path.read_text())
    said = ended.stdout.strip().splitlines()
    verdict = next((line for line in reversed(said) if "simulator" in line), said[-1])
    if name == "certificate":
        return {
            "ok": read["ok"],
            "said": "casts and scales in range as the simulator has them"
            if read["ok"]
            else verdict,
        }
    path.unlink()
    of = read["pairings"][0] if name == "wgmma" else read
    return {
        "ok": read["ok"],
        "said": verdict,
        "about": of["about"],
        "plan": of["plan"],
        "xla_flags": flags,
    }


def broken(name: str, why: str) -> dict:
    return {"ok": False, "said": why, "rows": [{"name": name, "error": why}]}


def markdown(data: dict) -> str:
    """The table of what was found."""
    keys = ("fused_width", "fraction_bits", "output_bits", "promotion", "split_k", "epilogue")
    lines = (
        ["Dry run on a CPU: no evidence of a GPU.", ""]
        if data["dry"]
        else [f"{data['device']}, driver {data['driver']}.", ""]
    )
    lines += [f"| asked | {' | '.join(keys)} | bits |", f"|{'---|' * (len(keys) + 2)}"]
    for name, found in data["sections"].items():
        plan = found.get("plan") or {}
        cells = ["-" if plan.get(key) is None else str(plan[key]) for key in keys]
        lines.append(f"| {name} | {' | '.join(cells)} | {found['said']} |")
    return "\n".join(lines) + "\n"


def gpu() -> str | None:
    """The device's name, if there is one."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


if __name__ == "__main__":
    sys.exit(main())
