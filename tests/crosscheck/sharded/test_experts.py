import numpy as np
import pytest

from fp8ref.conformance.kit.compare import Report
from fp8ref.crosscheck.operands import OperandCast
from fp8ref.crosscheck.sharded import experts as sharded_experts
from fp8ref.recipe import OPERANDS, RECIPES, REDUCED_AXES
from fp8ref.selection.grouped import GROUPED_RECIPES
from fp8ref.sim.distributed import sharding
from fp8ref.sim.distributed.mesh import Layout, Mesh
from fp8ref.sim.gemm import gemm
from fp8ref.sim.quantize import scaling
from fp8ref.train.config.sections import ParallelConfig

LAYER, K, N, EXPERTS = "experts", 32, 16, 4
# of a device along expert, then of one along data: those of its two experts
ROWS = {0: ((3, 0), (2, 4)), 1: ((0, 5), (0, 0))}
LAST = {"parallel": ParallelConfig(data=2, expert=2), "states": {}}


@pytest.fixture
def normal(rng):
    def of(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    return of


def device(recipe, x, g, w, whole):
    """What a device reports of experts whose rows x and g are parts of whole, by the simulator's
    own quantizer.
    """
    found = {}
    for e in range(len(w)):
        for which, spec in recipe.gemms.items():
            operands, used = [], []
            for role, how, axis in zip(
                OPERANDS[which], (spec.a, spec.b), REDUCED_AXES[which], strict=True
            ):
                hp = {"input": x[e], "grad_output": g[e], "weight": w[e]}[role]
                if not len(x[e]):
                    break
                options = {"granularity": how.granularity, "policy": how.policy, "axis": axis}
                of = hp if role == "weight" else whole[role][e]
                scales = scaling.scales_from_amax(
                    scaling.amax(of, how.granularity, axis=axis), how.fmt, how.policy
                )
                own = how.granularity == "rowwise" and axis == 1  # a scale for each row
                q = (
                    scaling.quantize(hp, how.fmt, **options)
                    if own or role == "weight"
                    else scaling.quantize_with(hp, scales, how.fmt, **options)
                )
                operands.append((hp, q.codes, q.scale))
                used.append(
                    q
                    if axis == 1
                    else q._replace(
                        codes=q.codes.T, scale=q.scale.T, scale_inv=q.scale_inv.T, axis=1
                    )
                )
            if used:
                found[LAYER, which, e] = (*operands, gemm.matmul(*used, epilogue=spec.epilogue))
    return found


def reported(recipe, normal):
    """(weights, what four devices of data x expert = 2 x 2 report)."""
    w = normal(EXPERTS, N, K)
    rows = {(data, e): ROWS[e // 2][data][e % 2] for data in (0, 1) for e in range(EXPERTS)}
    x, g = ({at: normal(n, c) for at, n in rows.items()} for c in (K, N))
    devices = []
    for data in (0, 1):
        for apart in (0, 1):
            own = range(2 * apart, 2 * apart + 2)
            whole = {
                role: [
                    np.concatenate([of[0, e], of[1, e]]) if rows[0, e] + rows[1, e] else None
                    for e in own
                ]
                for role, of in (("input", x), ("grad_output", g))
            }
            devices.append(
                device(
                    recipe,
                    [x[data, e] for e in own],
                    [g[data, e] for e in own],
                    w[own.start : own.stop],
                    whole,
                )
            )
    return w, devices


@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_devices_that_quantize_as_one_pass_and_no_other_does(name, normal):
    recipe = GROUPED_RECIPES[name].recipe
    w, devices = reported(recipe, normal)
    report = Report()
    sharded_experts.check(report, "jax 2x1x2", {LAYER: recipe}, devices, {LAYER: w}, **LAST)
    assert report.ok, [check.detail for check in report.failures]
    assert report.checks[f"{LAYER}/grad_output/codes/jax 2x1x2"].equal > 0
    report = Report()
    local = {"parallel": ParallelConfig(data=2, expert=2, amax_scope="local"), "states": {}}
    sharded_experts.check(report, "jax 2x1x2", {LAYER: recipe}, devices, {LAYER: w}, **local)
    assert f"{LAYER}/input/scale/jax 2x1x2" in {check.name for check in report.failures}


def test_faults_are_named(normal):
    recipe = GROUPED_RECIPES["tensorwise"].recipe
    w, devices = reported(recipe, normal)

    def failed(devices, **more):
        report = Report()
        sharded_experts.check(report, "torch", {LAYER: recipe}, devices, {LAYER: w}, **LAST | more)
        return {
            check.name.removeprefix(f"{LAYER}/").removesuffix("/torch") for check in report.failures
        }

    (a, b, out), key = devices[2][LAYER, "output", 0], (LAYER, "output", 0)
    codes = a[1].copy()
    codes[0, 0] ^= 1
    assert failed(
        [*devices[:2], devices[2] | {key: ((a[0], codes, a[2]), b, out)}, devices[3]]
    ) == {"input/codes"}
    assert failed([*devices[:2], devices[2] | {key: (a, b, out + 1000)}, devices[3]]) == {
        "output/value"
    }
    assert failed([*devices[:2], devices[2] | {key: (a, (b[0] + 1, *b[1:]), out)}, devices[3]]) == {
        "weights/value"
    }
    without = [
        {key: one for key, one in mine.items() if key[1] != "grad_input"} for mine in devices
    ]
    assert failed(without) == {"grad_input/value"}
    # grad_weight that devices have summed: each expert's own, where only one device has rows; and
    # of two
    sums = np.zeros((EXPERTS, N, K))
    for i, mine in enumerate(devices):
        for (_, which, e), (*_, result) in mine.items():
            if which == "grad_weight":
                sums[2 * (i % 2) + e] += result
    summed = [
        {
            key: (one[0], one[1], None) if key[1] == "grad_weight" else one
            for key, one in mine.items()
        }
        for mine in devices
    ]
    assert failed(summed, sums={LAYER: sums}) == set()
    assert failed(summed, sums={LAYER: 2 * sums}) == {"grad_weight/value"}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise"])
def test_parts_are_those_of_the_simulators_sharded_quantization(name, axis, rng):  # X-3, P-4
    how = RECIPES[name].output.a
    sizes = (128, 0, 256) if name == "blockwise" else (5, 0, 12)
    x = rng.standard_normal((sum(sizes), 128)).astype(np.float32)
    shards = np.split(x, np.cumsum(sizes)[:-1])
    mesh = Mesh(axes={"data": 3})
    layout = Layout(mesh=mesh, shape=x.shape, splits={0: ("data",)}, sizes={0: sizes})
    options = {
        "granularity": how.granularity,
        "policy": how.policy,
        "axis": axis,
        "scope": "global",
    }
    expected = sharding.quantize(
        dict(zip(mesh.devices, shards, strict=True)), layout, how.fmt, **options
    )
    rows = [shard for shard in shards if len(shard)]  # what has rows reports
    found = sharded_experts.quantized(rows, OperandCast("input", how, axis), scope="global")
    for q, device in zip(
        found, [d for d, n in zip(mesh.devices, sizes, strict=True) if n], strict=True
    ):
        np.testing.assert_array_equal(q.codes, expected[device].codes)
        np.testing.assert_array_equal(q.scale, expected[device].scale)
