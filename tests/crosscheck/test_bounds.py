import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn import functional

from fp8ref.crosscheck import bounds
from fp8ref.formats import BFLOAT16, E4M3FN
from fp8ref.recipe import RECIPES
from fp8ref.selection import linears as linear_selection
from fp8ref.sim import llama as model
from fp8ref.sim.gemm import gemm
from fp8ref.sim.quantize import cast, scaling
from fp8ref.spec import llama
from fp8ref.torch.blocks import operations

ATTENTION = llama.LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)


def test_constants_are_students_quantiles():  # B-3, B-4
    assert stats.t.ppf(1 - 1e-6 / 2, bounds.SAMPLES - 1) == pytest.approx(bounds.T_LOSS, abs=0.01)
    assert stats.t.ppf(1 - 1e-4 / 2, bounds.REPLICATES) == pytest.approx(bounds.T_CURVE, abs=0.02)
    assert 2**19 * 2 * stats.norm.sf(bounds.SIGMAS) < 1e-9  # B-2


@pytest.mark.parametrize("order", ["ascending", "descending", "pairwise", "scaled_operands"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_any_order_of_float32_sums_is_within_the_gemm_bound(order, recipe, rng):  # B-1
    spec = RECIPES[recipe].grad_weight
    x, y = ((rng.standard_normal((n, 512)) + 1).astype(np.float32) for n in (8, 6))
    a, b = (
        scaling.quantize(v, E4M3FN, granularity=spec.a.granularity, policy=spec.a.policy)
        for v in (x, y)
    )
    left, right = (cast.decode(q.codes, q.fmt) for q in (a, b))
    sa, sb = a.scale_inv.reshape(-1, 1), b.scale_inv.reshape(1, -1)
    if order == "scaled_operands":
        left, right, sa, sb = left * sa, right * sb.T, np.float32(1), np.float32(1)
    products = left[:, None, :] * right[None, :, :]
    if order == "pairwise":
        acc = products.sum(-1, dtype=np.float32)
    else:
        acc = np.zeros(products.shape[:2], np.float32)
        for k in range(512)[:: -1 if order == "descending" else 1]:
            acc += products[..., k]
    if spec.epilogue == "scale_then_round" or order == "scaled_operands":
        out = cast.round_to(acc * sa * sb, BFLOAT16)
    else:
        out = cast.round_to(cast.round_to(acc, BFLOAT16) * (sa * sb), BFLOAT16)
    simulated = gemm.matmul(a, b, epilogue=spec.epilogue, out_dtype=BFLOAT16)
    assert (np.abs(out - simulated) <= bounds.gemm(a, b, spec, out, simulated)).all()


def test_the_gemm_bound_is_a_few_ulps():
    """A wrong scale or a lost term must not hide under it: below 2 % of a typical output."""
    x = np.random.default_rng(0).standard_normal((16, 256)).astype(np.float32)
    q = scaling.quantize(x, E4M3FN)
    out = gemm.matmul(q, q, out_dtype=BFLOAT16)
    assert (
        np.median(bounds.gemm(q, q, RECIPES["tensorwise"].output, out, out))
        < 0.02 * np.abs(out).mean()
    )


@pytest.mark.parametrize("wide", [True, False])
def test_the_bound_of_a_sum_is_what_its_roundings_can_lose(wide, rng):  # P-8
    """By hand from the parts' own bounds: none of the terms may be wider than it has to be."""
    spec, parts = RECIPES["tensorwise"].grad_weight, []
    for _ in range(3):
        x, y = (rng.standard_normal((n, 32)).astype(np.float32) for n in (4, 5))
        a, b = (scaling.quantize(v, E4M3FN) for v in (x, y))
        parts.append((a, b, gemm.matmul(a, b, out_dtype=BFLOAT16)))
    found = np.full((4, 5), 2.0)
    each = [bounds.gemm(a, b, spec, out, out) for a, b, out in parts]
    largest = [np.abs(out) + own for (*_, out), own in zip(parts, each, strict=True)]
    unit = 2.0**-24 if wide else 2.0**-8  # of a sum of float32, or of bfloat16
    two_additions, both_rounded = 2 * 2 * unit * sum(largest), 2 * 2.0**-8 * (2.0 + sum(each))
    expected = sum(each) + two_additions + both_rounded
    np.testing.assert_allclose(
        bounds.summed_gemm(parts, spec, found, wide=wide), expected, rtol=1e-12
    )


def test_forward_bounds_hold_another_sample_and_not_another_model(rng):  # B-2, B-3
    config = llama.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    weights = llama.initial_weights(config, seed=0)
    tokens = rng.integers(0, 256, (2, 17))
    recipes = {
        d.path: d.recipe for d in linear_selection.select(llama.linear_shapes(config), "tensorwise")
    }
    logits, loss, logits_bound, loss_bound = bounds.forward(tokens, weights, config, recipes)
    other = model.forward(tokens[:, :-1], weights, config, model.Numerics(recipes=recipes), seed=99)
    assert (np.abs(other - logits) <= logits_bound).all()
    assert abs(model.loss(other, tokens[:, 1:]) - loss) <= loss_bound
    wrong = weights | {
        "model.layers.0.self_attn.v_proj.weight": weights["model.layers.0.self_attn.v_proj.weight"][
            ::-1
        ]
    }
    different = model.forward(tokens[:, :-1], wrong, config, model.Numerics(recipes=recipes))
    assert (np.abs(different - logits) > logits_bound).any()


def test_probe_weights_make_everything_matter():  # B-6
    config = llama.LlamaConfig()
    weights = bounds.probe_weights(llama.initial_weights(config, seed=0), seed=0)
    llama.check_weights(weights, config)
    x = np.random.default_rng(0).standard_normal((500, config.hidden_size))
    q, k = (x @ weights[f"model.layers.0.self_attn.{p}_proj.weight"].T for p in "qk")
    scores = q[:, : config.head_dim] @ k[:, : config.head_dim].T / np.sqrt(config.head_dim)
    assert 1 < scores.std() < 4
    assert 0.1 < weights["model.norm.weight"].std() < 0.4


def test_gradient_bound_is_three_times_a_replicates_departure():  # B-5
    base = np.zeros(4)
    assert bounds.gradient(
        base, [np.array([3.0, 0, 0, 0]), np.array([0, 0, 0, -3.0])]
    ) == pytest.approx(9)


def test_rerounded_weights_are_bfloat16_neighbors(rng):  # B-4
    value = {"w": rng.standard_normal(1000).astype(np.float32)}
    found = bounds.rerounded(value, seed=1)["w"]
    np.testing.assert_array_equal(found, cast.round_to(found, BFLOAT16))
    assert (np.abs(found - value["w"]) < np.abs(value["w"]) * 2.0**-7).all()
    assert (found != cast.round_to(value["w"], BFLOAT16)).mean() > 0.2


def test_curve_bound_grows_and_is_scaled_by_the_replicates():  # B-4
    base = np.zeros(3)
    replicates = np.array([[1e-3, 0, 2e-3], [-1e-3, 0, -2e-3]])
    np.testing.assert_allclose(
        bounds.curve(base, replicates), bounds.T_CURVE * np.array([1e-3, 1e-3, 2e-3])
    )


# ---- attention ----


def projections(gain: float, length: int = 24):
    rng = np.random.default_rng(3)
    shapes = {"q": 64, "k": 32, "v": 32}
    return {
        name: torch.from_numpy(gain * rng.standard_normal((2, length, n))).bfloat16()
        for name, n in shapes.items()
    }


def in_torch(given, *, causal: bool = True, rotate: bool = True) -> np.ndarray:
    q, k, v = (x.view(*x.shape[:2], -1, ATTENTION.head_dim).transpose(1, 2) for x in given.values())
    cos, sin = (torch.from_numpy(t) for t in llama.rotary_tables(ATTENTION, q.shape[2]))
    q, k = (operations.rotate(x, cos, sin) if rotate else x for x in (q, k))
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return y.transpose(1, 2).flatten(2).float().numpy()


def exact(given):
    return bounds.attention(*(x.float().numpy() for x in given.values()), ATTENTION)


@pytest.mark.parametrize("gain", [0.01, 0.3, 1.0])
def test_torchs_attention_is_within_the_bound(gain):  # B-11
    given = projections(gain)
    simulated = exact(given)
    out = in_torch(given)
    assert simulated.distance(out) <= 1
    # torch rounds before it normalizes; a float32 sum takes few elements to the other side of a tie
    assert (out == simulated.after).mean() > 0.95
    assert (out == simulated.before).mean() < 0.9
    assert max(simulated.distance(simulated.before), simulated.distance(simulated.after)) <= 1


@pytest.mark.parametrize("fault", [{"causal": False}, {"rotate": False}])
def test_another_attention_exceeds_the_bound(fault):
    """At scores of order one tenth; where they are large, the roundings of queries and keys leave
    all that and more open.
    """
    given = projections(0.3)
    assert exact(given).distance(in_torch(given, **fault)) > 1
