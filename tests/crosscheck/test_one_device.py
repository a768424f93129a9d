import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torchao.float8 import float8_training_tensor, float8_utils

from fp8ref.conformance.kit.compare import Report
from fp8ref.crosscheck import bounds, one_device
from fp8ref.crosscheck.one_device import (
    check_curves,
    check_forward,
    check_gradients,
    check_weights,
    crosscheck,
)
from fp8ref.formats import FP8_FORMATS
from fp8ref.jax.gemm import gemm as jax_gemm
from fp8ref.jax.linear import linear as jax_linear
from fp8ref.jax.quantize import cast as jax_cast
from fp8ref.jax.quantize import scales as jax_scales
from fp8ref.selection.rules import Rule
from fp8ref.shared.errors import ConfigError
from fp8ref.sim.quantize import cast as sim_cast
from fp8ref.spec import llama
from fp8ref.torch import delayed as torch_delayed
from fp8ref.torch.quantize import cast as torch_cast
from fp8ref.train import loop
from fp8ref.train.jax.llama import llama as jax_model
from fp8ref.train.torch import trainer as torch_train
from fp8ref.train.torch.llama import llama as torch_model

SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)
RARE = [
    ("delayed", "jax"),
    *itertools.product(("blockwise", "mxfp8", "mxfp4", "nvfp4"), ("torch", "jax")),
]


def run(config, recipe, **options):
    return crosscheck(config.replace(numerics={"recipe": recipe}), **options)


@pytest.mark.parametrize(
    "recipe", ["tensorwise", SLOW("rowwise"), SLOW("rowwise_with_gw_hp"), SLOW("bf16")]
)
def test_both_backends_hold_to_the_simulator(recipe, small):
    report = run(small, recipe, steps=2)
    assert report.ok, [f.detail for f in report.failures]
    rows = {row.name: row for row in report.table()}
    if recipe != "bf16":
        for backend in ("jax", "torch"):
            for role in ("input", "weight", "grad_output"):
                for kind in ("codes", "scale"):
                    row = rows[f"layers/{role}/{kind}/{backend}"]
                    assert row.compared == row.equal > 0
            assert rows[f"layers/output/value/{backend}"].compared > 0
    for name in (
        "logits/step0/value/jax",
        "logits/step0/value/jax-torch",
        "loss/step0/value/torch",
        "loss/curve/value/jax-torch",
    ):
        assert name in rows
    assert rows["grad_norm/curve/value/jax-torch"].compared == 2
    parameters = {name.removesuffix(".weight") for name in llama.parameter_shapes(small.model)}
    assert {
        name.partition("/gradient/value/")[0]
        for name in report.checks
        if "/gradient/value/" in name
    } == parameters
    for backend in ("jax", "torch"):
        assert {
            f"weights/initial/value/{backend}",
            f"synthetic.cast/e4m3fn/codes/{backend}",
        } <= report.checks.keys()


def test_one_backend_alone(small):
    report = run(small, "tensorwise", backends=("torch",), steps=0)
    assert report.ok
    assert {name.rsplit("/", 1)[1] for name in report.checks} == {"torch"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "backend"),
    [("delayed", "torch"), *(SLOW(*case) for case in RARE)],
    ids=lambda value: value,
)
def test_recipes_of_fp8refs_own_linear(recipe, backend, small):
    if recipe == "blockwise":  # blocks of 128 along N, K and the tokens
        small = small.replace(
            model={"hidden_size": 128, "intermediate_size": 128}, data={"sequence_length": 32}
        )
    report = run(small, recipe, backends=(backend,), steps=2)
    assert report.ok, [f.detail for f in report.failures]
    scales = {row.name: row for row in report.table()}[f"layers/grad_output/scale/{backend}"]
    # the operands of two GEMMs; delayed scales are looked at before each step and after the last
    assert recipe != "delayed" or scales.compared == 2 * 3 * len(
        [d for d in small.replace(numerics={"recipe": recipe}).decisions() if d.fp8]
    )
    assert scales.compared == scales.equal > 0


@pytest.mark.slow
@pytest.mark.parametrize("epilogue", ["product_then_round", "unit_round_scale_round"])
def test_epilogues_that_a_rule_gives(epilogue, small, monkeypatch):  # R-8, G-5, G-14
    """Also of cuBLASLt's, whose formula XLA computes on a CPU; the trainer's GEMMs have no
    other.
    """
    ruled = small.replace(numerics={"rules": (Rule(layers=("*",), epilogue=epilogue),)})
    report = crosscheck(ruled, backends=("jax",), steps=1)
    assert report.ok, [f.detail for f in report.failures]
    used, finish = set(), jax_gemm.finish

    def spied(acc, a, b, name, dtype):
        used.add(name)
        return finish(acc, a, b, name, dtype)

    monkeypatch.setattr(jax_gemm, "finish", spied)
    loop.trainer("jax", ruled).step(
        np.zeros((ruled.data.batch_size, ruled.data.sequence_length + 1), np.int64)
    )
    assert used == {epilogue}


