"""The sections of a configuration: frozen dataclasses whose fields are the keys.

Each checks its values when it is built.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import tyro

from fp8ref import recipe as recipes


def require(condition: bool, message: str) -> None:
    """ValueError(message) unless the condition holds."""
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The training text, and how it is cut into batches (SEMANTICS D)."""

    source: str = "stdlib"
    """``stdlib``: the Python standard library's sources on this machine; a directory whose ``*.py``, ``*.md`` and ``*.txt`` are read; token
    shards (.bin, .npy) or documents (.parquet, .jsonl): a file, a directory or a pattern; for ``fp8ref data prepare`` also hf:org/name[:config]."""
    tokenizer: str | None = None
    """How text becomes tokens: by default its bytes; else a tokenizer.json, or tiktoken:NAME."""
    end_of_document: str | None = None
    """The token after each document; by default the tokenizer's own, a zero byte between documents in bytes; '' is none."""
    text_column: str = "text"
    """The column of documents that holds their text."""
    token_dtype: Literal["uint16", "uint32"] | None = None
    """The integers of .bin shards that nothing beside them describes; by default uint16."""
    sequence_length: int = 128
    """Tokens in a sequence."""
    batch_size: int = 16
    """Sequences in the global batch."""
    microbatches: int = 1
    """Equal parts in which the global batch is trained, one after the other; their gradients are summed in float32."""
    validation_fraction: float = 0.1
    """Share kept for validation: of files of text, of documents, of each shard; unused where files are named val."""
    seed: int = 0
    """Seed of the shuffle."""

    def __post_init__(self) -> None:
        require(self.source != "", "data.source is 'stdlib', a file, a directory or a pattern; got ''.")
        for key in ("tokenizer", "text_column"):
            require(getattr(self, key) != "", f"data.{key} is not empty; leave it out for its default.")
        require(self.sequence_length >= 1, f"data.sequence_length is at least 1; got {self.sequence_length}.")
        require(self.batch_size >= 1, f"data.batch_size is at least 1; got {self.batch_size}.")
        require(self.microbatches >= 1, f"data.microbatches is at least 1; got {self.microbatches}.")
        require(
            self.batch_size % self.microbatches == 0,
            f"data.batch_size is divisible by data.microbatches; got {self.batch_size} and {self.microbatches}.",
        )
        require(0 < self.validation_fraction < 1, f"data.validation_fraction lies between 0 and 1; got {self.validation_fraction}.")
        require(self.seed >= 0, f"data.seed is not negative; got {self.seed}.")

    def indivisible(self, shared: int, who: str) -> str:
        """The error message for a batch that data x fsdp = ``shared`` devices cannot share evenly."""
        parts = f" times data.microbatches = {self.microbatches}" * (self.microbatches > 1)
        return f"data.batch_size is divisible by data x fsdp = {shared} {who}{parts}; got {self.batch_size}."

    def parts(self, batch: np.ndarray) -> np.ndarray:
        """A batch [B, ...] as microbatches [microbatches, B / microbatches, ...] of contiguous rows
        (SEMANTICS T-7)."""
        require(
            len(batch) % self.microbatches == 0,
            f"a batch is trained in data.microbatches = {self.microbatches} equal parts; got {len(batch)} sequences.",
        )
        return batch.reshape(self.microbatches, -1, *batch.shape[1:])


