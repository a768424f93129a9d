"""Configs of libraries are read as data."""

import json

import pytest
from checkpoints import models

from fp8ref.checkpoints import declared
from fp8ref.checkpoints.declared import Scheme


def read(path, config, name="config.json"):
    path.mkdir(exist_ok=True)
    (path / name).write_text(json.dumps(config))
    return declared.read(path)


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        (
            models.BLOCKS | {"scale_fmt": "ue8m0"},
            Scheme(fmt="e4m3fn", granularity="blockwise_128x128", scale_fmt="e8m0fnu"),
        ),
        (
            models.BLOCKS | {"weight_block_size": [64, 32]},
            Scheme(fmt="e4m3fn", granularity="64x32"),
        ),
        (models.compressed(strategy="channel"), Scheme(fmt="e4m3fn", granularity="rowwise")),
        (
            models.compressed(strategy="block", block_structure=[128, 128]),
            Scheme(fmt="e4m3fn", granularity="blockwise_128x128"),
        ),
        (
            models.compressed(
                num_bits=4, strategy="group", group_size=32, scale_dtype="torch.uint8"
            ),
            Scheme(fmt="e2m1fn", granularity="mx_1x32", scale_fmt="e8m0fnu"),
        ),
        (models.modelopt("fp8"), Scheme(fmt="e4m3fn", granularity="tensorwise")),
        (
            models.modelopt("NVFP4"),
            Scheme(fmt="e2m1fn", granularity="nvfp4_1x16", scale_fmt="e4m3fn"),
        ),
        (
            {"quant_method": "torchao", "quant_type": {"default": {"_type": "Float8.. PerRow"}}},
            Scheme(fmt="e4m3fn", granularity="rowwise"),
        ),
        (
            {"quant_method": "mxfp4"},
            Scheme(fmt="e2m1fn", granularity="mx_1x32", scale_fmt="e8m0fnu"),
        ),
        ({"quant_method": "awq"}, Scheme()),
        (models.BLOCKS | {"weight_block_size": 7, "fmt": []}, Scheme()),
    ],
)
def test_schemes(tmp_path, config, scheme):
    said = read(tmp_path, {"quantization_config": config})
    (own,) = said.schemes
    assert Scheme(fmt=own.fmt, granularity=own.granularity, scale_fmt=own.scale_fmt) == scheme
    assert said.method == config["quant_method"]
    assert said.scheme("model.layers.0.mlp.up_proj") == own


def test_modelopts_own_file_and_mixed_precision(tmp_path):
    layers = {
        "model.layers.0.mlp": {"quant_algo": "FP8"},
        "model.layers.1.mlp": {"quant_algo": "NVFP4"},
    }
    section = {
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers,
        "exclude_modules": ["*.gate"],
    }
    said = read(tmp_path, {"quantization": section}, "hf_quant_config.json")
    assert (said.method, said.source) == ("modelopt", "hf_quant_config.json")
    assert said.scheme("model.layers.1.mlp.up_proj").fmt == "e2m1fn"
    assert said.scheme("model.layers.2.mlp.up_proj") is None
    assert said.excludes("model.layers.0.mlp.gate") == "*.gate"


def test_nothing_is_said(tmp_path):
    assert declared.read(tmp_path) == declared.Declared()
    assert read(tmp_path, {"quantization_config": []}) == declared.Declared()
    text = read(tmp_path, {"text_config": {"quantization_config": models.BLOCKS}})
    assert text.method == "fp8"
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: "):
        declared.read(tmp_path)
