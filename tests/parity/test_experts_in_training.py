"""A model with experts in training: the simulator's operands, checkpoints, statistics, rules and
proofs, in either backend.
"""

import dataclasses

import numpy as np
import pytest
from helpers.training.ablations import ablated

from fp8ref.crosscheck.one_device import crosscheck
from fp8ref.selection import statistics as stats
from fp8ref.selection.rules import Rule
from fp8ref.spec.llama import LlamaConfig
from fp8ref.train import loop
from fp8ref.train.data import loader

MODEL = LlamaConfig(
    hidden_size=32,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    qk_norm=True,
    num_experts=4,
    num_experts_per_tok=2,
    shared_expert_intermediate_size=16,
)
BLOCKS = {"hidden_size": 128, "intermediate_size": 128, "shared_expert_intermediate_size": 128}
RECIPES = ("rowwise", "tensorwise", "delayed", "blockwise", "mxfp8")


@pytest.fixture
def mixture(small):
    """A config whose step takes milliseconds, in a recipe."""

    def of(recipe, **sections):
        config = dataclasses.replace(small, model=MODEL).replace(
            numerics={"recipe": recipe}, data={"sequence_length": 32}
        )
        return config.replace(model=BLOCKS if recipe in ("blockwise", "mxfp8") else {}).replace(
            **sections
        )

    return of


def case(backend, recipe, quick):
    return pytest.param(
        backend, recipe, marks=[] if (backend, recipe) in quick else pytest.mark.slow
    )


EVERY = [
    case(backend, recipe, {("torch", "delayed")}) for backend in loop.BACKENDS for recipe in RECIPES
]


@pytest.mark.parametrize(("backend", "recipe"), EVERY)
def test_every_experts_operands_are_the_simulators_bits(backend, recipe, mixture):  # X-2, M-8
    report = crosscheck(mixture(recipe), backends=(backend,), steps=1)
    assert report.ok, [f.detail for f in report.failures]
    rows = {row.name: row for row in report.table()}
    for role in ("input", "weight", "grad_output"):
        for kind in ("codes", "scale"):
            row = rows[f"layers/{role}/{kind}/{backend}"]
            assert row.compared == row.equal > 0
    of_experts = [name for name in report.checks if ".experts." in name]
    assert {name.split("/")[1] for name in of_experts} >= {
        "input",
        "weight",
        "grad_output",
        "output",
        "grad_input",
        "grad_weight",
    }


@pytest.mark.slow
def test_both_backends_agree_within_the_noise_of_rounding(mixture):  # B-2 to B-5
    report = crosscheck(mixture("rowwise"), steps=2)
    assert report.ok, [f.detail for f in report.failures]


@pytest.mark.parametrize(
    ("backend", "recipe"),
    [
        case(backend, recipe, {("torch", "delayed")})
        for backend in loop.BACKENDS
        for recipe in ("rowwise", "delayed")
    ],
)
def test_resuming_is_as_if_nothing_had_happened(backend, recipe, mixture, tmp_path):  # K-2
    config = mixture(recipe)
    opened = loader.open_batches(config)
    batches = [opened.step(k) for k in range(4)]
    whole, resumed = loop.trainer(backend, config), loop.trainer(backend, config)
    for tokens in batches[:2]:
        whole.step(tokens)
    whole.save(tmp_path / "state")()
    resumed.load(tmp_path / "state", 2)
    assert [resumed.step(tokens) for tokens in batches[2:]] == [
        whole.step(tokens) for tokens in batches[2:]
    ]
    for name, value in whole.weights().items():
        np.testing.assert_array_equal(resumed.weights()[name], value, err_msg=name)


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_a_proof_and_statistics_name_every_operand_of_experts(backend, mixture):  # B-7, B-8, Q-8
    trainer = loop.trainer(backend, mixture("tensorwise"))
    tokens = loader.open_batches(mixture("tensorwise")).step(0)
    proof = trainer.prove(tokens)
    assert not proof["missing"]
    proved = {gemm["gemm"] for gemm in proof["gemms"] if gemm["fp8"]}
    assert {
        f"model.layers.0.mlp.experts.{p}_proj/{g}"
        for p in ("gate", "up", "down")
        for g in ("output", "grad_input", "grad_weight")
    } <= proved
    found = trainer.statistics(tokens)
    assert found.keys() == {operand.name for operand in stats.planned(trainer.decisions)}
    # Every scale is that of one expert, whose amax the largest is of: 448 / amax, rounded down to a
    # power of two or not.
    of_weight = found["model.layers.0.mlp.experts.up_proj/output/weight"]
    master = trainer.weights()["model.layers.0.mlp.experts.up_proj.weight"]
    amaxes = np.abs(master).max(axis=(1, 2))
    assert of_weight["amax"] == pytest.approx(amaxes.max(), rel=2**-8)  # rounded to bfloat16
    assert of_weight["scale_max"] / of_weight["scale_min"] == pytest.approx(
        amaxes.max() / amaxes.min(), rel=2**-6
    )


