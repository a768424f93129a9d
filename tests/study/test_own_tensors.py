"""Tensors of no model: they are judged as a model's operands are, by the roles of their names."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from fp8ref import configs, study
from fp8ref.study import torch_model
from fp8ref.train import tensors as demo_tensors

RECIPES = ["tensorwise", "rowwise", "blockwise", "mxfp8"]


@pytest.fixture
def x():
    return np.random.default_rng(0).standard_normal((640, 96)).astype(ml_dtypes.bfloat16)


def test_tensors_have_the_rows_of_a_models_recording(x):
    linear = torch.nn.Linear(96, 192).bfloat16()
    inputs = torch.from_numpy(x.astype(np.float32)).bfloat16().requires_grad_()
    with torch_model.record(linear, rows=512, layers="*") as recording:
        linear(inputs).square().sum().backward()
    grads = {name.rpartition("/")[2]: one for name, one in recording.operands.items()}
    taken = study.tensors(
        {
            "Linear.input": inputs.detach(),
            "Linear.weight": linear.weight,
            "Linear.grad_output": grads["grad_output"].kept,
        }
    )
    assert taken.operands.keys() == recording.operands.keys()
    for name in ("Linear/input", "Linear/weight"):
        for key in ("kept", "amax", "columns", "rows"):
            np.testing.assert_array_equal(
                getattr(taken.operands[name], key), getattr(recording.operands[name], key)
            )
    of_model, of_tensors = (study.judge(one, RECIPES) for one in (recording, taken))
    for role in ("input", "weight"):
        expected = [row for row in of_model.rows if row.role == role]
        assert [row for row in of_tensors.rows if row.role == role] == expected
    np.testing.assert_array_equal(of_tensors.by_layer("input"), of_model.by_layer("input"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_arrays_of_every_framework_are_alike(dtype, x):
    a = x[:128].astype(dtype)
    expected = study.tensors({"x": a}).operands["x/input"].kept
    np.testing.assert_array_equal(expected, a.astype(np.float32))
    others = [torch.from_numpy(x[:128].astype(np.float32)).to(getattr(torch, dtype))]
    others += [jnp.asarray(a)] if dtype != "float64" else []
    for other in others:
        np.testing.assert_array_equal(
            study.tensors({"x": other}).operands["x/input"].kept, expected
        )


def test_the_last_part_of_a_name_is_its_role(x):
    names = ["a.weight", "b/kernel", "c.input", "d.grad_output", "q", "input", "weight.scaled"]
    taken = study.tensors(dict.fromkeys(names, x[:128]))
    assert list(taken.operands) == [
        "a/weight",
        "b/weight",
        "c/input",
        "d/grad_output",
        "q/input",
        "input/input",
        "weight.scaled/input",
    ]
    assert list(taken.titles.values()) == names
    assert taken.operands["b/weight"].kept.shape == (96, 128)  # Flax's is [K, N]
    assert list(study.tensors({"a.weight": x, "a/weight": x}).titles.values()) == [
        "a.weight",
        "a/weight",
    ]
    chosen = study.tensors({"a.w1": x, "a.input": x}, roles={"*.w?": "weight"})
    assert list(chosen.operands) == ["a.w1/weight", "a/input"]
    assert list(study.tensors({"a.input": x}, roles="grad_output").operands) == [
        "a.input/grad_output"
    ]
    with pytest.raises(ValueError, match="a role is input, weight, grad_output; got 'bias'"):
        study.tensors({"a": x}, roles="bias")


def test_what_is_no_matrix_of_floats_is_left_out_and_said(x):
    others = {
        "bias": np.zeros(4, np.float32),
        "ids": np.zeros((4, 4), np.int64),
        "codes": torch.zeros(4, 4, dtype=torch.float8_e4m3fn),
        "e.weight": np.zeros((2, 4, 4)),
        "none": np.zeros((0, 4)),
    }
    taken = study.tensors({**others, "x": x.reshape(4, 160, 96)})
    assert taken.operands["x/input"].rows == 640
    assert taken.refused.keys() == others.keys()
    assert "got float8_e4m3fn" in taken.refused["codes"]
    assert taken.refused["none"] == "shape (0, 4) is empty"
    found = study.judge(taken, ["tensorwise"])
    assert [name.split(" ")[0] for name in found.absent] == list(others)
    with pytest.raises(ValueError, match=r"at least one matrix of floats; got bias: shape \(4,\)"):
        study.tensors(others)
    with pytest.raises(ValueError, match=r"tensors takes \{name: array\}; got ndarray"):
        study.tensors(x)


def test_files_have_the_tensors_that_were_saved(x, tmp_path):
    arrays = {"a.input": x.astype(np.float32), "a.weight": x[:128].astype(np.float32)}
    expected = study.judge(study.tensors(arrays), RECIPES).rows
    np.savez(tmp_path / "a.npz", **arrays)
    save_file(
        {
            "a.input": x,
            "a.weight": x[:128].copy(),
            "codes": np.zeros((2, 2), ml_dtypes.float8_e5m2),
        },
        tmp_path / "a.safetensors",
    )
    np.save(tmp_path / "x.npy", arrays["a.input"])
    assert study.judge(study.read_file(tmp_path / "a.npz"), RECIPES).rows == expected
    taken = study.read_file(str(tmp_path / "a.safetensors"))
    assert study.judge(taken, RECIPES).rows == expected
    assert taken.refused == {
        "codes": "got F8_E5M2; a study takes float32, bfloat16, float16, float64"
    }
    assert list(study.read_file(tmp_path / "a.npz", "*.weight").operands) == ["a/weight"]
    assert list(study.read_file(tmp_path / "x.npy", roles="weight").operands) == ["x/weight"]
    with pytest.raises(ValueError, match=r"a\.npz: .* got no tensor of that name"):
        study.read_file(tmp_path / "a.npz", "b*")


def test_a_recording_and_the_shipped_tensors_are_read(x, tmp_path):
    written = study.tensors({"a.input": x, "a.weight": x})
    written.write(tmp_path / "step.npz")
    assert list(study.read_file(tmp_path / "step.npz").operands) == ["a/input", "a/weight"]
    assert list(study.read_file(tmp_path / "step.npz", "*/weight").operands) == ["a/weight"]
    with pytest.raises(ValueError, match="no operand that matches 'b'"):
        study.read_file(tmp_path / "step.npz", "b")
    with pytest.raises(ValueError, match="is a recording, which has its roles"):
        study.read_file(tmp_path / "step.npz", roles="input")
    shipped = demo_tensors.read(configs.find("tiny", ".npz")).operands
    taken = study.read_file("tiny")
    assert taken.operands.keys() == shipped.keys()
    for name, operand in taken.operands.items():
        np.testing.assert_array_equal(operand.kept, shipped[name])


def test_no_pickle_is_read(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.array([{}], object))
    torch.save({"x": torch.zeros(2, 2)}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"a\.npz: an array of object"):
        study.read_file(tmp_path / "a.npz")
    (tmp_path / "..up.npz").write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"/\.\.up\.npz: .*[^.]\.$"):
        study.read_file(tmp_path / "..up.npz")
    with pytest.raises(
        ValueError, match=r"A study reads \.npz, \.npy, \.safetensors, and no pickle"
    ):
        study.read_file(tmp_path / "a.pt")