def test_a_history_that_stands_still_fails_and_is_located(small, monkeypatch):  # H-1
    monkeypatch.setattr(torch_train.delayed, "update", lambda model, **_: None)
    with pytest.warns(UserWarning, match="an optimizer step was taken without one"):
        report = run(small, "delayed", backends=("torch",), steps=1)
    failures = {f.name.rpartition("self_attn.")[2] for f in report.failures}
    assert {
        "q_proj/input/scale/torch",
        "q_proj/input/codes/torch",
        "q_proj/grad_output/scale/torch",
    } <= failures


def test_wrong_states_of_attention_are_found(small, monkeypatch):  # A-19, H-3
    """The simulator has states of its own: the trainer's scales are held to them, not taken from
    it.
    """
    original = torch_delayed.advance
    monkeypatch.setattr(
        torch_delayed,
        "advance",
        lambda *given, **how: (s := original(*given, **how))._replace(scale=s.scale * 2),
    )
    numerics = {"recipe": "bf16", "attention": "cudnn", "attention_scaling": "delayed"}
    report = crosscheck(small.replace(numerics=numerics), backends=("torch",), steps=1)
    failures = {f.name.rpartition("self_attn/")[2] for f in report.failures}
    assert {f"{role}/scale/torch" for role in ("q", "k", "v")} <= failures


def test_states_of_attention_hold_to_the_simulator(small):
    numerics = {"recipe": "bf16", "attention": "cudnn", "attention_scaling": "delayed"}
    report = crosscheck(small.replace(numerics=numerics), backends=("torch",), steps=2)
    assert report.ok, [f.detail for f in report.failures]
    compared = [
        check for name, check in report.checks.items() if name.endswith("self_attn/do/scale/torch")
    ]
    assert compared
    assert all(check.compared == 3 for check in compared)  # before each step and after the last


def test_a_kernel_is_refused(by_kernel):
    with pytest.raises(
        ConfigError,
        match=r"the cross-check takes attention by tiles; got parallel.attention 'kernel'",
    ):
        crosscheck(by_kernel)


class Answers:
    """A trainer that was asked before: it gives what it is made with."""

    def __init__(self, **values):
        self.values = values

    def weights(self):
        return self.values["weights"]

    def gradients(self, tokens):
        return self.values["gradients"]

    def logits(self, tokens):
        return self.values["logits"]

    def evaluate(self, tokens):
        return self.values["loss"]

    def step(self, tokens):
        return self.values["lines"].pop(0)


def failures(report):
    assert report.checks
    return {check.name for check in report.failures}


def test_initial_weights_of_each_backend_are_held_to_the_configs(small):  # M-6
    weights = llama.initial_weights(small.model, seed=0)
    name = "model.layers.0.mlp.up_proj.weight"
    wrong = weights | {name: np.nextafter(weights[name], np.float32(1))}
    report = Report()
    check_weights(
        report, {"jax": Answers(weights=weights), "torch": Answers(weights=wrong)}, weights
    )
    assert failures(report) == {"weights/initial/value/torch"}
    assert report.checks["weights/initial/value/jax"].equal == sum(w.size for w in weights.values())
    assert (
        report.checks["weights/initial/value/torch"].equal
        == sum(w.size for w in weights.values()) - weights[name].size
    )


# B-2, B-3
def test_logits_and_losses_are_held_to_the_simulated_and_to_each_other(small, monkeypatch):
    logits, bound = np.zeros((1, 4, 8)), np.full((1, 4, 1), 0.5)
    monkeypatch.setattr(bounds, "forward", lambda *args, **kwargs: (logits, 2.0, bound, 0.125))

    def failed(jax, torch):
        backends = {"jax": jax, "torch": torch}
        trainers = {
            who: Answers(logits=logits + by * bound, loss=2.0 + loss * 0.125)
            for who, (by, loss) in backends.items()
        }
        report = Report()
        tokens = np.zeros((1, 5), np.int64)
        check_forward(report, "probe", trainers, {}, tokens, small, advance=lambda: None)
        return failures(report)

    assert failed((0.9, 0.9), (0.0, 0.0)) == set()
    assert failed((1.1, 0.0), (0.2, 0.0)) == {"logits/probe/value/jax"}
    assert failed((0.0, 0.2), (0.0, 1.1)) == {"loss/probe/value/torch"}
    assert failed((0.9, 0.9), (-0.9, -0.9)) == {
        "logits/probe/value/jax-torch",
        "loss/probe/value/jax-torch",
    }


