"""A max-reduction that loses NaNs, as libraries' do, and the flag that catches it (spec P-3)."""

import functools
import itertools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest
import torch

from fp8ref.formats import E4M3FN
from fp8ref.sim.distributed import sharding
from fp8ref.sim.distributed.mesh import Layout, Mesh, split
from fp8ref.sim.quantize import scaling


def gloo_max(values):
    """torch's own gloo all_reduce(MAX), a thread a rank; every rank's result."""
    store = torch.distributed.HashStore()
    options = torch.distributed.AllreduceOptions()
    options.reduceOp = torch.distributed.ReduceOp.MAX

    def rank(r):
        group = torch.distributed.ProcessGroupGloo(store, r, len(values), timedelta(seconds=60))
        t = torch.tensor([values[r]], dtype=torch.float32)
        group.allreduce([t], options).wait()
        return t.item()

    with ThreadPoolExecutor(len(values)) as pool:
        return list(pool.map(rank, range(len(values))))


XLA_PMAX = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=3"
import jax, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
f = jax.jit(jax.shard_map(lambda x: jax.lax.pmax(x, "d"), mesh=Mesh(np.array(jax.devices()), ("d",)), in_specs=P("d"), out_specs=P("d")))
for values in eval(sys.stdin.read(), {"nan": np.nan}):
    print(np.asarray(f(np.float32(values)))[0])
"""
RANKS = list(itertools.permutations([1.0, np.nan, 3.0]))


def test_the_maxima_are_those_of_the_libraries():
    """gloo keeps the NaN, loses it, or loses the 3 with it; XLA's CPU backend always loses the NaN
    (P-3).
    """
    for values in RANKS:
        expected = values[-1]
        for value in values[-2::-1]:  # gloo folds one element from the last rank to the first
            expected = sharding.max_by_comparison(np.float32(expected), np.float32(value))
        np.testing.assert_array_equal(gloo_max(values), [expected] * 3)
    done = subprocess.run(
        [sys.executable, "-c", XLA_PMAX],
        input=str(RANKS),
        capture_output=True,
        text=True,
        check=True,
    )
    assert [float(line) for line in done.stdout.split()] == [
        np.fmax.reduce(values) for values in RANKS
    ]


@pytest.mark.parametrize("maximum", [np.fmax, sharding.max_by_comparison])
def test_a_maximum_that_drops_nan_is_caught_only_by_the_flag(maximum):
    """One device makes every code NaN.

    A dropped NaN leaves finite codes on two ranks, and no trace of it in their scales (P-3).
    """
    layout = Layout(mesh=Mesh(axes={"data": 3}), shape=(3,), splits={0: ("data",)})
    dropped = 0
    for values in RANKS:
        x = np.float32(values)
        flagged = sharding.amax(split(x, layout), layout, scope="global", maximum=maximum)
        assert all(np.isnan(a.amax) and a.non_finite == 2 for a in flagged.values())
        without = sharding.amax(
            split(x, layout), layout, scope="global", maximum=maximum, flag=False
        )
        if np.isnan(without[0,].amax):
            continue
        dropped += 1
        q = sharding.gather(
            sharding.quantize(
                split(x, layout),
                layout,
                E4M3FN,
                scope="global",
                reduce=functools.partial(sharding.amax, maximum=maximum, flag=False),
            ),
            layout,
        )
        assert ((q.codes != 0x7F) == np.isfinite(x)).all()
        assert (scaling.quantize(x, E4M3FN).codes == 0x7F).all()
    assert dropped == (6 if maximum is np.fmax else 4)


def test_a_dropped_nan_can_take_the_maximum_with_it():
    """Ranks (3, NaN, 1): the comparison ends at 1, and the 3 saturates to 1: a value of another
    rank is wrong by a factor of three (P-3).
    """
    layout = Layout(mesh=Mesh(axes={"data": 3}), shape=(3,), splits={0: ("data",)})
    shards = split(np.float32([3, np.nan, 1]), layout)
    assert (
        sharding.amax(
            shards, layout, scope="global", maximum=sharding.max_by_comparison, flag=False
        )[0,].amax
        == 1
    )
    compared = functools.partial(sharding.amax, maximum=sharding.max_by_comparison, flag=False)
    q = sharding.quantize(shards, layout, E4M3FN, scope="global", reduce=compared)
    assert scaling.dequantize(sharding.gather(q, layout))[0] == 1
