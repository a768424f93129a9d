"""Runs are exported in bf16, FP8, MXFP8 and NVFP4: libraries read the codes and scales that the
simulator makes of the masters, and training starts from them."""

import json
import warnings

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from checkpoints import made
from safetensors import safe_open

from fp8ref import cli
from fp8ref.checkpoints import audit, tensors, weights, write
from fp8ref.checkpoints import rule as rules
from fp8ref.shared.errors import ConfigError
from fp8ref.sim.quantize import scaling
from fp8ref.spec import llama
from fp8ref.train import loop
from fp8ref.train.models import export, precision
from fp8ref.train.models.precision import Precision

QUANTIZED = list(write.FORMATS)
MODEL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
MOE = {"qk_norm": True, "num_experts": 4, "num_experts_per_tok": 2}


def run(folder, backend: str, **model):
    """A run of few steps, its config and where it is. In JAX without FP8, which XLA compiles for
    seconds: what is exported are the masters that a checkpoint has of any recipe."""
    (folder / "text").mkdir()
    for i in range(40):
        (folder / "text" / f"{i}.txt").write_text("amax scale " * 200)
    config = loop.Config().replace(
        model=MODEL | model,
        data={"source": str(folder / "text"), "sequence_length": 16, "batch_size": 4},
        numerics={"recipe": "bf16" if backend == "jax" else "tensorwise"},
        run={"steps": 2, "eval_batches": 1},
        statistics={"every": 0},
    )
    loop.train(config, backend, folder / "run")
    return folder, config


