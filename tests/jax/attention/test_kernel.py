"""cuDNN's FP8 attention: what it is called with, by a stand-in with its interface, and what is
refused (spec A-20).
"""

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.attention.attention_cases import backward_options, call_options
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.jax import delayed
from fp8ref.jax.attention import DeviceCall, attention
from fp8ref.jax.attention import kernel as attention_kernel
from fp8ref.jax.gemm import hardware
from fp8ref.sim.gemm import hardware as sim_hardware
from fp8ref.spec.attention import delayed as attention_delayed
from fp8ref.spec.attention.variants import GRADIENT_ROLES, ROLES, VARIANTS, Mask

CAUSAL = Mask(causal=True)
BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "compiled"


def given() -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(1, h, 128, 128)), jnp.bfloat16) for h in (4, 2, 2, 4)]


def scales_of(q, k, v, do) -> dict[str, jax.Array]:
    """Scales of the tensors themselves, one binary digit apart from each other, so that none can
    stand for another.
    """

    @jax.jit
    def amaxes_of(q, k, v, do):
        result = attention.forward(q, k, v, variant="cudnn", mask=CAUSAL)
        return (
            result.amaxes
            | attention.backward(do, q, k, v, result, variant="cudnn", mask=CAUSAL).amaxes
        )

    amaxes = amaxes_of(q, k, v, do)
    return {
        role: jnp.float32(448 / (amaxes[role] * (1 + i / 64)))
        for i, role in enumerate((*ROLES, *GRADIENT_ROLES))
    }


def stand_in(q8, k8, v8, call, parameters):
    """What cuDNN computes, with JAX's interface to it, by tiles: codes in, codes out, amaxes as
    results and as gradients.
    """
    tile = {"variant": "cudnn", "mask": call.mask, "scale": call.scale}
    names = {"dO": "do", "dP": "ds", "dQ": "dq", "dK": "dk", "dV": "dv"}
    of = {key: x.reshape(()) for key, x in parameters.items()}
    # what the tiles do not take: an inverse within a unit in the last place
    for key in ("s", "o", "dP"):
        np.testing.assert_allclose(
            of[f"descale_{key}"] * of[f"scale_{key}"], 1, rtol=2.0**-22, err_msg=key
        )

    def forward(q8, k8, v8):
        q, k, v = (
            x.astype(jnp.float32) * of[f"descale_{role}"]
            for role, x in zip("qkv", (q8, k8, v8), strict=True)
        )
        scales = {role: 1 / of[f"descale_{role}"] for role in "qkv"} | {
            "s": of["scale_s"],
            "o": of["scale_o"],
        }
        return attention.forward(q, k, v, **call_options(scales=scales, **tile)), (q, k, v)

    @jax.custom_vjp
    def passed(q8, k8, v8, amaxes):
        result, _ = forward(q8, k8, v8)
        return (
            result.tensors["o"].codes,
            result.amaxes["s"].reshape(1, 1, 1, 1),
            result.amaxes["o"].reshape(1, 1, 1, 1),
        )

    def saved(q8, k8, v8, amaxes):
        return passed(q8, k8, v8, amaxes), (q8, k8, v8)

    def backward(codes, cotangents):
        result, tensors = forward(*codes)
        do = cotangents[0].astype(jnp.float32) * of["descale_dO"]
        scales = {names[key]: of[f"scale_{key}"] for key in ("dP", "dQ", "dK", "dV")} | {
            "do": 1 / of["descale_dO"]
        }
        found = attention.backward(do, *tensors, result, **backward_options(scales=scales, **tile))
        amaxes = {
            f"amax_{key}": found.amaxes[names[key]].reshape(1, 1, 1, 1)
            for key in ("dQ", "dK", "dV", "dP")
        }
        return *(found.tensors[role].codes for role in ("dq", "dk", "dv")), amaxes

    passed.defvjp(saved, backward)
    return passed(q8, k8, v8, {key: x for key, x in parameters.items() if key.startswith("amax_")})


def test_simulated_hardware_cannot_replace_the_kernel():  # G-19
    scales = {role: jnp.float32(1) for role in (*ROLES, *GRADIENT_ROLES)}
    with (
        hardware.simulating(sim_hardware.by_name("hopper")),
        pytest.raises(
            ValueError, match=r"cuDNN's kernel, which is closed\. .* whose tiles take it"
        ),
    ):
        attention_kernel.apply(*given()[:3], scales=scales, platform="cuda")


