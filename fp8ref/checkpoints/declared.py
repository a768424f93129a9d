"""What a checkpoint's config says of its weights, as data.

Read are ``quantization_config`` (or ``compression_config``) of config.json, also below
``text_config``, and hf_quant_config.json of ModelOpt.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8ref.checkpoints import patterns
from fp8ref.shared import files

__all__ = ["Declared", "Scheme", "read"]


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How weights are quantized; "" of what the config does not say.

    fmt          the format of codes.
    granularity  what shares a scale, of ``spec.granularity``; of other blocks their size, as 64x64.
    scale_fmt    the format of scales: e8m0fnu, e4m3fn or float32.
    targets      names or patterns of modules; empty, or with a class of layers: all.
    """

    fmt: str = ""
    granularity: str = ""
    scale_fmt: str = ""
    targets: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Declared:
    """What a config says; ``method`` is "" where it says nothing.

    method    ``quant_method``: fp8, compressed-tensors, modelopt, torchao, mxfp4.
    source    the file that says it.
    schemes   of weights, the first that matches.
    ignored   patterns of modules left in high precision.
    engine    who matches them, of ``patterns.ENGINES``.
    extra     names of modules that are quantized too, such as embeddings.
    """

    method: str = ""
    source: str = "config.json"
    schemes: tuple[Scheme, ...] = ()
    ignored: tuple[str, ...] = ()
    engine: str = "transformers"
    extra: tuple[str, ...] = ()

    def excludes(self, module: str) -> str | None:
        """The pattern that leaves a module in high precision; None: it is quantized."""
        return patterns.excluding(self.engine, self.ignored, module)

    def scheme(self, module: str) -> Scheme | None:
        """How a module's weight is quantized; None: no scheme has it as a target."""
        for scheme in self.schemes:
            if any(
                _is_class(t) or patterns.excluding(self.engine, [t], module)
                for t in scheme.targets or ("Linear",)
            ):
                return scheme
        return None

    def names(self, module: str) -> bool:
        """Whether the config names a module as quantized, and not only its class."""
        targets = [t for scheme in self.schemes for t in scheme.targets if not _is_class(t)]
        return patterns.excluding(self.engine, [*targets, *self.extra], module) is not None


def _is_class(target: str) -> bool:
    """Whether a target is a class of layers, such as ``Linear``."""
    return target[:1].isupper() and target.isidentifier()


def read(path: Path) -> Declared:
    """What the configs of a checkpoint's directory say; of a file those beside it.

    Raises:   ValueError: a config that is no JSON, or whose values have other types.
    """
    folder = path if path.is_dir() else path.parent
    for name, keys in (
        ("config.json", ("quantization_config", "compression_config")),
        ("hf_quant_config.json", ("quantization",)),
    ):
        config = _object(folder / name)
        for holder in (config, _part(config, "text_config")):
            for key in keys:
                if section := _part(holder, key):
                    default = "modelopt" if key == "quantization" else ""
                    return _declared(section, name, default)
    return Declared()


def tied(path: Path) -> bool:
    """Whether config.json ties the output's weights to the embedding's."""
    config = _object((path if path.is_dir() else path.parent) / "config.json")
    value = config.get(
        "tie_word_embeddings", _part(config, "text_config").get("tie_word_embeddings")
    )
    return value is True


def _object(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        return files.read_object(path)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}.") from error


