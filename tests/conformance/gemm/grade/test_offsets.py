"""Grouped GEMMs that take offsets (spec X-1 to X-6): planted faults, and kernels."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from fp8ref.conformance.gemm import grade_offsets, require_offsets
from fp8ref.conformance.gemm.grade.offsets import SIZES
from fp8ref.conformance.gemm.scaled_gemm import ProbeError, RefusedError
from fp8ref.conformance.kit.subject import Subject
from fp8ref.formats import E4M3FN
from fp8ref.jax.experts import operands as jax_operands
from fp8ref.jax.quantize.scaling import Quantized
from fp8ref.recipe import RECIPES, CastSpec, GemmSpec
from fp8ref.torch.experts import gemm as grouped_gemm
from fp8ref.torch.experts import operands as grouped_operands
from fp8ref.torch.quantize import scaling


def spans(offs):
    ends = [int(end) for end in offs]
    return list(enumerate(map(slice, [0, *ends[:-1]], ends)))


def output(a, b, scale_a, scale_b, offs, *, weights=None, tail=0.0):
    """[M, N], by float32; weights: the weight that each group takes."""
    out = np.full((len(a), b.shape[1]), tail, np.float32)
    for e, rows in spans(offs):
        of = e if weights is None else weights[e]
        out[rows] = (
            a[rows].astype(np.float32) @ b[of].astype(np.float32).T * scale_a[rows] * scale_b[of].T
        )
    return out


def grad_weight(
    a, b, scale_a, scale_b, offs, *, rows_of=lambda rows, last: rows, scales=None, empty=0.0
):
    """[E, N, K], by float32."""
    out = np.full((len(offs), a.shape[1], b.shape[1]), empty, np.float32)
    for e, rows in spans(offs):
        if rows.start < rows.stop:
            taken, of = rows_of(rows, int(offs[-1])), e if scales is None else scales[e]
            out[e] = (
                a[taken].astype(np.float32).T
                @ b[taken].astype(np.float32)
                * scale_a[of][:, None]
                * scale_b[of]
            )
    return out


def output_of_whole_tiles(a, b, scale_a, scale_b, offs):
    """The output, in which a group's rows after its last multiple of 16 stay zeros."""
    out = output(a, b, scale_a, scale_b, offs)
    for _, rows in spans(offs):
        out[rows.start + (rows.stop - rows.start) // 16 * 16 : rows.stop] = 0
    return out


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("which", "function"), [("output", output), ("grad_weight", grad_weight)])
def test_right(which, function, dtype):
    grade = require_offsets(
        Subject(name="mine", function=lambda *given: function(*given).astype(dtype)), which=which
    )
    assert (
        grade.message
        == f"mine, {which} of groups of 59, 0, 16, 29 rows, and 16 of no group, and of 2 "
        "further questions, is right"
    )
    assert json.loads(json.dumps(grade.to_dict()))["faults"] == []
    assert grade.exit_code == 0


def first_128_rows(*given):
    out = output(*given)
    for _, rows in spans(given[-1]):
        out[rows.start + 128 : rows.stop] = 0
    return out


def first_256_rows(*given):
    out = output(*given)
    for _, rows in spans(given[-1]):
        out[rows.start + 256 : rows.stop] = 0
    return out


def first_32_groups(*given):
    out = output(*given)
    out[int(given[-1][:32][-1]) :] = 0
    return out


def first_128_columns(*given):
    out = output(*given)
    out[:, 128:] = 0
    return out


def first_128_of_k(a, b, scale_a, scale_b, offs):
    return output(a[:, :128], b[:, :, :128], scale_a, scale_b, offs)


def zeros_of_one_tile(*given):
    """Rows of no group are zeros up to a tile of 64 behind the last group."""
    out = output(*given)
    out[int(given[-1][-1]) + 64 :] = np.nan
    return out


def always_a_rest(*given):
    """The last row is taken for one of no group."""
    out = output(*given)
    out[-1] = 0
    return out


def empty_ends(*given):
    """Only groups between two others are set to zeros where they are empty."""
    out = grad_weight(*given)
    sizes = np.diff(given[-1], prepend=0)
    for e in (0, -1):
        out[e] = out[e] if sizes[e] else 5
    return out