@pytest.mark.slow  # JAX compiles for seconds
def test_the_call_has_the_operands_and_scales_of_the_variant(monkeypatch):
    """Around a stand-in that computes by tiles, o, gradients and amaxes are those of the tiles
    under the same scales: a wrong scale, descale or codes of any role would change them."""
    monkeypatch.setattr(attention_kernel, "dot_product_attention", stand_in)
    q, k, v, do = given()
    scales = scales_of(q, k, v, do)
    unseen = delayed.unseen(attention_delayed.casts(VARIANTS["cudnn"]))

    def run(function):
        o, vjp = jax.vjp(function, q, k, v, unseen)
        return o, *vjp((do, jax.tree.map(jnp.zeros_like, unseen)))

    def by_kernel(q, k, v, seen):
        call = DeviceCall(variant="cudnn", mask=CAUSAL, layer="layer")
        return attention_kernel.apply(
            q, k, v, scales=scales, variant=call, seen=seen, platform="cuda"
        )

    def by_tiles(q, k, v, seen):
        carried = attention.Carried(scales, seen)
        o, carried = attention.apply_with_stats(
            q, k, v, variant="cudnn", mask=CAUSAL, carried=carried
        )
        return o, carried.seen

    (o, forward), *gradients = run(by_kernel)
    (right, of_tiles), *others = run(by_tiles)
    np.testing.assert_array_equal(o, right)
    for mine, other in zip(gradients[:3], others[:3], strict=True):
        np.testing.assert_array_equal(mine, other)
    for role in ROLES:
        np.testing.assert_array_equal(forward[role], of_tiles[role], err_msg=role)
    for role in GRADIENT_ROLES:
        np.testing.assert_array_equal(gradients[3][role], others[3][role], err_msg=role)


REFUSED = [
    (
        {"platform": "cpu"},
        r"needs an NVIDIA GPU; this program is for cpu. Use fp8ref.jax.attention",
    ),
    ({"variant": "mxfp8"}, "as variant 'cudnn'; got 'mxfp8'"),
    (
        {"variant": dataclasses.replace(VARIANTS["cudnn"], gradient_fmt=E5M2)},
        r"one scale per tensor and everything in e4m3fn",
    ),
    ({"softcap": 30.0}, r"takes variant, mask, scale and layout; got"),
    ({"mask": Mask(window=(3, 0))}, r"no mask, or a causal one from the start"),
    ({"layer": "a/b"}, r"no '/', '\(' or '\)'"),
]


@pytest.mark.parametrize(("how", "said"), REFUSED)
def test_what_the_kernel_does_not_take_is_refused(how, said):
    q, k, v, _ = given()
    scales = dict.fromkeys((*ROLES, *GRADIENT_ROLES), jnp.float32(1))
    own = {"scales": {} if "variant" in how else scales, "platform": "cuda"}
    with pytest.raises(ValueError, match=said):
        attention_kernel.apply(q, k, v, **call_options(**{"variant": "cudnn"} | own | how))


def test_shapes_and_missing_scales_are_refused():
    q, k, v, _ = given()
    scales = dict.fromkeys((*ROLES, *GRADIENT_ROLES), jnp.float32(1))
    with pytest.raises(
        ValueError,
        match=r"takes 128 features and tokens in multiples of 128; got q \(1, 4, 100, 128\)",
    ):
        attention_kernel.apply(q[:, :, :100], k, v, scales=scales, platform="cuda")
    with pytest.raises(ValueError, match=r"ds, dq have none. Use delayed scaling"):
        attention_kernel.apply(
            q,
            k,
            v,
            scales={r: x for r, x in scales.items() if r not in ("ds", "dq")},
            platform="cuda",
        )
    assert VARIANTS["cudnn"].fmt == E4M3FN