@dataclass(frozen=True, kw_only=True)
class NumericsConfig:
    """Which linears run in FP8, and how (SEMANTICS R)."""

    recipe: Annotated[str, tyro.conf.arg(aliases=["--recipe"])] = "tensorwise"
    """bf16, tensorwise, rowwise, rowwise_with_gw_hp, delayed, blockwise or mxfp8."""
    filter_fqns: tuple[str, ...] = ()
    """Names of modules kept in high precision: whole dotted components, or shell patterns; auto_filter_small_kn keeps small ones.
    lm_head is kept anyway."""
    fp8_fqns: tuple[str, ...] = ()
    """Names converted explicitly, whatever filter_fqns says; lm_head may be one."""
    accumulate: str | None = None
    """Simulated hardware that FP8 GEMMs run under, on a CPU: hopper (hopper_fast where the recipe says fast, else hopper_slow), one plan for all of
    them (exact, f32, hopper_fast, hopper_slow, ada, blackwell), or the .json of a plan that fp8ref probe wrote; native: the framework's own GEMMs."""

    def __post_init__(self) -> None:
        require(self.recipe in recipes.RECIPES, f"numerics.recipe is one of {', '.join(recipes.RECIPES)}; got {self.recipe!r}.")
        require(self.accumulate != "", "numerics.accumulate names simulated hardware; got ''. Leave it out for the framework's own GEMMs.")

    @property
    def simulates(self) -> bool:
        """Whether FP8 GEMMs run under simulated hardware."""
        return self.accumulate not in (None, "native")

    def check_multiply(self, multiply: object) -> None:
        """ValueError unless ``multiply`` was given if, and only if, ``accumulate`` asks for it."""
        given = "none" if multiply is None else getattr(multiply, "name", repr(multiply))
        require(
            self.simulates == (multiply is not None),
            f"numerics.accumulate is {self.accumulate!r}, and the trainer was given {given} to multiply by. Make trainers by fp8ref.train.loop.trainer.",
        )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """A mesh of data x fsdp x tensor devices, and how it shards the model (SEMANTICS P)."""

    data: int = 1
    """Devices with a part of the batch and a copy of the weights each."""
    fsdp: int = 1
    """Devices with a part of the batch and a part of every matrix each; linears' weights are gathered in FP8."""
    tensor: int = 1
    """Devices that share every linear of attention and MLP, by heads and inner features."""
    sequence: bool = False
    """Cut the tokens between those linears over tensor too; inputs are gathered in FP8."""
    amax_scope: Literal["global", "local"] = "global"
    """Whose amaxes scale input and grad_output: every device's, or those of each piece of the batch alone."""
    through: Literal["shard_map", "jit"] = "shard_map"
    """JAX: collectives of our own, or XLA's under plain jit."""
    gather: Literal["fp8", "compute"] = "fp8"
    """PyTorch: how fsdp gathers linears' weights that one scale serves: in FP8, or in the compute dtype. No bit of training differs."""
    precompute_scales: bool = True
    """PyTorch: the scales of all weights that are gathered in FP8 by one all-reduce a forward pass, or by one of each weight's own."""
    reduction: Literal["native", "ordered"] = "native"
    """PyTorch: gradients are summed over fsdp as the backend does, or in rank order."""
    attention: Literal["xla", "cudnn"] = "xla"
    """JAX: by XLA's own products, which writes all scores, or by cuDNN's fused kernel, which needs an NVIDIA GPU."""
    checkpointing: Literal["none", "selective", "full"] = "none"
    """PyTorch: what of a layer's forward pass runs again in its backward pass: nothing, all but matrix products and attention, all."""
    compile: Literal["none", "block", "model"] = "none"
    """PyTorch: nothing, every layer by itself, or the whole model, which is then gathered in one piece, through torch.compile."""
    timeout_s: int = 600
    """PyTorch: seconds after which a rank that waits for another gives up."""

    def __post_init__(self) -> None:
        for key in ("data", "fsdp", "tensor", "timeout_s"):
            require(getattr(self, key) >= 1, f"parallel.{key} is at least 1; got {getattr(self, key)}.")
        require(not self.sequence or self.tensor > 1, f"parallel.sequence needs parallel.tensor above 1; got {self.tensor}.")
        require(
            self.amax_scope == "global" or self.through == "shard_map",
            "parallel.amax_scope 'local' is of devices, which plain jit does not show. Use parallel.through 'shard_map'.",
        )

        require(
            self.compile != "model" or self.tensor == 1,
            "parallel.compile 'model' is of a model that tensor parallelism does not cut. Set parallel.tensor to 1, or use 'block'.",
        )

    @property
    def devices(self) -> int:
        """Number of devices in the mesh; PyTorch has a process for each."""
        return self.data * self.fsdp * self.tensor

    def unattended(self, head_dim: int) -> list[str]:
        """The error messages for heads of this size under ``attention``; empty if they fit."""
        fits = self.attention != "cudnn" or (head_dim % 8 == 0 and head_dim <= 256)
        return [] if fits else [f"parallel.attention 'cudnn' takes heads of a multiple of 8 up to 256; got {head_dim}. Set it to xla."]

    def foreign(self, backend: str) -> list[str]:
        """The keys that are set, and that this backend does not have."""
        theirs = (
            ("through", "attention")
            if backend == "torch"
            else ("gather", "precompute_scales", "reduction", "checkpointing", "compile", "timeout_s")
        )
        return [f"parallel.{key}" for key in theirs if getattr(self, key) != getattr(ParallelConfig(), key)]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with warm-up, cosine decay and clipping (SEMANTICS T)."""

    kind: Literal["adamw", "adamw_fused", "adamw_fp8"] = "adamw"
    """PyTorch: torch's AdamW, torch's fused one, or torchao's whose moments are e4m3 in blocks of 256, through torch.compile."""
    learning_rate: float = 1e-3
    """The peak."""
    min_learning_rate: float = 1e-4
    """The floor of the cosine."""
    warmup_steps: int = 5
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    """On matrices only."""
    max_norm: float = 1.0
    """Global gradient norm above which gradients are scaled down."""

    def __post_init__(self) -> None:
        require(
            0 <= self.min_learning_rate <= self.learning_rate,
            f"0 <= optimizer.min_learning_rate <= learning_rate; got {self.min_learning_rate} and {self.learning_rate}.",
        )
        require(0 < self.learning_rate < math.inf, f"optimizer.learning_rate is positive and finite; got {self.learning_rate}.")
        require(self.warmup_steps >= 0, f"optimizer.warmup_steps is not negative; got {self.warmup_steps}.")
        for key in ("beta1", "beta2"):
            require(0 <= getattr(self, key) < 1, f"optimizer.{key} lies in [0, 1); got {getattr(self, key)}.")
        require(0 < self.eps < math.inf, f"optimizer.eps is positive and finite; got {self.eps}.")
        require(self.max_norm > 0, f"optimizer.max_norm is positive (inf: no clipping); got {self.max_norm}.")
        require(0 <= self.weight_decay < math.inf, f"optimizer.weight_decay is finite and not negative; got {self.weight_decay}.")

    def foreign(self, backend: str) -> list[str]:
        """The keys that are set, and that this backend does not have."""
        return ["optimizer.kind"] if backend == "jax" and self.kind != "adamw" else []

    def learning_rate_at(self, step: int, steps: int) -> float:
        """The learning rate of a step, counted from 0, in a run of ``steps``.

        Warm-up, then cosine (SEMANTICS T-3).
        """
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / (steps - self.warmup_steps)
        return self.min_learning_rate + (self.learning_rate - self.min_learning_rate) * (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True, kw_only=True)
