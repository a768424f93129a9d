import json
from unittest import mock

import numpy as np
import pytest
import torch
from torchao.float8 import float8_training_tensor, float8_utils

import fp8ref.torch.gemm.gemm
from fp8ref import cli
from fp8ref.crosscheck.divergence import live
from fp8ref.formats import E4M3FN
from fp8ref.shared.errors import ConfigError
from fp8ref.sim.quantize import cast
from fp8ref.train import loop

BLOCK = "model.layers.0"
AT = (3, 5)


@pytest.fixture
def planted(monkeypatch):
    """plant(fault): of two trainers the second is given the fault."""

    def plant(fault):
        made, original = [], loop.trainer

        def trainer(*args):
            made.append(original(*args))
            if len(made) % 2 == 0:
                fault(made[-1])
            return made[-1]

        monkeypatch.setattr(loop, "trainer", trainer)

    return plant


def in_layer(trainer, layer: str, owner, name: str, replacement) -> None:
    """While a linear's forward pass runs, owner.name is another function, made of the original."""
    module, patch = (
        trainer.model.get_submodule(layer),
        mock.patch.object(owner, name, replacement(getattr(owner, name))),
    )
    module.register_forward_pre_hook(lambda *_: [patch.start(), None][1])
    module.register_forward_hook(lambda *_: [patch.stop(), None][1])


def bump(x: torch.Tensor, at: tuple[int, ...], steps: int = 1) -> torch.Tensor:
    """An element moved by so many numbers of its dtype, away from zero."""
    kind = torch.int32 if x.dtype == torch.float32 else torch.int16
    changed = x.detach().clone()
    changed.view(kind)[at] += steps
    return changed


def test_two_trainings_of_one_backend_do_not_diverge(small, capsys):
    found = live.compare_backends(small, "torch", "torch", steps=3)
    assert found.ok
    assert found.names == ("torch (first)", "torch (second)")
    # three states of everything, the first step's next to it, and the batches
    parameters = sum(v.size for v in loop.trainer("torch", small).weights().values())
    assert found.compared == 4 * 3 * parameters + 3 * (4 * 17 + 2)
    found.print()
    assert (
        f"no divergence: {found.compared:,} values of 3 steps are equal, bit for bit"
        in capsys.readouterr().out
    )


def test_a_weight_changed_by_one_ulp_is_located(small, planted):  # T-1, B-10
    def fault(trainer):
        original = trainer.step

        def step(tokens):
            metrics = original(tokens)
            if trainer.count == 3:  # after step 2
                with torch.no_grad():
                    p = trainer._params[f"{BLOCK}.self_attn.o_proj.weight"]
                    p.copy_(bump(p, AT))
            return metrics

        trainer.step = step

    planted(fault)
    first = live.compare_backends(small, "torch", "torch", steps=5).first
    assert (first.step, first.phase, first.layer, first.role) == (
        2,
        "optimizer",
        f"{BLOCK}.self_attn.o_proj",
        "master weight",
    )
    assert first.difference.element == AT
    assert (first.difference.differ, first.difference.worst, first.difference.unit) == (
        1,
        1,
        "float32",
    )
    assert first.reason.clauses == ("T-1",)


def test_a_scale_of_another_policy_is_located(small, planted):  # S-3
    def larger(original):
        # by a power of two it would leave no trace
        return lambda *args, **kwargs: original(*args, **kwargs) * 0.75

    planted(
        lambda trainer: in_layer(
            trainer, f"{BLOCK}.mlp.up_proj", float8_utils, "amax_to_scale", larger
        )
    )
    first = live.compare_backends(small, "torch", "torch", steps=2).first
    assert (first.step, first.phase, first.layer, first.role, first.part) == (
        0,
        "forward",
        f"{BLOCK}.mlp.up_proj",
        "input",
        "scale",
    )
    assert first.gemm == f"{BLOCK}.mlp.up_proj output"
    a, b = (float(shown.split(" ")[0]) for shown in (first.difference.a, first.difference.b))
    assert b == pytest.approx(0.75 * a)
    assert first.operands["input amax"]
    assert first.reason.clauses == ()
    assert "different from the simulator's: torch (second)'s (1 of 1): a fault" in first.reason.text