def test_compiled_for_an_h200_it_is_cudnns_call():
    """The benchmark's case, in a process of its own: a topology needs the CUDA plugin."""
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for a GPU needs jax's CUDA plugin")
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    script = (
        "import aot_attention, pathlib; print(aot_attention.of_attention('kernel', "
        "pathlib.Path('h200_target.txtpb').read_text())['calls'])"
    )
    found = subprocess.run(
        [sys.executable, "-c", script],
        cwd=BENCHMARK,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip().endswith(
        "{'__cudnn$fmhaSoftmaxF8': 1, '__cudnn$fmhaSoftmaxBackwardF8': 1}"
    )


def recorder(found: list[dict]):
    """A kernel that computes nothing, records its scales, and has the numbers of its inputs as
    amaxes.
    """

    @jax.custom_vjp
    def call(q8, k8, v8, parameters):
        return q8, *(jnp.max(x.astype(jnp.float32)).reshape(1, 1, 1, 1) for x in (k8, v8))

    def saved(q8, k8, v8, parameters):
        return call(q8, k8, v8, parameters), (q8, k8, v8, parameters)

    def backward(saved, cotangents):
        *codes, parameters = saved
        largest = jnp.max(cotangents[0].astype(jnp.float32)).reshape(1, 1, 1, 1)
        return *codes, {
            key: largest if key.startswith("amax_") else jnp.zeros_like(x)
            for key, x in parameters.items()
        }

    call.defvjp(saved, backward)

    def recorded(q8, k8, v8, layer, parameters):
        found.append(parameters)
        return call(q8, k8, v8, parameters)

    return recorded


def scales_apart() -> dict[str, jax.Array]:
    """A power of two for each role: exact inverses, none of which can stand for another."""
    return {role: jnp.float32(2.0**i) for i, role in enumerate((*ROLES, *GRADIENT_ROLES), -5)}


def test_each_scale_and_inverse_is_its_roles(monkeypatch):
    found: list[dict] = []
    monkeypatch.setattr(attention_kernel, "dot_product_attention", recorder(found))
    q, k, v, _ = given()
    scales = scales_apart()
    attention_kernel.apply(q, k, v, scales=scales, mask=CAUSAL, platform="cuda")
    names = {"dO": "do", "dP": "ds", "dQ": "dq", "dK": "dk", "dV": "dv"}
    of = {key: float(x.reshape(())) for key, x in found[0].items() if not key.startswith("amax_")}
    scaled, descaled = ("s", "o", "dQ", "dK", "dV", "dP"), ("q", "k", "v", "s", "o", "dO", "dP")
    right = {f"scale_{key}": float(scales[names.get(key, key)]) for key in scaled}
    assert of == right | {
        f"descale_{key}": 1 / float(scales[names.get(key, key)]) for key in descaled
    }


def test_examples_of_a_vmap_merge(monkeypatch):  # H-4, A-19
    """Observations of both passes are the largest, not the sum, of a mapped axis that seen
    lacks.
    """
    monkeypatch.setattr(attention_kernel, "dot_product_attention", recorder([]))
    unseen = delayed.unseen(attention_delayed.casts(VARIANTS["cudnn"]))
    q, k, v, _ = (jnp.stack([x, 2 * x]) for x in given())

    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(seen):
        how = {"scales": scales_apart(), "seen": seen, "platform": "cuda"}
        o, merged = jax.vmap(lambda *given: attention_kernel.apply(*given, **how))(q, k, v)
        return o.astype(jnp.float32).sum(), merged

    (_, forward), backward = jax.jit(loss)(unseen)
    for role in ROLES:
        assert (forward[role][..., 2] == 1).all(), role
    for role in GRADIENT_ROLES:
        assert backward[role][0] > 0, role
        assert backward[role][2] == 1, role


def test_several_devices_are_refused():
    q, k, v, _ = given()
    q, k, v = (jnp.concatenate([x, x]) for x in (q, k, v))
    scales = scales_apart()
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))

    def layer(q, k, v):
        return attention_kernel.apply(q, k, v, scales=scales, platform="cuda")[0]

    mapped = jax.shard_map(layer, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    with pytest.raises(
        ValueError,
        match=r"not inside shard_map; got q along data. Use fp8ref.jax.attention with "
        r"over=\('data',\)",
    ):
        jax.jit(mapped)(q, k, v)
    apart = jax.device_put(k, NamedSharding(mesh, P("data")))
    with pytest.raises(
        ValueError, match=r"not reduced across devices; got k on 2. Use fp8ref.jax.attention"
    ):
        layer(q, apart, v)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"got q on 2"):
        jax.jit(layer)(q, k, v)


def test_a_mesh_of_a_jits_inputs_alone_is_refused_where_it_is_lowered(monkeypatch):
    """q, k and v come of arrays without a mesh, which XLA may cut all the same: another argument
    has one.
    """
    monkeypatch.setattr(
        attention_kernel,
        "dot_product_attention",
        lambda q8, *_: (q8, *[jnp.zeros((1, 1, 1, 1))] * 2),
    )
    q, k, v, _ = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given())
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    scales, other = (
        scales_apart(),
        jax.ShapeDtypeStruct((2, 128), jnp.bfloat16, sharding=NamedSharding(mesh, P("data"))),
    )

    def layer(q, k, v, other):
        return attention_kernel.apply(q, k, v, scales=scales, platform="cuda")[0] + other[0]

    traced = jax.jit(layer).trace(q, k, v, other)  # shows no mesh of q, k and v
    with pytest.raises(
        ValueError,
        match=r"not reduced across devices; got the program on 2. Use fp8ref.jax.attention",
    ):
        traced.lower()
    alone = jax.ShapeDtypeStruct(other.shape, other.dtype)
    jax.jit(layer).trace(q, k, v, alone).lower()
