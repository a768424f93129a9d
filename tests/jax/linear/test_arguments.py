import dataclasses

import jax.numpy as jnp
import pytest

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.jax import delayed
from fp8ref.jax.distributed.sharding import Placement
from fp8ref.jax.linear import arguments as linear_arguments
from fp8ref.jax.linear import linear
from fp8ref.jax.quantize import scales, scaling
from fp8ref.policy import POLICIES
from fp8ref.recipe import CastSpec, GemmSpec, Recipe


@pytest.mark.parametrize(
    ("x", "w", "options", "message"),
    [
        ((4, 64), (32, 48), {}, "q_proj.*with one K"),
        ((4, 64), (32, 64), {"state": 1}, "q_proj.*has no state"),
        ((4, 64), (32, 64), {"seen": 1}, "q_proj.*has no state"),
    ],
)
def test_errors_name_the_layer(x, w, options, message):
    with pytest.raises(ValueError, match=message):
        linear.apply(
            jnp.ones(x, jnp.bfloat16),
            jnp.ones(w, jnp.bfloat16),
            recipe="tensorwise",
            name="q_proj",
            **options,
        )


def test_states_of_a_stack_are_refused_by_name():  # H-2
    x, states = jnp.ones((16, 32), jnp.bfloat16), delayed.init("delayed", (3,))
    with pytest.raises(
        ValueError, match=r"fc: one linear has one state; got a stack of \[3\]\. Scan or vmap over"
    ):
        linear.apply(
            x, x, recipe="delayed", state=states, seen=delayed.unseen("delayed", (3,)), name="fc"
        )


def test_a_recipe_that_jax_cannot_run_is_refused_by_name():
    block, row = (
        CastSpec(fmt=E4M3FN, granularity=granularity)
        for granularity in ("blockwise_1x128", "rowwise")
    )
    for spec, message in (
        (
            GemmSpec(a=block, b=row, accumulate="slow"),
            "grad_weight of recipe 'mine': .*got blockwise_1x128 and rowwise",
        ),
        (
            GemmSpec(
                a=row, b=CastSpec(fmt=E4M3FN, policy=POLICIES["te_current"]), accumulate="slow"
            ),
            "'te_current'.*fp8ref.sim",
        ),
    ):
        with pytest.raises(ValueError, match=f"q_proj: .*{message}"):
            linear.apply(
                jnp.ones((4, 16)),
                jnp.ones((16, 16)),
                recipe=Recipe(name="mine", grad_weight=spec),
                name="q_proj",
            )


def test_dims_that_xla_pads_are_warned_of():  # L-5
    with pytest.warns(UserWarning, match=r"q_proj: .*\[24, 40\] to \[32, 48\].*1.60 times"):
        linear.apply(jnp.ones((4, 40)), jnp.ones((24, 40)), recipe="tensorwise", name="q_proj")


def test_mixed_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"one dtype.*bfloat16 and float32.*"):
        linear.apply(jnp.ones((4, 16), jnp.bfloat16), jnp.ones((16, 16)), recipe="tensorwise")


def test_what_is_prepared_and_does_not_fit_is_refused_by_name():  # O-16, P-9
    x, w = jnp.ones((2, 24, 64), jnp.bfloat16), jnp.ones((32, 64), jnp.bfloat16)
    copy = scaling.quantize(w, E4M3FN)
    for given, message in (
        (
            {"recipe": "rowwise"},
            "fc: prepared weights need a recipe that casts each once .* recipe 'rowwise' does not",
        ),
        ({"recipe": "bf16"}, "recipe 'bf16' does not. Use 'tensorwise'"),
        (
            {"prepared": w},
            r"fc: prepared is a tensorwise Quantized of e4m3fn and w's shape, \(32, 64\), or "
            r"its Scales; got",
        ),
        (
            {"prepared": scaling.quantize(w.T, E4M3FN)},
            r"got e4m3fn tensorwise \(64, 32\) in float8_e4m3fn. Use states.copies",
        ),
        (
            {"prepared": dataclasses.replace(copy, codes=scaling.quantize(w, E5M2).codes)},
            r"\(32, 64\) in float8_e5m2. Use states.copies",
        ),
        (
            {"prepared": dataclasses.replace(copy, scale=copy.scale[None])},
            r"fc: weight scales are float32 \(\); got float32 \(1,\), float32 \(\)",
        ),
        (
            {"prepared": scales.Scales(1.0, None)},
            r"fc: weight scales are float32 \(\); got float, NoneType",
        ),
        ({"prepared": scaling.quantize(w, E5M2)}, "got e5m2"),
        (
            {"prepared": scales.Scales(*[jnp.ones(3)] * 2)},
            r"fc: weight scales are float32 \(\); got float32 \(3,\), float32 \(3,\)",
        ),
        (
            {"prepared": scales.Scales(*[jnp.bfloat16(1)] * 2)},
            r"got bfloat16 \(\), bfloat16 \(\). Use scales_from_amax",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            linear.apply(x, w, **{"recipe": "tensorwise", "prepared": copy, "name": "fc", **given})


def test_a_layer_holds_what_is_static_of_a_call():
    """Of 2 x 3 sequences of 5 tokens, by a weight [K, N] and an output in float32."""
    x, w = jnp.ones((2, 3, 5, 16), jnp.bfloat16), jnp.ones((16, 32), jnp.bfloat16)
    layer = linear_arguments.layer("rowwise", "fc", None)
    layer = dataclasses.replace(layer, turned=True, measures=True)
    found = linear_arguments.resolved(layer, x, w, None, None, jnp.float32)
    assert (found.outer, found.batched, found.turned, found.measures, found.mode) == (
        6,
        False,
        True,
        True,
        "one",
    )
    assert found.dtypes == (jnp.float32, jnp.bfloat16, jnp.bfloat16)
    assert found.placement == Placement()
    assert found.observer is None
    assert hash(found) == hash(linear_arguments.resolved(layer, x, w, None, None, jnp.float32))


def test_a_name_that_the_proof_could_not_read_back_is_refused():  # B-7
    with pytest.raises(ValueError, match=r"no '/', '\(' or '\)'.*got 'a/b'"):
        linear.apply(jnp.ones((4, 16)), jnp.ones((16, 16)), recipe="tensorwise", name="a/b")


def test_an_output_dtype_of_integers_is_refused():
    layer = linear_arguments.layer("tensorwise", "fc", None)
    with pytest.raises(
        ValueError, match="fc: x, w and the output are bfloat16, float16 or float32; got int32"
    ):
        linear_arguments.resolved(
            layer, jnp.ones((4, 16)), jnp.ones((16, 16)), None, None, jnp.int32
        )