def test_an_operand_cast_by_truncation_is_located(small, planted):  # C-2
    truncations = []

    def truncating(original):
        def truncated(x, dtype):
            q = original(x, dtype)
            above = q.float().abs() > x.float().abs()
            if not truncations:
                truncations.append((x.detach().float().numpy(), above.numpy()))
            # towards zero: one code less in magnitude
            return (q.view(torch.uint8) - above.to(torch.uint8)).view(dtype)

        return truncated

    planted(
        lambda trainer: in_layer(
            trainer,
            f"{BLOCK}.mlp.down_proj",
            float8_training_tensor,
            "to_fp8_saturated",
            truncating,
        )
    )
    first = live.compare_backends(small, "torch", "torch", steps=2).first
    assert (first.step, first.layer, first.role, first.part) == (
        0,
        f"{BLOCK}.mlp.down_proj",
        "input",
        "codes",
    )
    x, above = truncations[0]
    assert first.difference.element == tuple(np.argwhere(above)[0])
    nearest, cut = (
        cast.encode(x, E4M3FN, rounding=r)[first.difference.element]
        for r in ("nearest_even", "toward_zero")
    )
    assert first.difference.a.endswith(f"(code 0x{nearest:02X})")
    assert first.difference.b.endswith(f"(code 0x{cut:02X})")
    assert set(first.operands) == {"input", "scale"}
    assert "C-2" in first.reason.text
    assert f"torch (second)'s ({above.sum()} of {above.size})" in first.reason.text


@pytest.mark.parametrize(
    ("plan", "steps", "clauses"), [(None, 1, ("G-7", "B-1")), (None, 64, ()), ("hopper", 1, ())]
)
# B-1, B-12
def test_sums_within_the_bound_beyond_it_and_other_than_their_plans(
    plan, steps, clauses, small, planted
):
    def summing(original):
        # where one step reaches the loss
        return lambda *args, **kwargs: bump(original(*args, **kwargs), (16, 0), steps)

    planted(
        lambda trainer: in_layer(
            trainer, f"{BLOCK}.self_attn.v_proj", fp8ref.torch.gemm.gemm, "matmul", summing
        )
    )
    config = small.replace(numerics={"recipe": "delayed", "accumulate": plan})
    first = live.compare_backends(config, "torch", "torch", steps=2).first
    assert (first.step, first.layer, first.role, first.part) == (
        0,
        f"{BLOCK}.self_attn.v_proj",
        "output",
        "value",
    )
    assert first.difference.element == (1, 0, 0)  # row 16 of sequences of 16
    assert (first.difference.differ, first.difference.worst) == (1, steps)
    assert first.reason.clauses == clauses
    assert list(first.operands) == ["input row 16", "weight row 0"]
    assert all(
        bits.startswith("scale 1 (0x3F800000), codes ") and bits.count(" ") == 4 + 31
        for bits in first.operands.values()
    )
    assert ("no clause explains it" in first.reason.text) == (not clauses)
    assert (
        "of torch (second) are not its plan's bit for bit (B-12): a fault" in first.reason.text
    ) == (plan is not None)


def test_a_gradient_is_located_before_what_it_reaches(small, planted):  # B-5
    def fault(trainer):
        def on_output(module, args, out):
            if out.requires_grad and trainer.count == 1:
                # twice as large: a code of e5m2 is wider than a bfloat16
                out.register_hook(lambda g: bump(g, (2, 3, 4), 256))

        trainer.model.get_submodule(f"{BLOCK}.mlp.gate_proj").register_forward_hook(on_output)

    planted(fault)
    first = live.compare_backends(small, "torch", "torch", steps=3).first
    assert (first.step, first.phase, first.layer, first.role) == (
        1,
        "backward",
        f"{BLOCK}.mlp.gate_proj",
        "grad_output",
    )
    assert first.difference.element == (2, 3, 4)
    assert first.gemm == f"{BLOCK}.mlp.gate_proj grad_input"
    assert first.reason.clauses == ()
    assert "B-5 bounds gradients" in first.reason.text


def test_a_norm_is_named_instead_of_the_linears_that_it_enters(small, planted):  # M-3
    def fault(trainer):
        hook = lambda module, args, out: bump(out, (0, 1, 2))  # noqa: E731
        trainer.model.get_submodule(f"{BLOCK}.post_attention_layernorm").register_forward_hook(hook)

    planted(fault)
    first = live.compare_backends(small, "torch", "torch", steps=1).first
    assert (first.layer, first.role, first.difference.element) == (
        f"{BLOCK}.post_attention_layernorm",
        "output",
        (0, 1, 2),
    )
    assert first.gemm == f"{BLOCK}.mlp.gate_proj output"
    assert first.reason.clauses == ("M-3",)


def test_what_does_not_happen_twice_is_said_to_be_unstable(small, planted):
    def fault(trainer):
        original, calls = trainer.step, []

        def step(tokens):
            metrics = original(tokens)
            calls.append(1)
            if len(calls) == 2:  # and not when it is taken again
                with torch.no_grad():
                    trainer._params["lm_head.weight"].mul_(2)
            return metrics

        trainer.step = step

    planted(fault)
    first = live.compare_backends(small, "torch", "torch", steps=3).first
    assert (first.step, first.layer, first.role) == (1, "lm_head", "master weight")
    assert "one of them is not deterministic" in first.reason.text


