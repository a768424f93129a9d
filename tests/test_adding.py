"""A new recipe is one line, and a new policy of decisions that are there one table: everything that
takes one by name takes it.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECIPE = (
    '        _uniform("tensorwise_e4m3", CastSpec(fmt=E4M3FN), CastSpec(fmt=E4M3FN), '
    "CastSpec(fmt=E4M3FN)),\n"
)
POLICY = """[torchao_margin1]
summary = "As torchao, with a power of two of room."
like = "torchao"
margin = 1

"""
KERNEL = """
import numpy as np
from fp8ref.formats import E4M3FN
from fp8ref.sim.quantize import scaling


def quantize(x):
    q = scaling.quantize(x, E4M3FN, granularity="tensorwise", policy="torchao_margin1")
    return q.codes, q.scale
"""
CHECKS = """
import numpy as np
from fp8ref import plots, policy, recipe
from fp8ref.formats import E4M3FN
from fp8ref.recipe import CastSpec, Recipe
from fp8ref.sim import linear
from fp8ref.sim.quantize import scaling

added = recipe.by_name("tensorwise_e4m3")
rng = np.random.default_rng(0)
x, w, g = (rng.standard_normal(shape).astype(np.float32) for shape in ((32, 64), (48, 64), (32, 48)))
assert linear.forward(x, w, "tensorwise_e4m3").shape == (32, 48)
assert [grad.shape for grad in linear.backward(g, x, w, "tensorwise_e4m3")] == [(32, 64), (48, 64)]
assert "tensorwise_e4m3" in recipe.SHARED_RECIPES
assert plots.runs.COLORS["tensorwise_e4m3"]

import jax.numpy as jnp
import torch
from fp8ref import jax as fj
from fp8ref import torch as ft

y, _ = fj.linear.apply(jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16), recipe="tensorwise_e4m3")
assert y.shape == (32, 48)
converted = ft.convert(torch.nn.Linear(64, 48).bfloat16(), "tensorwise_e4m3")
assert type(converted).__name__ == "Float8Linear"

half = scaling.quantize(x, E4M3FN, policy="torchao_margin1").scale * 2
assert half == scaling.quantize(x, E4M3FN, policy="torchao").scale
for encode in (lambda: fj.scaling.quantize(jnp.asarray(x), E4M3FN, policy=policy.POLICIES["torchao_margin1"]),
               lambda: ft.scaling.quantize(torch.tensor(x), E4M3FN, policy=policy.POLICIES["torchao_margin1"])):
    try:
        encode()
    except ValueError as error:  # a backend that has no such decision refuses it by its name
        assert "torchao_margin1" in str(error)
    else:
        raise AssertionError("a policy that no backend implements was taken")
"""


@pytest.fixture(scope="module")
def added(tmp_path_factory) -> Path:
    """The package with one line more in recipe.py and a table more in policies.toml."""
    root = tmp_path_factory.mktemp("added")
    # With numba's compiled kernels, whose sources stay as they are; but not with files that another
    # process is writing.
    shutil.copytree(
        ROOT / "fp8ref", root / "fp8ref", ignore=shutil.ignore_patterns("*.pyc*", "*.tmp.*")
    )
    for name, before, line in (
        ("recipe.py", '        _rowwise("rowwise", ', RECIPE),
        ("policies.toml", "[torchao_pow2]\n", POLICY),
    ):
        path = root / "fp8ref" / name
        text = path.read_text(encoding="utf-8")
        assert text.count(before) == 1
        path.write_text(text.replace(before, line + before), encoding="utf-8")
    (root / "mykernel.py").write_text(KERNEL, encoding="utf-8")
    (root / "text").mkdir()
    for i in range(8):
        (root / "text" / f"{i}.txt").write_text("fp8 amax scale bits\n" * 200, encoding="utf-8")
    return root


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_both_are_taken_by_the_simulator_the_libraries_and_the_plots(added):
    done = run(added, "-c", CHECKS)
    assert done.returncode == 0, done.stderr


SMALL = [
    "--data.source",
    "text",
    "--data.sequence_length",
    "32",
    "--data.batch_size",
    "4",
    "--run.steps",
    "2",
    "--run.eval_batches",
    "1",
]
TINY = ["tiny", "--recipe", "tensorwise_e4m3", "--model.num_hidden_layers", "1", *SMALL]
COMMANDS = [
    *(
        ("train", *TINY, "--backend", backend, "--run.out", f"runs/{backend}")
        for backend in ("jax", "torch")
    ),
    ("crosscheck", *TINY, "--steps", "0"),
    ("crosscheck", *TINY, "--steps", "1", "--backend", "torch", "--sharded", "2"),
    ("crosscheck", *TINY, "--backend", "jax", "--sharded", "2"),
    (
        "train",
        *TINY,
        "--backend",
        "torch",
        "--dry-run",
        "--parallel.tensor",
        "2",
        "--parallel.amax_scope",
        "local",
    ),
    ("estimate", *TINY, "--gpu", "h200", "--backend", "jax"),
    ("conform", "mykernel:quantize", "--format", "e4m3fn", "--expect", "torchao_margin1"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    COMMANDS,
    ids=lambda c: " ".join(c[:1] + tuple(a for a in c if a in ("jax", "torch", "--sharded"))),
)
def test_every_command_takes_them(added, command):
    done = run(added, "-m", "fp8ref", *command)
    assert done.returncode == 0, done.stdout + done.stderr