@pytest.mark.slow
def test_both_backends_measure_the_same_statistics(mixture):
    """Of weights, which both backends cast the same: counts and scales are equal, sums of squares
    within their order.
    """
    config = mixture("rowwise")
    tokens = loader.open_batches(config).step(0)
    of_jax, of_torch = (
        loop.trainer(backend, config).statistics(tokens) for backend in loop.BACKENDS
    )
    weights = [name for name in of_torch if name.endswith("/weight")]
    assert weights
    for name in weights:
        exact = (
            "amax",
            "scale_min",
            "scale_max",
            "underflow_rate",
            "saturation_rate",
            "overflow_rate",
            "non_finite",
        )
        assert {key: of_jax[name][key] for key in exact} == {
            key: of_torch[name][key] for key in exact
        }, name
        assert of_jax[name]["sqnr"] == pytest.approx(of_torch[name]["sqnr"], abs=1e-3), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [{"scan": True}, {"checkpointing": "selective"}, {"checkpointing": "full", "scan": True}],
)
def test_jax_scans_and_recomputes_experts_with_the_same_bits(parallel, mixture):  # T-8
    config = mixture("delayed", model={"num_hidden_layers": 2})
    opened = loader.open_batches(config)
    plain, other = (
        loop.trainer("jax", config),
        loop.trainer("jax", config.replace(parallel=parallel)),
    )
    for k in range(2):
        assert other.step(opened.step(k)) == plain.step(opened.step(k))
    for name, value in plain.fp8_states().items():
        for mine, theirs in zip(value, other.fp8_states()[name], strict=True):
            np.testing.assert_array_equal(mine, theirs, err_msg=name)


@pytest.mark.parametrize("how", ["selective", "full"])
def test_torch_recomputes_experts_with_the_same_bits(how, mixture):  # T-8
    config = mixture("rowwise")
    opened = loader.open_batches(config)
    plain, other = (
        loop.trainer("torch", config),
        loop.trainer("torch", config.replace(parallel={"checkpointing": how})),
    )
    for k in range(2):
        assert other.step(opened.step(k)) == plain.step(opened.step(k))


def test_rules_reach_experts_and_a_schedule_switches_them(mixture):  # R-8, T-9
    rule = Rule(
        layers=("experts.down_proj",), roles=("grad_output",), format="e4m3fn", policy="unscaled"
    )
    config = mixture("tensorwise", numerics={"rules": (rule,)})
    tokens = loader.open_batches(config).step(0)
    plain, ruled = loop.trainer("torch", mixture("tensorwise")), loop.trainer("torch", config)
    down = "model.layers.0.mlp.experts.down_proj.weight"
    without, under = plain.gradients(tokens), ruled.gradients(tokens)
    # Nothing else of this gradient's GEMM differs. Gradients of 1e-4 lie below half of e4m3's
    # smallest number, 2^-9: unscaled they are zeros. Scaled, a code is within 2^-4 of its number.
    lost = np.linalg.norm(under[down] - without[down]) / np.linalg.norm(without[down])
    assert lost > 2 * 2**-4
    assert (
        next(d for d in config.decisions() if d.path == down.removesuffix(".weight")).reason
        == "rule 1"
    )

    switched = loop.trainer(
        "torch", mixture("tensorwise", numerics={"schedule": ((0, "tensorwise"), (1, "bf16"))})
    )
    assert switched.step(tokens) == plain.step(tokens)
    switched.switch("bf16")
    as_bf16 = loop.trainer("torch", mixture("bf16"), plain.weights())
    assert switched.evaluate(tokens) == as_bf16.evaluate(tokens) != plain.evaluate(tokens)