class StatisticsConfig:
    """What quantising did to the operands of FP8 GEMMs, recorded while a run trains (SEMANTICS Q)."""

    every: int = 0
    """Steps between records, the first of step 0; 0: none. Each costs about as much as a step."""

    def __post_init__(self) -> None:
        require(self.every >= 0, f"statistics.every is not negative; got {self.every}.")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Length of the run, validation, and the run directory."""

    steps: int = 200
    """Optimizer steps."""
    seed: int = 0
    """Seed of the initial weights."""
    eval_every: int = 25
    """Steps between validations; the last step is always validated."""
    eval_batches: int = 4
    """Validation batches, the same ones every time."""
    out: str | None = None
    """Directory of the run; by default runs/<config>-<backend>-<recipe>, with -<plan> behind it under numerics.accumulate."""
    init_from: str | None = None
    """Directory of a model in safetensors, as fp8ref export or transformers writes it, whose weights training starts from."""
    allow_fallback: bool = False
    """Train even if the compiled step lacks an FP8 GEMM or gather that was planned; the manifest names what it lacks."""

    def __post_init__(self) -> None:
        for key in ("steps", "eval_every", "eval_batches"):
            require(getattr(self, key) >= 1, f"run.{key} is at least 1; got {getattr(self, key)}.")
        require(self.seed >= 0, f"run.seed is not negative; got {self.seed}.")
        for key in ("out", "init_from"):
            require(getattr(self, key) != "", f"run.{key} names a directory; got ''. Leave it out for its default.")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """How often checkpoints are written, and how many are kept (SEMANTICS K)."""

    every: int = 100
    """Steps between checkpoints; the state after the last step is always saved, and after that in which SIGTERM comes. 0: only then."""
    keep_last: int = 2
    """How many are kept; older ones are removed when a newer one is whole."""

    def __post_init__(self) -> None:
        require(self.every >= 0, f"checkpoint.every is not negative (0: at the end alone); got {self.every}.")
        require(self.keep_last >= 1, f"checkpoint.keep_last is at least 1; got {self.keep_last}.")


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Experiment trackers that get the metrics too. The first process writes."""

    tensorboard: bool = False
    """Write TensorBoard events to the run's directory, by tensorboardX."""
    wandb: str | None = None
    """Project of Weights & Biases that the run is logged to, by wandb."""

    def __post_init__(self) -> None:
        require(self.wandb != "", "log.wandb is the name of a project; got ''. Leave it out to log nothing there.")