@pytest.fixture(scope="module", params=loop.BACKENDS)
def trained(request, tmp_path_factory):
    """A run of either backend in all formats, its config and backend."""
    folder, config = run(tmp_path_factory.mktemp("trained"), request.param)
    for name in precision.FORMATS:
        export.export(folder / "run", folder / name, precision=Precision(format=name))
    return folder, config, request.param


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A run with experts."""
    return run(tmp_path_factory.mktemp("experts"), "torch", **MOE)


def masters(folder) -> dict[str, np.ndarray]:
    return {name: tensor[...] for name, tensor in tensors.stored(folder / "float32").items()}


def quantized(high: dict[str, np.ndarray], format: str, source: str = "float32"):
    """{name: codes and scales} of the simulator; q, k, v and gate, up share a tensor's scale."""
    rule = rules.by_name(f"{write.FORMATS[format].rule}:{source}")
    together = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
    for name, x in high.items():
        if name.endswith("_proj.weight"):
            parent, last, _ = name.rsplit(".", 2)
            group = next((group for group in together if last in group), (last,))
            amax = max(float(np.abs(high[f"{parent}.{one}.weight"]).max()) for one in group)
            yield name, write.quantize(x, rule, amax if format == "nvfp4" else None)


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("source", ["masters", "bf16"])
def test_codes_and_scales_are_the_simulators(trained, tmp_path, name, source):  # K-7
    folder, config, _ = trained
    step = export.export(
        folder / "run", tmp_path / "out", precision=Precision(format=name, source=source)
    )
    result = audit.audit(tmp_path / "out")
    assert result.ok, [f.to_dict() for f in result.findings]
    # transformers and compressed-tensors make a quantized linear of what is not listed
    assert result.declared.excludes("lm_head")
    stored = tensors.stored(tmp_path / "out")
    found = weights.find(stored)
    dtype = {"masters": "float32", "bf16": "bfloat16"}[source]
    expected = dict(quantized(masters(folder), name, dtype))
    assert found.keys() == expected.keys()
    assert len(found) == 14
    for module, q in expected.items():
        again = found[module].quantized()
        assert found[module].form.name == write.FORMATS[name].form
        np.testing.assert_array_equal(again.codes, q.codes)
        np.testing.assert_array_equal(again.scale_inv.ravel(), q.scale_inv.ravel())
        np.testing.assert_array_equal(again.tensor_scale_inv, q.tensor_scale_inv)
    others = llama.parameter_shapes(config.model).keys() - found.keys()
    assert {stored[other].dtype for other in others} == {"BF16"}
    for other in others:
        master = masters(folder)[other].astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(stored[other][...], master)
    with safe_open(tmp_path / "out" / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {
            "format": "pt",
            "fp8ref.format": name,
            "fp8ref.rule": f"{write.FORMATS[name].rule}:{dtype}",
            "fp8ref.from": source,
            "fp8ref.step": str(step),
        }


def test_the_command_takes_every_format(trained, tmp_path, capsys):
    folder, *_ = trained
    for name in precision.FORMATS:
        words = ["export", str(folder / "run"), "--out", str(tmp_path / name), "--format", name]
        assert cli.main([*words, *(["--from", "bf16"] if name in QUANTIZED else [])]) == 0
        said = capsys.readouterr().out
        assert "the weights after 2 steps" in said
        assert (":bfloat16" in said) == (name in QUANTIZED)
        assert ("fp8ref audit" in said) == (name in QUANTIZED)
    with safe_open(tmp_path / "mxfp8" / "model.safetensors", framework="numpy") as file:
        assert file.metadata()["fp8ref.from"] == "bf16"


def test_every_original_is_found_by_the_audit(trained):
    folder, *_ = trained
    for name in QUANTIZED:
        result = audit.audit(folder / name, originals=folder / "float32")
        assert result.ok, [f.to_dict() for f in result.findings]
        assert all(row.made_by for row in result.rows)


def test_bfloat16_is_loaded_by_transformers(trained):
    folder, _, _ = trained
    model, report = transformers.LlamaForCausalLM.from_pretrained(
        folder / "bf16", output_loading_info=True
    )
    assert not any(report.values())
    high = masters(folder)
    for name, value in model.state_dict().items():
        assert value.dtype == torch.bfloat16
        expected = torch.from_numpy(high[name]).to(torch.bfloat16)
        assert torch.equal(value, expected), name


def test_transformers_dequantizes_deepseeks_blocks(trained):
    """The operation that its loader runs without a GPU; the whole loader is below."""
    library = pytest.importorskip("transformers.integrations.finegrained_fp8")
    folder, *_ = trained
    ours = export.stored(folder / "deepseek")
    with safe_open(folder / "deepseek" / "model.safetensors", framework="pt") as file:
        for name in weights.find(tensors.stored(folder / "deepseek")):
            codes, scales = file.get_tensor(name), file.get_tensor(f"{name}_scale_inv")
            assert (codes.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
            inputs = {"weight": [codes], "weight_scale_inv": [scales]}
            (value,) = library.Fp8Dequantize(None).convert(inputs).values()
            np.testing.assert_array_equal(value.numpy(), ours[name][...])


def test_transformers_loads_deepseeks_format(trained):
    pytest.importorskip("accelerate")
    folder, *_ = trained
    model, report = transformers.LlamaForCausalLM.from_pretrained(
        folder / "deepseek", output_loading_info=True
    )
    assert not any(report.values())
    ours = export.stored(folder / "deepseek")
    for name, value in model.state_dict().items():
        assert torch.equal(value, torch.from_numpy(ours[name][...]).to(torch.bfloat16)), name
    assert torch.isfinite(model(torch.arange(16)[None]).logits).all()


@pytest.mark.parametrize("name", ["deepseek", "compressed-tensors"])
def test_transformers_loads_experts(experts, tmp_path, name):
    pytest.importorskip("accelerate")
    options = {}
    if name == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
        options = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}
    folder, config = experts
    export.export(folder / "run", tmp_path / "out", precision=Precision(format=name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the config's own quantization is not replaced
        model = transformers.Qwen3MoeForCausalLM.from_pretrained(
            tmp_path / "out", dtype=torch.float32, **options
        )
    ours, stored = export.read(tmp_path / "out", config.model), model.state_dict()
    for layer in range(2):
        module = f"model.layers.{layer}.mlp.experts"
        up = [ours[f"{module}.{part}_proj.weight"][...] for part in ("gate", "up")]
        gate_up = stored[f"{module}.gate_up_proj"].numpy()
        np.testing.assert_array_equal(gate_up, np.concatenate(up, axis=1))
        down = ours[f"{module}.down_proj.weight"][...]
        np.testing.assert_array_equal(stored[f"{module}.down_proj"].numpy(), down)


LAYOUTS = ["compressed-tensors", "mxfp8", "nvfp4"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_compressed_tensors_reads_codes_and_scales(trained, name):
    """Loaded by transformers, codes and scales are the bytes of the file; decompressed they are
    the numbers that training starts from."""
    pytest.importorskip("compressed_tensors")
    folder, *_ = trained
    model, report = transformers.LlamaForCausalLM.from_pretrained(
        folder / name, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values())
    held = model.state_dict()
    with safe_open(folder / name / "model.safetensors", framework="pt") as file:
        for key in file.keys():  # noqa: SIM118, no mapping
            value = file.get_tensor(key)
            high = value.dtype == torch.bfloat16
            assert held[key].dtype == (torch.float32 if high else value.dtype), key
            if high:
                assert torch.equal(held[key], value.float())
            else:
                assert torch.equal(held[key].view(torch.uint8), value.view(torch.uint8)), key


@pytest.mark.parametrize("name", LAYOUTS)
def test_compressed_tensors_decompresses_to_the_same_numbers(trained, name):
    library = pytest.importorskip("compressed_tensors.compressors")
    schemes = pytest.importorskip("compressed_tensors.quantization")
    folder, *_ = trained
    config = json.loads((folder / name / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    scheme = schemes.QuantizationScheme.model_validate(group)
    compressor = library.BaseCompressor.get_value_from_registry(config["format"])
    ours = export.stored(folder / name)
    found = weights.find(tensors.stored(folder / name))
    with safe_open(folder / name / "model.safetensors", framework="pt") as file:
        for weight in found.values():
            module = weight.name.removesuffix("weight")
            state = {p.name.removeprefix(module): file.get_tensor(p.name) for p in weight.parts}
            value = compressor.decompress(state, scheme)["weight"]
            # NVFP4 and MXFP8 come back in bfloat16: half a unit of its 8 bits for the scale over
            # the tensor's, and one for the product
            bits = {"compressed-tensors": 0, "mxfp8": 0, "nvfp4": 2 * 2.0**-9}[name]
            expected = ours[weight.name][...]
            np.testing.assert_allclose(value.float().numpy(), expected, rtol=bits, atol=0)


@pytest.mark.grid(6)
@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("backend", loop.BACKENDS)
def test_training_starts_from_it(trained, tmp_path, capsys, name, backend):  # K-7
    folder, config, _ = trained
    config = config.replace(run={"init_from": str(folder / name), "steps": 1})
    if backend == "jax":
        config = config.replace(numerics={"recipe": "bf16"})
    ours = {n: w[...] for n, w in export.read(folder / name, config.model).items()}
    for key, q in quantized(masters(folder), name):
        np.testing.assert_array_equal(ours[key], scaling.dequantize(q), err_msg=key)
    started = loop.trainer(backend, config, export.weights_of(folder / name, config))
    for key, value in started.weights().items():
        np.testing.assert_array_equal(value, ours[key], err_msg=key)
    (line,) = loop.train(config, backend, tmp_path / "run")
    first = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert line["loss"] < first["loss"]  # two steps further
    said = capsys.readouterr().err
    assert "14 weights are e" in said
    assert "training starts from their dequantized numbers" in said


def test_experts_are_exported_one_by_one_and_come_back(experts, tmp_path):
    folder, config = experts
    for name in ("float32", "deepseek", "compressed-tensors"):
        export.export(folder / "run", tmp_path / name, precision=Precision(format=name))
    high = masters(tmp_path)
    for name in ("deepseek", "compressed-tensors"):
        result = audit.audit(tmp_path / name, originals=tmp_path / "float32")
        assert result.ok, [f.to_dict() for f in result.findings]
        assert len(result.rows) == 2 * (4 + 3 * 4)
        assert result.declared.excludes("lm_head")
        assert result.declared.excludes("model.layers.1.mlp.gate")
        ours = export.read(tmp_path / name, config.model)
        rule = rules.by_name(write.FORMATS[name].rule)
        for e in range(4):
            key = f"model.layers.1.mlp.experts.{e}.up_proj.weight"
            value = ours["model.layers.1.mlp.experts.up_proj.weight"][e : e + 1, 3:9]
            expected = scaling.dequantize(rule.quantize(high[key]))
            np.testing.assert_array_equal(value[0], expected[3:9])


@pytest.mark.parametrize(
    ("name", "source", "model", "said"),
    [
        ("float32", "bf16", {}, "--format float32 quantizes nothing: leave --from out"),
        ("bf16", "masters", {}, "--format bf16 quantizes nothing"),
        ("mxfp8", None, MOE, "mxfp8 has no experts"),
        ("nvfp4", None, MOE, "nvfp4 has no experts"),
        ("deepseek", None, MOE | {"qk_norm": False}, "GraniteMoeShared's experts"),
        (
            "deepseek",
            None,
            {"intermediate_size": 192},
            r"whole blocks; .*gate_proj\.weight \[192, 128\], .*up_proj.* is not divided",
        ),
        ("mxfp8", None, {"intermediate_size": 48}, r"down_proj\.weight \[128, 48\]"),
        ("nvfp4", None, {"intermediate_size": 40}, r"down_proj\.weight \[128, 40\]"),
    ],
)
def test_what_no_library_reads_is_refused(name, source, model, said):
    config = loop.Config().replace(model=MODEL | model)
    with pytest.raises(ConfigError, match=said):
        Precision(format=name, source=source).check(config)


def test_a_model_of_transformers_has_no_quantized_format():
    config = loop.Config().replace(architecture={"kind": "transformers", "source": "model"})
    Precision(format="bf16").check(config)
    with pytest.raises(
        ConfigError, match="fp8ref's own models; this one is of kind 'transformers'"
    ):
        Precision(format="deepseek").check(config)


def test_other_names_are_refused():
    with pytest.raises(ValueError, match="--format is one of float32, bf16, deepseek"):
        Precision(format="fp8")
    with pytest.raises(ValueError, match="--from is one of masters, bf16"):
        Precision(format="deepseek", source="float16")


def test_codes_whose_scales_do_not_fit_are_refused(trained, tmp_path):
    folder, config, _ = trained
    high = {name: tensor[...] for name, tensor in tensors.stored(folder / "bf16").items()}
    name = "model.layers.0.mlp.up_proj.weight"
    codes = rules.by_name("deepseek_v3_block").quantize(high[name])
    high |= {name: made.codes(codes), f"{name}_scale_inv": np.ones((5, 7), np.float32)}
    config_json = json.loads((folder / "bf16" / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"up_proj\.weight has codes \[256, 128\] without scales"):
        export.read(made.write(tmp_path, high, config_json), config.model)
