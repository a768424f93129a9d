import dataclasses

import numpy as np
import pytest
import torch
from transformers import LlamaConfig as HuggingFaceConfig
from transformers import LlamaForCausalLM

from fp8ref.formats import BFLOAT16, E4M3FN
from fp8ref.recipe import RECIPES, SHARED_RECIPES
from fp8ref.selection import linears as linear_selection
from fp8ref.sim import delayed
from fp8ref.sim import llama as model
from fp8ref.sim.attention import attention
from fp8ref.sim.quantize import cast, scales, scaling
from fp8ref.spec import llama
from fp8ref.spec.attention.variants import Mask

CONFIG = llama.LlamaConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def recipes(config, name):
    return {d.path: d.recipe for d in linear_selection.select(llama.linear_shapes(config), name)}


def numerics(config, recipe, **keys):
    return model.Numerics(recipes=recipes(config, recipe), **keys)


def pass_of(seen, **keys):
    """A pass without weights, whose values by role become those of seen."""
    watch = lambda site: seen.update({site.role: site.value})  # noqa: E731
    return model._Pass({}, CONFIG, model.Numerics(**keys), model.Rounding(), watch)


@pytest.mark.parametrize("tied", [False, True])
def test_without_rounding_the_model_is_transformers(tied, rng, monkeypatch):  # M-1, M-3, M-4
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
    weights = llama.initial_weights(config, seed=1)
    weights = {
        k: (v * 5 if v.ndim == 2 else v + rng.standard_normal(v.shape) * 0.1).astype(np.float32)
        for k, v in weights.items()
    }
    hf = HuggingFaceConfig(
        **dataclasses.asdict(config), attention_bias=False, attn_implementation="eager"
    )
    reference = LlamaForCausalLM(hf).double()
    reference.load_state_dict({k: torch.tensor(v) for k, v in weights.items()}, strict=not tied)
    tokens = rng.integers(0, 256, (2, 9))
    with torch.no_grad():
        expected = reference(torch.tensor(tokens)).logits.numpy()
    monkeypatch.setattr(model.Rounding, "__call__", lambda self, x: x.astype(np.float64))
    found = model.forward(tokens, weights, config, numerics(config, "bf16"))
    # all in float64 but the rotary tables, float32 on both sides: 2^-24 relative on each rotated
    # query and key
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_loss_is_torchs_cross_entropy(rng):  # M-5
    logits, targets = rng.standard_normal((2, 5, 11)) * 3, rng.integers(0, 11, (2, 5))
    expected = torch.nn.functional.cross_entropy(
        torch.tensor(logits).flatten(0, 1), torch.tensor(targets).flatten()
    ).item()
    assert model.loss(logits, targets) == pytest.approx(expected, rel=1e-14)


def casts():
    """Every way in which a recipe makes an operand of the forward pass FP8."""
    return sorted(
        {spec for r in RECIPES.values() for spec in (r.output.a, r.output.b) if spec is not None},
        key=str,
    )


@pytest.mark.parametrize(
    "spec",
    casts(),
    ids=lambda spec: f"{spec.granularity}-{spec.policy.name}-{spec.delayed is not None}",
)
def test_rounded_to_nearest_operands_are_the_simulators(spec, rng):  # S-5, H-1, H-2
    x = rng.standard_normal((128, 256)).astype(np.float32) * 100
    if spec.delayed is None:
        q = scaling.quantize(x, spec.fmt, granularity=spec.granularity, policy=spec.policy)
    else:
        one = np.float32(1)
        q = scaling.quantize_with(x, scales.Scales(one, one), spec.fmt, policy=spec.policy)
    by = model.scales_of(x, spec)
    found = model.values(model.Rounding().codes(x, spec, by), spec, by)
    np.testing.assert_array_equal(found.astype(np.float32), scaling.dequantize(q))


@pytest.mark.parametrize("recipe", [*SHARED_RECIPES, "mxfp8"])
def test_stochastic_samples_surround_the_nearest_even_result(recipe, rng):
    weights = llama.initial_weights(CONFIG, seed=0)
    tokens = rng.integers(0, 256, (2, 9))
    args = (tokens, weights, CONFIG, numerics(CONFIG, recipe))
    nearest, *samples = (model.forward(*args, seed=seed) for seed in (None, 0, 1, 2))
    np.testing.assert_array_equal(samples[0], model.forward(*args, seed=0))
    assert (samples[0] != samples[1]).any()
    spread = (samples[0] - samples[1]).std()
    assert 0 < spread < 0.25 * nearest.std()
    assert np.abs(nearest - np.mean(samples, axis=0)).max() < 10 * spread


