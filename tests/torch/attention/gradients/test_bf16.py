"""The backward pass in bfloat16 of a forward pass in FP8, next to the simulator (spec A-25)."""

import numpy as np
import pytest
import torch
from helpers.attention.attention_cases import backward_options, call_options

from fp8ref.sim.attention import attention as simulator
from fp8ref.sim.attention.gradients import gradients as attention_gradients
from fp8ref.sim.gemm.hardware import HARDWARE
from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variants import Mask, differentiated
from fp8ref.torch.attention import attention
from fp8ref.torch.gemm import hardware

MASK = Mask(causal=True)


def given():
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, heads, 150, 32, generator=generator).bfloat16() for heads in (4, 2, 2, 4)
    ]


def gradients(variant, arithmetic, multiply=None) -> list[np.ndarray]:
    *inputs, do = given()
    leaves = [x.clone().requires_grad_() for x in inputs]
    with hardware.simulating(multiply):
        o = attention.apply(
            *leaves, variant=Call(variant=variant, mask=MASK, arithmetic=arithmetic)
        )
        o.backward(do)
    return [leaf.grad.float().numpy() for leaf in leaves]


def right_of(variant) -> list[np.ndarray]:
    *inputs, do = (x.float().numpy() for x in given())
    result = simulator.forward(*inputs, variant=variant, mask=MASK)
    return list(attention_gradients.backward(do, *inputs, result, variant=variant, mask=MASK)[:3])


@pytest.mark.parametrize("name", ["fa4", "cudnn", "mxfp8"])
def test_stated_gradients_are_the_simulators(name):
    """Sums in bfloat16 are the library's, of one order each; the forward pass's bits are the
    simulator's but for ties.
    """
    variant = differentiated(name, "bf16")
    for mine, right in zip(gradients(variant, "stated"), right_of(variant), strict=True):
        assert (mine == right).mean() > 0.99
        assert np.linalg.norm(mine - right) < 2**-11 * np.linalg.norm(right)


def test_under_simulated_hardware_fa3_has_the_simulators_gradients():  # A-25, B-12
    """Its forward pass has the simulator's bits then; the backward pass is in bfloat16, which the
    hardware does not multiply.
    """
    variant = differentiated("fa3_promoted", "bf16")
    for mine, right in zip(
        gradients(variant, "stated", HARDWARE["hopper_fast"]), right_of(variant), strict=True
    ):
        assert (mine == right).mean() > 0.99
        assert np.linalg.norm(mine - right) < 2**-11 * np.linalg.norm(right)


def test_sinks_and_a_softcap_are_differentiated_in_bfloat16_too():
    """As close as without them: orders of sums differ, and roundings to bfloat16, at most 2^-9 of
    an element, where they decide a tie.
    """
    variant, (q, k, v, do) = differentiated("fa4", "bf16"), given()
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    leaves = [x.clone().requires_grad_() for x in (q, k, v, sinks)]
    call = Call(variant=variant, mask=MASK, arithmetic="stated", softcap=4.0)
    attention.apply(*leaves[:3], variant=call, sinks=leaves[3]).backward(do)
    arrays = [x.float().numpy() for x in (q, k, v, do)]
    how = {"variant": variant, "mask": MASK, "softcap": 4.0, "sinks": sinks.numpy()}
    right = attention_gradients.backward(
        arrays[3],
        *arrays[:3],
        simulator.forward(*arrays[:3], **call_options(**how)),
        **backward_options(**how),
    )
    for leaf, other in zip(leaves, (right.dq, right.dk, right.dv, right.dsinks), strict=True):
        assert np.linalg.norm(leaf.grad.float().numpy() - other) < 2**-11 * np.linalg.norm(other)


def test_explicit_passes_have_the_bits_of_autograd():
    variant = differentiated("fa3", "bf16")
    q, k, v, do = given()
    result = attention.forward(q, k, v, variant=variant, mask=MASK)
    found = attention.backward(do, q, k, v, result, variant=variant, mask=MASK)
    for mine, other in zip(found[:3], gradients(variant, "fast"), strict=True):
        np.testing.assert_array_equal(mine.bfloat16().float().numpy(), other)


def test_sixteen_bits_an_element_are_kept():  # q, k, v themselves, not copies
    variant = differentiated("fa3", "bf16")
    *inputs, _ = given()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        attention.apply(*(x.requires_grad_() for x in inputs), variant=variant, mask=MASK)
    assert {x.data_ptr() for x in inputs} < {x.data_ptr() for x in kept}
    assert sum(x.dtype == torch.bfloat16 for x in kept) == 4


def test_the_way_out_is_named():
    q, k, v, _ = given()
    with pytest.raises(
        ValueError,
        match=r"variant 'fa3' has no backward pass.* "
        r"fp8ref.spec.attention.variants.differentiated\(variant, 'bf16'\), or",
    ):
        attention.apply(q.requires_grad_(), k, v, variant="fa3")
