"""Where an ablation begins: a run's last checkpoint, or weights of Hugging Face's format (E-8).

start = run_start(Path("runs/tiny-jax-bf16"), "tensorwise")
start.into(trainer, config)                    # whatever layouts and delayed scales config has
"""

import dataclasses
import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from fp8ref.recipe import RECIPES
from fp8ref.shared import files
from fp8ref.shared.errors import ConfigError
from fp8ref.spec import llama
from fp8ref.spec.llama import LlamaConfig
from fp8ref.train import loop
from fp8ref.train.config.config import Config
from fp8ref.train.config.sections import ArchitectureConfig, DataConfig, NumericsConfig
from fp8ref.train.data import loader, shards
from fp8ref.train.models import export, hugging_face
from fp8ref.train.run import log, run_dir, state_conversion, train_state
from fp8ref.train.run.checkpoint import Checkpoint
from fp8ref.train.run.state_conversion import Source


@dataclass(kw_only=True)
class Start:
    """Weights, moments and states of delayed scaling that every variant begins with.

    own         the config under which they were kept; config: that of what is studied.
    checkpoint  of a run; None of a directory of Hugging Face's, whose weights are ``weights``.
    """

    name: str
    backend: str
    step: int
    own: Config
    config: Config
    checkpoint: Checkpoint | None = None
    weights: Path | None = None

    def into(self, trainer: loop.Trainer, config: Config) -> None:
        """Have a trainer of ``config`` begin here; a state of equal meaning is read as it is."""
        if self.checkpoint is not None and train_state.interchangeable(
            config, self.own, self.backend
        ):
            trainer.load(self.checkpoint.state, self.step)
        else:
            trainer.adopt(state_conversion.converted(self.source, config, self.backend), self.step)

    @functools.cached_property
    def identity(self) -> str:
        """A sha256 of what is begun with: the checkpoint's files, or the weights and config."""
        if self.checkpoint is not None:
            listed = self.checkpoint.manifest["files"]
            of = {name: entry["sha256"] for name, entry in listed.items()}
        else:
            assert self.weights is not None
            tensors = sorted(self.weights.glob("*.safetensors"))
            files = [self.weights / "config.json", *tensors]
            of = {path.name: shards.sha256(path) for path in files if path.is_file()}
        return hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()

    @functools.cached_property
    def batches(self) -> loader.Batches:
        """The data."""
        return loader.open_batches(self.config)

    @functools.cached_property
    def source(self) -> Source:
        """What the state is worth."""
        weights: dict[str, llama.Weight] | None = None
        if self.weights is not None:
            weights = export.weights_of(self.weights, self.own)
        trainer = loop.trainer(self.backend, self.own, weights)
        if self.checkpoint is None:
            return Source(weights=trainer.weights(), step=0, amaxes=self._amaxes)
        trainer.load(self.checkpoint.state, self.step)
        casts = train_state.delayed_states(self.own)
        return Source(
            weights=trainer.weights(),
            moments=trainer.moments(),
            delayed=trainer.fp8_states(),
            casts={f"{path}/{role}": cast for (path, role), cast in casts.items()},
            step=self.step,
            amaxes=self._amaxes,
        )

    def _amaxes(self) -> dict[str, float]:
        """The amax of every operand of the linears, of the batch after the checkpoint."""
        config = with_plain_attention(self.config).replace(
            numerics={"recipe": "tensorwise", "rules": None},
            optimizer={"kind": "adamw", "layout": None},
        )
        trainer = loop.trainer(self.backend, config)
        trainer.adopt(state_conversion.converted(self.source, config, self.backend), self.step)
        amaxes = {}
        for name, measured in trainer.statistics(self.batches.step(self.step)).items():
            linear, _, role = name.rsplit("/", 2)
            amaxes[f"{linear}/{role}"] = float(measured["amax"])
        return amaxes


