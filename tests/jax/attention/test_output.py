"""The forward pass of attention in JAX as a function of its own: what it leaves out unless asked
(spec A-12).
"""

import dataclasses

import numpy as np
from helpers.attention.attention_cases import integers

from fp8ref.jax.attention import attention
from fp8ref.jax.attention import output as attention_forward
from fp8ref.jax.attention.operands import inputs as attention_inputs


def test_it_keeps_and_observes_what_is_asked_alone():
    q, k, v, _ = integers(b=1, h=1, heads=1, tq=4, tk=4, d=16)
    call = attention_inputs.DeviceCall(variant="cudnn")
    given = attention_inputs.prepare(q, k, v, call, None, None)
    plain = attention_forward.run(given, {}, call)
    assert (plain.p_codes, plain.scores) == (None, None)
    assert set(plain.amaxes) == {"q", "k", "v"}
    asked = attention_forward.run(
        given, {}, dataclasses.replace(call, keep_p=True, keep_s=True), observe=True
    )
    assert set(asked.amaxes) == {"q", "k", "v", "s", "o"}
    assert asked.p_codes.shape == asked.scores.shape == (1, 1, 4, 4)
    np.testing.assert_array_equal(plain.o, asked.o)
    assert attention.Result is attention_forward.Result
