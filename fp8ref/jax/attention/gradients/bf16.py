"""The backward pass in bfloat16 of an attention whose forward pass is in FP8 (spec A-25).

It is that of the variant ``bf16``, of q, k and v themselves, with o and the log-sum-exp of the FP8
pass.
"""

import dataclasses

import jax
import jax.numpy as jnp

from fp8ref.formats import BFLOAT16
from fp8ref.jax.attention.gradients import gradients
from fp8ref.jax.attention.gradients.gradients import Gradients
from fp8ref.jax.attention.operands import heads
from fp8ref.jax.attention.operands import operands as operands
from fp8ref.jax.attention.operands.inputs import DeviceCall, Inputs


def backward(do: jax.Array, inputs: Inputs, result, call: DeviceCall) -> Gradients:
    """The gradients, of the steps of A-15 in bfloat16.

    result    what ``attention.forward`` gave; of it o and the log-sum-exp.
    """
    wide = dataclasses.replace(call.in_bf16(), simulated=None, measures=False)
    one, o = jnp.ones((), jnp.float32), heads.to_hp(result.o, BFLOAT16)
    kept = result._replace(
        tensors=operands.quantize(inputs, wide, {}), o=o, scale_p=one, scale_inv_p=one
    )
    return gradients.backward(do, inputs, kept, {}, wide)
