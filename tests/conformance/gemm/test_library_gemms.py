"""The libraries' GEMMs on a CPU, and functions by name."""

import numpy as np
import pytest

from fp8ref.conformance.gemm import library_gemms
from fp8ref.conformance.gemm.scaled_gemm import operand
from fp8ref.formats import E4M3FN
from fp8ref.sim.gemm import gemm


@pytest.mark.parametrize("name", library_gemms.KNOWN)
def test_the_libraries_on_a_cpu(name):
    """Scales and operands arrive where they belong: sums of integers are exact in any order."""
    made = library_gemms.named(name)
    rng = np.random.default_rng(0)
    a, b = (
        operand(
            rng.integers(0x30, 0x48, (rows, 64), dtype=np.uint8),
            E4M3FN,
            made.granularity,
            2.0 ** rng.integers(-3, 4, (rows, 1) if made.granularity == "rowwise" else ()),
        )
        for rows in (32, 16)
    )
    found, dtype = made.multiply(a, b)
    np.testing.assert_array_equal(found, gemm.matmul(a, b, out_dtype=dtype))
    assert made.about["device"]


def test_a_function_by_its_name(tmp_path, monkeypatch):
    (tmp_path / "mykernel.py").write_text(
        "from fp8ref.sim.gemm import gemm\n\n\ndef scaled_mm(a, b, bias=None):\n    return "
        "gemm.matmul(a, b)\n\n\nnumber = 3\n"
    )
    (tmp_path / "broken_kernel.py").write_text("raise RuntimeError('no GPU')\n")
    monkeypatch.chdir(tmp_path)
    made = library_gemms.named("mykernel:scaled_mm", granularity="rowwise")
    assert (made.bias, made.granularity) == (True, "rowwise")
    for name, said in (
        ("mykernel:number", "mykernel:number is a int; a function is needed"),
        ("mykernel:missing", "cannot be imported from .*AttributeError"),
        ("broken_kernel:f", "RuntimeError: no GPU"),
        ("mykernel:", "named as module:function, such as"),
        (":f", "named as module:function"),
        (
            "turing",
            "one of torch-scaled-mm, torch-rowwise, jax-dot, wgmma, or module:function; got "
            "'turing'",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            library_gemms.named(name)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("os:getcwd", {"fast": True}, "os:getcwd has its own"),
        ("os:getcwd", {"out_dtype": "float32"}, "Leave them out"),
        (
            "os:getcwd",
            {"granularity": "blockwise_1x128"},
            "tensorwise, rowwise; got 'blockwise_1x128'",
        ),
        ("jax-dot", {"granularity": "rowwise"}, "jax-dot has its own"),
        ("torch-rowwise", {"out_dtype": "int8"}, "one of float32, bfloat16, float16; got 'int8'"),
    ],
)
def test_options_that_have_no_use(name, options, said):
    with pytest.raises(ValueError, match=said):
        library_gemms.named(name, **options)
