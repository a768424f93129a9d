"""Small quantized models as libraries store them: a directory of safetensors and its config."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from checkpoints import made
from safetensors.numpy import save_file

from fp8ref.checkpoints import rule as rules
from fp8ref.formats import E4M3FN
from fp8ref.sim.quantize import cast

Tensors = dict[str, np.ndarray]

SHAPES = {
    "self_attn.q_proj": (256, 384),
    "self_attn.k_proj": (128, 384),
    "self_attn.v_proj": (128, 384),
    "self_attn.o_proj": (384, 256),
    "mlp.gate_proj": (512, 384),
    "mlp.up_proj": (512, 384),
    "mlp.down_proj": (384, 512),
}


def spread(shape, seed: int) -> np.ndarray:
    """Weights with heavy tails and with rows and columns of unlike sizes, as bfloat16 holds them."""
    random = np.random.default_rng(seed)
    x = random.standard_t(5, shape) * 0.02
    for axis in (-1, -2):
        sizes = [1] * len(shape)
        sizes[axis] = shape[axis]
        x = x * np.exp(0.4 * random.standard_normal(sizes))
    return x.astype(made.BF16).astype(np.float32)


def linears(shapes=None, layers: int = 2) -> Tensors:
    """Weights of linears by module."""
    shapes = shapes or SHAPES
    return {
        f"model.layers.{layer}.{name}": spread(shape, 100 * layer + i)
        for layer in range(layers)
        for i, (name, shape) in enumerate(shapes.items())
    }


def others(tied: bool = False, k: int = 384) -> Tensors:
    """What stays in bfloat16."""
    tensors = {
        "model.embed_tokens.weight": spread((512, k), 7).astype(made.BF16),
        "model.norm.weight": np.ones(k, made.BF16),
        "model.layers.0.input_layernorm.weight": np.ones(k, made.BF16),
    }
    return tensors if tied else tensors | {"lm_head.weight": spread((512, k), 8).astype(made.BF16)}


def quantized(weights: Tensors, store: Callable[[str, np.ndarray], Tensors]) -> Tensors:
    """The tensors of all weights as a library stores each."""
    return {k: v for name, x in weights.items() for k, v in store(name, x).items()}


def fp8(rule: str, scale: str = ".weight_scale", shape: Callable = np.asarray):
    """As libraries store FP8: codes, and factors of any shape."""

    def store(name: str, x: np.ndarray) -> Tensors:
        q = rules.by_name(rule).quantize(x)
        return {f"{name}.weight": made.codes(q), name + scale: shape(q.scale_inv)}

    return store


def nvfp4(scales: str, divides: bool, codes: str = ".weight"):
    """Two levels, of one tensor scale for q, k and v, and for gate and up, as engines need it."""
    amaxes: dict[str, float] = {}

    def group(name: str) -> str:
        parent, _, last = name.rpartition(".")
        return parent + {"q": "qkv", "k": "qkv", "v": "qkv", "g": "gu", "u": "gu"}.get(
            last[0], last
        )

    def store(name: str, x: np.ndarray) -> Tensors:
        # a row with the amax of the group gives every member its scale
        amax = amaxes[group(name)]
        row = np.zeros((1, x.shape[1]), np.float32)
        row[0, 0] = amax
        q = rules.by_name("torchao_nvfp4_nv").quantize(np.concatenate([x, row]))
        factor = np.asarray(q.tensor_scale_inv, np.float32).reshape(1)
        e4m3 = cast.encode(q.scale_inv[:-1], E4M3FN).view(made.FP8["e4m3fn"])
        return {
            name + codes: made.codes(q._replace(codes=q.codes[:-1])),
            f"{name}.weight_scale": e4m3,
            name + scales: 1 / factor if divides else factor,
        }

    def prepare(weights: Tensors) -> Callable:
        for name, x in weights.items():
            amaxes[group(name)] = max(amaxes.get(group(name), 0.0), float(np.abs(x).max()))
        return store

    return prepare


def as_codes(scale_inv: np.ndarray) -> np.ndarray:
    """e8m0 codes as bytes."""
    return made.scale_codes(scale_inv).view(np.uint8)


BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def compressed(ignore=("lm_head",), targets=("Linear",), **weights) -> dict:
    """The config of compressed-tensors."""
    group = {"targets": list(targets), "weights": {"num_bits": 8, "type": "float"} | weights}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
    }


def modelopt(algorithm: str) -> dict:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}


def write(
    path: Path, tensors: Tensors, quantization: dict | None, shards: int = 1, **config
) -> Path:
    """The directory of a checkpoint, of one file or of several with an index."""
    if quantization is not None:
        config["quantization_config"] = quantization
    if shards == 1:
        return made.write(path, tensors, config)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    places = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {k: np.array(tensors[k], order="C") for k in sorted(tensors)[shard::shards]}
        save_file(part, path / file)
        places |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return path


def experts(rule: str = "deepseek_v3_block") -> Tensors:
    """The experts of a layer in one tensor, as transformers 5 stores them."""
    tensors: Tensors = {}
    for i, (name, shape) in enumerate(
        {"gate_up_proj": (4, 512, 256), "down_proj": (4, 256, 256)}.items()
    ):
        each = [rules.by_name(rule).quantize(x) for x in spread(shape, i)]
        module = f"model.layers.0.mlp.experts.{name}"
        tensors[module] = np.stack([made.codes(q) for q in each])
        tensors[f"{module}_scale_inv"] = np.stack([q.scale_inv for q in each])
    return tensors | {"model.layers.0.mlp.gate.weight": spread((4, 256), 3).astype(made.BF16)}


def gpt_oss() -> Tensors:
    """MXFP4 experts [E, N, K / 32, 16] and their scales."""
    tensors: Tensors = {}
    for i, name in enumerate(("gate_up_proj", "down_proj")):
        each = [
            rules.by_name("mx_floor_mx", "e2m1fn").quantize(x) for x in spread((2, 192, 256), i)
        ]
        module = f"model.layers.0.mlp.experts.{name}"
        tensors[f"{module}_blocks"] = np.stack([made.codes(q).reshape(192, 8, 16) for q in each])
        tensors[f"{module}_scales"] = np.stack([as_codes(q.scale_inv) for q in each])
    attention = {f"model.layers.0.self_attn.{p}_proj.weight": spread((256, 256), 9) for p in "qkvo"}
    router = {"model.layers.0.mlp.router.weight": spread((2, 256), 3)}
    return tensors | {k: v.astype(made.BF16) for k, v in (attention | router).items()}
