import numpy as np
import pytest
import torch
from helpers.processes import rank_jobs, ranks
from helpers.training import measured, seeds

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.recipe import OPERANDS, REDUCED_AXES, CastSpec, by_name
from fp8ref.selection import statistics as statistics
from fp8ref.sim import linear as sim
from fp8ref.sim.attention.operands import hadamard
from fp8ref.sim.quantize import scaling as sim_scaling
from fp8ref.spec.rotation import NVFP4_ROTATION
from fp8ref.torch import delayed
from fp8ref.torch.observe import statistics as stats
from fp8ref.torch.quantize import scaling
from fp8ref.train.data import loader
from fp8ref.train.torch.llama.llama import Llama
from fp8ref.train.torch.trainer import Trainer

pytestmark = pytest.mark.filterwarnings(
    # dynamo looks at it, of what it traces
    "ignore:The .grad attribute of a Tensor that is not a leaf",
    "ignore:.*is deprecated:DeprecationWarning",  # torch, as it imports its backends
    "ignore:FSDP2-wrapped module .* returned a view tensor",
)
RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "mxfp8"]


def check(x, q) -> dict:
    operand = statistics.Operand("layer", "output", "input", CastSpec(fmt=q.fmt))
    one = statistics.merged([operand], [stats.measure(x, q).numpy()[None]])["layer/output/input"]
    spec = CastSpec(fmt=q.fmt, granularity=q.granularity)
    measured.check(
        one, x.float().numpy(), q.codes.view(torch.uint8).numpy(), q.scale.numpy(), spec, q.axis
    )
    return one


@pytest.mark.parametrize(
    "granularity", ["tensorwise", "rowwise", "blockwise_1x128", "blockwise_128x128", "mx_1x32"]
)
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
def test_measurements_are_the_simulators(rng, fmt, granularity):
    x = torch.from_numpy(
        rng.standard_normal((96, 256)) * np.exp(rng.normal(0, 6, (96, 256)))
    ).bfloat16()
    policy = "mx_rceil" if granularity == "mx_1x32" else "torchao"
    one = check(x, scaling.quantize(x, fmt, granularity=granularity, policy=policy))
    assert one["underflow_rate"] > 0
    assert one["saturation_rate"] > 0