def _part(holder: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = holder.get(key)
    return value if isinstance(value, Mapping) else {}


def _declared(section: Mapping[str, Any], source: str, default: str) -> Declared:
    """Of a section whose values have other types nothing is said."""
    method = str(section.get("quant_method") or default).lower()
    reader = METHODS.get(method, _unknown)
    build = functools.partial(Declared, method=method or "unknown", source=source)
    return reader(section, build)


def _texts(section: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    """The texts of the first of these lists that is there."""
    for key in keys:
        if isinstance(value := section.get(key), list):
            return tuple(text for text in value if isinstance(text, str))
    return ()


def _blocks(rows: object, columns: object) -> str:
    """The granularity of blocks; its name, or the size of others."""
    sizes = {(128, 128): "blockwise_128x128", (1, 128): "blockwise_1x128", (1, 32): "mx_1x32"}
    sizes |= {(1, 16): "nvfp4_1x16", (32, 32): "mx_32x32", (16, 16): "nvfp4_16x16"}
    return sizes.get((rows, columns), f"{rows}x{columns}")  # type: ignore[call-overload]


def _fp8(section: Mapping[str, Any], build) -> Declared:
    size = section.get("weight_block_size")
    whole = isinstance(size, list) and len(size) == 2
    scale = {"ue8m0": "e8m0fnu", "float": "float32"}.get(str(section.get("scale_fmt")), "")
    fmt = {"e4m3": "e4m3fn", "e5m2": "e5m2"}.get(str(section.get("fmt", "")), "")
    return build(
        schemes=(Scheme(fmt=fmt, granularity=_blocks(*size) if whole else "", scale_fmt=scale),),
        ignored=_texts(section, "modules_to_not_convert", "ignored_layers"),
        extra=_texts(section, "modules_to_convert"),
    )


def _compressed_tensors(section: Mapping[str, Any], build) -> Declared:
    schemes = [
        _compressed_scheme(_part(group, "weights"), _texts(group, "targets"))
        for group in _part(section, "config_groups").values()
        if isinstance(group, Mapping)
    ]
    return build(
        schemes=tuple(schemes), ignored=_texts(section, "ignore"), engine="compressed-tensors"
    )


def _compressed_scheme(weights: Mapping[str, Any], targets: tuple[str, ...]) -> Scheme:
    bits, strategy, size = (weights.get(k) for k in ("num_bits", "strategy", "group_size"))
    is_float = weights.get("type") == "float"
    fmt = {4: "e2m1fn", 8: "e4m3fn"}.get(bits, "") if is_float else ""  # type: ignore[call-overload]
    shape = weights.get("block_structure")
    groups = {"tensor": "tensorwise", "channel": "rowwise"}
    groups |= {"group": _blocks(1, size), "tensor_group": _blocks(1, size)}
    groups |= {"block": _blocks(*shape)} if isinstance(shape, list) and len(shape) == 2 else {}
    scale = {"torch.uint8": "e8m0fnu", "torch.float8_e4m3fn": "e4m3fn"}
    return Scheme(
        fmt=fmt,
        granularity=groups.get(str(strategy), ""),
        scale_fmt=scale.get(str(weights.get("scale_dtype")), ""),
        targets=targets,
    )


ALGORITHMS = {
    "FP8": Scheme(fmt="e4m3fn", granularity="tensorwise"),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme(fmt="e4m3fn", granularity="rowwise"),
    "FP8_PB_WO": Scheme(fmt="e4m3fn", granularity="blockwise_128x128"),
    "FP8_PB_REAL": Scheme(fmt="e4m3fn", granularity="blockwise_128x128"),
    "NVFP4": Scheme(fmt="e2m1fn", granularity="nvfp4_1x16", scale_fmt="e4m3fn"),
    "W4A16_NVFP4": Scheme(fmt="e2m1fn", granularity="nvfp4_1x16", scale_fmt="e4m3fn"),
    "MXFP8": Scheme(fmt="e4m3fn", granularity="mx_1x32", scale_fmt="e8m0fnu"),
    "MXFP4": Scheme(fmt="e2m1fn", granularity="mx_1x32", scale_fmt="e8m0fnu"),
}
"""{ModelOpt's ``quant_algo``: how weights are quantized}."""


def _modelopt(section: Mapping[str, Any], build) -> Declared:
    section = _part(section, "quantization") or section
    schemes = [ALGORITHMS.get(str(section.get("quant_algo")).upper(), Scheme())]
    layers = {
        name: ALGORITHMS.get(str(layer.get("quant_algo")).upper(), Scheme())
        for name, layer in _part(section, "quantized_layers").items()
        if isinstance(layer, Mapping)
    }
    if layers:
        schemes = [
            Scheme(fmt=s.fmt, granularity=s.granularity, scale_fmt=s.scale_fmt, targets=(name,))
            for name, s in layers.items()
        ]
    return build(
        schemes=tuple(schemes),
        ignored=_texts(section, "exclude_modules", "ignore"),
        engine="modelopt",
    )


def _torchao(section: Mapping[str, Any], build) -> Declared:
    kind = str(_part(section, "quant_type"))
    fp8 = "Float8" in kind and "Int" not in kind
    granularity = {"PerRow": "rowwise", "PerTensor": "tensorwise"}
    return build(
        schemes=(
            Scheme(
                fmt="e4m3fn" if fp8 else "",
                granularity=next((g for word, g in granularity.items() if word in kind), ""),
            ),
        ),
        ignored=_texts(section, "modules_to_not_convert"),
        engine="torchao",
    )


def _mxfp4(section: Mapping[str, Any], build) -> Declared:
    scheme = Scheme(fmt="e2m1fn", granularity="mx_1x32", scale_fmt="e8m0fnu")
    return build(schemes=(scheme,), ignored=_texts(section, "modules_to_not_convert"))


def _unknown(section: Mapping[str, Any], build) -> Declared:
    return build(schemes=(Scheme(),), ignored=_texts(section, "modules_to_not_convert", "ignore"))


METHODS = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "compressed_tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "modelopt_mixed": _modelopt,
    "torchao": _torchao,
    "mxfp4": _mxfp4,
}
"""{``quant_method``: its reader}."""
