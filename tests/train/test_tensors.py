import json

import numpy as np
import pytest

from fp8ref.commands import demo
from fp8ref.formats import BFLOAT16
from fp8ref.shared.errors import ConfigError
from fp8ref.sim.quantize import cast
from fp8ref.train import loop, tensors
from fp8ref.train.run import checkpoint
from fp8ref.train.tensors import Tensors
from fp8ref.train.torch import checkpoint as torch_checkpoint

LAYER = "model.layers.0.mlp.gate_proj"


@pytest.fixture
def made(rng):
    values = cast.round_to(rng.standard_normal((4, 3)), BFLOAT16)
    values[0] = [-0.0, 2.0**-130, np.inf]
    return Tensors(
        operands={f"{LAYER}/input": values},
        amaxes={f"{LAYER}/input": np.array([1.0, np.nan], np.float32)},
        about={"step": 2, "text": "µ"},
    )


def test_what_is_written_is_read_again_bit_for_bit(made, tmp_path):
    tensors.write(tmp_path / "tensors.npz", made)
    found = tensors.read(tmp_path / "tensors.npz")
    assert found.about == made.about
    for mine, theirs in ((found.operands, made.operands), (found.amaxes, made.amaxes)):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert value.dtype == np.float32
            np.testing.assert_array_equal(value.view(np.uint32), theirs[name].view(np.uint32))


def test_operands_lie_in_it_as_the_bits_of_bfloat16(made, tmp_path):
    tensors.write(tmp_path / "tensors.npz", made)
    with np.load(tmp_path / "tensors.npz", allow_pickle=False) as found:
        assert set(found) == {"about", "sha256", f"{LAYER}/input", f"{LAYER}/input/amax"}
        bits = found[f"{LAYER}/input"]
    assert bits.dtype == np.uint16
    assert bits[0].tolist() == [0x8000, 0x0008, 0x7F80]


def test_what_bfloat16_does_not_hold_is_refused(tmp_path):
    with pytest.raises(ValueError, match="does not hold all of layer/input"):
        tensors.write(
            tmp_path / "tensors.npz",
            Tensors(
                operands={"layer/input": np.full(2, 1 + 2.0**-10, np.float32)}, amaxes={}, about={}
            ),
        )
    assert not (tmp_path / "tensors.npz").exists()


@pytest.mark.parametrize("content", [None, b"", b"not a zip", "other"])
def test_a_file_that_is_none_is_named(tmp_path, content):
    path = tmp_path / "tensors.npz"
    if content == "other":
        np.savez(path, x=np.zeros(2))
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"tensors.npz is not a file of tensors"):
        tensors.read(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layer/input", np.zeros((2, 3))),
        ("layer/input", np.zeros((2, 3), np.float32)),
        ("layer/input", np.zeros(3, np.uint16)),
        ("layer/input", np.zeros((2, 3), ">u2")),
        ("layer/input/amax", np.zeros(3)),
        ("layer/input/amax", np.zeros((3, 1), np.float32)),
    ],
)
def test_arrays_of_other_dtypes_are_refused(tmp_path, name, value):
    """float64 was taken for the bits of bfloat16."""
    np.savez(tmp_path / "tensors.npz", about=np.array("{}"), **{name: value})
    with pytest.raises(
        ConfigError,
        match=rf"tensors.npz is not a file of tensors.*{name} is {value.dtype} of {value.ndim} "
        r"axes",
    ):
        tensors.read(tmp_path / "tensors.npz")


@pytest.fixture
def run(small, tmp_path):
    config = small.replace(
        numerics={"recipe": "tensorwise"}, run={"steps": 2}, statistics={"every": 1}
    )
    loop.train(config, "torch", tmp_path / "run")
    return tmp_path / "run"


def test_tensors_of_a_run_are_those_of_the_step_that_would_come_next(run, small, monkeypatch):
    monkeypatch.setattr(tensors, "ROWS", 48)  # of the batch's 4 x 16 tokens
    found = tensors.of_run(run, [LAYER])
    assert {name: value.shape for name, value in found.operands.items()} == {
        f"{LAYER}/grad_output": (48, 48),
        f"{LAYER}/input": (48, 32),
        f"{LAYER}/weight": (48, 32),
    }
    state = checkpoint.latest(run, print)
    masters = dict(torch_checkpoint.weights(state.state, {f"{LAYER}.weight": (48, 32)}))
    np.testing.assert_array_equal(
        found.operands[f"{LAYER}/weight"], cast.round_to(masters[f"{LAYER}.weight"], BFLOAT16)
    )
    for value in found.operands.values():
        np.testing.assert_array_equal(value, cast.round_to(value, BFLOAT16))
        assert np.any(value)
    assert found.about["step"] == state.step == 2


def test_amaxes_of_a_run_are_those_it_recorded_of_every_linear(run):
    found = tensors.of_run(run, [LAYER])
    lines = [json.loads(line) for line in (run / "statistics.jsonl").read_text().splitlines()]
    assert found.about["recorded"] == [0, 1]
    assert len(found.amaxes) == 7 * 3
    for name, trace in found.amaxes.items():
        layer, _, role = name.rpartition("/")
        gemm = "output" if role != "grad_output" else "grad_input"
        assert trace.tolist() == [
            np.float32(line["statistics"][f"{layer}/{gemm}/{role}"]["amax"]) for line in lines
        ]


def test_a_run_of_no_such_fp8_linear_is_refused(run):
    with pytest.raises(
        ConfigError, match=r"has no lm_head among model.layers.0.self_attn.q_proj, "
    ):
        tensors.of_run(run, ["lm_head"])


def test_the_demo_keeps_two_linears_of_the_last_block_if_they_run_in_fp8(small):
    deeper = small.replace(model={"num_hidden_layers": 2})
    assert demo._kept(deeper) == ["model.layers.1.mlp.gate_proj", "model.layers.1.mlp.down_proj"]
    filtered = deeper.replace(numerics={"filter_fqns": ("lm_head", "model.layers.1.mlp.gate_proj")})
    assert demo._kept(filtered) == ["model.layers.1.mlp.down_proj"]
