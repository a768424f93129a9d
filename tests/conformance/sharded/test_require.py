"""require_sharded: correct collectives pass; planted faults and libraries' departures are found and
nothing else (spec P-27).
"""

import concurrent.futures
import dataclasses
import datetime
import functools

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torchao.float8 import float8_utils

from fp8ref.conformance.sharded import require_sharded
from fp8ref.conformance.sharded.comparison import Collective
from fp8ref.conformance.sharded.require import departures
from fp8ref.formats import E4M3FN
from fp8ref.policy import POLICIES
from fp8ref.sim.quantize.scales import scales_from_amax

F32 = np.float32


def local(shard):
    return np.abs(shard).max(initial=F32(0))


def everywhere(values, reduce=np.maximum):
    return [functools.reduce(reduce, values)] * len(values)


def right(shards):
    return everywhere([local(shard) for shard in shards])


def right_scale(shards):
    return [scales_from_amax(np.asarray(amax), E4M3FN).scale for amax in right(shards)]


def right_microbatches(ranks):
    return everywhere([np.maximum.reduce([local(batch) for batch in batches]) for batches in ranks])


def said(collective, **how) -> str:
    with pytest.raises(AssertionError) as raised:
        require_sharded(collective, examples=8, **how)
    return str(raised.value)


def names_of(collective, **how):
    """{difficulty: clause} of what departs."""
    of = Collective(function=collective, policy=POLICIES["torchao"], fmt=E4M3FN, **how)
    return {one.difficulty: one.clause for one in departures(of, examples=8)}


@pytest.mark.parametrize("axis", [0, 1])
def test_a_right_one_passes(axis):  # P-2, P-3, P-27
    require_sharded(right, axis=axis, examples=8)
    require_sharded(right_scale, made="scale", axis=axis, examples=8)
    require_sharded(right_microbatches, microbatches=True, axis=axis, examples=8)


def rank_local(shards):
    return [local(shard) for shard in shards]


def mean(shards):
    return everywhere([F32(np.mean([local(shard) for shard in shards]))])[:1] * len(shards)


def test_what_ranks_get_instead_has_a_name():
    """Of an amax and of a scale; a right collective is given none."""
    named = {
        "each rank has the amax of its own shard": rank_local,
        "every rank has the mean of the amaxes": mean,
        "every rank has the smallest amax": lambda x: everywhere(rank_local(x), np.minimum),
        "every rank has the first rank's amax": lambda x: [local(x[0])] * len(x),
        "a rank has its neighbor's amax": lambda x: np.roll(rank_local(x), 1),
    }
    for words, collective in named.items():
        assert words in said(collective)
    scales = "each rank has the amax of its own shard"
    assert scales in said(
        lambda x: [scales_from_amax(np.asarray(amax), E4M3FN).scale for amax in rank_local(x)],
        made="scale",
    )


def drops_nan(shards):
    return everywhere([np.nanmax(np.abs(shard), initial=F32(0)) for shard in shards], np.fmax)


def without_sign(shards):
    return everywhere([shard.max(initial=F32(0)) for shard in shards])


def inf_is_largest(shards):
    return [np.minimum(amax, np.finfo(F32).max) for amax in right(shards)]


def first_rank(shards):
    return [local(shards[0])] * len(shards)


def flushes(shards):
    return [np.where(amax < 2.0**-126, F32(0), amax) for amax in right(shards)]


def by_equal_rows(shards):
    """Reads as many rows of every shard as the first has."""
    return everywhere([local(shard[: len(shards[0])]) for shard in shards])


def one_rank_late(shards):
    values = right(shards)
    return [*values[:-1], local(shards[-1])] if any(np.isnan(v) for v in values) else values


@pytest.mark.parametrize(
    ("collective", "expected"),
    [
        (rank_local, {"ordinary"}),
        (mean, {"ordinary"}),
        (first_rank, {"ordinary"}),
        (without_sign, {"ordinary"}),
        (drops_nan, {"nan"}),
        (one_rank_late, {"nan"}),
        (inf_is_largest, {"infinite"}),
        (flushes, {"tiny"}),
        (by_equal_rows, {"uneven", "empty"}),
    ],
)
def test_a_planted_fault_is_found_and_nothing_else(collective, expected):  # P-2, P-3, P-27
    assert set(names_of(collective)) == expected


def test_messages_are_minimal():
    assert said(rank_local).splitlines()[1:] == [
        "  equal shards of ordinary numbers: rank 0 has [1]; rank 1 has [2]: got 1 and 2; "
        "each rank has the amax of its own shard, expected 2 (0x40000000) on every rank (P-2)"
    ]
    assert said(drops_nan).splitlines()[1:] == [
        "  a NaN on some ranks: rank 0 has [nan]: got 0, expected nan on every rank (P-3)"
    ]
    assert "rank 0 has [2], then [1]: got 1, expected 2 (0x40000000) on every rank (H-4)" in said(
        overwritten, microbatches=True
    )


def overwritten(ranks):
    """The last microbatch alone counts."""
    return everywhere([local(batches[-1]) for batches in ranks])


def first_alone(ranks):
    return everywhere([local(batches[0]) for batches in ranks])


@pytest.mark.parametrize("collective", [overwritten, first_alone])
def test_microbatches(collective):  # H-4
    assert names_of(collective, microbatches=True) == {"microbatches": "H-4"}


# ---- libraries ----


@functools.cache
def groups(n):
    """A group of gloo with n ranks in this process."""
    store, wait = dist.HashStore(), datetime.timedelta(seconds=60)
    with concurrent.futures.ThreadPoolExecutor(n) as pool:  # each waits for the others
        return list(pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, n, wait), range(n)))


