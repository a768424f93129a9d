"""Fixtures that several rooms share."""

import collections
import contextlib
import gc
import importlib
import importlib.util
import os
import tempfile
import time
from pathlib import Path

import hypothesis
import numpy as np
import pytest

from fp8ref.spec.llama import LlamaConfig
from fp8ref.train.config.config import Config
from fp8ref.train.config.sections import DataConfig, RunConfig, StatisticsConfig

# Before anything imports jax: a CPU as eight devices, for meshes. Programs are small: LLVM compiles
# each in one piece, a tenth cheaper than in parts.
_FLAGS = "--xla_force_host_platform_device_count=8 --xla_cpu_parallel_codegen_split_count=1"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}".strip()

# Kernels are compiled at their first call, however small: else tests of few elements would compare
# plain functions with themselves.
os.environ.setdefault("FP8REF_COMPILE", "always")

# Two workers of pytest-xdist with as many threads as cores each would wait for each other, and the
# processes that they start too.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Programs that one test compiled serve the others, in every process and every checkout of this
# user, as inductor's do: to compile them is two thirds of the time of JAX's tests. Workers and what
# they start inherit the variables of the first process. JAX knows a program by its text, flags,
# version and processor, and keeps none that calls back. The trainer keeps none whose loops hold
# collectives (fp8ref/jax/distributed/persistent_cache.py): of 60 processes that read such a step from
# the cache, 5 were killed in the first two steps. What no run has used for a week is removed.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    _compiled = _caches / "fp8ref" / "jax"
    _compiled.mkdir(parents=True, exist_ok=True)
    for _file in _compiled.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another run removes them too
            if _file.stat().st_atime < time.time() - 7 * 24 * 3600:
                _file.unlink()
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_compiled)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# In a new environment the first import of PyTorch, JAX and the test files compiles them to
# bytecode, half a minute in all. Where that is to come, the first worker collects alone, and the
# others find what it kept.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _torch = importlib.util.find_spec("torch")
    os.environ["FP8REF_FIRST_IMPORTS"] = str(
        int(_torch is not None and _torch.cached is not None and not Path(_torch.cached).exists())
    )
FIRST_IMPORTS_S = 300  # seconds: when the first worker has died, the others go on

# Tracing makes thousands of objects that live as long as its program: looked through after each 700
# of them, they cost a twentieth more.
gc.set_threshold(20_000, 20, 20)

# The first example of a test compiles kernels, and other workers run meanwhile: time says nothing.
hypothesis.settings.register_profile("fp8ref", deadline=None)
hypothesis.settings.load_profile("fp8ref")

MODEL = LlamaConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
)


def pytest_addoption(parser):
    parser.addoption(
        "--slow-stride",
        type=int,
        default=1,
        metavar="N",
        help="of the tests marked slow, run every N-th",
    )
    parser.addoption(
        "--slow-turn",
        type=int,
        default=0,
        metavar="K",
        help="of these, begin with the K-th, modulo N",
    )


def pytest_collection_modifyitems(config, items):
    grids = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("grid") and not item.get_closest_marker("slow"):
            grids[item.path, item.originalname].append(item)
    for cases in grids.values():
        (always,) = cases[0].get_closest_marker("grid").args
        kept = {round(i * (len(cases) - 1) / max(1, always - 1)) for i in range(always)}
        for i, item in enumerate(cases):
            if i not in kept:
                item.add_marker("slow")
    slow = [item for item in items if item.get_closest_marker("slow")]
    stride = config.getoption("--slow-stride")
    left_out = set(slow) - set(slow[config.getoption("--slow-turn") % stride :: stride])
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    # long ones first: at the end a worker would wait for them
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection():
    # ten thousand tests and what they import stay: to look through them again and again is a fifth
    # of the time
    gc.disable()
    if (
        os.environ.get("PYTEST_XDIST_WORKER", "gw0") != "gw0"
        and os.environ["FP8REF_FIRST_IMPORTS"] == "1"
    ):
        until = time.monotonic() + FIRST_IMPORTS_S
        while not _first_collected().exists() and time.monotonic() < until:
            time.sleep(0.2)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    gc.freeze()
    gc.enable()
    if os.environ.get("PYTEST_XDIST_WORKER") == "gw0":
        _first_collected().touch()


def pytest_unconfigure():
    if os.environ.get("PYTEST_XDIST_WORKER") == "gw0":
        _first_collected().unlink(missing_ok=True)


def _first_collected() -> Path:
    """The file that says that the first worker of this run has collected."""
    return Path(tempfile.gettempdir()) / f"fp8ref-collected-{os.environ['PYTEST_XDIST_TESTRUNUID']}"


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not importlib.import_module("torch").cuda.is_available():
        pytest.skip("no NVIDIA GPU")


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def text(tmp_path):
    """A directory of text: 40 files of 2,000 bytes."""
    words = np.random.default_rng(1).choice(["fp8 ", "amax ", "scale\n", "bits "], size=(40, 400))
    root = tmp_path / "text"
    root.mkdir()
    for i, row in enumerate(words):
        (root / f"{i}.txt").write_text("".join(row))
    return root


@pytest.fixture
def small(text):
    """A config whose step takes milliseconds."""
    return Config(
        model=MODEL,
        data=DataConfig(source=str(text), sequence_length=16, batch_size=4),
        run=RunConfig(steps=6, eval_every=3, eval_batches=1),
        statistics=StatisticsConfig(every=0),
    )


@pytest.fixture
def by_kernel(small):
    """A config whose attention is cuDNN's, which no CPU runs."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 256}
    numerics = {"recipe": "bf16", "attention": "cudnn", "attention_scaling": "delayed"}
    return small.replace(
        model=heads,
        data={"sequence_length": 128},
        numerics=numerics,
        parallel={"attention": "kernel"},
    )
