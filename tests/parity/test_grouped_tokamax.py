"""tokamax's and qwix's grouped GEMMs of quantized arrays, on a CPU, asked by the conformance kit
(spec X-4, X-5, X-8).

Neither is among fp8ref's extras: these tests run where both are installed
(benchmarks/compiled/aot_ragged.py says how). tokamax's kernel for GPUs runs in
Pallas's interpreter, which fills what nothing writes with NaN.
"""

import functools

import numpy as np
import pytest

from fp8ref.conformance.gemm import grade_offsets

jax = pytest.importorskip("jax")
qwix = pytest.importorskip("qwix")
tokamax = pytest.importorskip("tokamax")

from absl import flags  # noqa: E402
from jax import numpy as jnp  # noqa: E402
from jax.experimental import pallas  # noqa: E402
from tokamax import config  # noqa: E402
from tokamax._src.ops.ragged_dot import base, pallas_triton  # noqa: E402
from tokamax._src.pallas import block  # noqa: E402

flags.FLAGS(["pytest"])  # else tokamax parses the arguments of pytest when it first reads a flag
pytestmark = pytest.mark.filterwarnings(
    "ignore:jax.experimental.pallas.dot was moved:DeprecationWarning"
)
F8 = jnp.float8_e4m3fn
SMALL = pallas_triton.Config(block_m=32, block_n=16, block_k=16, num_warps=4, num_stages=2)


@pytest.fixture
def triton(monkeypatch):
    """tokamax's Triton kernel, in the interpreter."""
    monkeypatch.setattr(
        block.pl, "pallas_call", functools.partial(pallas.pallas_call, interpret=True)
    )

    def call(*arguments, **options):
        with config.cross_compile(True):  # else it is refused without a GPU
            return pallas_triton.PallasTritonRaggedDot(config=SMALL)(*arguments, **options)

    return call


def sizes(offs):
    return jnp.diff(offs, prepend=0)


def output_by(function):
    """What ``grade_offsets`` calls: a scale for each row, and for each column of each group."""

    def output(a, b, scale_a, scale_b, offs):
        x, w = qwix.QArray(a, scale_a, None, F8), qwix.QArray(b.mT, scale_b.mT, None, F8)
        return function(x, w, group_sizes=sizes(offs), preferred_element_type=jnp.float32)

    return output


def grad_weight_by(function):
    """Of dequantized operands: a QArray of rows has no scale for each column of each group."""

    def grad_weight(a, b, scale_a, scale_b, offs):
        groups = jnp.minimum(
            jnp.searchsorted(offs, jnp.arange(len(a)), side="right"), len(offs) - 1
        )
        a, b = (v.astype(jnp.float32) * scale[groups] for v, scale in ((a, scale_a), (b, scale_b)))
        how = {
            "ragged_dot_dimension_numbers": base.RAGGED_CONTRACTING_DOT_DIM_NUMS,
            "preferred_element_type": jnp.float32,
        }
        return function(a, b, group_sizes=sizes(offs), **how)

    return grad_weight


def test_tokamaxs_form_for_any_device_is_right():
    """It dequantizes, and calls lax.ragged_dot."""
    grade = grade_offsets(
        output_by(functools.partial(tokamax.ragged_dot, implementation="xla")), framework="jax"
    )
    assert grade.ok, grade.message
    grade = grade_offsets(grad_weight_by(base.RaggedDot()), which="grad_weight", framework="jax")
    assert grade.ok, grade.message


def test_tokamaxs_kernel_leaves_rows_of_no_group_unwritten(triton):
    grade = grade_offsets(output_by(triton), framework="jax")
    assert [str(fault) for fault in grade.faults] == ["rows of no group are NaN, not zeros (X-5)"]


def test_tokamaxs_kernel_sums_rows_of_another_group_for_an_empty_one(triton):
    """Its last block of rows is read unconditionally: the block_k rows before an empty group, which
    are another's.
    """
    grade = grade_offsets(grad_weight_by(triton), which="grad_weight", framework="jax")
    assert [(fault.group, fault.clause) for fault in grade.faults] == [(1, "X-4")]


def test_qwixs_ragged_dot_leaves_a_nan_of_no_group(triton):
    """It multiplies codes, and then by scales: zero times the NaN of a scale of no group is NaN."""
    grade = grade_offsets(output_by(qwix.ragged_dot), framework="jax")
    assert [str(fault) for fault in grade.faults] == ["rows of no group are NaN, not zeros (X-5)"]


@pytest.mark.parametrize(
    ("columns", "multiplied"),
    [(1, ["float8_e4m3fn", "float8_e4m3fn"]), (48, ["float32", "float32"])],
)
#
def test_codes_reach_tokamaxs_product_under_one_scale_a_weight_alone(triton, columns, multiplied):
    """A scale for each column of a weight: both operands are dequantized in the kernel.

    Either way the sums of integers are exact.
    """
    rng = np.random.default_rng(0)
    x, w = (
        rng.integers(-7, 8, (64, 32)).astype(np.float32),
        rng.integers(-7, 8, (2, 32, 48)).astype(np.float32),
    )
    given = (
        jnp.asarray(x, F8),
        jnp.full((64, 1), 0.5),
        jnp.asarray(w, F8),
        jnp.full((2, 1, columns), 4.0),
        jnp.array([40, 24]),
    )

    def product(a, scale_a, b, scale_b, sizes):
        return triton(
            qwix.QArray(a, scale_a, None, F8),
            qwix.QArray(b, scale_b, None, F8),
            group_sizes=sizes,
            preferred_element_type=jnp.float32,
        )

    expected = np.concatenate([x[:40] @ w[0], x[40:] @ w[1]]) * 2
    np.testing.assert_array_equal(product(*given), expected)
    dots = [
        eqn
        for eqn in equations(jax.make_jaxpr(product)(*given).jaxpr)
        if eqn.primitive.name == "dot_general"
    ]
    assert [str(v.aval.dtype) for eqn in dots for v in eqn.invars] == multiplied


def equations(jaxpr):
    """All equations, of jaxprs in parameters too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for one in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(one, "jaxpr", one)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)
