"""What a run records of attention's FP8 operands (Q-13), held to the simulator's statistics of the
tensors that it quantizes itself.
"""

import math

import jax
import numpy as np
import pytest
from helpers.attention.attention_cases import backward_options, call_options
from helpers.processes import rank_jobs, ranks

from fp8ref.conformance.gemm.bound import gamma
from fp8ref.jax.attention import attention as attention_jax
from fp8ref.sim.attention import attention
from fp8ref.sim.attention.gradients import gradients as attention_gradients
from fp8ref.sim.attention.operands import heads as head_scaling
from fp8ref.sim.quantize import stats
from fp8ref.sim.quantize.scaling import Quantized
from fp8ref.spec import llama
from fp8ref.spec.attention import products as attention_products
from fp8ref.spec.attention import variants as data
from fp8ref.spec.attention.variants import Mask
from fp8ref.torch.attention import observer as attention_observer
from fp8ref.train import loop
from fp8ref.train.config import schedule
from fp8ref.train.data import loader
from fp8ref.train.report import figures, run_files, what_if
from fp8ref.train.run import log

U = 2.0**-24
WIDE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Heads of 32 features, of which mxfp8 takes multiples."""


@pytest.fixture
def config(small):
    return small.replace(model=WIDE, numerics={"recipe": "bf16", "attention": "cudnn"})


def large(config) -> dict[str, np.ndarray]:
    """Weights with which probabilities differ."""
    return {name: 4 * w for name, w in llama.initial_weights(config.model, seed=0).items()}


def check(one: dict, x: np.ndarray, operand, variant) -> None:
    """The record of a tensor x [B, H, T, D], quantized here by the simulator: counts, amax and
    scales to the bit, SQNR by Q-9.
    """
    along = attention_products.along_tokens(operand.product, operand.role)
    tensor = head_scaling.quantize(
        x, operand.fmt, variant.granularity, variant.policy, heads=2, along_tokens=along
    )
    spread = (
        head_scaling.spread(s, x.shape, variant.granularity, along_tokens=along)
        for s in (tensor.scale, tensor.scale_inv)
    )
    # a scale for each element: blocks may be short
    scale, scale_inv = (np.broadcast_to(s, x.shape)[..., None] for s in spread)
    q = Quantized(tensor.codes[..., None], scale, scale_inv, operand.fmt, "rowwise", -1)
    expected = stats.statistics(x[..., None], q)
    exact = {
        "amax": float(np.abs(x).max()),
        "scale_min": float(tensor.scale.min()),
        "scale_max": float(tensor.scale.max()),
        "underflow_rate": expected.underflow_rate,
        "saturation_rate": expected.saturation_rate,
        "overflow_rate": expected.overflow_rate,
        "non_finite": 0,
    }
    assert {key: one[key] for key in exact} == exact, operand.name
    ratio = expected.signal / expected.noise
    rows, columns = math.prod(x.shape[:3]), x.shape[3]
    relative = 2 * (rows + columns + 3) * U + 2 * U * math.sqrt(ratio) + U * U * ratio
    assert abs(one["sqnr"] - expected.sqnr) <= 10 / math.log(10) * 1.1 * relative, operand.name


def check_counts(p: dict, ds: dict, tensors: dict[str, np.ndarray], variant) -> None:
    """The records of P and dS: counts and the amax of the simulator's passes over the same tensors.
    An element whose distance from a threshold is below A-18's bound might be counted otherwise; of
    these few thousand none is that near."""
    q, k, v, do = (tensors[role] for role in ("q", "k", "v", "do"))
    how: dict = {"variant": variant, "mask": Mask(causal=True)}
    result = attention.forward(q, k, v, **call_options(keep_s=True, **how))
    gradients = attention_gradients.backward(
        do, q, k, v, result, **backward_options(keep_ds=variant.granularity == "tensor", **how)
    )
    near = 0
    if gradients.matrices:
        # Where one key has nearly all weight dS is a difference of equal numbers: 0, or what
        # roundings leave, which the cast makes 0.
        v8, o8, do8 = (
            np.abs(x.values * x.scale_inv)
            for x in (result.tensors["v"], result.tensors["o"], gradients.tensors["do"])
        )
        sizes = do8 @ np.repeat(v8, q.shape[1] // k.shape[1], axis=1).swapaxes(2, 3) + (
            do8 * o8
        ).sum(3, keepdims=True)
        weights = np.exp(result.scores.astype(np.float64) - result.lse[..., None])
        near = int(
            (
                np.abs(gradients.matrices["ds"])
                < 2 * gamma(q.shape[3] + 8) * weights * sizes / math.sqrt(q.shape[3])
            ).sum()
        )
    count = q.shape[0] * q.shape[1] * q.shape[2] * (q.shape[2] + 1) // 2
    for one, amax, saturated, lost in (
        (p, result.amaxes["s"], result.saturated, result.lost),
        (ds, gradients.amaxes["ds"], gradients.saturated_ds, gradients.lost),
    ):
        assert (one["count"], one["saturated"]) == (count, saturated)
        assert abs(one["lost"] - lost) <= (0 if one is p else near)
        lost = one["lost"]
        assert lost < count
        assert (one["underflow_rate"], one["overflow_rate"]) == (lost / count, saturated / count)
        # E of A-18 is below 2^-17: scores below 16, one tile
        assert one["amax"] == pytest.approx(float(amax), rel=2.0**-16)
        assert set(one) == {"amax", "count", "saturated", "lost", "underflow_rate", "overflow_rate"}


@pytest.fixture
def tensors(monkeypatch):
    """{layer: {role: tensor}} of q, k, v and do as a backend's attention was given them, float32
    [B, heads, T, D].
    """
    found: dict[str, dict[str, np.ndarray]] = {}

    def note(name: str, role: str):
        return lambda x: found.setdefault(name, {}).__setitem__(role, np.array(x, np.float32))

    report, apply = attention_observer.report, attention_jax.apply_with_stats

    def reported(name, product, role, x, tensor) -> None:
        note(name, role)(x.float().numpy())
        report(name, product, role, x, tensor)

    def applied(q, k, v, *, variant, carried, **how):
        name = variant.layer

        @jax.custom_vjp
        def passed(o):
            return o

        def backward(_, do):
            jax.debug.callback(note(name, "do"), do)
            return (do,)

        passed.defvjp(lambda o: (o, None), backward)
        for role, x in (("q", q), ("k", k), ("v", v)):
            jax.debug.callback(note(name, role), x)
        o, carried = apply(q, k, v, variant=variant, carried=carried, **how)
        return passed(o), carried

    monkeypatch.setattr(attention_observer, "report", reported)
    monkeypatch.setattr(attention_jax, "apply_with_stats", applied)
    return found


@pytest.mark.parametrize("backend", loop.BACKENDS)
@pytest.mark.parametrize("variant", ["cudnn", pytest.param("mxfp8", marks=pytest.mark.slow)])
def test_a_record_is_the_simulators(backend, variant, config, tensors):
    config = config.replace(numerics={"attention": variant})
    found = loop.trainer(backend, config, large(config)).statistics(
        loader.open_batches(config).step(0)
    )
    jax.effects_barrier()
    planned = attention_products.planned(
        [f"model.layers.{i}.self_attn" for i in range(config.model.num_hidden_layers)],
        data.by_name(variant),
    )
    assert list(found) == [operand.name for operand in planned]
    assert len(found) == 10 * config.model.num_hidden_layers
    assert all(found[f"{layer}/values/p"]["lost"] > 100 for layer in tensors)
    for layer, of_layer in tensors.items():
        check_counts(
            found[f"{layer}/values/p"], found[f"{layer}/grad_q/ds"], of_layer, data.by_name(variant)
        )
    for operand in (one for one in planned if not one.counted):
        check(
            found[operand.name],
            tensors[operand.layer][operand.role],
            operand,
            data.by_name(variant),
        )
    names = [
        f"model.layers.0.self_attn/{product}/{role}"
        for product, role in (("scores", "q"), ("grad_k", "q"))
    ]
    # Blocks along the tokens are other codes than those along the features.
    assert (found[names[0]] == found[names[1]]) == (variant == "cudnn")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "axis"), [({"fsdp": 2, "checkpointing": "full"}, 0), ({"tensor": 2}, 1)], ids=str
)
@pytest.mark.parametrize("variant", ["cudnn", "mxfp8"])
def test_ranks_record_the_whole_tensors(variant, keys, axis, config):
    config = config.replace(
        model={"intermediate_size": 64},
        numerics={"attention": variant, "recipe": "tensorwise"},
        parallel=keys,
    )
    (one, first), (other, second) = ranks.run(
        2, rank_jobs.attention_statistics, config, loader.open_batches(config).step(0)
    )
    assert one == other
    of_variant = data.by_name(variant)
    layer = "model.layers.0.self_attn"
    whole = {
        role: np.concatenate([of_rank[layer][role] for of_rank in (first, second)], axis)
        for role in ("q", "k", "v", "do")
    }
    check_counts(one[f"{layer}/values/p"], one[f"{layer}/grad_q/ds"], whole, of_variant)
    for operand in (
        operand
        for operand in attention_products.planned([layer], of_variant)
        if not operand.counted
    ):
        x = np.concatenate(
            [of_rank[operand.layer][operand.role] for of_rank in (first, second)], axis
        )
        assert x.shape == (4, 2 if operand.role in "kv" else 4, config.data.sequence_length, 32)
        check(one[operand.name], x, operand, of_variant)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [{"scan": True, "checkpointing": "selective"}, {"data": 2, "fsdp": 2, "tensor": 2}],
    ids=str,
)
def test_a_scan_or_a_mesh_records_what_one_device_does(parallel, config):
    config = config.replace(
        numerics={"attention": "mxfp8"}, model={"num_hidden_layers": 2 if "scan" in parallel else 1}
    )
    tokens = loader.open_batches(config).step(0)
    one, other = (
        loop.trainer("jax", config.replace(parallel=keys), large(config)).statistics(tokens)
        for keys in ({}, parallel)
    )
    assert one.keys() == other.keys()
    assert len(one) == 10 * config.model.num_hidden_layers
    for name, found in other.items():
        if "scan" in parallel or name.endswith(
            ("scores/q", "scores/k", "values/v", "grad_q/k", "grad_k/q", "values/p")
        ):
            # The first layer's projections sum over no device.
            assert {k: v for k, v in found.items() if k != "sqnr"} == {
                k: v for k, v in one[name].items() if k != "sqnr"
            }, name
        assert found.get("count") == one[name].get("count")
        if "sqnr" in found:
            # of do: the gradient sums otherwise, in bfloat16
            assert found["sqnr"] == pytest.approx(one[name]["sqnr"], rel=2.0**-8)
        assert found["amax"] == pytest.approx(one[name]["amax"], rel=2.0**-6)


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
#
def test_measuring_changes_no_bit_and_the_record_is_reported(backend, config, tmp_path):
    config = config.replace(
        run={"steps": 3}, parallel={"checkpointing": "full"} if backend == "torch" else {}
    )
    for name, every in (("with", 1), ("without", 0)):
        loop.train(config.replace(statistics={"every": every}), backend, tmp_path / name)
    losses = [
        [line["loss"] for line in log.read_metrics(tmp_path / name)] for name in ("with", "without")
    ]
    assert losses[0] == losses[1]
    lines = run_files.statistics(tmp_path / "with")
    assert [len(line["statistics"]) for line in lines] == [10, 10, 10]
    for measure in ("amax", "underflow_rate", "sqnr"):
        titles = [ax.get_title(loc="left") for ax in figures.heat_map(lines, measure).axes]
        assert [title for title in titles if title] == [
            "q",
            "k",
            "v",
            "do",
            *(["p", "ds"] if measure != "sqnr" else []),
        ]
    assert figures.heat_map(lines, "overflow_rate") is None  # nothing is clipped
    replayed = what_if.replay(tmp_path / "with", "torchao").outcomes
    assert list(replayed) == [
        f"model.layers.0.self_attn/{role}/e4m3fn" for role in ("q", "k", "v", "do", "p", "ds")
    ]


def test_a_record_without_fp8_has_no_attention(config):
    for variant in (None, "bf16", "exact"):
        plain = config.replace(numerics={"attention": variant})
        assert plain.attention_in_fp8 == []
        assert attention_products.planned(plain.attention_in_fp8, plain.attention_variant) == []


def test_a_phase_is_not_decided_by_attention():  # T-9
    one, other = "model.layers.0.self_attn/scores/q", "model.layers.0.self_attn.q_proj/output/input"
    assert schedule.lowest_sqnr({one: {"sqnr": 10.0}, other: {"sqnr": 20.0}}) == (20.0, other)
