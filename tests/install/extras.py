"""Install each extra alone into a new environment, and use its rooms and commands there: python
tests/install/extras.py [EXTRA ...]

An extra that is not asked for must not be needed. What needs another one must name it. Packages
come from the index that pip is set up for.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
TINY = "tiny"


class Use(NamedTuple):
    """One thing to do. code: ``python -c``; else a command of fp8ref. exit and says: what it ends
    with, and what it prints among others.
    """

    what: str
    command: tuple[str, ...] = ()
    code: str = ""
    exit: int = 0
    says: str = ""


def missing(room: str, extra: str) -> Use:
    """An import that fails, and names what installs it."""
    return Use(
        f"import {room} names [{extra}]", code=f"import {room}", exit=1, says=f"fp8ref[{extra}]"
    )


FRONT = """
import fp8ref as f8
x = [[0.5, -3.0] * 64, [1.0, 7.0] * 64]
print(f8.formats, f8.recipes, f8.policies, f8.quantize(x, "e4m3fn", "rowwise").error(x))
print(f8.compare(x))
"""
SIMULATOR = """
import numpy as np
from fp8ref.spec import delayed, epilogue, granularity
from fp8ref import formats, policy, recipe
from fp8ref.sim.quantize import cast, scaling, stats
from fp8ref.sim.gemm import gemm
from fp8ref.sim import linear
from fp8ref.sim.distributed import sharding
x = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)
w = np.random.default_rng(1).standard_normal((48, 64)).astype(np.float32)
assert linear.forward(x, w, "rowwise").shape == (32, 48)
assert stats.statistics(x, scaling.quantize(x, formats.E4M3FN))
"""
IDENTIFY = """
from fp8ref.conformance import identify_cast
from fp8ref.formats import E4M3FN
from fp8ref.sim.quantize import cast
found = identify_cast(lambda x: cast.encode(x, E4M3FN), E4M3FN)
assert found.ok, found.summary
"""
JAX = """
import jax, jax.numpy as jnp, sys
from fp8ref import jax as fj
x, w = jnp.ones((32, 64), jnp.bfloat16), jnp.ones((48, 64), jnp.bfloat16)
jax.grad(lambda w: fj.linear.apply(x, w, recipe="rowwise")[0].astype(jnp.float32).sum())(w)
import flax.linen as nn
nn.Dense(32, dot_general_cls=fj.flax.linen_dot_general("tensorwise")).init(jax.random.key(0), jnp.ones((32, 64)))
assert not {"pydantic", "grain", "fp8ref.shared.console", "fp8ref.train", "torch"} & set(sys.modules)  # flax imports rich
"""
TORCH = """
import sys, torch
from torch import nn
from fp8ref import torch as ft
model = ft.convert(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32)).bfloat16(), "delayed")
model(torch.ones(32, 64, dtype=torch.bfloat16)).square().mean().backward()
ft.delayed.update(model)
assert not {"pydantic", "grain", "fp8ref.shared.console", "fp8ref.train", "jax"} & set(sys.modules)
"""
STUDY = """
import torch
from fp8ref import study
model = torch.nn.Sequential(torch.nn.Linear(128, 128))
with study.record(model) as recording:
    model(torch.ones(16, 128)).sum().backward()
assert len(study.judge(recording, ["rowwise"]).rows) == 6
assert study.depth(model, lambda model: model(torch.ones(16, 128)), ["rowwise"]).outcomes["rowwise"].in_fp8 == 1
"""

KERNELS = """
import numpy as np
from fp8ref.kernels import casts, jit
x, scale = np.ones((32, 64), np.float32), np.ones((), np.float32)
codes, transposed = np.zeros((32, 64), np.uint8), np.zeros((64, 32), np.uint8)
arrays = [x, scale, codes, transposed, np.zeros(1, np.int32)]
jit.interpret(casts.cast(x.shape, (64, 1), e5m2=False), arrays, [str(a.dtype) for a in arrays])
assert (codes == 0x38).all() and (transposed == 0x38).all()
"""
JAX_KERNELS = """
import jax.numpy as jnp
from fp8ref import jax as fj
from fp8ref.jax.kernels import TritonKernels, casting
x, w = jnp.ones((32, 64), jnp.bfloat16), jnp.ones((48, 64), jnp.bfloat16)
with casting(TritonKernels()):
    y, _ = fj.linear.apply(x, w, recipe="tensorwise")
