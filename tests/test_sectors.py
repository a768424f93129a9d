"""Sectors that benchmarks/compiled/sectors.py counts of kernels, next to counts by hand."""

import importlib.util
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location(
    "sectors", Path(__file__).parents[1] / "benchmarks" / "compiled" / "sectors.py"
)
sectors = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sectors)

ROWS, COLUMNS = 4096, 2048
HEAD = (
    "triton_meta={'signature': {'in_ptr0': '*bf16', 'in_ptr1': '*fp32', 'in_ptr2': '*bf16', "
    "'out_ptr0': '*fp8e4nv', 'xnumel': 'i32'}}\n"
)
REDUCTION = """\
def triton_per_fused_0(in_ptr0, in_ptr1, out_ptr0, xnumel, r0_numel, XBLOCK : tl.constexpr):
    xnumel = 4096
    r0_numel = 2048
    x0 = xindex
    r0_1 = r0_index
    tmp0 = tl.load(in_ptr0 + (r0_1 + 2048*x0), None).to(tl.float32)
    tmp1 = tl.load(in_ptr1 + (0))
    tmp3 = tl.load(in_ptr2 + (r0_1 + 2048*x0), None).to(tl.float32)
    tl.store(out_ptr0 + (STORED), tmp2, None)
"""
POINTWISE = """\
def triton_poi_fused_0(in_ptr0, in_ptr1, out_ptr0, ynumel, xnumel, YBLOCK : tl.constexpr, XBLOCK : tl.constexpr):
    ynumel = 4096
    xnumel = 2048
    x1 = xindex
    y0 = yindex
    tmp0 = tl.load(in_ptr0 + (x1 + 2048*y0), None).to(tl.float32)
    tl.store(out_ptr0 + (y0 + 4096*x1), tmp2, None)
"""
SIZE = ROWS * COLUMNS


def counted(body):
    return [
        (access.pointer, access.bytes, access.sectors, access.scattered)
        for access in sectors.accesses(HEAD + body)
    ]


def test_a_reduction_writes_a_sector_for_each_transposed_code():
    loads = [
        ("in_ptr0", 2 * SIZE, 2 * SIZE // 32, False),
        ("in_ptr1", 4, 1, False),
        ("in_ptr2", 2 * SIZE, 2 * SIZE // 32, False),
    ]
    assert counted(REDUCTION.replace("STORED", "r0_1 + 2048*x0")) == [
        *loads,
        ("out_ptr0", SIZE, SIZE // 32, False),
    ]
    assert counted(REDUCTION.replace("STORED", "x0 + 4096*r0_1")) == [
        *loads,
        ("out_ptr0", SIZE, SIZE, True),
    ]


def test_a_kernel_tiled_by_both_axes_transposes_in_whole_sectors():
    assert counted(POINTWISE) == [
        ("in_ptr0", 2 * SIZE, 2 * SIZE // 32, False),
        ("out_ptr0", SIZE, SIZE // 32, False),
    ]


def test_views_are_followed_through_their_names():
    """Heads of 128 that lie apart still fill sectors; every eighth element does not."""
    body = (
        "def triton_poi_fused_0(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):\n    xnumel "
        "= 8388608\n    x0 = (xindex % 128)\n    x1 = xindex // 128\n"
    )
    whole = counted(body + "    tmp0 = tl.load(in_ptr0 + (x0 + 4096*x1), None)\n")
    assert whole == [("in_ptr0", 2 * SIZE, 2 * SIZE // 32, False)]
    eighth = counted(
        body + "    tl.store(out_ptr0 + (tl.broadcast_to(16*x0 + 2048*x1, [XBLOCK])), tmp0, None)\n"
    )
    assert eighth == [("out_ptr0", SIZE, SIZE // 2, True)]


def test_partial_sums_of_each_program_are_a_row_of_a_workspace():
    """Of 4,096 rows by programs of 128 each: 32 rows of 2,048 float32."""
    partial = REDUCTION.partition("    tl.store")[0] + (
        "    tl.store(ws_ptr + (tl.program_id(0) + 1 * tl.num_programs(0)) * r0_numel + "
        "r0_index, accum1, r0_mask)\n"
    )
    head = HEAD.replace("'in_ptr0'", "'ws_ptr': '*fp32', 'in_ptr0'")
    found = sectors.accesses(f"{head}inductor_meta={{'RSPLIT_SIZE': 128}}\n{partial}")
    assert found[-1] == sectors.Access(True, "ws_ptr", 32 * 2048 * 4, 32 * 256)
    assert [access.sectors for access in found[:-1]] == [2 * SIZE // 32, 1, 2 * SIZE // 32]
    with pytest.raises(ValueError, match="got no RSPLIT_SIZE"):
        sectors.accesses(head + partial)


def test_an_index_that_is_loaded_is_refused():
    with pytest.raises(ValueError, match=r"one of the kernel's axes; got tmp2"):
        counted(REDUCTION.replace("STORED", "tmp2"))