def test_experts_start_from_the_same_bits_in_any_piece():  # M-6
    from fp8ref.spec import llama

    name = "model.layers.0.mlp.experts.up_proj.weight"
    lazy = llama.lazy_initial_weights(MODEL, seed=7)[name]
    whole = lazy[...]
    assert whole.shape == (4, 16, 32)
    np.testing.assert_array_equal(lazy[1:3, 4:, :8], whole[1:3, 4:, :8])
    place = list(llama.parameter_shapes(MODEL)).index(name)
    drawn = (
        np.random.Generator(
            np.random.Philox(key=7, counter=[0, 0, 2 * 16 + 5, place])
        ).standard_normal(32)
        * 0.02
    )
    np.testing.assert_array_equal(whole[2, 5], drawn.astype(np.float32))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"parallel": {"tensor": 2}}, "devices that share the batch; got parallel.tensor 2"),
        ({"parallel": {"compile": "block"}}, r"eager PyTorch.*parallel\.compile 'block'"),
        ({"numerics": {"accumulate": "hopper"}}, r"own GEMMs; got numerics\.accumulate 'hopper'"),
        (
            {"optimizer": {"kind": "adamw_states", "layout": "msamp_o2"}},
            "float32 masters; optimizer.layout 'msamp_o2'",
        ),
    ],
    ids=["mesh", "compile", "accumulate", "masters"],
)
def test_what_experts_do_not_take_is_refused_by_name(sections, said, mixture):  # M-8
    with pytest.raises(ValueError, match=rf"model\.num_experts is for .*{said}"):
        mixture("tensorwise", **sections)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"num_experts": 4}, r"model\.num_experts_per_tok is 1 to num_experts = 4; got 0"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "1 to num_experts = 4; got 5"),
        ({"num_experts_per_tok": 2}, r"model\.num_experts_per_tok needs experts; got 2"),
        ({"router_aux_loss_coef": 0.1}, r"model\.router_aux_loss_coef needs experts"),
        ({"num_experts": -1}, r"model\.num_experts is not negative; got -1"),
        ({"head_size": 15}, r"model\.head_size is even, and at least 2"),
    ],
)
def test_keys_that_do_not_fit_say_so(keys, said):
    with pytest.raises(ValueError, match=said):
        LlamaConfig(**keys)


def test_what_takes_no_experts_says_so_and_an_estimate_and_a_dry_run_count_them(mixture, capsys):
    from rich.console import Console

    from fp8ref.crosscheck.divergence import live
    from fp8ref.estimate import dry_run, report
    from fp8ref.estimate.gpu_rates import PUBLISHED
    from fp8ref.shared.errors import ConfigError
    from fp8ref.train.config import device_shapes

    config = mixture("rowwise")
    with pytest.raises(
        ConfigError,
        match=r"--first-divergence, of the config, takes no experts; got model\.num_experts 4",
    ):
        live.check_alone(config, "the config")
    found = report.of(config, "torch", PUBLISHED["h100"])
    # and the shared one
    assert {row.experts for row in found.rows if row.linear == "up_proj"} == {4, None}
    assert found.parameters - found.active == 6144 // 2  # two of four experts
    dry_run.show(config, "torch", Console(width=200))
    shown = " ".join(capsys.readouterr().out.split())
    assert "parameters: experts │ 6,144" in shown  # 4 experts, 3 projections [16, 32]
    assert "│ gate_proj │ [4, 16, 32] │ 1 │ yes" in shown
    assert "an expert has 64 rows on average" in shown  # 128 tokens, two of four experts each
    assert device_shapes.kinds(config)["all"] == sum(
        v for k, v in device_shapes.kinds(config).items() if k != "all"
    )


@pytest.mark.slow
def test_an_ablation_casts_one_operand_of_experts_alone(mixture, tmp_path):  # E-8, L-4
    loop.train(mixture("rowwise", run={"steps": 2, "eval_every": 0}), "torch", tmp_path / "run")
    found = ablated(
        tmp_path / "run", base="bf16", by="linear", layers=["experts.down_proj"], batches=2
    )
    operands = {(row.operand.gemm, row.operand.role): row for row in found.rows}
    # what forward passes have
    assert operands.keys() == {("output", "input"), ("output", "weight")}
    assert all(row.cost != 0 for row in operands.values())