@pytest.mark.parametrize("scale", [0.0, 2.0**-10, 1.0, 2.0**6, 2.0**100, 2.0**127, np.inf, np.nan])
def test_of_a_scale_that_clips_or_loses(rng, scale):
    x = torch.from_numpy(rng.standard_normal((64, 48)) * 20).bfloat16()
    x[:2] = 0.0  # whose code is NaN where the scale is infinite
    one = check(x, scaling.quantize_with(x, torch.tensor(scale), E4M3FN))
    assert (one["overflow_rate"] > 0) == (scale >= 2.0**6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_counted_apart(rng, bad):
    x = torch.from_numpy(rng.standard_normal((64, 48))).float()
    x[3, 4] = x[5, 6] = bad
    one = check(x, scaling.quantize_with(x, torch.tensor(16.0), E4M3FN))
    assert (one["non_finite"], one["amax"]) == (2, None)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_trainers_statistics_are_of_the_operands_that_its_gemms_had(small, recipe):
    config = small.replace(numerics={"recipe": recipe}, model={"intermediate_size": 64})
    trainer, tokens = Trainer(config), loader.open_batches(config).step(0)
    trainer.step(tokens)
    seen = measured.Seen(trainer.decisions)
    trainer.observe(tokens, seen.add)
    found = trainer.statistics(tokens)
    seen.check(found)
    assert trainer.measured_step(tokens)[1] == found


def test_a_tensor_that_is_cast_along_both_axes_is_looked_at_once(small, monkeypatch):
    trainer, looked = (
        Trainer(small.replace(numerics={"recipe": "rowwise"}, model={"intermediate_size": 64})),
        [],
    )
    honest = stats.measure_whole
    monkeypatch.setattr(stats, "measure_whole", lambda x: looked.append(x.shape) or honest(x))
    operands = statistics.planned(trainer.decisions)
    assert len(trainer.statistics(loader.open_batches(small).step(0))) == len(operands)
    assert len(looked) == len({(o.layer, o.role) for o in operands}) == len(operands) // 2


WAYS = [
    ("tensorwise", {}),
    ("rowwise", {"checkpointing": "selective"}),
    ("delayed", {"checkpointing": "full"}),
    pytest.param("delayed", {"compile": "block"}, marks=pytest.mark.slow),
    pytest.param(
        "rowwise_with_gw_hp",
        {"compile": "block", "checkpointing": "selective"},
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("recipe", "keys"), WAYS)
def test_measuring_changes_no_bit_of_training(small, recipe, keys):
    config, runs, found = small.replace(numerics={"recipe": recipe}, parallel=keys), [], {}
    batches = loader.open_batches(config)
    for measures in (False, True):
        trainer, metrics = Trainer(config), []
        for i in range(3):
            if measures:
                one, found, _ = trainer.measured_step(batches.step(i))
                metrics.append(one)
            else:
                metrics.append(trainer.step(batches.step(i)))
        states = [
            getattr(s, key)
            for _, s in delayed.states(trainer.model)
            for key in ("scale", "amax_history", "step", "seen")
        ]
        runs.append((metrics, trainer.weights(), states))
    assert runs[0][0] == runs[1][0]
    for name, value in runs[0][1].items():
        np.testing.assert_array_equal(runs[1][1][name], value)
    assert all(map(torch.equal, runs[0][2], runs[1][2]))
    assert list(found) == [operand.name for operand in statistics.planned(trainer.decisions)]


@pytest.mark.parametrize(
    ("recipe", "keys"),
    [
        ("tensorwise", {"fsdp": 2}),
        ("delayed", {"fsdp": 2}),
        pytest.param("rowwise", {"data": 2}, marks=pytest.mark.slow),
        pytest.param(
            "tensorwise",
            {"data": 2, "gather": "compute", "amax_scope": "local"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_on_ranks_every_part_is_counted_once(small, recipe, keys):
    """Every rank returns the same: the simulator's, of the operands that all ranks had, put
    together.
    """
    config = small.replace(numerics={"recipe": recipe}, parallel=keys)
    tokens = loader.open_batches(config).step(0)
    found = ranks.run(2, rank_jobs.statistics, config, tokens)
    assert found[0][0] == found[1][0]
    one, weights = found[0][0], found[0][2]
    gathered = "fsdp" in keys and recipe != "rowwise"
    assert all(
        n == (2 if gathered or not name.endswith("weight") else 1)
        for name, n in found[0][3].items()
    )
    for operand in statistics.planned(config.decisions()):
        parts = [of_rank[1][operand.name] for of_rank in found]
        if operand.role == "weight":
            # which every rank has whole; one that was gathered in FP8 is observed as its codes
            # alone
            hp = torch.from_numpy(weights[f"{operand.layer}.weight"]).bfloat16().float().numpy()
            merged = [(hp, *parts[0][1:])]
        elif keys.get("amax_scope") == "local" or operand.cast.granularity != "tensorwise":
            merged = parts
        else:
            merged = [
                (
                    np.concatenate([p[0] for p in parts]),
                    np.concatenate([p[1] for p in parts]),
                    parts[0][2],
                )
            ]
        if len(merged) == 1:
            axis = REDUCED_AXES[operand.gemm][OPERANDS[operand.gemm].index(operand.role)] - 2
            measured.check(one[operand.name], *merged[0], operand.cast, axis, operand.name)
        else:
            assert one[operand.name]["amax"] == max(np.abs(hp).max() for hp, *_ in merged)
            assert one[operand.name]["scale_min"] == min(scale.min() for *_, scale in merged)
            zeros = sum(((codes & 0x7F == 0) & (hp != 0)).sum() for hp, codes, _ in merged)
            assert one[operand.name]["underflow_rate"] == zeros / sum(
                codes.size for _, codes, _ in merged
            )


# Along which dim tensor parallelism cuts a linear's tensors; None: every rank has all of it.
CUTS = {
    "colwise": {"input": None, "weight": 0, "grad_output": 1},
    "rowwise": {"input": 1, "weight": 1, "grad_output": None},
}


def assembled(parts, dim):
    """Ranks' parts of a tensor or of its scales."""
    if dim is None or parts[0].ndim == 0 or parts[0].shape[dim] == 1:
        assert all(np.array_equal(parts[0], p) for p in parts)
        return parts[0]
    return np.concatenate(parts, dim)


@pytest.mark.parametrize(
    ("recipe", "keys"),
    [
        ("tensorwise", {"sequence": True}),
        ("rowwise", {"sequence": True}),
        pytest.param("tensorwise", {}, marks=pytest.mark.slow),
        pytest.param("rowwise_with_gw_hp", {"checkpointing": "full"}, marks=pytest.mark.slow),
    ],
)
# P-14
def test_under_tensor_parallelism_they_are_of_whole_operands(small, recipe, keys):
    """The simulator's, of ranks' operands put together, which are what their codes were cast from;
    of the weights one process's.
    """
    alone = small.replace(
        numerics={"recipe": recipe}, model={"num_key_value_heads": 2, "intermediate_size": 64}
    )
    tokens = loader.open_batches(alone).step(0)
    found = ranks.run(
        2, rank_jobs.statistics, alone.replace(parallel={"tensor": 2, **keys}), tokens
    )
    assert found[0][0] == found[1][0]
    one, weights = found[0][0], found[0][2]
    expected = Trainer(alone, weights).statistics(tokens)
    assert list(one) == list(expected)
    for operand in statistics.planned(alone.decisions()):
        dim = CUTS[Llama.tensor_plan.styles[operand.layer.rpartition(".")[2]]][operand.role]
        assert found[0][3][operand.name] == (1 if dim is None else 2)
        hp, codes, scale = (
            assembled([f[1][operand.name][i] for f in found], dim) for i in range(3)
        )
        axis = REDUCED_AXES[operand.gemm][OPERANDS[operand.gemm].index(operand.role)] - 2
        measured.check(one[operand.name], hp, codes, scale, operand.cast, axis, operand.name)
        cast = scaling.quantize_with(
            torch.from_numpy(hp),
            torch.from_numpy(scale),
            operand.cast.fmt,
            granularity=operand.cast.granularity,
            axis=axis,
        )
        np.testing.assert_array_equal(
            cast.codes.view(torch.uint8).numpy(), codes, err_msg=operand.name
        )
        # others differ as GEMMs round (P-16)
        if (
            operand.role == "weight"
            or operand.name == "model.layers.0.self_attn.q_proj/output/input"
        ):
            # float64 sums in another order
            assert one[operand.name].pop("sqnr") == pytest.approx(
                expected[operand.name].pop("sqnr"), abs=1e-9
            )
            assert one[operand.name] == expected[operand.name]


@pytest.mark.slow
def test_on_a_mesh_with_fsdp_too(small):
    alone = small.replace(model={"num_key_value_heads": 2, "intermediate_size": 64})
    tokens = loader.open_batches(alone).step(0)
    found = ranks.run(
        4,
        rank_jobs.statistics,
        alone.replace(parallel={"fsdp": 2, "tensor": 2, "amax_scope": "local"}),
        tokens,
    )
    one, weights, parts = found[0][0], *found[0][2:]
    assert all(f[0] == one for f in found)
    expected = Trainer(alone, weights).statistics(tokens)
    assert list(one) == list(expected)
    for operand in statistics.planned(alone.decisions()):
        dim = CUTS[Llama.tensor_plan.styles[operand.layer.rpartition(".")[2]]][operand.role]
        assert parts[operand.name] == (2 if dim is None else 4)
        if operand.role == "weight":
            assert one[operand.name].pop("sqnr") == pytest.approx(
                expected[operand.name].pop("sqnr"), abs=1e-9
            )
            assert one[operand.name] == expected[operand.name]
        elif dim is None:  # each rank's own scales: a line of ranks has the same part
            halves = [found[0][1][operand.name], found[2][1][operand.name]]
            zeros = sum(((codes & 0x7F == 0) & (hp != 0)).sum() for hp, codes, _ in halves)
            assert one[operand.name]["underflow_rate"] == zeros / sum(
                codes.size for _, codes, _ in halves
            )
            assert one[operand.name]["amax"] == max(np.abs(hp).max() for hp, *_ in halves)


# By the numbers of the formats: max is odd in e5m2 (0x7B) and even in e4m3fn (0x7E).
@pytest.mark.parametrize(
    ("fmt", "tie", "beyond"), [(E5M2, 61440.0, True), (E4M3FN, 464.0, False)], ids=["odd", "even"]
)
def test_the_tie_above_max_overflows_where_max_is_odd(fmt, tie, beyond):  # C-4, Q-8
    below, above = (float(np.nextafter(np.float32(tie), np.float32(side))) for side in (0, np.inf))
    x = torch.tensor([1.0, -tie, below, above])
    assert stats._overflows(x.abs(), fmt).item() == 1 + beyond


def test_nvfp4s_errors_are_of_what_was_cast(small, monkeypatch):  # Q-9, S-22, S-23, S-24
    """By both levels of scales, and of rotated tensors where they are rotated."""
    trainer, seen = Trainer(small.replace(numerics={"recipe": "nvfp4"})), {}
    tokens = loader.open_batches(small).step(0)
    trainer.observe(tokens, lambda name, which, a, b, out: seen.update({(name, which): (a, b)}))
    records = trainer.statistics(tokens)
    for (name, which), operands in seen.items():
        hp = {role: q[0] for role, q in zip(OPERANDS[which], operands, strict=True)}
        seed = seeds.of_linear(small.run.seed, 0, 0, name)
        expected = sim.quantize_operands(which, hp, by_name("nvfp4"), seed=seed)
        for role, axis, q in zip(OPERANDS[which], REDUCED_AXES[which], expected, strict=True):
            x = hp[role] if axis else hp[role].T
            x = hadamard.rotate_blocks(x, NVFP4_ROTATION) if which == "grad_weight" else x
            noise = np.square((sim_scaling.dequantize(q) - x).astype(np.float64)).sum()
            sqnr = 10 * np.log10(np.square(x.astype(np.float64)).sum() / noise)
            assert records[f"{name}/{which}/{role}"]["sqnr"] == pytest.approx(sqnr, rel=1e-6)