def test_states_scale_what_delayed_scaling_casts(rng):  # H-1
    config = dataclasses.replace(CONFIG, num_hidden_layers=1)
    weights, tokens = llama.initial_weights(config, seed=0), rng.integers(0, 256, (2, 9))
    name = "model.layers.0.mlp.down_proj"
    seen = {}
    first = delayed.init("delayed")
    states = {f"{name}/weight": first._replace(stored=np.float32(2.0**10)), f"{name}/input": first}
    delayed_numerics = numerics(config, "delayed", states=states)
    model.forward(
        tokens,
        weights,
        config,
        delayed_numerics,
        watch=lambda site: seen.update({(site.module, site.role): site}),
    )
    assert (seen[name, "weight scale"].value, seen[name, "weight scale_inv"].value) == (
        2**10,
        2.0**-10,
    )
    factors = seen[name, "output"].factors
    q = scaling.quantize_with(
        seen[name, "weight"].value.astype(np.float32),
        scales.Scales(np.float32(2**10), np.float32(2.0**-10)),
        E4M3FN,
    )
    np.testing.assert_array_equal(factors["weight"], scaling.dequantize(q))
    np.testing.assert_array_equal(
        seen[name, "output"].value, model.Rounding()(factors["input"] @ factors["weight"].T)
    )


def test_every_value_is_watched_in_order(rng):  # M-3
    config = dataclasses.replace(CONFIG, num_hidden_layers=1)
    sites = []
    found = model.forward(
        rng.integers(0, 256, (2, 9)),
        llama.initial_weights(config, seed=0),
        config,
        numerics(config, "bf16"),
        watch=sites.append,
    )
    linear = ["weight", "output"]
    attention = [
        "rotated query",
        "rotated key",
        "attention scores",
        "attention probabilities",
        "attention output",
    ]
    assert [site.role for site in sites] == [
        "output",  # the embedding's
        *linear,  # a norm has the same roles
        *(3 * linear),
        *attention,
        *linear,
        "residual after self_attn",
        *linear,
        *(2 * linear),
        "silu(gate) * up",
        *linear,
        "residual after mlp",
        *linear,
        *linear,
    ]
    assert sites[-1].module == "lm_head"
    np.testing.assert_array_equal(sites[-1].value, found)


def test_what_is_float32_overflows_as_float32_does():  # M-7
    limit = float(np.finfo(np.float32).max)
    given = np.array(
        [limit, -limit, limit * (1 + 2.0**-26), limit * (1 + 2.0**-24), -1e39, np.nan, np.inf]
    )
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(
            np.isinf(model.in_range(given)), np.isinf(given.astype(np.float32))
        )
    np.testing.assert_array_equal(model.in_range(given)[:3], given[:3])
    config = dataclasses.replace(CONFIG, num_hidden_layers=1)
    weights = llama.initial_weights(config, seed=0)
    weights[llama.EMBEDDING][:] = 4e18  # 32 squares of which are 5.1e38, and their mean is 1.6e37
    sites = {}
    model.forward(
        np.zeros((1, 3), int),
        weights,
        config,
        numerics(config, "bf16"),
        watch=lambda s: sites.update({(s.module, s.role): s}),
    )
    norm = sites["model.layers.0.input_layernorm", "output"]
    assert norm.parts["mean of squares"].min() == np.inf
    assert not norm.value.any()


@pytest.mark.parametrize(("gain", "fails"), [(-1.0, False), (1.0, True)])
def test_scores_of_minus_infinity_are_no_failure_beside_others(gain, fails):  # M-7
    query = np.full((1, 1, 2, 4), 1e20)
    key = np.zeros((1, 1, 2, 4))
    key[0, 0, 1] = gain * 1e20
    seen = {}
    with np.errstate(invalid="ignore"):
        out = pass_of(seen)._attention("self_attn", query, key, np.ones_like(key))
    assert np.isfinite(seen["attention scores"]).all() == (not fails)
    assert np.isfinite(out).all() == (not fails)


def test_tokens_outside_the_vocabulary_are_refused():
    with pytest.raises(ValueError, match=r"\[0, 256\)"):
        model.forward(
            np.array([[256]]),
            llama.initial_weights(CONFIG, seed=0),
            CONFIG,
            numerics(CONFIG, "bf16"),
        )


def test_a_variant_attends():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, heads, 5, 32)) for heads in (2, 1, 1))
    seen = {}

    given = [x.astype(np.float32) for x in (q, k, v)]
    one_pass = pass_of(seen, attention="cudnn")
    out = one_pass._attention_in_fp8("self_attn", *(x.astype(np.float64) for x in given))
    right = attention.forward(*given, variant="cudnn", mask=Mask(causal=True)).o
    np.testing.assert_array_equal(out, cast.round_to(right, BFLOAT16))
    assert list(seen) == ["attention output"]


def test_a_variant_of_numbers_that_are_not_finite_is_nan():
    x = np.full((1, 1, 2, 4), np.inf)
    assert np.isnan(pass_of({}, attention="cudnn")._attention_in_fp8("self_attn", x, x, x)).all()
