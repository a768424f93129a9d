import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.training import measured

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.jax.linear import linear
from fp8ref.jax.quantize import scaling, stats
from fp8ref.recipe import RECIPES, CastSpec
from fp8ref.selection import statistics as statistics
from fp8ref.train.data import loader
from fp8ref.train.jax.mesh import Layout
from fp8ref.train.jax.trainer import Trainer

FP8 = [name for name, recipe in RECIPES.items() if recipe.fp8]


def recorded(x, q) -> dict:
    found = stats.parts(np.asarray(jax.jit(stats.measure)(x, q)))[None]
    operand = statistics.Operand("layer", "output", "input", CastSpec(fmt=q.fmt))
    return statistics.merged([operand], [found])["layer/output/input"]


def check(x, q) -> dict:
    one = recorded(x, q)
    codes = np.asarray(jax.lax.bitcast_convert_type(q.codes, jnp.uint8))
    measured.check(
        one,
        np.asarray(x, np.float32),
        codes,
        np.asarray(q.scale),
        CastSpec(fmt=q.fmt, granularity=q.granularity),
        q.axis,
    )
    return one


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    "granularity", ["tensorwise", "rowwise", "blockwise_1x128", "blockwise_128x128", "mx_1x32"]
)
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
def test_measurements_are_the_simulators(rng, fmt, granularity):
    x = jnp.asarray(
        rng.standard_normal((96, 256)) * np.exp(rng.normal(0, 6, (96, 256))), jnp.bfloat16
    )
    policy = "mx_rceil" if granularity == "mx_1x32" else "torchao"
    one = check(x, scaling.quantize(x, fmt, granularity=granularity, policy=policy))
    assert one["underflow_rate"] > 0
    assert one["saturation_rate"] > 0


@pytest.mark.parametrize("scale", [2.0**-10, 1.0, 2.0**6, 2.0**100])
def test_of_a_scale_that_clips_or_loses(rng, scale):
    x = jnp.asarray(rng.standard_normal((64, 48)) * 20, jnp.bfloat16)
    one = check(x, scaling.quantize_with(x, jnp.float32(scale), E4M3FN))
    assert (one["overflow_rate"] > 0) == (scale >= 2.0**6)


def test_counts_pass_two_to_the_sixteenth():
    """Each is carried as two float32 numbers of 16 bits: 76,800 overflow of 102,400."""
    x = jnp.concatenate([jnp.full((300, 256), 1000.0), jnp.ones((100, 256))])
    one = check(x, scaling.quantize_with(x, jnp.float32(1), E4M3FN))
    assert one["overflow_rate"] == 0.75


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e20, 1e30])
def test_sums_of_squares_stay_in_range(rng, size):
    x = jnp.asarray(rng.standard_normal((64, 48)) * size, jnp.bfloat16)
    assert (
        20
        < check(x, scaling.quantize(x, E4M3FN, policy="te_mxfp8", granularity="mx_1x32", axis=0))[
            "sqnr"
        ]
        < 40
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_counted_apart(rng, bad):
    x = rng.standard_normal((64, 48)).astype(np.float32)
    x[3, 4] = x[5, 6] = bad
    one = check(jnp.asarray(x), scaling.quantize_with(jnp.asarray(x), jnp.float32(16), E4M3FN))
    assert (one["non_finite"], one["amax"]) == (2, None)


def test_zeros_have_no_sqnr():
    x = jnp.zeros((32, 32), jnp.bfloat16)
    assert check(x, scaling.quantize(x, E4M3FN))["sqnr"] is None


def test_more_than_int32_counts_is_refused():
    x = jax.ShapeDtypeStruct((2**16, 2**15), jnp.bfloat16)
    with pytest.raises(ValueError, match="below 2\\^31 elements"):
        jax.eval_shape(lambda x: stats.measure(x, scaling.quantize(x, E4M3FN)), x)


SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("delayed", "rowwise_with_gw_hp", "mxfp8", "blockwise", "rowwise")
]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", *SLOW])
def test_a_trainers_statistics_are_of_the_operands_that_its_gemms_had(small, recipe):
    """Observed within the very program that measures."""
    sizes = (
        {"hidden_size": 128, "intermediate_size": 128}
        if recipe == "blockwise"
        else {"intermediate_size": 64}
    )
    # 128 tokens: whole blocks along M
    length = {"sequence_length": 32} if recipe == "blockwise" else {}
    wide = small.replace(numerics={"recipe": recipe}, model=sizes, data=length)
    trainer, tokens = Trainer(wide), loader.open_batches(wide).step(0)
    trainer.step(tokens)
    seen = measured.Seen(trainer.decisions)
    with linear.observing(seen.add):
        found = trainer.statistics(tokens)
    jax.effects_barrier()
    seen.check(found)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_measuring_changes_no_bit_of_training(small, recipe):
    config, runs = small.replace(numerics={"recipe": recipe}), []
    batches = loader.open_batches(config)
    for measures in (False, True):
        trainer = Trainer(config)
        metrics = [
            trainer.measured_step(batches.step(i))[0] if measures else trainer.step(batches.step(i))
            for i in range(3)
        ]
        runs.append((metrics, trainer.weights(), jax.tree.map(np.asarray, trainer._state.fp8)))
    assert runs[0][0] == runs[1][0]
    jax.tree.map(np.testing.assert_array_equal, runs[0][1:], runs[1][1:])


