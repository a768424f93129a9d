"""Kernels that are kept on disk are those that were asked for."""

import os
import platform
import subprocess
import sys

import numba
import numpy as np
import pytest
from numba.core import caching

from fp8ref.formats import E4M3FN
from fp8ref.sim.kernels import cast, compiled, scaling


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Where kernels are kept; none is at first."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    return tmp_path


def kept(folder) -> list[str]:
    return sorted(file.name for file in folder.rglob("*") if file.is_file())


def adds(n: int, how=compiled.compiled):
    """A kernel whose closure is n: all come of one function, and differ in n alone."""

    @how
    def add(x):
        return x + n

    return add


def of_numba(function):
    return numba.njit(cache=True)(function)


ONES = np.ones(4, np.uint32), np.zeros(4, np.uint8), 0, np.uint64(0)
BLOCK = (
    np.ones((1, 4), np.uint32),
    np.zeros(1, np.int64),
    4,
    np.ones((1, 1), np.float32),
    np.zeros((1, 4), np.uint8),
)


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (lambda: cast.encoder.__wrapped__(E4M3FN, "nearest_even", True), ONES),
        (lambda: scaling.encoder.__wrapped__(E4M3FN, False), BLOCK),
    ],
)
def test_a_change_of_any_kernel_file_compiles_again(make, arguments, monkeypatch, folder):
    def found() -> bool:
        kernel = make()
        kernel(*arguments)
        return sum(kernel.stats.cache_hits.values()) == 1

    assert [found(), found()] == [False, True]
    before = kept(folder)
    monkeypatch.setattr(compiled, "sources", lambda: "edited")
    assert [found(), found()] == [False, True]
    assert len(kept(folder)) == 1
    assert kept(folder) != before


def both_at_once(how, monkeypatch) -> None:
    """Compile the kernels of 1 and of 2 as two processes may: each looks for what is there before
    the other writes, and the first writes its code last."""
    first = adds(1, how)
    files = first._cache._cache_file
    write = files._save_data

    def late(name, data):
        second = adds(2, how)
        monkeypatch.setattr(second._cache._cache_file, "_load_index", dict)  # it looked before
        assert second(10) == 12
        write(name, data)

    monkeypatch.setattr(files, "_save_data", late)
    assert first(10) == 11


def test_two_processes_that_compile_at_once_keep_both(monkeypatch, folder):
    both_at_once(compiled.compiled, monkeypatch)
    assert [adds(n)(10) for n in (1, 2)] == [11, 12]
    assert len(kept(folder)) == 2


def test_numbas_own_cache_gives_one_kernel_for_the_other(monkeypatch, folder):
    """Why there is one of our own: once this fails, numba's will do."""
    both_at_once(of_numba, monkeypatch)
    assert adds(2, of_numba)(10) == 11


def test_arguments_of_other_types_are_other_kernels(folder):
    kernel = adds(1)
    assert kernel(1) == 2
    assert kernel(0.5) == 1.5
    again = adds(1)
    assert again(0.5) == 1.5
    assert again(1) == 2
    assert sum(again.stats.cache_hits.values()) == 2
    assert not again.stats.cache_misses
    again._cache.flush()
    assert kept(folder) == []


def test_without_a_folder_or_room_every_process_compiles(monkeypatch, folder):
    def full(self, name, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compiled._Files, "_save_data", full)
    assert adds(1)(1) == 2
    assert kept(folder) == []
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    assert adds(1)(1) == 2


def test_a_kernel_is_worth_its_compilation_once_plain_twins_did_the_work(folder, monkeypatch):
    monkeypatch.delenv("FP8REF_COMPILE")
    add = adds(17)
    assert [compiled.worth(add, 40, 100) for _ in range(4)] == [False, False, True, True]
    assert not compiled.worth(add, 1, 100)  # what was refused did not count
    add(1)
    assert compiled.worth(add, 1, 100)
    other = adds(18)
    assert compiled.worth(other, 101, 100)
    monkeypatch.setenv("FP8REF_COMPILE", "always")
    assert compiled.worth(other, 1, 100)