def test_gradients_of_every_parameter_are_compared(small, monkeypatch):  # B-5
    weights = {"embed.weight": np.ones((2, 2), np.float32), "norm.weight": np.ones(3, np.float32)}
    gradients = {name: np.ones_like(value) for name, value in weights.items()}
    apart = {name: value + np.float32(0.01) for name, value in gradients.items()}
    monkeypatch.setattr(one_device.loop, "trainer", lambda *args: Answers(gradients=apart))

    def failed(other):
        report = Report()
        trainers = {"torch": Answers(gradients=gradients), "jax": Answers(gradients=other)}
        check_gradients(report, trainers, weights, np.zeros((1, 2)), small, advance=lambda: None)
        assert set(report.checks) == {
            "embed/gradient/value/jax-torch",
            "norm/gradient/value/jax-torch",
        }
        return failures(report)

    # the bound is GRADIENT_FACTOR = 3 times the distance of replicates, 0.01 in each element
    assert failed({name: value - np.float32(0.029) for name, value in gradients.items()}) == set()
    assert failed(gradients | {"norm.weight": gradients["norm.weight"] - np.float32(0.031)}) == {
        "norm/gradient/value/jax-torch"
    }


def test_curves_of_both_metrics_are_compared_at_every_step(small, monkeypatch):  # B-4
    lines = [{"loss": 2.0, "grad_norm": 1.0}, {"loss": 1.5, "grad_norm": 0.5}]

    class Batches:
        def step(self, step):
            return step

    def shifted(by):
        return [{metric: value + by for metric, value in line.items()} for line in lines]

    monkeypatch.setattr(one_device.loop, "trainer", lambda *args: Answers(lines=shifted(0.01)))

    def failed(step, metric, by):
        other = shifted(0.0)
        other[step][metric] += by
        report = Report()
        check_curves(
            report, {"torch": lines, "jax": other}, {}, Batches(), small, advance=lambda: None
        )
        return failures(report)

    bound = bounds.T_CURVE * 0.01
    for metric in ("loss", "grad_norm"):
        for step in (0, 1):
            assert failed(step, metric, 0.9 * bound) == set()
            assert failed(step, metric, -1.1 * bound) == {f"{metric}/curve/value/jax-torch"}


def jax_scale_one_ulp_up(monkeypatch):
    original = jax_scales.scales_from_amax

    def fault(*args):
        return jax_scales.with_inverse(jnp.nextafter(original(*args).scale, jnp.float32(jnp.inf)))

    monkeypatch.setattr(jax_scales, "scales_from_amax", fault)


def jax_rounds_to_odd(monkeypatch):
    def fault(x, fmt, *, saturate=True):
        dtype = jax_cast.DTYPES[fmt.name]
        value = jnp.clip(jax_cast.to_f32(x), -fmt.max, fmt.max)
        nearest = value.astype(dtype)
        codes = jax_linear.jax.lax.bitcast_convert_type(nearest, jnp.uint8)
        back = nearest.astype(jnp.float32)
        # the neighbor on the other side of the value
        step = jnp.where(jnp.abs(back) > jnp.abs(value), -1, 1)
        odd = jnp.where(
            (back != value) & (codes % 2 == 0) & (codes & 0x7F != 0), codes + step, codes
        )
        return jax_linear.jax.lax.bitcast_convert_type(odd.astype(jnp.uint8), dtype)

    cast_eight_bits(monkeypatch, jax_cast, fault)


def cast_eight_bits(monkeypatch, backend, cast):
    """Cast to FP8 by a function, and to 4 bits, which has no other codes (C-9), as before."""
    to_fp8 = backend.to_fp8

    def either(x, fmt, **options):
        return cast(x, fmt) if fmt.bits == 8 else to_fp8(x, fmt, **options)

    monkeypatch.setattr(backend, "to_fp8", either)


def jax_leaves_saturation_out(monkeypatch):
    def unsaturated(x, fmt):
        return jax_cast.to_f32(x).astype(jax_cast.DTYPES[fmt.name])

    cast_eight_bits(monkeypatch, jax_cast, unsaturated)


def torch_scale_one_ulp_down(monkeypatch):
    original = float8_utils.amax_to_scale

    def fault(*args, **kwargs):
        return torch.nextafter(original(*args, **kwargs), torch.tensor(0.0))

    monkeypatch.setattr(float8_utils, "amax_to_scale", fault)


def torch_rounds_to_odd(monkeypatch):
    def fault(x, dtype):
        fmt = next(f for f in FP8_FORMATS.values() if torch_cast.DTYPES[f.name] == dtype)
        codes = sim_cast.encode(x.detach().numpy(), fmt, rounding="to_odd")
        return torch.from_numpy(codes).view(dtype)

    monkeypatch.setattr(float8_training_tensor, "to_fp8_saturated", fault)


