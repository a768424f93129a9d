"""Faults of attention: scales of q, k, v, P and the output, and sinks."""

import dataclasses
import functools

import numpy as np
from museum import ask
from museum.arithmetic import F, saturated
from museum.attention import attend, dequantized, full, heads_of, scores
from museum.exhibit import Exhibit

from fp8ref.sim import attention as simulated
from fp8ref.spec.attention.variants import VARIANTS

WITHOUT_FACTOR = dataclasses.replace(VARIANTS["fa4"], name="without_factor", offset=0)
"""FlashAttention-4 with P from 0 to 1, not to 256."""


def cast_p(q, k, v, factor):
    """P in e4m3 after a factor [..., 1], which the output is divided by."""
    s = scores(q, k)
    p = np.exp(s - s.max(-1, keepdims=True))
    total = p.sum(-1, keepdims=True)
    factor = factor(total)
    v = heads_of(np.asarray(v), q.shape[1]).astype(np.float64)
    return ((saturated(p * factor).astype(np.float64) @ v) / (factor * total)).astype(F)


def normalized_first(q, k, v):
    """P is divided by its sum before the cast: of many keys all are subnormal."""
    return cast_p(q, k, v, lambda total: 1 / total)


def of_256ths(q, k, v):
    return cast_p(q, k, v, lambda total: np.full_like(total, 256))


def ignored_v_descale(q, k, v, q_descale, k_descale, v_descale):
    return dequantized(q, k, v, q_descale, k_descale, np.ones_like(v_descale))


def transposed_descales(q, k, v, q_descale, k_descale, v_descale):
    """The index of a descale counts sequences within heads, not heads within sequences."""
    k_descale, v_descale = (np.asarray(x).T.reshape(np.shape(x)) for x in (k_descale, v_descale))
    return dequantized(q, k, v, q_descale, k_descale, v_descale)


def unrestored_output(q, k, v):
    """A scratch output is stored as a quarter, to fit into e4m3, and copied as it is."""
    return attend(q, k, v) / F(4)


def with_sinks(q, k, v, sinks=None):
    return attend(q, k, v, sinks=sinks)


def dropped_sinks(q, k, v, sinks=None):
    return attend(q, k, v)


def sinks_of_base_two(q, k, v, sinks=None):
    """Scores have base e, and a sink is seeded as if they had base 2."""
    if sinks is not None:
        sinks = np.asarray(sinks, np.float64) * np.log2(np.e)
    return attend(q, k, v, sinks=sinks)


EXHIBITS = (
    Exhibit(
        name="flashinfer-5020",
        link="https://github.com/flashinfer-ai/flashinfer/pull/5020",
        library="FlashInfer (SM120)",
        year=2026,
        title="P is cast to e4m3 without a factor, and small weights are lost",
        fault=functools.partial(simulated.forward, variant=WITHOUT_FACTOR),
        twin=functools.partial(simulated.forward, variant="fa4"),
        ask=ask.required_attention("fa4"),
        named="largest P: 1.0, in the variant 256.0",
    ),
    Exhibit(
        name="aiter-5642",
        link="https://github.com/ROCm/aiter/pull/5642",
        library="aiter",
        year=2026,
        title="P is normalized before it is cast, and weights are subnormal",
        fault=normalized_first,
        twin=of_256ths,
        ask=ask.probed(),
        missed="without a variant to compare with, the kit does not judge how exactly P is cast",
    ),
    Exhibit(
        name="sglang-34765",
        link="https://github.com/sgl-project/sglang/pull/34765",
        library="SGLang",
        year=2026,
        title="K's scale is restored, V's is not",
        fault=ignored_v_descale,
        twin=dequantized,
        ask=ask.probed(),
        named="v_descale: ignored",
    ),
    Exhibit(
        name="aiter-3894",
        link="https://github.com/ROCm/aiter/pull/3894",
        library="aiter",
        year=2026,
        title="The flat index of a key head's descale is wrong",
        fault=transposed_descales,
        twin=dequantized,
        ask=ask.probed(),
        named="k_descale: of another sequence or head",
    ),
    Exhibit(
        name="vllm-55670",
        link="https://github.com/vllm-project/vllm/pull/55670",
        library="vLLM",
        year=2026,
        title="The scale of a scratch output is not restored",
        fault=unrestored_output,
        twin=full,
        ask=ask.attention("exact"),
        named="o is 0.25 times what it is",
    ),
    Exhibit(
        name="sglang-jax-905",
        link="https://github.com/sgl-project/sglang-jax/pull/905",
        library="sgl-jax",
        year=2026,
        title="A fused path drops the sinks",
        fault=dropped_sinks,
        twin=with_sinks,
        ask=ask.probed(),
        named="sinks argument: ignored",
    ),
    Exhibit(
        name="rocm-libraries-12229",
        link="https://github.com/ROCm/rocm-libraries/pull/12229",
        library="CK Tile",
        year=2026,
        title="The sink is seeded for scores of another base",
        fault=sinks_of_base_two,
        twin=with_sinks,
        ask=ask.probed(),
        named="sinks argument: multiplied by log2(e)",
    ),
)
