"""Export and import weights of ``hugging_face``'s classes of transformers, in safetensors (K-7)."""

import functools
import importlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from fp8ref.checkpoints import tensors
from fp8ref.checkpoints import weights as quantized_weights
from fp8ref.checkpoints.tensors import StoredTensor
from fp8ref.shared import files
from fp8ref.shared.errors import ConfigError, require
from fp8ref.spec import llama
from fp8ref.spec.llama import LlamaConfig
from fp8ref.train.config import architecture, user_model
from fp8ref.train.config import config as configs
from fp8ref.train.config.config import Config
from fp8ref.train.models import hugging_face
from fp8ref.train.models.precision import Precision
from fp8ref.train.run import checkpoint, log
from fp8ref.train.run.checkpoint import Checkpoint

__all__ = ["export", "read"]

DEFAULT = Precision()  # float32
LARGEST = 5 * 2**30  # the most bytes of a file, unless a single tensor is larger

OURS = {
    "moe_intermediate_size": "intermediate_size",
    "head_dim": "head_size",
    "num_local_experts": "num_experts",
    "shared_intermediate_size": "shared_expert_intermediate_size",
}
"""Keys of config.json whose name in a config of fp8ref is another."""

REQUIRED = (
    *("model_type", "hidden_size", "num_experts", "num_local_experts"),
    *("moe_intermediate_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "vocab_size"),
)
"""Keys of a config.json that describe its model: transformers' defaults are of another."""


def export(
    run: Path,
    out: Path,
    *,
    tokenizer: Path | None = None,
    precision: Precision = DEFAULT,
    say: Callable[[str], None] = print,
) -> int:
    """Write the weights of a run's newest intact checkpoint to a new or empty directory.

    Returns their step.

    precision   float32, unless another one is named.

    tokenizer   a file, or a directory of files, to copy too; by default the run's own
                tokenizer.json, if it exists and is one.
    Raises:   ConfigError: no run, checkpoint or tokenizer; out is not empty, or inside the run;
              a precision that the model has not.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out} is not empty; it is left alone. Name a new directory.")
    text = f"--tokenizer {tokenizer} is not there. Name a file or a directory of files."
    require(tokenizer is None or tokenizer.exists(), text, ConfigError)
    text = f"--out {out} is in the run's own directory {run}. Name another directory."
    require(not out.absolute().is_relative_to(run.absolute()), text, ConfigError)
    while True:
        newest_checkpoint = checkpoint.latest(run, say, aside=False)
        if newest_checkpoint is None:
            log.read_manifest(run)  # raises if this is not a run at all
            raise ConfigError(
                f"{run} has no checkpoint yet. Train it with checkpoint.every above 0, or to "
                "its end."
            )
        try:
            _export(newest_checkpoint, out, tokenizer, precision, say)
            return newest_checkpoint.step
        except (OSError, ValueError):
            if newest_checkpoint.path.exists():
                raise
            # the run still trains, and has removed it after writing newer ones: try those


def _export(
    source: Checkpoint,
    out: Path,
    tokenizer: Path | None,
    precision: Precision,
    say: Callable[[str], None],
) -> None:
    config = configs.from_dict(source.manifest["config"], source=str(source.path / "manifest.json"))
    if config.architecture.kind in ("torch", "nnx"):
        raise ConfigError(
            "an export has the format of transformers, which a model of kind "
            f"{config.architecture.kind!r} has not; read {source.state}."
        )
    if tokenizer is None and (used := config.data.tokenizer) and Path(used).is_file():
        if _is_tokenizer(Path(used)):
            tokenizer = Path(used)
        else:
            say(
                f"{source.path / 'manifest.json'} names {used}, which is no tokenizer.json; it "
                "is left out. --tokenizer copies any file"
            )
    if tokenizer is None:
        beside = []
    elif tokenizer.is_file():
        beside = [tokenizer]
    else:
        beside = sorted(p for p in tokenizer.iterdir() if p.is_file())
    if (backend := source.manifest.get("backend")) not in architecture.BACKEND.values():
        raise ConfigError(
            f"{source.path} is of backend {backend!r}; fp8ref writes jax and torch. Leave it out."
        )
    if config.architecture.kind == "llama":
        hugging_face.kind(config.model)  # refuses a model that transformers has not
    precision.check(config)
    unfinished = out.with_name(out.name + checkpoint.UNFINISHED)
    try:
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        checkpoint.make_empty(unfinished)
        # the source may have changed since, or be gone
        if model_config := source.manifest.get("model", {}).get("config"):
            (unfinished / "config.json").write_text(json.dumps(model_config), encoding="utf-8")
            config = config.replace(architecture={"source": str(unfinished)})
        weights = functools.partial(_weights, source, config)
        _write(unfinished, config, precision.stored(weights), precision, source.step)
        for file in beside:
            shutil.copyfile(file, unfinished / file.name)
        if out.exists():
            out.rmdir()
        unfinished.rename(out)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"--out {out} could not be written: {error}. Make room, or name another directory."
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _weights(source: Checkpoint, config: Config) -> Iterator[tuple[str, np.ndarray]]:
    """The weights of a checkpoint by the names of files."""
    library = importlib.import_module(f"fp8ref.train.{source.manifest['backend']}.checkpoint")
    weights = _read(source.state, library.weights(source.state, config.shapes.parameters))
    if config.architecture.kind != "llama":
        return weights
    return hugging_face.apart(weights, hugging_face.kind(config.model))


def _is_tokenizer(path: Path) -> bool:
    """Whether a file is a tokenizer.json: another's run may name a file that is private."""
    try:
        model = files.read_object(path)["model"]
    except (OSError, ValueError):  # a missing key too
        return False
    return isinstance(model, dict) and "vocab" in model


def _read(
    state: Path, weights: Iterator[tuple[str, np.ndarray]]
) -> Iterator[tuple[str, np.ndarray]]:
    """The weights of a saved state, each checked.

    Raises:   ConfigError: the state is damaged, or a weight is not finite.
    """
    while True:
        try:
            name, value = next(weights)
            llama.check_finite(name, value, None)
        except StopIteration:
            return
        except MemoryError:
            raise
        except Exception as error:
            # safetensors, dcp and tensorstore raise all kinds of errors for damaged files
            raise ConfigError(f"{state} cannot be exported: {error}") from error
        yield name, value


@dataclass(frozen=True)
class StoredWeight:
    """A weight of safetensors as float32, exactly; only the piece asked for is read. Codes are
    dequantized."""

    tensor: StoredTensor | quantized_weights.StoredWeight
    path: Path

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight."""
        return self.tensor.shape

    def __getitem__(self, index) -> np.ndarray:
        """float32 values at slices; ... is the whole.

        Raises:   ConfigError: values that are not finite.
        """
        slices = index if isinstance(index, tuple) else ()
        try:
            piece = self.tensor[index].astype(np.float32)
            llama.check_finite(self.tensor.name, piece, [s.start or 0 for s in slices] or None)
        except ValueError as error:
            raise ConfigError(f"run.init_from {self.path}: {error}") from error
        return piece


def read(path: Path, model: LlamaConfig) -> dict[str, llama.Weight]:
    """The weights that ``export`` or transformers wrote, each read where it is used.

    Raises:   ConfigError: no such directory; another model's config.json; safetensors that are
              missing or damaged; weights of other names, shapes or dtypes.
    """
    _check_config(path, model)
    weights = stored(path)
    if model.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    try:
        weights = hugging_face.together(weights)
        llama.check_weights(weights, model)
    except ValueError as error:
        raise ConfigError(f"run.init_from {path}: {error}") from error
    return weights


def weights_of(path: Path, config: Config) -> dict[str, llama.Weight]:
    """The weights of a directory for a config's model; a user's are compared when it is filled."""
    if config.architecture.kind != "llama":
        return stored(path)
    return read(path, config.model)


def stored(path: Path) -> dict[str, llama.Weight]:
    """The weights in the safetensors of a directory, each read where it is used.

    Raises:   ConfigError: none, or damaged ones; other dtypes than float32, float16 and bfloat16;
              codes whose scales do not fit.
    """
    try:
        every = tensors.stored(path)
        quantized = quantized_weights.find(every)
        parts = {part.name for weight in quantized.values() for part in weight.parts}
        plain = {name: tensor for name, tensor in every.items() if name not in parts}
        for name, tensor in plain.items():
            text = f"{name} is {tensor.dtype}; weights are float32, float16 or bfloat16, or codes"
            require(tensor.dtype in ("F32", "F16", "BF16"), text)
        for name, weight in quantized.items():
            text = f"{name} has codes {[*weight.shape]} without scales [N, K] is divided by"
            fits = len(weight.shape) == 2 and weight.granularity != "" and not weight.is_integer
            require(fits, text)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"run.init_from {path}: {str(error).rstrip('.')}. It holds weights in safetensors; "
            "pickled ones are never read."
        ) from error
    return {name: StoredWeight(weight, path) for name, weight in (plain | quantized).items()}


def dequantized(path: Path) -> str:
    """Which weights of a directory are dequantized, in a sentence; "": none."""
    quantized = quantized_weights.find(tensors.stored(path)).values()
    kinds = sorted({f"{weight.fmt} ({weight.form.name})" for weight in quantized})
    text = f"run.init_from {path}: {len(quantized)} weights are {', '.join(kinds)}; "
    return f"{text}training starts from their dequantized numbers" if kinds else ""


def _write(
    out: Path,
    config: Config,
    weights: Iterator[tuple[str, np.ndarray]],
    precision: Precision = DEFAULT,
    step: int = 0,
) -> None:
    """Write files of at most LARGEST bytes, one after the other: only one is in memory."""
    places: dict[str, str] = {}
    piece: dict[str, np.ndarray] = {}
    written: list[Path] = []

    def close() -> None:
        path = out / f"model-{len(written) + 1:05d}.safetensors"
        path.touch()
        mode = path.stat().st_mode
        save_file(piece, path, metadata={"format": "pt"} | precision.metadata(step))
        path.chmod(mode)  # safetensors 0.8 lets only its owner read a file
        written.append(path)
        places.update(dict.fromkeys(piece, path.name))
        piece.clear()

    total = 0
    for name, value in weights:
        if piece and sum(v.nbytes for v in piece.values()) + value.nbytes > LARGEST:
            close()
        piece[name] = np.ascontiguousarray(value)
        total += value.nbytes
    close()
    if len(written) == 1:
        written[0].rename(out / "model.safetensors")
    else:
        renamed = {
            p.name: f"model-{i + 1:05d}-of-{len(written):05d}.safetensors"
            for i, p in enumerate(written)
        }
        for path in written:
            path.rename(out / renamed[path.name])
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: renamed[file] for name, file in places.items()},
        }
        (out / tensors.INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    (out / "config.json").write_text(
        json.dumps(_hugging_face(config, precision), indent=1) + "\n", encoding="utf-8"
    )


def _hugging_face(config: Config, precision: Precision = DEFAULT) -> dict[str, Any]:
    """The content of config.json."""
    stored = precision.config(config.shapes.parameters)
    if config.architecture.kind == "transformers":
        safe = user_model.without_code(user_model.configuration(config.architecture))
        return {
            key: value for key, value in safe.items() if key not in ("dtype", "torch_dtype")
        } | stored
    theta = config.model.rope_theta
    return {
        **hugging_face.described(config.model),
        "architectures": [hugging_face.KINDS[hugging_face.kind(config.model)]],
        "max_position_embeddings": config.data.sequence_length,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        **stored,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _settings(path: Path) -> dict[str, Any]:
    """The content of config.json, with the keys of transformers 5 under their older names too."""
    try:
        settings = files.read_object(path / "config.json")
        hugging_face.check_types(settings)
        settings.setdefault("rope_theta", (settings.get("rope_parameters") or {}).get("rope_theta"))
        if "num_local_experts" in settings:
            settings.setdefault("num_experts", settings["num_local_experts"])
        return settings
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"run.init_from {path}: config.json cannot be read ({error}). Name a directory that "
            "fp8ref export wrote."
        ) from error


def _check_config(path: Path, model: LlamaConfig) -> None:
    """ConfigError if config.json describes another model.

    initializer_range and router_aux_loss_coef may differ: they drew the initial weights and train.
    """
    settings, expected = _settings(path), hugging_face.described(model)
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    scaled = rope.get("rope_type", "default") if isinstance(rope, dict) else rope
    if scaled != "default":
        raise ConfigError(
            f"run.init_from {path}: fp8ref has rotary tables of rope_type 'default' only (M-4); "
            f"its config.json has {scaled!r}."
        )
    for key in REQUIRED:
        if key in expected and settings.get(key) is None:
            raise ConfigError(
                f"run.init_from {path}: its config.json has no {key}. Name a directory that "
                "fp8ref export wrote."
            )
    slides = "sliding_attention" in list(settings.get("layer_types") or ())
    if settings.get("use_sliding_window") or slides:
        raise ConfigError(
            f"run.init_from {path}: every layer attends to all that is before (M-3); its "
            "config.json has sliding windows, by use_sliding_window or layer_types. Name "
            "weights of a model without."
        )
    absent = hugging_face.missing(expected["model_type"], settings)
    for key in expected.keys() - {"initializer_range", "router_aux_loss_coef"}:
        has = settings.get(key)
        value = absent.get(key) if has is None else has
        if value != expected[key]:
            ours = OURS.get(key, key)
            default = f"no {key}, which is {value!r} in transformers"
            raise ConfigError(
                f"run.init_from {path}: its config.json has "
                f"{default if has is None else f'{key} {has!r}'}; model.{ours} is "
                f"{expected[key]!r}. Make them equal."
            )