FEW = """
import hashlib
import numpy as np
from fp8ref.formats import BFLOAT16, E4M3FN
from fp8ref.sim.quantize import cast, scaling
from fp8ref.sim.gemm import gemm
from fp8ref.sim.kernels import cast as c, gemm as g, scaling as s
from fp8ref.sim.kernels.chains import chains as t

x = np.random.default_rng(0).standard_normal((48, 64)).astype(np.float32)
x[3, 5], x[7, 9] = np.nan, np.inf
q = scaling.quantize(x, E4M3FN, granularity="rowwise")
finite = scaling.quantize(np.nan_to_num(x, posinf=0), E4M3FN)
found = [cast.encode(x, E4M3FN), cast.encode(x, E4M3FN, rounding="stochastic", seed=3), *q[:3]]
found += [gemm.matmul(finite, finite, accumulate=how, out_dtype=BFLOAT16) for how in ("f32", "hopper_fast", "blackwell")]
print(hashlib.sha256(b"".join(np.ascontiguousarray(a).tobytes() for a in found)).hexdigest())
kernels = [c.encoder(E4M3FN, "nearest_even", True), c.encoder(E4M3FN, "stochastic", True), s.amax, s.encoder(E4M3FN, False)]
kernels += [t.chains, g.in_order, g.finisher("rows", False)]
print(sum(len(kernel.overloads) for kernel in kernels))
"""


def test_first_calls_of_few_elements_compile_nothing_and_change_no_bit():
    """Seven kernels, none of which is compiled; FP8REF_COMPILE=always compiles all, chains for two
    types, and gives the same bits.
    """
    bits, counts = [], []
    for how in ("", "always"):
        done = subprocess.run(
            [sys.executable, "-c", FEW],
            env=os.environ | {"FP8REF_COMPILE": how},
            capture_output=True,
            text=True,
            check=True,
        )
        found, count = done.stdout.split()
        bits.append(found)
        counts.append(int(count))
    assert bits[0] == bits[1]
    assert counts == [0, 8]


OLDER = """
import numpy as np
from fp8ref.formats import E4M3FN, E5M2
from fp8ref.sim.gemm import accumulate
from fp8ref.sim.quantize import cast
from fp8ref.sim.kernels.chains import chains

x = (np.random.default_rng(0).standard_normal((96, 256)) * 30).astype(np.float32)
for how, seed in (("nearest_even", None), ("toward_zero", None), ("stochastic", 5)):
    np.testing.assert_array_equal(cast.encode(x, E4M3FN, rounding=how, seed=seed), cast.encode_plain(x, E4M3FN, rounding=how, seed=seed))
a, b = cast.encode(x, E4M3FN), cast.encode(x[::-1], E5M2)
for name in ("hopper_slow", "blackwell"):
    plan = accumulate.ACCUMULATIONS[name]
    found = accumulate.chains_of_codes(a, b, E4M3FN, E5M2, plan)
    expected = accumulate.chains_plain(cast.decode(a, E4M3FN), cast.decode(b, E5M2), E4M3FN, E5M2, plan)
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))
text = "".join(chains.chains.inspect_asm().values())
print([name for name in ("zmm", "ymm", "xmm") if name in text][0])
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the names are of processors of x86-64")
@pytest.mark.parametrize(
    ("processor", "features", "registers"),
    [("haswell", "+avx2,+fma", "ymm"), ("nehalem", "", "xmm")],
)
def test_older_processors_give_the_same_bits(processor, features, registers, tmp_path):
    """Compiled for one with AVX2, and for one without AVX."""
    own = {
        "NUMBA_CPU_NAME": processor,
        "NUMBA_CPU_FEATURES": features,
        "NUMBA_CACHE_DIR": str(tmp_path),
        "FP8REF_COMPILE": "always",
    }
    done = subprocess.run(
        [sys.executable, "-c", OLDER],
        env=os.environ | own,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == registers, done.stderr