@pytest.mark.parametrize(
    ("function", "which", "said"),
    [
        (first_128_rows, "output", "group 3: drops its rows after a multiple of 128 (X-2)"),
        (first_256_rows, "output", "group 7: drops its rows after a multiple of 32 (X-2)"),
        (first_32_groups, "output", "group 32: is all zeros (X-1)"),
        (first_128_columns, "output", "group 2: has other numbers (X-2)"),
        (first_128_of_k, "output", "group 2: has other numbers (X-2)"),
        (zeros_of_one_tile, "output", "rows of no group are NaN, not zeros (X-5)"),
        (always_a_rest, "output", "group 3: "),
        (
            empty_ends,
            "grad_weight",
            "group 0: has no rows, and its grad_weight is 5, not zeros (X-4)",
        ),
    ],
)
def test_what_few_short_groups_do_not_show(function, which, said):
    grade = grade_offsets(function, which=which)
    assert any(str(fault).startswith(said) for fault in grade.faults), grade.message


def up(size):
    return lambda rows, last: slice(
        rows.start, min(rows.start - (rows.start - rows.stop) // size * size, last)
    )


PLANTED = {
    "the matrix of another group": (
        "output",
        lambda *g: output(*g, weights=[0, 1, 1, 2]),
        [
            "group 2: is multiplied by the weight of group 1 (X-1)",
            "group 3: is multiplied by the weight of group 2 (X-1)",
        ],
    ),
    "memory": (
        "output",
        lambda *g: output(*g, tail=np.nan),
        ["rows of no group are NaN, not zeros (X-5)"],
    ),
    "a minus": (
        "output",
        lambda *g: output(*g, tail=-0.0),
        ["rows of no group are -0, not zeros (X-5)"],
    ),
    "an empty group": (
        "grad_weight",
        lambda *g: grad_weight(*g, empty=7),
        ["group 1: has no rows, and its grad_weight is 7, not zeros (X-4)"],
    ),
    "rows of the next group": (
        "grad_weight",
        lambda *g: grad_weight(*g, rows_of=up(32)),
        [
            "group 0: sums rows of the next group, up to a multiple of 16 (X-2)",  # or of 32
            "group 2: sums rows of the next group, up to a multiple of 32 (X-2)",
        ],
    ),
    "rows that are dropped": (
        "grad_weight",
        lambda *g: grad_weight(
            *g,
            rows_of=lambda rows, last: slice(
                rows.start, rows.start + (rows.stop - rows.start) // 32 * 32
            ),
        ),
        [f"group {e}: drops its rows after a multiple of 32 (X-2)" for e in (0, 2, 3)],
    ),
    "rows after a multiple of 16": (  # torchtitan#2262
        "grad_weight",
        lambda *g: grad_weight(
            *g,
            rows_of=lambda rows, last: slice(
                rows.start, rows.start + (rows.stop - rows.start) // 16 * 16
            ),
        ),
        [f"group {e}: drops its rows after a multiple of 16 (X-2)" for e in (0, 3)],
    ),
    "outputs after a multiple of 16": (
        "output",
        lambda *g: output_of_whole_tiles(*g),
        [f"group {e}: drops its rows after a multiple of 16 (X-2)" for e in (0, 3)],
    ),
    "rows of no group": (
        "grad_weight",
        lambda *g: grad_weight(*g, rows_of=lambda rows, last: slice(rows.start, None)),
        [
            "group 0: holds NaN: rows of no group are read (X-5)",
            "group 2: holds NaN: rows of no group are read (X-5)",
            "group 3: holds NaN: rows of no group are read (X-5)",
        ],
    ),
    "all groups": (
        "grad_weight",
        lambda *g: grad_weight(*g, rows_of=lambda rows, last: slice(0, last)),
        [
            "group 0: sums the rows of all groups (X-2)",
            "group 2: sums the rows of all groups (X-2)",
            "group 3: sums the rows of all groups (X-2)",
        ],
    ),
    "scales that are not jagged": (
        "grad_weight",
        lambda *g: grad_weight(*g, scales=[0, 0, 0, 0]),
        ["group 2: is scaled as group 0 (X-3)", "group 3: is scaled as group 0 (X-3)"],
    ),
    "anything": (
        "output",
        lambda *g: output(*g) + 1,
        [
            "group 0: has other numbers (X-2)",
            "group 2: has other numbers (X-2)",
            "group 3: has other numbers (X-2)",
            "rows of no group are 1, not zeros (X-5)",
        ],
    ),
}


def test_a_kernel_that_refuses_groups_which_are_not_aligned_is_asked_aligned_ones():
    def aligned(a, b, scale_a, scale_b, offs):
        if (offs % 16).any():
            raise ValueError("groups are multiples of 16")
        return output(a, b, scale_a, scale_b, offs)

    grade = require_offsets(Subject(name="mine", function=aligned))
    assert (grade.ok, grade.sizes) == (True, (48, 0, 16, 32))
    assert (
        "not tested: groups of 59, 0, 16, 29 rows, and 16 of no group, for which it raised (mine "
        "raised ValueError" in grade.message
    )
    with pytest.raises(RefusedError, match="multiples of 16"):
        grade_offsets(aligned, sizes=(59, 0, 16, 29))


def test_the_question_that_a_kernel_refuses_is_named():
    def with_rows_of_no_group(a, b, scale_a, scale_b, offs):
        if offs[-1] == len(a):
            raise ValueError("no rows of no group")
        return output(a, b, scale_a, scale_b, offs)

    grade = require_offsets(Subject(name="mine", function=with_rows_of_no_group))
    assert (grade.sizes, grade.others, grade.to_dict()["others"]) == (SIZES, 1, 1)
    assert (
        "not tested: groups of 59, 0, 16, 29 rows, and 0 of no group, for which it raised"
        in grade.message
    )


@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults(name):
    which, function, faults = PLANTED[name]
    grade = grade_offsets(function, which=which)
    assert list(map(str, grade.faults)) == faults
    with pytest.raises(AssertionError, match="is wrong\n"):
        require_offsets(function, which=which)


def torch_values(codes, scale):
    return codes.float().nan_to_num() * scale


def test_torchs_grouped_mm_is_found_to_leave_rows():
    """torch 2.13 on a CPU, on dequantized operands: right, but for rows of no group."""

    def function(a, b, scale_a, scale_b, offs):
        return torch._grouped_mm(
            torch_values(a, scale_a.nan_to_num()), torch_values(b, scale_b).mT, offs=offs
        )

    grade = grade_offsets(function, framework="torch")
    (fault,) = {(fault.group, fault.clause) for fault in grade.faults}
    assert fault == (None, "X-5")


ROWS = CastSpec(fmt=E4M3FN, granularity="rowwise", policy=RECIPES["rowwise"].output.a.policy)
SPEC = GemmSpec(a=ROWS, b=ROWS, accumulate="fast")


def test_sizes_may_be_an_array():
    assert grade_offsets(output, sizes=np.array([5, 0, 1, 17])).ok


@pytest.mark.parametrize("which", ["output", "grad_weight"])
def test_fp8refs_in_torch(which):
    def function(a, b, scale_a, scale_b, offs):
        groups = grouped_operands.groups_of(offs, len(a))
        axis = -2 if which == "grad_weight" else -1
        first = scaling.Quantized(a, scale_a, scale_a, E4M3FN, "rowwise", axis)
        second = scaling.Quantized(b, scale_b, scale_b, E4M3FN, "rowwise", axis)
        return grouped_gemm.multiply(which, first, second, groups, SPEC, torch.bfloat16)

    require_offsets(function, which=which, framework="torch")
    require_offsets(function, which=which, framework="torch", sizes=[5, 0, 1, 17], rest=3)


def test_fp8refs_in_jax():
    @jax.jit
    def function(a, b, scale_a, scale_b, offs):
        groups = jax_operands.groups_of(jnp.diff(offs, prepend=0), len(a))
        first, second = (
            Quantized(codes=q, scale=s, scale_inv=s, fmt=E4M3FN, granularity="rowwise", axis=-1)
            for q, s in ((a, scale_a), (b, scale_b))
        )
        return jax_operands.rows_by_weights(
            first, second, SPEC, groups, jnp.bfloat16, scope="layer/output"
        )

    require_offsets(function, framework="jax")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"which": "grad_input"}, ValueError, "which is one of output, grad_weight"),
        ({"framework": "cupy"}, ValueError, "framework is one of numpy, torch, jax"),
        ({"framework": None}, ValueError, "framework is one of numpy, torch, jax; got None"),
        ({"sizes": [0, 0]}, ValueError, "groups have sizes of 0 or more rows"),
        ({"rest": -1}, ValueError, "groups have sizes of 0 or more rows"),
        ({"function": lambda *_: 1 / 0}, RefusedError, "mine raised ZeroDivisionError"),
        (
            {"function": lambda *_: np.zeros(3, np.float32)},
            ProbeError,
            r"mine gives \[120, 48\]; got shape \[3\]",
        ),
        ({"function": lambda *_: None}, ProbeError, "mine gives one array"),
    ],
)
def test_what_is_refused(options, error, message):
    assert sum(SIZES) + 16 == 120
    function = Subject(name="mine", function=options.get("function", output))
    with pytest.raises(error, match=message):
        grade_offsets(**(options | {"function": function}))


