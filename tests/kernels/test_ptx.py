"""What the kernels compile to for Hopper and Blackwell, on a machine without a GPU (spec M-11)."""

import dataclasses

import pytest

pytest.importorskip("triton")

import triton
import triton.language as tl
from helpers.kernels import ptx_rules
from helpers.kernels.compiled import compiled
from helpers.kernels.forms import EVERY, FORMS, SHAPE, forms, launched_kernels

from fp8ref.kernels import casts
from fp8ref.kernels.casts import load_tile, store_amax, store_tile, store_transposed


@pytest.mark.parametrize("name", FORMS)
def test_a_kernel_computes_on_hopper_what_the_interpreter_shows(name):
    form = forms()[name]
    assert ptx_rules.faults(form, compiled(form.launch, form.dtypes, 90)) == []


def test_every_kernel_is_compiled():
    launched = launched_kernels()
    assert len(launched) > 20
    assert {form.launch.kernel.fn for form in forms().values()} >= launched


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "e5m2", "transposed", "capability"), EVERY)
def test_every_launch_of_a_kernel_does(name, dtype, e5m2, transposed, capability):
    form = forms(dtype, e5m2=e5m2, transposed=transposed)[name]
    assert ptx_rules.faults(form, compiled(form.launch, form.dtypes, capability)) == []


@triton.jit
def _planted(
    x_ptr,
    scale_ptr,
    q_ptr,
    t_ptr,
    amax_ptr,
    stride_m,
    stride_n,
    M,
    N,
    BM: tl.constexpr,
    BN: tl.constexpr,
    EVEN: tl.constexpr,
    FAULT: tl.constexpr,
):
    """A cast to e5m2, sound or with a fault."""
    x, scale = load_tile(x_ptr, stride_m, stride_n, M, N, BM, BN, EVEN), tl.load(scale_ptr)
    y = x * scale
    if FAULT == "div.full":
        y = x / scale
    if FAULT == "sqrt.approx":
        y = tl.sqrt(x)
    if FAULT == "fma":
        y = x * scale + x
    if FAULT == "max.NaN":
        y = tl.maximum(x, scale, propagate_nan=tl.PropagateNan.ALL)
    if FAULT == "mul.ftz":
        y = tl.inline_asm_elementwise(
            "mul.ftz.f32 $0, $1, $2;", "=f,f,f", [x, scale], tl.float32, is_pure=True, pack=1
        )
    if FAULT == "truncation":
        codes = y.to(tl.float8e5, fp_downcast_rounding="rtz").to(tl.uint8, bitcast=True)
    else:
        codes = y.to(tl.float8e5).to(tl.uint8, bitcast=True)
    store_tile(codes, q_ptr, M, N, BM, BN, EVEN)
    if FAULT == "one order by bytes":
        store_transposed(codes, t_ptr, M * 2 + 1, N, BM, BN, EVEN)
    else:
        store_transposed(codes, t_ptr, M, N, BM, BN, EVEN)
    store_amax(x, amax_ptr)


def planted(fault: str, **options) -> list[str]:
    form = forms(e5m2=True)["cast"]
    numbers = casts.matrix(SHAPE, (SHAPE[1], 1)) | {"FAULT": fault}
    launch = dataclasses.replace(form.launch, kernel=_planted, numbers=numbers)
    form = dataclasses.replace(form, launch=launch)
    return ptx_rules.faults(form, compiled(launch, form.dtypes, 90, **options))


def test_a_sound_cast_has_no_fault():
    assert planted("none") == []


@pytest.mark.parametrize(
    ("fault", "rule"),
    [
        ("div.full", "div.full.f32: rounds otherwise"),
        ("sqrt.approx", "sqrt.approx"),
        ("max.NaN", "a maximum of floats"),
        ("mul.ftz", "mul.ftz.f32: flushes subnormals"),
        ("truncation", "numbers are cast by cvt"),
        ("one order by bytes", "written as codes 16 at a time"),
    ],
)
def test_a_planted_fault_is_seen(fault, rule):
    assert any(rule in found for found in planted(fault))


def test_a_contracted_sum_is_seen_and_a_launch_contracts_none():
    assert planted("fma") == []
    assert [fault.split(":")[0] for fault in planted("fma", contracts=True)] == ["fma.rn.f32"]


def test_spills_are_seen():
    form = forms()["lines"]
    few = dataclasses.replace(form.launch, warps=1)
    form = dataclasses.replace(form, launch=few)
    assert any("spill" in fault for fault in ptx_rules.faults(form, compiled(few, form.dtypes, 90)))


def test_narrow_reads_are_seen():
    """Rows of an odd stride begin at any byte."""
    shape = (4096, 8191)
    form = forms()["cast"]
    launch = casts.cast(shape, (8191, 1), e5m2=False)
    found = ptx_rules.faults(
        dataclasses.replace(form, launch=launch), compiled(launch, form.dtypes, 90)
    )
    assert any("are read 16 at a time" in fault for fault in found)
