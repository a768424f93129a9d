"""The model in ``transformers``' terms: its config.json, and the names of its weights (K-7).

A dense model is Llama's, or Qwen3's with ``qk_norm``. One with experts is Qwen3-MoE's with
``qk_norm``, or GraniteMoeShared's, which may have a shared expert (M-10). Files of Qwen3-MoE hold
each expert's weights by themselves, where the trainer has one parameter [E, N, K] of a projection;
those of GraniteMoeShared hold gate and up in one tensor.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from fp8ref.shared.errors import ConfigError, require
from fp8ref.spec.llama import EXPERTS, ROUTER, SHARED, LlamaConfig, Weight

_OF_EXPERT = re.compile(r"^(?P<mlp>.*)\.experts\.(?P<expert>\d+)\.(?P<projection>\w+)\.weight$")

_SHARED_SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads"),
)
_SHARED_KEYS = (*_SHARED_SIZES, "rms_norm_eps", "rope_theta", "tie_word_embeddings")
"""Keys of config.json that every model has, under the names of ``LlamaConfig``."""

_SIZES = (
    *_SHARED_SIZES,
    "intermediate_size",
    "moe_intermediate_size",
    "shared_intermediate_size",
    "head_dim",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
)
"""Keys of config.json that are whole numbers."""

_FACTORS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
"""GraniteMoeShared's factors, of which the trainer's model has none: they are 1."""

GRANITE = "granitemoeshared"
"""The model_type whose experts are without QK norm, and may have a shared one."""

KINDS = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    GRANITE: "GraniteMoeSharedForCausalLM",
}
"""{model_type: class}."""

_GRANITES = {
    f".mlp{ROUTER}.weight": (".block_sparse_moe.router.layer.weight", None),
    f".mlp{EXPERTS}.gate_proj.weight": (".block_sparse_moe.input_linear.weight", 0),
    f".mlp{EXPERTS}.up_proj.weight": (".block_sparse_moe.input_linear.weight", 1),
    f".mlp{EXPERTS}.down_proj.weight": (".block_sparse_moe.output_linear.weight", None),
    f".mlp{SHARED}.gate_proj.weight": (".shared_mlp.input_linear.weight", 0),
    f".mlp{SHARED}.up_proj.weight": (".shared_mlp.input_linear.weight", 1),
    f".mlp{SHARED}.down_proj.weight": (".shared_mlp.output_linear.weight", None),
}
"""{end of our name: (GraniteMoeShared's, which half of its output features; None: all)}."""


def kind(model: LlamaConfig) -> str:
    """The model_type; ConfigError for a model that none of ``KINDS`` is."""
    without = ("attention_softcap", "attention_sinks")
    if options := [name for name in without if getattr(model, name)]:
        raise ConfigError(
            f"{', '.join(KINDS.values())} of transformers have no place for "
            f"model.{' and model.'.join(options)}. Use run.init_from and export without them; a "
            "checkpoint's state has the weights."
        )
    if not model.num_experts:
        return "qwen3" if model.qk_norm else "llama"
    if model.qk_norm and not model.shared_expert_intermediate_size:
        return "qwen3_moe"
    if not model.qk_norm and model.norm_topk_prob:
        return GRANITE
    shared = model.shared_expert_intermediate_size
    has = "neither qk_norm nor norm_topk_prob"
    if model.qk_norm:
        has = f"qk_norm and shared_expert_intermediate_size {shared}"
    raise ConfigError(
        "transformers has experts with qk_norm and without a shared expert, Qwen3-MoE's, and "
        "with norm_topk_prob and without qk_norm, GraniteMoeShared's, which may have a shared "
        f"one; the model has {has}. Use run.init_from and export with such a model alone."
    )


def described(model: LlamaConfig) -> dict[str, Any]:
    """The keys of config.json that say which model it is."""
    config = {
        "model_type": kind(model),
        **{key: getattr(model, key) for key in (*_SHARED_KEYS, "initializer_range")},
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
    }
    if not model.num_experts:
        config["intermediate_size"] = model.intermediate_size
        return config if model.qk_norm else config | {"mlp_bias": False}
    if config["model_type"] == GRANITE:
        return config | {
            "intermediate_size": model.intermediate_size,
            "shared_intermediate_size": model.shared_expert_intermediate_size,
            "num_local_experts": model.num_experts,
            "num_experts_per_tok": model.num_experts_per_tok,
            **dict.fromkeys(_FACTORS, 1.0),
            "attention_multiplier": model.head_dim**-0.5,
            "router_aux_loss_coef": model.router_aux_loss_coef,
        }
    experts = {
        key: getattr(model, key)
        for key in ("num_experts", "num_experts_per_tok", "norm_topk_prob", "router_aux_loss_coef")
    }
    every_layer = {"decoder_sparse_step": 1, "mlp_only_layers": []}
    return config | {"moe_intermediate_size": model.intermediate_size, **experts, **every_layer}


def check_types(settings: Mapping[str, Any]) -> None:
    """ValueError for a value of config.json that is computed with, of a type no model has."""
    for key, value in settings.items():
        if key == "model_type" and not isinstance(value, str):
            raise ValueError(f"{key} is a text; got {value!r}")
        kind = {"layer_types": list, "rope_parameters": dict}.get(key)
        if kind and value is not None and not isinstance(value, kind):
            raise ValueError(f"{key} is {'a list' if kind is list else 'an object'}; got {value!r}")
        least = int(key == "num_attention_heads")
        if (
            key in _SIZES
            and value is not None
            and (type(value) is not int or not least <= value <= 2**31)
        ):
            raise ValueError(f"{key} is a whole number from {least} to 2^31; got {value!r}")


def missing(model_type: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of the keys of ``described``, what transformers takes where config.json has none, or null.

    Its sizes have no place here: without them a file says too little (``export``).
    """
    heads = settings.get("num_attention_heads")
    from_heads = settings["hidden_size"] // heads if heads else None
    every = {
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "attention_bias": False,
    }
    if model_type == "llama":
        return {**every, "num_key_value_heads": heads, "head_dim": from_heads, "mlp_bias": False}
    if model_type == "qwen3":
        return {**every, "num_key_value_heads": 32, "head_dim": 128}
    if model_type == GRANITE:
        sizes = {"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 0}
        factors = dict.fromkeys((*_FACTORS, "attention_multiplier"), 1.0)
        return {**every, "num_key_value_heads": heads, "head_dim": from_heads, **sizes, **factors}
    experts = {
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return {**every, "num_key_value_heads": 4, "head_dim": from_heads, **experts}


def model_of(settings: Mapping[str, Any]) -> LlamaConfig:
    """The trainer's model that a config.json describes; ``export.read`` compares all of it.

    Raises:   ValueError: a model_type not in ``KINDS``; missing or impossible sizes.
    """
    model_type = settings.get("model_type")
    text = f"the trainer's own model is of model_type {', '.join(KINDS)}; got {model_type!r}."
    require(model_type in KINDS, text)
    theta = settings.get("rope_theta") or (settings.get("rope_parameters") or {}).get("rope_theta")
    values = {key: value for key, value in settings.items() if value is not None}
    if theta:
        values["rope_theta"] = theta
    further = {"qwen3_moe": "norm_topk_prob", GRANITE: "shared_expert_intermediate_size"}
    keys = list(_SHARED_KEYS)
    if model_type in further:
        keys += ["num_experts", "num_experts_per_tok", further[model_type]]
    inner = "moe_intermediate_size" if model_type == "qwen3_moe" else "intermediate_size"
    try:
        every = missing(str(model_type), values) | values
        if "num_local_experts" in every:  # as transformers 5 writes it
            every.setdefault("num_experts", every["num_local_experts"])
        if "shared_intermediate_size" in every:
            every["shared_expert_intermediate_size"] = every["shared_intermediate_size"]
        head = every["head_dim"]
        if head == every["hidden_size"] // every["num_attention_heads"]:
            head = None
        return LlamaConfig(
            **{key: every[key] for key in keys},
            intermediate_size=every[inner],
            head_size=head,
            qk_norm=model_type in ("qwen3", "qwen3_moe"),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"config.json of model_type {model_type!r} lacks {error}.") from error


def apart(
    weights: Iterable[tuple[str, np.ndarray]], model_type: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Our weights, in the order of M-6, by the names and shapes of a model_type's files."""
    gates: dict[str, np.ndarray] = {}
    for name, value in weights:
        if model_type == GRANITE:
            named, half = _granites(name)
            if half == 0:
                gates[named] = value
            else:
                if half is not None:
                    value = np.concatenate([gates.pop(named), value], axis=-2)
                yield named, value
            continue
        mlp, dot, projection = name.rpartition(f"{EXPERTS}.")
        if not dot:
            yield name, value
            continue
        yield from ((f"{mlp}{EXPERTS}.{e}.{projection}", value[e]) for e in range(len(value)))


def together(weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """The trainer's names and weights, of those of files.

    Raises:   ValueError: a missing or misshaped expert; gate and up of no two halves.
    """
    joined: dict[str, Weight] = {}
    experts: dict[str, dict[int, Weight]] = {}
    ours: dict[str, list[str]] = {}
    for end, (theirs, _) in _GRANITES.items():
        ours.setdefault(theirs, []).append(end)
    for name, value in weights.items():
        if theirs := next((end for end in ours if name.endswith(end)), ""):
            n, rest = divmod(value.shape[-2], len(ours[theirs]))
            if rest:
                raise ValueError(
                    f"{name} has gate and up in two halves of its output features; got "
                    f"{list(value.shape)}. Save it whole."
                )
            for i, end in enumerate(ours[theirs]):
                joined[name.removesuffix(theirs) + end] = (
                    value if len(ours[theirs]) == 1 else HalfWeight(value, i * n, n)
                )
        elif match := _OF_EXPERT.match(name):
            experts.setdefault(f"{match['mlp']}{EXPERTS}.{match['projection']}.weight", {})[
                int(match["expert"])
            ] = value
        else:
            joined[name] = value
    for name, parts in experts.items():
        if set(parts) != set(range(len(parts))) or len({w.shape for w in parts.values()}) > 1:
            raise ValueError(
                f"{name} has experts 0 to {len(parts) - 1} of one shape; found "
                f"{sorted(parts)[:8]} of {[w.shape for w in parts.values()][:2]}"
            )
        joined[name] = ExpertsWeight(tuple(parts[e] for e in range(len(parts))))
    return joined


def _granites(name: str) -> tuple[str, int | None]:
    """GraniteMoeShared's name for one of ours, and which half of that tensor it is; None: all."""
    for ours, (theirs, half) in _GRANITES.items():
        if name.endswith(ours):
            return name.removesuffix(ours) + theirs, half
    return name, None


@dataclasses.dataclass(frozen=True)
class HalfWeight:
    """n output features from ``first`` on of a weight [..., N, K]; reads what is asked for."""

    of: Weight
    first: int
    n: int

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., n, K]."""
        return (*self.of.shape[:-2], self.n, self.of.shape[-1])

    def __getitem__(self, index) -> np.ndarray:
        """float32 values at slices of a step of 1; ... is the whole."""
        indices = index if isinstance(index, tuple) else (index,)
        at = indices.index(Ellipsis) if Ellipsis in indices else len(indices)
        more = (slice(None),) * (len(self.shape) - len(indices) + (Ellipsis in indices))
        slices = [*indices[:at], *more, *indices[at + 1 :]]
        start, stop, _ = slices[-2].indices(self.n)
        slices[-2] = slice(self.first + start, self.first + max(start, stop))
        return self.of[tuple(slices)]


@dataclasses.dataclass(frozen=True)
class ExpertsWeight:
    """A projection's weight [E, N, K] of each expert's [N, K]; only what is asked for is read."""

    parts: tuple[Weight, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """[E, N, K]."""
        return (len(self.parts), *self.parts[0].shape)

    def __getitem__(self, index) -> np.ndarray:
        """float32 values at slices; ... is the whole."""
        indices = index if isinstance(index, tuple) else (index,)
        if Ellipsis in indices:
            at = indices.index(Ellipsis)
            indices = indices[:at] + (slice(None),) * (4 - len(indices)) + indices[at + 1 :]
        experts, rows = indices[0], indices[1:]
        chosen = np.array([*self.parts, None], object)[:-1][experts]
        return np.stack([w[rows or ...] for w in chosen])