MESHES = [
    ("tensorwise", {"data": 2, "fsdp": 2}),
    pytest.param("delayed", {"fsdp": 2, "tensor": 2, "sequence": True}, marks=pytest.mark.slow),
    pytest.param("rowwise", {"data": 2, "tensor": 2}, marks=pytest.mark.slow),
    pytest.param(
        "tensorwise", {"data": 2, "fsdp": 2, "amax_scope": "local"}, marks=pytest.mark.slow
    ),
    pytest.param("tensorwise", {"fsdp": 2, "tensor": 2, "through": "jit"}, marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "mesh"), MESHES)
def test_on_a_mesh_every_part_is_counted_once(small, recipe, mesh):
    """Operands of a mesh differ from one device's by what GEMMs round otherwise (P-8), but not the
    first weights and inputs of the first layer.
    """
    config = small.replace(
        numerics={"recipe": recipe}, model={"num_key_value_heads": 2, "intermediate_size": 64}
    )
    tokens = loader.open_batches(config).step(0)
    one, many = (Trainer(config.replace(parallel=keys)).statistics(tokens) for keys in ({}, mesh))
    assert list(one) == list(many)
    for name in one:
        exact = name.endswith("weight") or ("q_proj" in name and name.endswith("output/input"))
        if exact and mesh.get("amax_scope") != "local":
            # 2 * 64 u in dB, and sums in another order
            assert many[name].pop("sqnr") == pytest.approx(one[name].pop("sqnr"), abs=1e-3)
            assert many[name] == one[name], name
        else:
            # as many elements: a copy counted twice or not at all would leave rates alone, and
            # change no amax; but a part left out does both
            assert many[name]["amax"] == pytest.approx(one[name]["amax"], rel=0.1)
            assert many[name]["sqnr"] == pytest.approx(one[name]["sqnr"], abs=1)


@pytest.mark.parametrize(
    ("mesh", "linear", "parts"),
    [
        ({"data": 2, "fsdp": 2}, "q_proj", {"input": 4, "weight": 2, "grad_output": 4}),
        ({"data": 2, "tensor": 2}, "q_proj", {"input": 2, "weight": 2, "grad_output": 4}),
        ({"fsdp": 2, "tensor": 2}, "o_proj", {"input": 4, "weight": 4, "grad_output": 2}),
        (
            {"fsdp": 2, "tensor": 2, "sequence": True},
            "o_proj",
            {"input": 4, "weight": 4, "grad_output": 4},
        ),
        (
            {"fsdp": 2, "tensor": 2, "through": "jit"},
            "o_proj",
            {"input": 1, "weight": 1, "grad_output": 1},
        ),
    ],
)
def test_of_copies_one_is_counted(small, mesh, linear, parts):
    layout = Layout(small.replace(parallel=mesh, model={"num_key_value_heads": 2}))
    devices = np.arange(4 if layout.mapped else 1)
    for role, number in parts.items():
        assert len(layout.own_parts(devices, f"model.layers.0.self_attn.{linear}", role)) == number


def test_without_fp8_there_is_nothing(small):
    trainer = Trainer(small.replace(numerics={"recipe": "bf16"}))
    assert trainer.statistics(loader.open_batches(small).step(0)) == {}


# By the numbers of the formats: max is odd in e5m2 (0x7B) and even in e4m3fn (0x7E).
@pytest.mark.parametrize(
    ("fmt", "tie", "above_alone"),
    [(E5M2, 61440.0, False), (E4M3FN, 464.0, True)],
    ids=["odd", "even"],
)
def test_the_tie_above_max_overflows_where_max_is_odd(fmt, tie, above_alone):  # C-4, Q-8
    assert stats._overflow_bound(fmt) == (tie, above_alone)


def test_sums_of_squares_are_in_the_operands_own_unit():
    """A ratio of both would hide it: parts of one operand on several devices have units of their
    own.
    """
    x = jnp.full((2, 16), 1024.0, jnp.float32)
    found = stats.parts(np.asarray(stats.measure(x, scaling.quantize(x, E4M3FN))))
    numbers = dict(zip(statistics.FIELDS, found.tolist(), strict=True))
    assert (numbers["count"], numbers["signal"], numbers["noise"]) == (32, 32 * 2.0**20, 0)
