"""What a checkpoint's config says of its weights, as data.

Read are ``quantization_config`` (or ``compression_config``) of config.json, also below
``text_config``, and hf_quant_config.json of ModelOpt.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8ref.checkpoints import patterns
from fp8ref.shared import files, package_data
from fp8ref.spec.granularity import GRANULARITIES

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
        return next((s for s in self.schemes if self._is_target(s.targets, module)), None)

    def _is_target(self, targets: tuple[str, ...], module: str) -> bool:
        named = patterns.excluding(self.engine, targets, module) is not None
        return named or not targets or any(map(_is_class, targets))

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
    """Of values of other types nothing is said."""
    method = str(section.get("quant_method") or default).lower()
    reader = METHODS.get(method.partition("_fp4")[0].replace("_", "-"), _plain)
    return dataclasses.replace(reader(section), method=method or "unknown", source=source)


def _texts(section: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    """The texts of the first of these lists that is there."""
    lists = (value for key in keys if isinstance(value := section.get(key), list))
    return tuple(text for text in next(lists, []) if isinstance(text, str))


SIZES = {name.rpartition("_")[2]: name for name, g in GRANULARITIES.items() if g.reduced}
"""{size of a block: its granularity}; others keep their size for a name."""


def _blocks(size: object) -> str:
    text = "x".join(map(str, size)) if isinstance(size, list) else ""
    return SIZES.get(text, text)


def _fp8(section: Mapping[str, Any]) -> Declared:
    scale = {"ue8m0": "e8m0fnu", "float": "float32"}.get(str(section.get("scale_fmt")), "")
    fmt = {"e4m3": "e4m3fn", "e5m2": "e5m2"}.get(str(section.get("fmt")), "")
    blocks = _blocks(section.get("weight_block_size"))
    return Declared(
        schemes=(Scheme(fmt=fmt, granularity=blocks, scale_fmt=scale),),
        ignored=_texts(section, "modules_to_not_convert", "ignored_layers"),
        extra=_texts(section, "modules_to_convert"),
    )


def _compressed_tensors(section: Mapping[str, Any]) -> Declared:
    groups = _part(section, "config_groups").values()
    schemes = tuple(_group(group) for group in groups if isinstance(group, Mapping))
    return Declared(schemes=schemes, ignored=_texts(section, "ignore"), engine="compressed-tensors")


def _group(group: Mapping[str, Any]) -> Scheme:
    """A group of compressed-tensors."""
    weights = _part(group, "weights")
    size = _blocks([1, weights.get("group_size")])
    granularity = {
        "tensor": "tensorwise",
        "channel": "rowwise",
        "group": size,
        "tensor_group": size,
        "block": _blocks(weights.get("block_structure")),
    }
    fmt = {"float 4": "e2m1fn", "float 8": "e4m3fn"}
    scale = {"torch.uint8": "e8m0fnu", "torch.float8_e4m3fn": "e4m3fn"}
    return Scheme(
        fmt=fmt.get(f"{weights.get('type')} {weights.get('num_bits')}", ""),
        granularity=granularity.get(str(weights.get("strategy")), ""),
        scale_fmt=scale.get(str(weights.get("scale_dtype")), ""),
        targets=_texts(group, "targets"),
    )


ALGORITHMS = {
    name: Scheme(**fields) for name, fields in package_data.tables(__file__, "algorithms").items()
}
"""{ModelOpt's ``quant_algo``: how weights are quantized}."""


def _modelopt(section: Mapping[str, Any]) -> Declared:
    section = _part(section, "quantization") or section
    layers = _part(section, "quantized_layers") or {"": section}
    schemes = tuple(
        dataclasses.replace(
            ALGORITHMS.get(str(layer.get("quant_algo")).upper(), Scheme()),
            targets=(name,) if name else (),
        )
        for name, layer in layers.items()
        if isinstance(layer, Mapping)
    )
    ignored = _texts(section, "exclude_modules", "ignore")
    return Declared(schemes=schemes, ignored=ignored, engine="modelopt")


def _torchao(section: Mapping[str, Any]) -> Declared:
    kind = str(_part(section, "quant_type"))
    granularity = {"PerRow": "rowwise", "PerTensor": "tensorwise"}
    scheme = Scheme(
        fmt="e4m3fn" if "Float8" in kind and "Int" not in kind else "",
        granularity=next((g for word, g in granularity.items() if word in kind), ""),
    )
    ignored = _texts(section, "modules_to_not_convert")
    return Declared(schemes=(scheme,), ignored=ignored, engine="torchao")


def _plain(section: Mapping[str, Any]) -> Declared:
    ignored = _texts(section, "modules_to_not_convert", "ignore")
    return Declared(schemes=(Scheme(),), ignored=ignored)


def _mxfp4(section: Mapping[str, Any]) -> Declared:
    scheme = Scheme(fmt="e2m1fn", granularity="mx_1x32", scale_fmt="e8m0fnu")
    return dataclasses.replace(_plain(section), schemes=(scheme,))


METHODS = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "torchao": _torchao,
    "mxfp4": _mxfp4,
}
"""{``quant_method``: its reader}."""