def with_plain_attention(config: Config) -> Config:
    """The config with the framework's own attention, in high precision."""
    plain = {k: v for k, v in vars(NumericsConfig()).items() if k.startswith("attention")}
    own = config.parallel.attention
    return config.replace(
        numerics=plain, parallel={"attention": "xla" if own in ("tiles", "kernel") else own}
    )


def run_start(run: Path, recipe: str | None) -> Start:
    """The last checkpoint of a run, and its config in the recipe that is studied.

    Raises:   ConfigError: no run or checkpoint; several devices; a recipe without FP8.
    """
    manifest = log.read_manifest(run)
    config, last = run_dir.on_one_device(run, "an ablation takes a run")
    trained = config.recipes
    own = config.numerics.recipe
    in_fp8 = [name for name in (own, *reversed(trained)) if RECIPES[name].fp8]
    recipe = recipe or (in_fp8 or ["tensorwise"])[0]
    return Start(
        name=str(run),
        backend=manifest["backend"],
        step=last.step,
        own=config,
        config=_studied(config, recipe, keeps_rules=recipe in trained),
        checkpoint=last,
    )


def weights_start(path: Path, backend: str, recipe: str | None, data: DataConfig) -> Start:
    """The weights in a directory of ``fp8ref export`` or transformers; moments begin at 0.

    The model is the trainer's own, where that is it; in PyTorch else transformers' (T-10).
    data      its text, lengths and batches; tokens by its tokenizer.json, else bytes.
    Raises:   ConfigError: no such directory, another model, damaged weights; no FP8 recipe.
    """
    try:
        settings = files.read_object(path / "config.json")
        hugging_face.check_types(settings)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} is no run, and has no config.json ({error}). Name a run, or a directory of "
            "Hugging Face's format."
        ) from error
    tokenizer = path / "tokenizer.json"
    named = str(tokenizer) if tokenizer.is_file() else None
    data = dataclasses.replace(data, tokenizer=named)
    own = _own_config(path, backend, settings, data).replace(numerics={"recipe": "bf16"})
    return Start(
        name=str(path),
        backend=backend,
        step=0,
        own=own,
        config=_studied(own, recipe or "tensorwise", keeps_rules=False),
        weights=path,
    )


def _own_config(path: Path, backend: str, settings: dict, data: DataConfig) -> Config:
    """A config of the model in a directory: the trainer's own, or in PyTorch transformers'."""
    # else transformers' model would be taken, and say less of damaged weights
    if settings.get("model_type") in hugging_face.KINDS:
        try:
            export.stored(path)
        except ConfigError as error:
            raise ConfigError(_weights_message(error)) from error
    try:
        own = Config(data=data).replace(model=vars(hugging_face.model_of(settings)))
        export.read(path, own.model)
    except (ValueError, ConfigError) as error:
        if backend == "torch":
            return Config(
                data=data,
                model=LlamaConfig(vocab_size=settings.get("vocab_size", 256)),
                architecture=ArchitectureConfig(kind="transformers", source=str(path)),
            )
        raise ConfigError(
            f"JAX trains the trainer's own model alone, which {path} is not: "
            f"{_weights_message(error)} Use --backend torch, which takes transformers' model."
        ) from error
    return own


def _weights_message(error: Exception) -> str:
    """A message of ``export``, without the key that no user of an ablation gave."""
    return str(error).removeprefix("run.init_from ")


def _studied(config: Config, recipe: str, *, keeps_rules: bool) -> Config:
    """A config in one recipe, without what changes no loss or has no place here."""
    if recipe not in RECIPES or not RECIPES[recipe].fp8:
        fp8 = ", ".join(name for name, one in RECIPES.items() if one.fp8)
        raise ConfigError(f"--recipe is one with FP8 that trains: {fp8}; got {recipe!r}.")
    rules = config.numerics.rules if keeps_rules else None
    if config.optimizer.kind == "adamw_fp8":  # torchao's own states, which no layout converts
        config = config.replace(optimizer={"kind": "adamw"})
    return config.replace(
        numerics={"recipe": recipe, "rules": rules, "schedule": None, "accumulate": None},
        parallel={"scan": False},
        statistics={"every": 0},
    )