def torch_leaves_saturation_out(monkeypatch):
    def unsaturated(x, fmt):
        return torch_cast.to_f32(x).to(torch_cast.DTYPES[fmt.name])

    cast_eight_bits(monkeypatch, torch_cast, unsaturated)


@pytest.mark.parametrize(
    ("plant", "backend", "names"),
    [
        SLOW(
            jax_scale_one_ulp_up,
            "jax",
            [
                "q_proj/input/scale/jax",
                "q_proj/grad_output/scale/jax",
                "synthetic.normal/tensorwise/scale/jax",
            ],
        ),
        SLOW(
            jax_rounds_to_odd,
            "jax",
            ["q_proj/input/codes/jax", "q_proj/weight/codes/jax", "q_proj/grad_output/codes/jax"],
        ),
        SLOW(
            jax_leaves_saturation_out,
            "jax",
            ["synthetic.cast/e4m3fn/codes/jax", "synthetic.cast/e5m2/codes/jax"],
        ),
        (
            torch_scale_one_ulp_down,
            "torch",
            ["q_proj/input/scale/torch", "q_proj/weight/scale/torch"],
        ),
        (
            torch_rounds_to_odd,
            "torch",
            ["q_proj/input/codes/torch", "q_proj/grad_output/codes/torch"],
        ),
        (torch_leaves_saturation_out, "torch", ["synthetic.cast/e5m2/codes/torch"]),
    ],
)
def test_a_planted_fault_fails_and_is_located(plant, backend, names, small, monkeypatch):
    plant(monkeypatch)
    report = run(small, "tensorwise", backends=(backend,), steps=0)
    assert not report.ok
    details = {check.name: check.detail for check in report.failures}
    for name in names:
        [found] = [detail for failed, detail in details.items() if failed.endswith(name)][:1]
        assert "differ, first at [" in found
        assert "sim 0x" in found or "sim np.float32" in found
        if "/codes/" in name:
            assert "float32 bits 0x" in found


def no_causal_mask(monkeypatch):
    original = jax.nn.dot_product_attention
    monkeypatch.setattr(
        jax.nn,
        "dot_product_attention",
        lambda *args, **kwargs: original(*args, **{**kwargs, "is_causal": False}),
    )


def no_scaling_of_scores(monkeypatch):
    original = jax.nn.dot_product_attention
    monkeypatch.setattr(
        jax.nn,
        "dot_product_attention",
        lambda *args, **kwargs: original(*args, **kwargs, scale=1.0),
    )


def rotary_of_interleaved_pairs(monkeypatch):
    def rotate(x, cos, sin):
        wide, half = x.astype(jnp.float32), x.shape[-1] // 2
        even, odd = wide[..., ::2], wide[..., 1::2]
        c, s = cos[:, None, :half], sin[:, None, :half]
        return (
            jnp.stack([even * c - odd * s, even * s + odd * c], -1).reshape(x.shape).astype(x.dtype)
        )

    monkeypatch.setattr(jax_model, "rotate", rotate)


def gelu_for_silu(monkeypatch):
    # the function itself: JAX keeps the trace of what it calls
    monkeypatch.setattr(
        jax_model,
        "swiglu",
        lambda gate, up: (jax.nn.gelu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(
            gate.dtype
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "recipe"),
    [
        (no_causal_mask, "bf16"),
        SLOW(no_scaling_of_scores, "tensorwise"),
        *(
            SLOW(plant, "bf16")
            for plant in (no_scaling_of_scores, rotary_of_interleaved_pairs, gelu_for_silu)
        ),
        SLOW(rotary_of_interleaved_pairs, "tensorwise"),
    ],
)
def test_a_wrong_model_breaks_the_logits_bound(plant, recipe, small, monkeypatch):  # B-2, B-6
    plant(monkeypatch)
    failed = {check.name for check in run(small, recipe, backends=("jax",), steps=0).failures}
    assert "logits/probe/value/jax" in failed


@pytest.mark.slow
# B-5: the mean square is taken for a constant in one backend
def test_wrong_gradients_break_their_bound(small, monkeypatch):
    def forward(self, x):
        wide = x.float()
        mean_square = wide.square().mean(-1, keepdim=True).detach()
        return (wide * torch.rsqrt(mean_square + self.eps) * self.weight.float()).to(x.dtype)

    monkeypatch.setattr(torch_model.RMSNorm, "forward", forward)
    report = run(small, "bf16", steps=0)
    failed = {check.name for check in report.failures}
    assert "model.embed_tokens/gradient/value/jax-torch" in failed
    assert not any("logits" in name or "loss" in name for name in failed)