def by_ends(a, b, scale_a, scale_b, offs, *, begins, stops):
    """A grouped GEMM whose groups have these first rows and ends."""
    x, y = (values.astype(np.float32) for values in (a, b))
    out = np.zeros((len(x), y.shape[1]), np.float32)
    for e, (begin, stop) in enumerate(zip(begins, stops, strict=True)):
        rows = slice(min(begin, len(x)), min(stop, len(x)))
        out[rows] = x[rows] @ y[e].T * scale_a[rows] * scale_b[e].T
    return out


@pytest.mark.parametrize(
    ("begins", "stops", "words"),
    [
        (lambda o: np.cumsum(o) - o, np.cumsum, "sizes, of groups one after another"),
        (lambda o: o, lambda o: np.append(o[1:], 120), "the first rows of groups"),
    ],
)
def test_what_offs_are_taken_for_is_named(begins, stops, words):
    def function(*arguments):
        offs = np.asarray(arguments[-1])
        return by_ends(*arguments, begins=begins(offs), stops=stops(offs))

    grade = grade_offsets(function)
    assert [str(fault) for fault in grade.faults] == [f"offs are read as {words} (X-1)"]


def test_rows_that_wrap_around_are_named():
    def wraps(a, b, scale_a, scale_b, offs):
        """The last tile's rows lie beyond the group, and wrap around to its first ones."""
        out = np.zeros((len(a), b.shape[1]), np.float32)
        for e, (begin, stop) in enumerate(zip([0, *offs[:-1]], offs, strict=True)):
            for row in range(begin, stop + (begin - stop) % 32):
                at = begin + (row - begin) % (stop - begin)
                scale = scale_a[min(row, len(a) - 1)]
                sums = a[at].astype(np.float32) @ b[e].astype(np.float32).T
                out[at] = sums * scale * scale_b[e].T
        return out

    words = [str(fault) for fault in grade_offsets(wraps, rest=64).faults]
    said = "group 2: is written again by rows behind its last tile of 32, which wrap (X-2)"
    assert said in words


@pytest.mark.parametrize(
    ("ones", "words"),
    [("a", "scale_inv of a ("), ("b", "scale_inv of b ("), ("ab", "scale_inv of a or b (")],
)
def test_unused_scales_are_named(ones, words):
    def unscaled(a, b, scale_a, scale_b, offs):
        scale_a = np.ones_like(scale_a) if "a" in ones else scale_a
        return output(a, b, scale_a, np.ones_like(scale_b) if "b" in ones else scale_b, offs)

    assert f"group 0: is not scaled by {words}" in grade_offsets(unscaled).message


def test_rows_that_an_earlier_tile_overwrites_are_named():
    def spilled(a, b, scale_a, scale_b, offs):
        y, end = output(a, b, scale_a, scale_b, offs), int(offs[0])
        first = output(a, b, scale_a, scale_b, [len(a)] * len(offs))
        y[end : end + 5] = first[end : end + 5]
        return y

    message = grade_offsets(spilled).message
    assert "group 2: rows 0 to 4 are overwritten by the last tile of group 0" in message
