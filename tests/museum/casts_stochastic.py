"""Faults of stochastic rounding: their random numbers."""

import numpy as np
from museum import ask
from museum.arithmetic import E2M1, E4M3, bf16, saturated, spacing
from museum.exhibit import Exhibit


def stochastic(draw, dtype=E4M3, *, reseeded=False):
    """A cast that rounds up where the fraction and a random number reach 1.

    draw: (generator, shape) -> numbers from 0 to 1. reseeded: each call starts the generator anew.
    """
    generator = np.random.default_rng(0)

    def cast(x):
        source = np.random.default_rng(0) if reseeded else generator
        q = spacing(x, dtype)
        up = np.floor(np.abs(x) / q + draw(source, np.shape(x)))
        return saturated(np.copysign(up * q, x), dtype)

    return cast


def each(generator, shape):
    """A number for each element."""
    return generator.random(shape)


def shared(generator, shape):
    """One number for all elements of a call."""
    return generator.random()


def in_bfloat16(generator, shape):
    """Numbers in bfloat16, of which some are 1."""
    return bf16(generator.random(shape))


OWN_NUMBERS = stochastic(each)

EXHIBITS = (
    Exhibit(
        name="primus-turbo-365",
        link="https://github.com/AMD-AGI/Primus-Turbo/pull/365",
        library="Primus-Turbo",
        year=2026,
        title="The seed of stochastic rounding is 0 in every launch",
        fault=stochastic(each, E2M1, reseeded=True),
        twin=stochastic(each, E2M1),
        ask=ask.cast("e2m1fn", None),
        missed="the kit says that the seed is fixed, but a cast may have a fixed seed",
    ),
    Exhibit(
        name="llm.c-601",
        link="https://github.com/karpathy/llm.c/pull/601",
        library="llm.c",
        year=2024,
        title="All elements of a call share one random number",
        fault=stochastic(shared),
        twin=OWN_NUMBERS,
        ask=ask.cast("e4m3fn", None),
        unnamed="(0x39352941) gave different codes on the second call",
    ),
    Exhibit(
        name="comfy-kitchen-60",
        link="https://github.com/Comfy-Org/comfy-kitchen/pull/60",
        library="comfy-kitchen",
        year=2026,
        title="Random numbers in bfloat16 may be 1, which rounds exact numbers up",
        fault=stochastic(in_bfloat16),
        twin=OWN_NUMBERS,
        ask=ask.cast("e4m3fn", None),
        unnamed="float32 1 (0x3F800000) gave 0x39 = 1.125, which is not a neighbor",
    ),
)
