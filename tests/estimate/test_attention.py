"""What the estimate counts of attention by a variant, held to the backends' own programs."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import torch
from helpers.attention.attention_cases import call_options
from helpers.models import sizes
from torch.utils._python_dispatch import TorchDispatchMode

from fp8ref.estimate import attention, memory, report, roofline
from fp8ref.estimate.collectives import collectives
from fp8ref.estimate.gpu_rates import PUBLISHED
from fp8ref.jax.attention import attention as attention_jax
from fp8ref.shared.errors import ConfigError
from fp8ref.spec.attention import delayed as attention_delayed
from fp8ref.spec.attention import variants as data
from fp8ref.spec.attention.variants import Mask
from fp8ref.torch.attention import attention as attention_torch

H100 = PUBLISHED["h100"]


def config(variant: str, length: int = 1088, **parallel):
    # 4 heads of 32
    return sizes.config("bf16", **parallel).replace(
        model={"hidden_size": 128},
        data={"sequence_length": length, "batch_size": 2},
        numerics={"attention": variant},
    )


def dots(jaxpr, times: int = 1) -> int:
    """FLOPs of all dots of a program, loops unrolled."""
    found = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            a, out = eqn.invars[0].aval, eqn.outvars[0].aval
            summed = eqn.params["dimension_numbers"][0][0]
            found += times * 2 * out.size * a.shape[summed[0]]
        inner = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for value in eqn.params.values():
            if hasattr(value, "jaxpr"):
                found += dots(value.jaxpr, inner)
    return found


@pytest.mark.parametrize(
    ("variant", "scaling"),
    [("cudnn", "current"), ("cudnn", "delayed"), ("mxfp8", "current"), ("bf16", "current")],
)
def test_flops_are_those_of_jaxs_program(variant, scaling):
    """A delayed scale of dS takes no walk for its amax."""
    roles = attention_delayed.roles(data.by_name(variant)) if scaling == "delayed" else ()
    how = {
        "variant": variant,
        "mask": Mask(causal=True),
        "scales": {role: jnp.float32(1) for role in roles},
    }

    def loss(q, k, v):
        return attention_jax.apply(q, k, v, **call_options(**how)).astype(jnp.float32).sum()

    q, k = (jax.ShapeDtypeStruct((2, heads, 1088, 32), jnp.bfloat16) for heads in (4, 2))
    program = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(q, k, k)
    counted = config(variant).replace(numerics={"attention_scaling": scaling})
    assert dots(program.jaxpr) == attention.flops(counted, data.by_name(variant), "jax")


@pytest.mark.parametrize("variant", ["cudnn", "mxfp8", "bf16"])
def test_flops_are_those_that_torch_dispatches(variant):
    found = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if "bmm" in func.__name__ or func.__name__.startswith("mm."):
                first = args[1] if "baddbmm" in func.__name__ else args[0]
                found.append(2 * out.numel() * first.shape[-1])
            return out

    q, k, v = (torch.randn(2, heads, 320, 32).bfloat16().requires_grad_() for heads in (4, 2, 2))
    with Count():
        attention_torch.apply(
            q, k, v, variant=variant, mask=Mask(causal=True)
        ).float().sum().backward()
    of_sixteen = sum(found)
    whole = attention.flops(config(variant, 320), data.by_name(variant), "torch")
    # MX pads rows to whole blocks of 32, and a backward pass to 16: of 320 queries neither pads.
    assert of_sixteen == whole


def test_seconds_by_hand():
    """One tile of 128 keys for 128 queries; 2 sequences of 4 heads of 32; a layer by cudnn has 9
    products.
    """
    one = config("cudnn", 128)
    rates = dataclasses.replace(H100, fp8=1e14, bf16=1e14, bandwidth=1e12, launch=1e-6)
    scores, rows = 2 * 4 * 128 * 128, 2 * 4 * 128 * 32
    products = [max(n * 2 * scores * 32 / 1e14, n * 1e-6) for n in (2, 2, 5)]
    moved = scores * (14 + 16 + 21) + rows * ((16 + 2) + 2 + (48 + 5))
    assert attention.seconds(one, data.by_name("cudnn"), "jax", rates) == pytest.approx(
        sum(products) + moved / 1e12
    )
    # PyTorch launches one for each sequence and head of keys
    launched = dataclasses.replace(rates, launch=1e-4)
    apart = attention.seconds(one, data.by_name("cudnn"), "torch", launched) - moved / 1e12
    assert apart == pytest.approx(9 * 2 * 2 * 1e-4)


def test_a_step_in_bfloat16_has_the_frameworks_own_attention():
    plain, by_variant = (
        roofline.predict_step(config(variant), "jax", H100) for variant in (None, "cudnn")
    )
    assert by_variant.in_bf16 == plain.rest
    assert by_variant.rest["attention"] != plain.rest["attention"]
    assert {k: v for k, v in by_variant.rest.items() if k != "attention"} == {
        k: v for k, v in plain.rest.items() if k != "attention"
    }
    before, after = (by_variant.bf16 + sum(rest.values()) for rest in (plain.rest, by_variant.rest))
    assert by_variant.ratio == pytest.approx(before / after)
    assert report.of(config("cudnn"), "jax", H100).step == by_variant


def test_memory_is_of_one_tile():
    bytes_, formula, at = memory.lines(config("cudnn"), "jax")["attention scores"]
    assert at == ("last layer", "first layer")
    assert bytes_ == 18 * 512 * 128 * 2 * 4
    assert formula.startswith("18 bytes each, of 512 queries and 128 keys at a time")


@pytest.mark.parametrize(
    ("variant", "backend", "what"), [("exact", "jax", "float64"), ("mxfp8", "torch", "float32")]
)
def test_a_rate_that_nobody_knows_is_refused(variant, backend, what):
    with pytest.raises(
        ConfigError,
        match=rf"'{variant}' multiplies in {what} in {backend}, of which no rate is known",
    ):
        report.of(config(variant, compile="block" if backend == "torch" else "none"), backend, H100)


def test_a_kernel_has_no_tiles(by_kernel):
    """Its seconds are not known, and it keeps no scores."""
    with pytest.raises(
        ConfigError,
        match=r"seconds takes attention by tiles; got parallel.attention 'kernel', which shows "
        r"nothing. Set it to tiles",
    ):
        report.of(by_kernel, "jax", H100)
    by_tiles = by_kernel.replace(parallel={"attention": "tiles"})
    mine, tiles = (memory.lines(each, "jax") for each in (by_kernel, by_tiles))
    assert mine.keys() == tiles.keys() - {"attention scores"}


def context(**parallel):
    return config("cudnn", 1024).replace(parallel={"context": 2} | parallel)


def test_parts_of_the_tokens_gather_keys_and_values():
    """Two layers of 2 heads of keys of 32 features, 2 sequences of 1,024 tokens: half of k and v
    come from the other device, as codes in both passes; their gradients in float32."""
    found, half = collectives.flows(context(), "torch"), 2 * 2 * 2 * 2 * 32 * 512
    assert found["keys and values, gathered over context"].bytes == 2 * half
    assert found["gradients of keys and values, summed over context"].bytes == 4 * half
    wide = collectives.flows(
        context(checkpointing="full").replace(numerics={"attention": "bf16"}), "torch"
    )
    assert wide["keys and values, gathered over context"].bytes == 3 * half * 2
    mine, fsdp = (
        collectives.flows(context(), "jax"),
        collectives.flows(config("cudnn", 1024, fsdp=2), "jax"),
    )
    name = "weights, gathered over fsdp"  # context cuts weights as fsdp does
    assert mine[name] == fsdp[name]
    assert (
        memory.lines(context(), "jax")["keys and values of all parts"][0]
        == 2 * 5 * 2 * 2 * 1024 * 32
    )


@pytest.mark.parametrize(
    ("backend", "expected"),
    [("torch", [(512, 128)] * 5 + [(384, 128), (256, 128), (128, 128)]), ("jax", [(512, 128)] * 8)],
)
def test_pairs_of_the_last_part(backend, expected):
    """Its 512 queries see all tiles of the first half, and less of each later one; JAX's program is
    the same on all devices.
    """
    assert attention.pairs(1024, 128, backend, parts=2) == expected


def test_an_estimate_compares_whole_sequences():
    with pytest.raises(
        ConfigError,
        match=r"which has no parts of the tokens; got parallel.context 2. fp8ref train --dry-run "
        r"has",
    ):
        report.of(context(), "jax", H100)