assert (y == 64).all()
"""
PROPERTY = """
import numpy as np
from hypothesis import given, settings
from fp8ref.conformance import parameters, require, strategies
from fp8ref.formats import E4M3FN
from fp8ref.sim.quantize import cast

@settings(max_examples=20, database=None, deadline=None)
@given(strategies.tensors())
def right(x):
    require.require_cast(x, cast.encode(x, E4M3FN), E4M3FN)

right()
assert parameters.casts(E4M3FN)
"""
KERNEL = "from fp8ref.formats import E4M3FN\nfrom fp8ref.sim import cast, gemm\n\n\n"
KERNEL += "def mycast(x):\n    return cast.encode(x, E4M3FN)\n\n\n"
KERNEL += 'def mygemm(a, b):\n    return gemm.matmul(a, b, accumulate="f32")\n'
SOME = ("--run.steps", "2", "--run.eval_batches", "1", "--run.out", "run", "--data.source", "text")
TRAINS = [
    Use("train --dry-run", ("train", TINY, "--backend", "torch", "--dry-run"), says="GiB"),
    Use("estimate", ("estimate", TINY, "--gpu", "h200", "--backend", "jax"), says="PREDICTED"),
    Use("data prepare", ("data", "prepare", "--source", "text", "--out", "tokens")),
]
USES: dict[str, list[Use]] = {
    "bare": [
        Use("the front", code=FRONT, says="The worst row keeps"),
        Use("the simulator", code=SIMULATOR),
        Use("identify_cast", code=IDENTIFY),
        Use("fp8ref --help", ("--help",), says="COMMAND"),
        Use(
            "vectors gen", ("vectors", "gen", "scale", "--format", "e4m3fn", "--policy", "torchao")
        ),
        missing("fp8ref.jax", "jax"),
        missing("fp8ref.torch", "torch"),
        missing("fp8ref.train.config.config", "train"),
        missing("fp8ref.estimate.report", "train"),
        missing("fp8ref.plots", "train"),
        missing("fp8ref.conformance.strategies", "conformance"),
        Use(
            "conform names [conformance]",
            ("conform", "kernel:mycast", "--format", "e4m3fn"),
            exit=2,
            says="fp8ref[conformance]",
        ),
        Use(
            "train names [train]", ("train", TINY, "--backend", "jax"), exit=2, says="fp8ref[train]"
        ),
    ],
    "jax": [
        Use("fp8ref.jax and its Flax hooks", code=JAX),
        missing("fp8ref.torch", "torch"),
        missing("fp8ref.train.loop", "train"),
    ],
    "torch": [
        Use("fp8ref.torch", code=TORCH),
        Use("a study", code=STUDY),
        missing("fp8ref.study.page", "train"),
        missing("fp8ref.jax", "jax"),
        missing("fp8ref.train.loop", "train"),
    ],
    "kernels": [
        Use("Triton's interpreter", code=KERNELS),
        missing("fp8ref.jax", "jax"),
        missing("fp8ref.torch", "torch"),
    ],
    "jax-kernels": [Use("a linear that kernels cast, interpreted", code=JAX_KERNELS)],
    "conformance": [
        Use("property tests", code=PROPERTY),
        Use("conform", ("conform", "kernel:mycast", "--format", "e4m3fn"), says="saturating"),
        Use("probe", ("probe", "kernel:mygemm", "--shape", "16", "16", "128"), says="identified"),
        Use(
            "certify names what brings libraries to compare",
            ("certify",),
            exit=2,
            says="fp8ref[all]",
        ),
        Use("crosscheck names [train]", ("crosscheck", TINY), exit=2, says="fp8ref[train]"),
    ],
    "train": [
        *TRAINS,
        Use(
            "train names [jax]",
            ("train", TINY, "--backend", "jax", *SOME),
            exit=2,
            says="fp8ref[jax]",
        ),
    ],
    "data": [
        *TRAINS,
        Use(
            "data prepare of .jsonl",
            ("data", "prepare", "--source", "documents/*.jsonl", "--out", "documents-tokens"),
        ),
    ],
    "notebooks": [
        Use("train with jax", ("train", TINY, "--backend", "jax", *SOME), says="loss"),
        Use(
            "train with torch",
            ("train", TINY, "--backend", "torch", *SOME, "--overwrite"),
            says="loss",
        ),
        Use("report", ("report", "run"), says="run"),
        Use(
            "the notebooks' packages",
            code="import ipykernel, nbclient, nbformat, transformers; from fp8ref import plots",
        ),
    ],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "extras", nargs="*", metavar="EXTRA", help=f"of {', '.join(USES)}; all without"
    )
    parser.add_argument(
        "--turn",
        type=int,
        metavar="N",
        help="of all, every fourth, beginning with the N-th modulo 4",
    )
    known = parser.parse_args()
    if unknown := [name for name in known.extras if name not in USES]:
        parser.error(f"EXTRA is one of {', '.join(USES)}; got {', '.join(unknown)}")
    chosen = known.extras or (list(USES) if known.turn is None else list(USES)[known.turn % 4 :: 4])
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        wheel = built(Path(folder))
        for extra in chosen:
            failed += check(extra, wheel, Path(folder) / extra)
    print(f"{'all' if not failed else 'NOT all'} uses of {', '.join(chosen)} are as they should be")
    return 1 if failed else 0


def built(folder: Path) -> Path:
    """The wheel of the files that git tracks, so that nothing left behind gets into it."""
    source = folder / "source"
    for name in subprocess.run(
        ["git", "ls-files", "-z", "fp8ref", "pyproject.toml", "README.md", "LICENSE"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0"):
        if name and (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--disable-pip-version-check",
            "--no-deps",
            "-w",
            folder,
            source,
        ],
        check=True,
    )
    return next(folder.glob("fp8ref-*.whl"))


def check(extra: str, wheel: Path, folder: Path) -> int:
    """Install one extra and do what it is for; how many uses went wrong."""
    begun = time.monotonic()
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    what = f"{wheel}[{extra}]" if extra != "bare" else str(wheel)
    install = [
        python,
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        "--no-compile",
        "-c",
        ROOT / "constraints.txt",
        what,
    ]
    subprocess.run(install, check=True, stderr=subprocess.DEVNULL if extra == "bare" else None)
    (folder / "kernel.py").write_text(KERNEL, encoding="utf-8")
    for name, suffix, text in (
        ("text", "txt", "fp8 amax scale bits\n" * 4000),
        ("documents", "jsonl", '{"text": "fp8 amax scale bits"}\n' * 400),
    ):
        (folder / name).mkdir()
        for i in range(8):
            (folder / name / f"{i}.{suffix}").write_text(text, encoding="utf-8")
    print(f"[{extra}] installed in {time.monotonic() - begun:.0f} s", flush=True)
    return sum(not used(use, python, folder) for use in USES[extra])


def used(use: Use, python: Path, folder: Path) -> bool:
    """Whether it went as it should."""
    command = [python, "-c", use.code] if use.code else [python, "-m", "fp8ref", *use.command]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    ok = done.returncode == use.exit and use.says in done.stdout + done.stderr
    print(f"  {'ok   ' if ok else 'FAILS'} {use.what}", flush=True)
    if not ok:
        print(
            f"exit {done.returncode}, wanted {use.exit} and "
            f"{use.says!r}\n{done.stdout}{done.stderr}",
            flush=True,
        )
    return ok


if __name__ == "__main__":
    sys.exit(main())