def gloo(values):
    """gloo's own MAX of one amax a rank."""
    options, amaxes = (
        dist.AllreduceOptions(),
        [torch.from_numpy(np.array([value])) for value in values],
    )
    options.reduceOp = dist.ReduceOp.MAX
    for work in [
        group.allreduce([amax], options)
        for group, amax in zip(groups(len(values)), amaxes, strict=True)
    ]:
        work.wait()
    return [amax.numpy()[0] for amax in amaxes]


def of_torchao(monkeypatch, reduce):
    """torchao's tensor_to_amax(reduce_amax=True) on every rank, over a collective: one amax a rank
    -> the result of each.
    """

    def sync(shards):
        values = []

        def all_reduce(amax, op, group):
            assert op == "MAX"
            values.append(np.float32(amax.item()))
            return torch.tensor(totals[len(values) - 1 - len(shards)]) if totals else amax

        monkeypatch.setattr(float8_utils.dist, "is_initialized", lambda: True)
        monkeypatch.setattr(float8_utils.dist, "get_world_size", lambda: len(shards))
        monkeypatch.setattr(float8_utils, "all_reduce", all_reduce)
        totals: list = []
        for shard in shards:
            float8_utils.tensor_to_amax(shard, reduce_amax=True)
        totals.extend(reduce(values))
        return [float8_utils.tensor_to_amax(shard, reduce_amax=True) for shard in shards]

    return sync


def of_torch(sync):
    return Collective(function=sync, policy=POLICIES["torchao"], fmt=E4M3FN, framework="torch")


def test_torchao_refuses_empty_shards_and_loses_nothing_of_its_own(monkeypatch):  # P-3, P-27
    sync = of_torchao(monkeypatch, everywhere)
    assert names_of(sync, framework="torch") == {"empty": "P-2"}
    assert "it raises RuntimeError: max()" in said(of_torch(sync))


def test_torchao_over_gloo_loses_nans(monkeypatch):  # P-3, P-27
    """A NaN is lost, by rank order, and nothing else departs."""
    sync = of_torchao(monkeypatch, gloo)
    assert names_of(sync, framework="torch") == {"empty": "P-2", "nan": "P-3"}
    words = "rank 0 has [1]; rank 1 has [nan]: got 1 and 1, expected nan"
    assert words in said(of_torch(sync))


def test_jax_over_eight_devices():  # P-3, P-27
    """XLA's pmax on a CPU loses NaNs; nothing else of jnp.max and pmax departs."""
    import jax

    @functools.cache
    def program(n):
        return jax.pmap(
            lambda x: jax.lax.pmax(x, "ranks"), axis_name="ranks", devices=jax.devices()[:n]
        )

    def sync(shards):
        return list(program(len(shards))(np.stack([local(np.asarray(shard)) for shard in shards])))

    assert names_of(sync) == {"nan": "P-3"}


def test_what_it_cannot_ask_is_refused():
    for how in (
        {"made": "codes"},
        {"axis": 2},
        {"collective": dataclasses.replace(of_torch(right), framework="tensorflow")},
        {"collective": of_torch(right), "axis": 1},
        {"without": ("ordinary",)},
        {"policy": "none"},
    ):
        with pytest.raises(ValueError, match=r"got"):
            require_sharded(**({"collective": right} | how))


def test_other_numbers_of_values_are_counterexamples():
    assert "gives shapes [(1,)] for 2 ranks, not one number for each" in said(
        lambda shards: [local(shards[0])]
    )


class Largest:
    """Remembers the largest amax of all calls."""

    def __init__(self):
        self.amax = np.float32(0)

    def __call__(self, shards):
        self.amax = np.maximum(
            self.amax, np.float32(max((np.abs(x).max() for x in shards if x.size), default=0))
        )
        return [self.amax] * len(shards)


def changes_shards(shards):
    for x in shards:
        np.abs(x, out=x)
    return [np.maximum.reduce([x.max() for x in shards if x.size])] * len(shards)


def every_other(calls=[0]):  # noqa: B006 - it counts
    def mine(shards):
        calls[0] += 1
        return [np.float32(2 if calls[0] == 1 else 1)] * len(shards)

    return mine


def leaves(shards):
    raise SystemExit("no network")


@pytest.mark.parametrize(
    ("collective", "expected"),
    [
        (
            Largest(),
            "; what it gives depends on earlier calls: rank 0 has [1e-30] gives other values "
            "after rank 0 has [3e+38], expected 1",
        ),
        (changes_shards, "got it changes its shards, expected "),
        (every_other(), "got 1: not the same in every call, expected 1 "),
        (leaves, "got it raises SystemExit: no network, expected "),
        (
            lambda shards: dict(enumerate(shards)),
            "got it gives a dict, not one number for each rank in their order, expected ",
        ),
        (
            lambda shards: ["one"] * len(shards),
            "got it raises ValueError: could not convert string to float",
        ),
    ],
)
def test_what_no_collective_does_is_said(collective, expected):  # P-27
    assert expected in said(collective)


def test_no_function_is_refused():
    with pytest.raises(ValueError, match="a collective is a function of a list of shards; got int"):
        require_sharded(5)


@pytest.mark.parametrize(
    ("group", "words"),
    [
        (lambda i: i // 2, "pairs of ranks have the amax of the pair, not of all"),
        (lambda i: i % 2, "every other rank has the same amax, not all"),
    ],
)
def test_a_reduction_over_a_group_of_ranks_is_named(group, words):
    def of_a_group(shards):
        own = [np.abs(shard).max(initial=0) for shard in shards]
        return [max(x for j, x in enumerate(own) if group(j) == group(i)) for i in range(len(own))]

    with pytest.raises(AssertionError, match=words):
        require_sharded(of_a_group)
