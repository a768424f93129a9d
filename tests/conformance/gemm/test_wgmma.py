"""Hopper's instruction by itself, as far as it goes without the GPU: compiled, its operands cut
into tiles, and held to integers.
"""

import shutil

import numpy as np
import pytest

from fp8ref.conformance.gemm import wgmma
from fp8ref.conformance.gemm.scaled_gemm import ProbeError
from fp8ref.sim.gemm import gemm

M, N = 130, 20


def tile_by_tile(a, b, c, fmt_a, fmt_b):
    """Every tile by the simulator, as the kernel gets them."""
    cut = zip(*wgmma.tiles(a, b, c), strict=True)
    d = np.stack([gemm.mma(x, y, z, fmt_a=fmt_a, fmt_b=fmt_b) for x, y, z in cut])
    return wgmma.untiled(d, len(a), len(b))


@pytest.mark.parametrize("pair", wgmma.PAIRS, ids=lambda p: f"{p[0]}-{p[1]}")
def test_tiles_are_the_whole(pair, rng):
    a, b = (
        rng.integers(0, fmt.max_code, (rows, 32), dtype=np.uint8)
        for rows, fmt in zip((M, N), pair, strict=True)
    )
    c = rng.standard_normal((M, N)).astype(np.float32)
    cut = wgmma.tiles(a, b, c)
    assert [x.shape for x in cut] == [(9, 64, 32), (9, 8, 32), (9, 64, 8)]
    assert all(x.flags.c_contiguous for x in cut)
    np.testing.assert_array_equal(
        tile_by_tile(a, b, c, *pair), gemm.mma(a, b, c, fmt_a=pair[0], fmt_b=pair[1])
    )


def test_integers_tell_a_kernel_that_works():
    assert wgmma.right_on_integers(tile_by_tile)
    for wrong in (
        # C is not added
        lambda a, b, c, fmt_a, fmt_b: tile_by_tile(a, b, np.zeros_like(c), fmt_a, fmt_b),
        # halves of K the other way round
        lambda a, b, c, fmt_a, fmt_b: tile_by_tile(a, np.roll(b, 16, axis=1), c, fmt_a, fmt_b),
        # formats the other way round
        lambda a, b, c, fmt_a, fmt_b: tile_by_tile(a, b, c, fmt_b, fmt_a),
    ):
        assert not wgmma.right_on_integers(wrong)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    try:
        wgmma.nvcc()
    except ProbeError:
        pytest.skip("needs nvcc")
    return wgmma.build(tmp_path_factory.mktemp("wgmma"))


def test_it_compiles_for_hopper(library):
    assert library.stat().st_size > 0
    if disassembler := shutil.which("cuobjdump"):
        import subprocess

        code = subprocess.run(
            [disassembler, "--dump-sass", library], capture_output=True, text=True, check=True
        ).stdout
        assert code.count("QGMMA.64x8x32.F32") == 4
        for names in ("E4M3.E4M3", "E4M3.E5M2", "E5M2.E4M3", "E5M2.E5M2"):
            assert names in code


def test_a_compiler_that_refuses_is_quoted(tmp_path, monkeypatch):
    compiler = tmp_path / "bin" / "nvcc"
    compiler.parent.mkdir()
    compiler.write_text(
        "#!/bin/sh\necho \"Unsupported gpu architecture 'compute_90a'\" >&2\nexit 1\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert wgmma.nvcc() == str(compiler)
    with pytest.raises(
        ProbeError,
        match=r"nvcc cannot compile wgmma.cu \(Unsupported gpu architecture 'compute_90a'\). Use "
        r"CUDA 12.0",
    ):
        wgmma.build(tmp_path)


def test_without_a_compiler(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(
        ProbeError,
        match=r"nvcc, which was not found. Set CUDA_HOME, or install nvcc with: pip install "
        r"'fp8ref\[cuda\]'",
    ):
        wgmma.nvcc()


@pytest.mark.gpu
def test_integers_on_the_gpu():
    assert wgmma.right_on_integers(wgmma.instruction())
