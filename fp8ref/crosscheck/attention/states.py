"""Delayed states of attention, as a trainer keeps them, next to the simulator's (spec A-19, H).

Amaxes of q, k, v and do are of tensors that exist whole. Those of s, o, ds, dq, dk and dv are of
float32 sums that no pass shows; but a cast is monotone, so the largest of a tensor's codes is the
code of its amax, and shows it to within a spacing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fp8ref.conformance.kit.compare import Report, compare_bits
from fp8ref.crosscheck.attention.attention import QUANTIZED, AttentionPass
from fp8ref.sim import delayed
from fp8ref.sim.quantize import cast
from fp8ref.train.config.config import Config

SHOWN = {"s": "p"}
"""The name of a role's codes among what a pass shows, where it is another."""


def check(
    report: Report,
    backend: str,
    config: Config,
    passes: Sequence[AttentionPass],
    before: Mapping[str, delayed.DelayedState],
    after: Mapping[str, delayed.DelayedState],
    trained: Mapping[str, Any],
) -> None:
    """Compare every state after a step, and what its passes cast by.

    before, after   the simulator's states before and after the step, which took the amaxes of sums
                    from the trainer (``states_after``).
    trained         the trainer's ``fp8_states`` after the step.
    Checks:   scales, histories and counts are the simulator's, bit for bit; each pass cast by the
              scale before the step; the amax of probabilities is 1; the code of each other amax of
              sums is the largest of its tensor's. In JAX, whose step is another program than the
              observed one, it may be a neighbor.
    """
    for layer, casts in config.attention_casts.items():
        for role, (fmt, _) in casts.items():
            name, fields = f"{layer}/{role}", delayed.DelayedState._fields
            for part, mine, right in zip(fields, trained[name], after[name], strict=True):
                _bits(report, f"{name}/state.{part}/{backend}", backend, mine, right)
            shown = SHOWN.get(role, role)
            if role in QUANTIZED:
                continue
            amax = np.float32(np.asarray(trained[name][1])[0])
            if role == "s":
                _bits(report, f"{name}/amax/{backend}", backend, amax, np.float32(1))
            for one in passes:
                if one.layer != layer or f"{shown}/codes" not in one.arrays:
                    continue
                scale = np.asarray(one.arrays[f"{shown}/scale"], np.float32)
                stored, path = before[name].stored, f"{name}/scale/{backend}"
                _bits(report, path, backend, scale, stored)
                if role == "s":
                    continue
                largest = int((np.asarray(one.arrays[f"{shown}/codes"]) & 0x7F).max())
                expected = int(cast.encode(np.atleast_1d(np.float32(amax * scale)), fmt)[0])
                message = f"code {expected} of the amax, {largest} of the tensor"
                apart = np.array([abs(largest - expected)])
                bound = 1.0 if backend == "jax" else 0.0
                amax_check = report.check(f"{name}/amax/{backend}", bound=bound)
                amax_check.add(apart == 0, apart, lambda _, message=message: message)


def _bits(report: Report, name: str, backend: str, mine, right) -> None:
    observed, expected = (np.asarray(x, np.float32) for x in (mine, right))
    compare_bits(report.check(name), observed, expected, names=(backend, "sim"))