def test_with_parts_of_a_batch_operands_are_left_out(small, planted):  # T-7
    def fault(trainer):
        hook = lambda module, args, out: bump(out, (0, 1, 2), 500)  # noqa: E731
        trainer.model.get_submodule(f"{BLOCK}.post_attention_layernorm").register_forward_hook(hook)

    planted(fault)
    found = live.compare_backends(
        small.replace(data={"microbatches": 2}), "torch", "torch", steps=1
    )
    assert (found.first.phase, found.first.layer) == ("loss", "loss")
    assert "operands of GEMMs, attention and logits are not observed" in found.notes[0]


@pytest.mark.slow
def test_two_trainings_in_jax_do_not_diverge(small):
    assert live.compare_backends(small, "jax", "jax", steps=2).ok


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "bf16"])
def test_jax_and_torch_part_at_a_site_that_a_clause_explains(recipe, small):  # M-3, G-9
    found = live.compare_backends(
        small.replace(numerics={"recipe": recipe}), "jax", "torch", steps=2
    )
    first = found.first
    assert first.step == 0
    assert first.phase == "forward"
    assert first.reason.clauses
    if recipe == "bf16":  # nothing else of its forward pass is observed
        assert (first.layer, first.role) == ("lm_head", "logits")
    assert all(
        check.ok
        for name, check in found.report.checks.items()
        if name.startswith(f"{BLOCK}.self_attn.q_proj/output input")
    )


def run(*arguments) -> int:
    return cli.main([str(a) for a in arguments])


def test_the_command_trains_two_backends_and_writes_what_it_found(
    small, planted, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "small.toml"
    sections = {
        "model": vars(small.model),
        "data": {"source": small.data.source, "sequence_length": 16, "batch_size": 4},
        "run": {"steps": 6},
    }
    lines = [
        f"[{section}]\n"
        + "".join(f"{k} = {json.dumps(v)}\n" for k, v in keys.items() if v is not None)
        for section, keys in sections.items()
    ]
    path.write_text("".join(lines))
    found = tmp_path / "found.json"
    assert (
        run(
            "crosscheck",
            path,
            "--first-divergence",
            "torch",
            "torch",
            "--steps",
            1,
            "--json",
            found,
        )
        == 0
    )
    assert json.loads(found.read_text())["ok"]

    def fault(trainer):
        hook = lambda module, args, out: bump(out, (0, 1, 2))  # noqa: E731
        trainer.model.get_submodule(f"{BLOCK}.input_layernorm").register_forward_hook(hook)

    planted(fault)
    assert (
        run(
            "crosscheck",
            path,
            "--first-divergence",
            "torch",
            "torch",
            "--steps",
            1,
            "--json",
            found,
        )
        == 1
    )
    shown = capsys.readouterr().out
    assert f"first divergence, step 0, forward: {BLOCK}.input_layernorm, output" in shown
    assert "element [0, 1, 2]\n  torch (first): " in shown
    assert "1 of 2,048 differ" in shown
    written = json.loads(found.read_text())
    assert not written["ok"]
    assert (
        written["first"]["layer"],
        written["first"]["element"],
        written["first"]["clauses"],
    ) == (f"{BLOCK}.input_layernorm", [0, 1, 2], ["M-3"])
    assert written["first"]["why"].startswith("its parts are equal")
    assert not all(check["ok"] for check in written["checks"])

    for options, named in (
        (["--sharded", 2], "--sharded"),
        (["--replay", "x"], "--replay"),
        (["--backend", "jax"], "--backend"),
    ):
        assert run("crosscheck", path, "--first-divergence", "jax", "torch", *options) == 2
        assert f"--first-divergence compares A with B; got {named} too" in capsys.readouterr().err
    assert run("crosscheck", "--first-divergence", "jax", "torch") == 2
    assert (
        "two backends trains a CONFIG in both; got jax and torch without one. Name it first: "
        "fp8ref crosscheck tiny --first-divergence jax torch"
    ) in capsys.readouterr().err
    for pair in (("runs/a", "torch"), ("jax", "runs/a")):
        assert run("crosscheck", "--first-divergence", *pair) == 2
        alone = next(name for name in pair if name != "runs/a")
        said = capsys.readouterr().err
        assert (
            "compares two runs, or two backends that train one CONFIG; got "
            f"{' and '.join(pair)}, but only {alone} is a backend" in said
        )
        assert (
            "Name two run directories, or two of jax and torch. For a run directory named "
            f"{alone}, write ./{alone}." in said
        )
    assert run("crosscheck", path, "--first-divergence", "torch", "torch", "--steps", 7) == 2
    assert "between 1 and run.steps = 6; got 7" in capsys.readouterr().err


def test_several_devices_are_refused(small):
    with pytest.raises(ConfigError, match=r"the config has parallel\.\* for 2"):
        live.compare_backends(small.replace(parallel={"data": 2}), "jax", "torch")
