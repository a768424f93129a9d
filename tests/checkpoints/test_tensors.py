"""Tensors of safetensors are read in pieces, and what does not fit is refused."""

import json

import ml_dtypes
import numpy as np
import pytest
from checkpoints import made

from fp8ref.checkpoints.tensors import INDEX, stored


def test_only_the_piece_asked_for_is_read(tmp_path):
    x = made.weight((300, 64))
    files = made.write(tmp_path, {"a": x.astype(ml_dtypes.bfloat16), "n": np.float32(3)})
    tensors = stored(files)
    assert (tensors["a"].dtype, tensors["a"].shape) == ("BF16", (300, 64))
    assert np.array_equal(tensors["a"][128:256].astype(np.float32), x[128:256])
    assert np.array_equal(tensors["a"][...].astype(np.float32), x)
    assert float(tensors["n"][...]) == 3


def test_a_directory_without_safetensors_is_named(tmp_path):
    with pytest.raises(
        ValueError, match=r"has neither model\.safetensors nor .* Name the directory"
    ):
        stored(tmp_path)


def test_codes_are_bytes_with_their_format(tmp_path):
    x = np.arange(256, dtype=np.uint8).reshape(4, 64)
    tensors = stored(made.write(tmp_path, {"a": x.view(ml_dtypes.float8_e5m2)}))
    assert tensors["a"].fmt.name == "e5m2"
    assert np.array_equal(tensors["a"][1:3], x[1:3])
    assert stored(tmp_path / "model.safetensors").keys() == {"a"}


def test_an_index_names_its_own_files_and_their_tensors(tmp_path):
    made.write(tmp_path, {"a": made.weight((2, 2)), "b": made.weight((2, 2))})
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    with pytest.raises(ValueError, match="b is in a file, and not in the index"):
        stored(tmp_path)
    lines: list[str] = []
    assert set(stored(tmp_path, lines.append)) == {"a", "b"}
    assert lines == ["b is in a file, and not in the index"]
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    with pytest.raises(ValueError, match="names files of its own directory"):
        stored(tmp_path)


def _raw(path, header: dict, data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234", "damaged"),
        ({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 4]}}, b"1234", "damaged"),
        ({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}, b"1234", "damaged"),
    ],
)
def test_headers_are_checked_before_memory_is_taken(tmp_path, header, data, message):
    _raw(tmp_path / "model.safetensors", header, data)
    with pytest.raises(ValueError, match=message):
        stored(tmp_path)
