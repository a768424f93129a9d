"""The sections of a configuration: frozen dataclasses whose fields are the keys.

Each checks its values when it is built.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import numpy as np
import tyro

from fp8ref import attention, attention_casts, attention_delayed, gradient_reduction, layout_parts, states
from fp8ref import recipe as recipes
from fp8ref.attention import Backward
from fp8ref.linear_rules import Rule
from fp8ref.train import schedule as schedules


def require(condition: bool, message: str) -> None:
    """ValueError(message) unless the condition holds."""
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, kw_only=True)
class ArchitectureConfig:
    """What is trained: the trainer's own Llama of section model, or a model of yours (spec T-10)."""

    kind: Literal["llama", "transformers", "torch", "nnx"] = "llama"
    """llama: the trainer's own. transformers: a causal model of transformers (PyTorch). torch, nnx: what an import path makes, for PyTorch or JAX."""
    source: str | None = None
    """transformers: a directory with config.json, or the file. torch, nnx: module:function; called with vocab_size= (nnx: and rngs=), it makes a model
    that takes tokens [B, T] and returns logits [B, T, V]."""

    def __post_init__(self) -> None:
        given = self.source is not None
        require(
            given == (self.kind != "llama"),
            f"architecture.source is of a model of yours, which architecture.kind names; got kind {self.kind!r} and source {self.source!r}.",
        )
        require(
            self.kind not in ("torch", "nnx") or ":" in (self.source or ""),
            f"architecture.source is module:function of kind {self.kind!r}; got {self.source!r}.",
        )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The training text, and how it is cut into batches (spec D)."""

    source: str = "stdlib"
    """Training text: ``stdlib`` (sources of Python's standard library), a directory of text (``*.py``, ``*.md``, ``*.txt``), token shards (.bin,
    .npy) or documents (.parquet, .jsonl), as a file, directory or pattern. ``fp8ref data prepare`` also takes hf:org/name[:config]."""
    mixture: tuple[tuple[str, float], ...] | None = None
    """Sources and their weights, in place of source: [["books", 3.0], ["code", 1.0]] takes three sequences of books for each of code."""
    evaluation: tuple[tuple[str, str], ...] | None = None
    """Further sets to validate on, each a name and a source, of which all tokens are taken: [["code", "held-out/code"]] is val_loss_code."""
    tokenizer: str | None = None
    """Tokenizer: a tokenizer.json or tiktoken:NAME. Default: each byte is a token."""
    end_of_document: str | None = None
    """Token after each document; '' for none. Default: the tokenizer's own, or a zero byte."""
    text_column: str = "text"
    """Column of the documents that holds the text."""
    token_dtype: Literal["uint16", "uint32"] | None = None
    """Integer type of .bin shards without a shards.json. Default: uint16."""
    sequence_length: int = 128
    """Tokens in a sequence."""
    batch_size: int = 16
    """Sequences in the global batch."""
    microbatches: int = 1
    """Train the global batch in this many equal parts, one after the other. Gradients are summed in parallel.accumulate_dtype."""
    validation_fraction: float = 0.1
    """Share of the files, documents or shard tokens kept for validation. Unused if files are named val."""
    seed: int = 0
    """Seed of the data order."""

    def __post_init__(self) -> None:
        require(self.source != "", "data.source is 'stdlib', a file, a directory or a pattern; got ''.")
        if self.mixture is not None:
            require(
                self.source == "stdlib",
                f"data.mixture names the sources in place of data.source; got {self.source!r} too. Leave one of them out.",
            )
            require(len(self.mixture) >= 1, "data.mixture has at least one source; got none. Leave it out.")
            for name, weight in self.mixture:
                require(name != "" and 0 < weight < math.inf, f"data.mixture has sources with weights above 0; got {[name, weight]}.")
        names = [name for name, _ in self.evaluation or ()]
        require(
            len(set(names)) == len(names) and all(name.isidentifier() for name in names),
            f"data.evaluation names each set once, by letters, digits and underscores; got {names}.",
        )
        for key in ("tokenizer", "text_column"):
            require(getattr(self, key) != "", f"data.{key} is not empty; leave it out for its default.")
        require(self.sequence_length >= 1, f"data.sequence_length is at least 1; got {self.sequence_length}.")
        require(self.batch_size >= 1, f"data.batch_size is at least 1; got {self.batch_size}.")
        require(self.microbatches >= 1, f"data.microbatches is at least 1; got {self.microbatches}.")
        require(
            self.batch_size % self.microbatches == 0,
            f"data.batch_size is divisible by data.microbatches; got {self.batch_size} and {self.microbatches}.",
        )
        require(0 < self.validation_fraction < 1, f"data.validation_fraction must be between 0 and 1; got {self.validation_fraction}.")
        require(self.seed >= 0, f"data.seed is not negative; got {self.seed}.")

    def indivisible(self, shared: int, who: str) -> str:
        """The error message for a batch that data x fsdp = ``shared`` devices cannot share evenly."""
        parts = f" times data.microbatches = {self.microbatches}" * (self.microbatches > 1)
        return f"data.batch_size is divisible by data x fsdp = {shared} {who}{parts}; got {self.batch_size}."

    def parts(self, batch: np.ndarray) -> np.ndarray:
        """A batch [B, ...] as microbatches [microbatches, B / microbatches, ...] of contiguous rows
        (spec T-7)."""
        require(
            len(batch) % self.microbatches == 0,
            f"a batch is trained in data.microbatches = {self.microbatches} equal parts; got {len(batch)} sequences.",
        )
        return batch.reshape(self.microbatches, -1, *batch.shape[1:])


@dataclass(frozen=True, kw_only=True)
class NumericsConfig:
    """Which linears run in FP8, and how (spec R)."""

    recipe: Annotated[str, tyro.conf.arg(aliases=["--recipe"], help=f"One of {', '.join(recipes.trained_recipes())}.")] = "tensorwise"
    schedule: schedules.Entries | None = None
    """Recipes by phase, such as [[0, "tensorwise"], [8000, "bf16"]], the first of them numerics.recipe. A phase begins at a step, or at a string:
    "learning_rate < 3e-4" after warm-up, or, of what statistics.every measures, "sqnr < 18" (dB) of an operand of the phase before or "update_error > 0.1"
    of optimizer states."""
    filter_fqns: tuple[str, ...] = ()
    """Modules to keep in high precision, by whole name components or shell patterns. ``auto_filter_small_kn`` keeps small linears. lm_head is
    always kept."""
    fp8_fqns: tuple[str, ...] = ()
    """Modules to convert even if filter_fqns names them; lm_head too."""
    rules: Annotated[tuple[Rule, ...] | None, tyro.conf.Fixed, tyro.conf.Suppress] = None
    """Tables [[numerics.rules]] that change casts of single operands: layers, gemms and roles, and the recipe, or the format, granularity or policy,
    that they take. In a file alone; on one device."""
    accumulate: str | None = None
    """Simulated hardware for FP8 GEMMs, on a CPU: hopper (hopper_fast or hopper_slow, as the recipe says), exact, f32, hopper_fast, hopper_slow,
    ada, blackwell, or a .json file of ``fp8ref probe``. native, the default: the framework's own GEMMs."""
    attention: str | None = None
    """Attention, a tile of keys after another, by a variant (spec A-1): in FP8 cudnn or mxfp8, or with numerics.attention_backward bf16 also fa3,
    fa3_promoted, fa4, fa4_threshold4 and fa3_paper; bf16, or exact. Default: the framework's own, in bfloat16."""
    attention_backward: Backward = "own"
    """The backward pass of numerics.attention in FP8: the variant's own, or bf16, of q, k and v in bfloat16 with the log-sum-exp of the FP8 pass (spec
    A-25). FlashAttention's kernels in FP8 have none of their own."""
    attention_arithmetic: Literal["fast", "stated"] = "fast"
    """How numerics.attention computes between its products: by the framework's own sums and functions, within A-18's bound; or every operation in the
    stated order, rounded once, several times slower."""

    attention_scaling: Literal["current", "delayed"] = "current"
    """Where numerics.attention has its scales from: the tensors of the step itself; or, of cudnn alone, the amaxes of past steps (spec A-19), a state
    for each of q, k, v, s, o, do, ds, dq, dk and dv of a layer."""

    attention_operands: tuple[str, ...] | None = None
    """Of numerics.attention 'cudnn', the operands that alone are cast, q, k, v, p, do and ds, of every layer or, as "layers.0/q", of those that a
    pattern names. All else of attention is in float32, on whole matrices (spec E-9). Default: all, a tile of keys after another."""

    def __post_init__(self) -> None:
        recipes.check_trained(self.recipe, "numerics.recipe")
        if self.schedule is not None:
            first = schedules.parse(self.schedule)[0].recipe
            require(
                first == self.recipe,
                f"numerics.schedule begins with numerics.recipe, which is {self.recipe!r}; got {first!r}. Set both to one recipe, or leave "
                "out the schedule.",
            )
        require(
            self.rules is None or self.schedule is None,
            "numerics.rules change one recipe; got numerics.schedule too. Leave one of them out.",
        )
        require(self.rules is None or len(self.rules) > 0, "numerics.rules has at least one rule; got none. Leave it out.")
        require(self.accumulate != "", "numerics.accumulate names simulated hardware; got ''. Leave it out for the framework's own GEMMs.")
        require(
            self.attention_arithmetic in attention.ARITHMETIC,
            f"numerics.attention_arithmetic is one of {', '.join(attention.ARITHMETIC)}; got {self.attention_arithmetic!r}.",
        )
        require(
            self.attention is not None or self.attention_arithmetic == "fast",
            f"numerics.attention_arithmetic is of numerics.attention, which is left out; got {self.attention_arithmetic!r}. Leave both out, or "
            "name a variant.",
        )
        require(
            self.attention_scaling in ("current", "delayed"),
            f"numerics.attention_scaling is current or delayed; got {self.attention_scaling!r}.",
        )
        require(
            self.attention_scaling == "current"
            or (self.attention in attention.VARIANTS and bool(attention_delayed.roles(attention.by_name(self.attention)))),
            "numerics.attention_scaling 'delayed' is of attention with one FP8 scale for a tensor; got numerics.attention "
            f"{self.attention!r}. Use variant 'cudnn', or leave it out.",
        )
        if self.attention_operands is not None:
            require(
                self.attention in attention.VARIANTS
                and (self.attention_scaling, self.attention_backward, self.attention_arithmetic) == ("current", "own", "fast")
                and not self.simulates,
                "numerics.attention_operands are of numerics.attention, with its own backward pass, scales of the tensors themselves, fast arithmetic "
                f"and the framework's own GEMMs; got {self.attention!r}, {self.attention_backward!r}, {self.attention_scaling!r}, "
                f"{self.attention_arithmetic!r} and numerics.accumulate {self.accumulate!r}. Leave them out, or set attention to cudnn.",
            )
            roles = frozenset(operand.rpartition("/")[2] for operand in self.attention_operands)
            attention_casts.Casts(attention.by_name(str(self.attention)), roles)  # type: ignore[arg-type]  # refuses unknown ones
        require(
            self.attention_backward in get_args(Backward),
            f"numerics.attention_backward is own or bf16; got {self.attention_backward!r}.",
        )
        if self.attention is None:
            require(
                self.attention_backward == "own",
                f"numerics.attention_backward is of numerics.attention, which is left out; got {self.attention_backward!r}. Leave both out, or name "
                "a variant.",
            )
        else:
            trained = [name for name, variant in attention.VARIANTS.items() if variant.backward is not None]
            forward = [name for name in attention.VARIANTS if name not in trained]
            require(
                self.attention in trained or (self.attention in forward and self.attention_backward == "bf16"),
                f"numerics.attention is one of {', '.join(trained)}, which have gradients, or with numerics.attention_backward 'bf16' of "
                f"{', '.join(forward)}; got {self.attention!r}. Leave it out for the framework's own attention.",
            )
            require(
                self.attention_backward == "own" or attention.by_name(self.attention).fmt.bits == 8,
                f"numerics.attention_backward 'bf16' is of a forward pass in FP8; got numerics.attention {self.attention!r}. Leave it out.",
            )
            require(
                not self.simulates or attention.by_name(self.attention).granularity != "mx_1x32",
                f"numerics.accumulate multiplies FP8 codes, and attention multiplies MX blocks dequantized; got {self.accumulate!r} with "
                f"numerics.attention {self.attention!r}. Leave one of them out, or use variant 'cudnn'.",
            )

    def unattended(self, head_dim: int) -> list[str]:
        """The error messages for heads of this size under ``attention``; empty if they fit."""
        if self.attention is None:
            return []
        variant = attention.by_name(self.attention)
        largest, multiple = variant.tiles[-1].features, 32 if variant.granularity == "mx_1x32" else 1
        fits = head_dim % multiple == 0 and (variant.real or head_dim <= largest)
        what = f"a multiple of {multiple} up to {largest}" if multiple > 1 else f"at most {largest} features"
        return [] if fits else [f"numerics.attention {self.attention!r} takes heads of {what}; got {head_dim}. Leave it out."]

    @property
    def simulates(self) -> bool:
        """Whether FP8 GEMMs run under simulated hardware."""
        return self.accumulate not in (None, "native")

    def check_multiply(self, multiply: object) -> None:
        """ValueError unless ``multiply`` was given if, and only if, ``accumulate`` asks for it."""
        given = "none" if multiply is None else getattr(multiply, "name", repr(multiply))
        require(
            self.simulates == (multiply is not None),
            f"numerics.accumulate is {self.accumulate!r}, but the trainer was given multiply "
            f"{given}. Make trainers with fp8ref.train.loop.trainer.",
        )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """A mesh of data x fsdp x context x expert x tensor devices, and how it shards the model (spec P)."""

    data: int = 1
    """Data-parallel devices: each has a part of the batch and a copy of the weights."""
    fsdp: int = 1
    """FSDP devices: each has a part of the batch and a shard of every matrix. Weights of FP8 linears are gathered in FP8; in PyTorch those
    with one scale."""
    context: int = 1
    """Context-parallel devices: each has a part of every sequence, and together with fsdp a shard of every matrix. Of numerics.attention bf16 or cudnn,
    which gathers keys and values (spec A-24)."""
    expert: int = 1
    """Expert-parallel devices of a model with experts: each has a part of the batch and experts of its own, to which all send their rows. All other
    matrices are sharded over them as over fsdp."""
    tensor: int = 1
    """Tensor-parallel devices: they share each linear of attention (by heads) and MLP (by inner features)."""
    sequence: bool = False
    """Sequence parallelism: also shard the tokens between those linears. Inputs are gathered in FP8; in PyTorch under
    tensorwise scaling (P-15)."""
    amax_scope: Literal["global", "local"] = "global"
    """Amax of input and grad_output: over all devices (global), or for each device's part of the batch (local)."""
    through: Literal["shard_map", "jit"] = "shard_map"
    """JAX: explicit collectives in shard_map, or XLA's partitioner under jit."""
    reduce: Literal["rounded", "accumulators"] = "rounded"
    """What devices sum to complete a GEMM: results rounded to bfloat16 (rounded), or raw float32 accumulators (JAX: accumulators)."""
    reduce_dtype: Literal["float32", "bfloat16", "float8_e4m3fn"] = "float32"
    """Dtype in which rounded gradients are summed over data and fsdp. In JAX those of linears; others are summed in float32. float8_e4m3fn: weights
    of linears are exchanged in FP8, by one scale for all devices, and summed in float32."""
    reduce_mu: Literal["one", "automatic"] = "one"
    """Under reduce_dtype float8_e4m3fn, the factor of the scale: 1, or FP8-LM's mu, which is halved where elements saturate, and else grows."""
    mu_threshold: float = gradient_reduction.AUTO.threshold
    """The share of saturated elements above which an automatic mu is halved."""
    mu_window: int = gradient_reduction.AUTO.window
    """The steps in which an automatic mu doubles, while it is not halved."""
    tensor_reduce_dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype in which rounded partial outputs are summed over tensor. Default: bfloat16, which is PyTorch's only one."""
    accumulate_dtype: Literal["float32", "bfloat16", "float8_e4m3fn"] = "float32"
    """JAX: dtype in which the gradients of microbatches are summed. bfloat16 halves the memory of the sum; float8_e4m3fn keeps sums of linears'
    weights as codes with a scale. PyTorch: float32."""
    gather: Literal["fp8", "compute"] = "fp8"
    """PyTorch: dtype in which FSDP gathers weights with one scale for both GEMMs: FP8 or the compute dtype. Results are the same bits."""
    precompute_scales: bool = True
    """PyTorch: compute the scales of all weights gathered in FP8 with one all-reduce for each forward pass, not one for each weight."""
    reduction: Literal["native", "ordered"] = "native"
    """PyTorch: sum gradients over FSDP devices as the backend does (native) or in rank order (ordered)."""
    attention: Literal["xla", "chunked", "cudnn", "tiles", "kernel"] = "xla"
    """JAX: attention by XLA, which writes all scores (xla) or those of 512 queries at a time (chunked); or by cuDNN's fused kernel, which needs
    an NVIDIA GPU. Of numerics.attention, in either backend: tile by tile (tiles, its default), or a library's FP8 kernel (kernel): cuDNN's in JAX, of
    cudnn with delayed scales."""
    checkpointing: Literal["none", "selective", "full"] = "none"
    """Activation checkpointing. Recompute nothing, everything except the outputs of linears and attention, or the whole layer. In JAX selective
    also recomputes attention's scores."""
    scan: bool = False
    """JAX: compile one layer and loop over all of them. All layers need the same recipes."""
    compile: Literal["none", "block", "model"] = "none"
    """PyTorch: torch.compile of nothing, of each layer, or of the whole model. FSDP then gathers the whole model at once."""
    timeout_s: int = 600
    """PyTorch: seconds that a rank waits for another before the run ends."""

    def __post_init__(self) -> None:
        for key in ("data", "fsdp", "context", "expert", "tensor", "timeout_s"):
            require(getattr(self, key) >= 1, f"parallel.{key} is at least 1; got {getattr(self, key)}.")
        require(
            self.context == 1 or self.through == "shard_map",
            "parallel.context needs visible devices, and plain jit shows none. Use parallel.through 'shard_map'.",
        )
        require(not self.sequence or self.tensor > 1, f"parallel.sequence needs parallel.tensor above 1; got {self.tensor}.")
        require(
            self.amax_scope == "global" or self.through == "shard_map",
            "parallel.amax_scope 'local' needs visible devices, and plain jit shows none. Use parallel.through 'shard_map'.",
        )
        if self.reduce_dtype == "float8_e4m3fn":
            require(
                self.through == "shard_map" and self.reduce == "rounded",
                "parallel.reduce_dtype 'float8_e4m3fn' casts rounded gradients, and XLA under plain jit inserts no such sum; got through "
                f"{self.through!r}, reduce {self.reduce!r}. Use through 'shard_map' and reduce 'rounded'.",
            )
        self._check_mu()
        if self.reduce == "accumulators":
            require(
                "bfloat16" not in (self.reduce_dtype, self.tensor_reduce_dtype),
                "parallel.reduce 'accumulators' sums float32; got bfloat16 in reduce_dtype or tensor_reduce_dtype. Use reduce 'rounded'.",
            )
            require(
                self.amax_scope == "global",
                "parallel.reduce 'accumulators' sums under one scale; got amax_scope 'local'. Use reduce 'rounded', or amax_scope 'global'.",
            )
        require(
            self.compile != "model" or self.tensor == 1,
            "parallel.compile 'model' takes a model without tensor parallelism. Set parallel.tensor to 1, or use 'block'.",
        )
        require(
            self.compile == "none" or self.tensor == 1 or self.checkpointing != "full",
            "parallel.compile under tensor parallelism takes no blocks that are recomputed whole, on which torch 2.13 fails. "
            "Set parallel.checkpointing to selective or none.",
        )

    def _check_mu(self) -> None:
        """ValueError for keys of mu that do not fit (P-22)."""
        auto = gradient_reduction.AUTO
        require(
            self.reduce_mu == "one" or self.reduce_dtype == "float8_e4m3fn",
            f"parallel.reduce_mu 'automatic' is of gradients in FP8; got parallel.reduce_dtype {self.reduce_dtype!r}. Set it to 'float8_e4m3fn'.",
        )
        for key, default in (("mu_threshold", auto.threshold), ("mu_window", auto.window)):
            require(
                self.reduce_mu == "automatic" or getattr(self, key) == default,
                f"parallel.{key} is of parallel.reduce_mu 'automatic'; got {getattr(self, key)} with reduce_mu 'one'. Leave one of them out.",
            )
        # Counts are exact up to 2^24: 1e-3 of a weight of 2^33 elements is below.
        require(0 <= self.mu_threshold <= 1e-3, f"parallel.mu_threshold is in [0, 1e-3]; got {self.mu_threshold}.")
        require(self.mu_window >= 1, f"parallel.mu_window is at least 1; got {self.mu_window}.")

    @property
    def auto_scale(self) -> gradient_reduction.AutoScale | None:
        """The rule of an automatic mu; None if mu is 1."""
        if self.reduce_mu == "one":
            return None
        return gradient_reduction.AutoScale(threshold=self.mu_threshold, window=self.mu_window)

    @property
    def devices(self) -> int:
        """Number of devices in the mesh; PyTorch has a process for each."""
        return self.sharing * self.tensor

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the mesh, in order; context and expert where they are above 1."""
        return tuple(
            axis for axis in ("data", "fsdp", "context", "expert", "tensor") if axis not in ("context", "expert") or getattr(self, axis) > 1
        )

    @property
    def mesh(self) -> str:
        """The axes and their sizes, as text."""
        return f"{' x '.join(self.axes)} = {' x '.join(str(getattr(self, axis)) for axis in self.axes)}"

    @property
    def sharing(self) -> int:
        """Number of devices, or groups of tensor-parallel ones, that share the batch: each has sequences, or parts of them."""
        return self.data * self.shards

    @property
    def batch_parts(self) -> int:
        """Number of parts that the sequences of a batch are dealt into: those that context cuts count once."""
        return self.data * self.fsdp * self.expert

    @property
    def shards(self) -> int:
        """Number of pieces that each matrix is stored in, of those that tensor parallelism cuts; experts aside."""
        return self.fsdp * self.context * self.expert

    @property
    def of_shards(self) -> str:
        """The keys of ``shards`` and their product, for messages."""
        keys = [axis for axis in self.axes if axis in ("fsdp", "context", "expert")]
        return f"{' x '.join(keys)} = {self.shards}"

    def unattended(self, head_dim: int) -> list[str]:
        """The error messages for heads of this size under ``attention``; empty if they fit."""
        fits = self.attention != "cudnn" or (head_dim % 8 == 0 and head_dim <= 256)
        return [] if fits else [f"parallel.attention 'cudnn' takes heads of a multiple of 8 up to 256; got {head_dim}. Set it to xla."]

    def unreduced(self, backend: str) -> list[str]:
        """The error messages for gradients that this backend cannot sum as asked (P-25)."""
        if self.reduce_dtype != "float8_e4m3fn":
            return []
        if self.sharing == 1:
            return [
                "parallel.reduce_dtype 'float8_e4m3fn' exchanges gradients over data, fsdp and context, of which there is one device. Leave it out."
            ]
        if backend == "torch" and self.data > 1:
            return [
                f"parallel.reduce_dtype 'float8_e4m3fn' in PyTorch sums over fsdp alone, as FSDP2's sum over data has no hook; got parallel.data {self.data}. "
                "Set it to 1, and fsdp to all devices."
            ]
        return []

    def foreign(self, backend: str) -> list[str]:
        """The keys that are set, and that this backend does not have."""
        theirs = (
            (
                "through",
                *(["attention"] if self.attention not in ("tiles", "kernel") else []),
                "scan",
                "reduce",
                "accumulate_dtype",
                *(["tensor_reduce_dtype"] if self.tensor_reduce_dtype == "float32" else []),
            )
            if backend == "torch"
            else ("gather", "precompute_scales", "reduction", "compile", "timeout_s")
        )
        return [f"parallel.{key}" for key in theirs if getattr(self, key) != getattr(ParallelConfig(), key)]


Decay = Literal["cosine", "linear", "sqrt", "none"]
"""The shapes of the learning rate's decay (spec T-3)."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with warm-up, decay and clipping (spec T)."""

    kind: Literal["adamw", "adamw_fused", "adamw_fp8", "adamw_states"] = "adamw"
    """AdamW in float32 (adamw), or with the states of optimizer.layout (adamw_states). PyTorch: also torch's fused AdamW, or torchao's AdamW with
    e4m3 moments in blocks of 256, which stores small second moments as 0: their updates explode."""
    layout: str | None = None
    """How adamw_states keeps its moments: float32, bfloat16, msamp, fishman, sqrt_e5m2, sqrt_e4m3, torchao, te or coat; and masters in float16
    too: msamp_o2 or sqrt_e4m3_f16. Or some parts of one, with the others in float32: te/m, te/v, msamp_o2/v+master, te/none. Default: sqrt_e4m3."""
    learning_rate: float = 1e-3
    """Peak learning rate."""
    min_learning_rate: float = 1e-4
    """Learning rate at the end of the decay."""
    warmup_steps: int = 5
    """Steps of linear warm-up."""
    decay: Decay = "cosine"
    """How the learning rate falls to min_learning_rate: as a half cosine, a line, or a line in the root of the steps; none: it stays at its peak."""
    decay_steps: int | None = None
    """The last steps of the run, in which it falls; before them it stays at its peak (warm-up, stable, decay: WSD). Default: all after the warm-up."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Weight decay, of matrices only."""
    max_norm: float = 1.0
    """Clip gradients to this global norm."""

    def __post_init__(self) -> None:
        require(
            0 <= self.min_learning_rate <= self.learning_rate,
            f"0 <= optimizer.min_learning_rate <= learning_rate; got {self.min_learning_rate} and {self.learning_rate}.",
        )
        require(0 < self.learning_rate < math.inf, f"optimizer.learning_rate is positive and finite; got {self.learning_rate}.")
        require(self.warmup_steps >= 0, f"optimizer.warmup_steps is not negative; got {self.warmup_steps}.")
        decays = get_args(Decay)
        require(self.decay in decays, f"optimizer.decay is one of {', '.join(decays)}; got {self.decay!r}.")
        require(self.decay_steps is None or self.decay_steps >= 1, f"optimizer.decay_steps is at least 1; got {self.decay_steps}.")
        require(
            self.decay_steps is None or self.decay != "none",
            f"optimizer.decay 'none' has no steps; got optimizer.decay_steps {self.decay_steps}. Leave one of them out.",
        )
        for key in ("beta1", "beta2"):
            require(0 <= getattr(self, key) < 1, f"optimizer.{key} must be in [0, 1); got {getattr(self, key)}.")
        require(0 < self.eps < math.inf, f"optimizer.eps is positive and finite; got {self.eps}.")
        require(self.max_norm > 0, f"optimizer.max_norm is positive (inf: no clipping); got {self.max_norm}.")
        require(0 <= self.weight_decay < math.inf, f"optimizer.weight_decay is finite and not negative; got {self.weight_decay}.")
        require(
            self.layout is None or self.kind == "adamw_states",
            f"optimizer.layout is of optimizer.kind 'adamw_states'; got layout {self.layout!r} with kind {self.kind!r}. Leave one of them out.",
        )
        names = (*states.LAYOUTS, *states.WITH_MASTERS)
        name, slash, _ = (self.layout or "sqrt_e4m3").partition("/")
        require(name in names, f"optimizer.layout is one of {', '.join(names)}; got {self.layout!r}.")
        if slash:
            layout_parts.by_name(str(self.layout))  # refuses parts that it has not
        require(
            self.kind != "adamw_states" or self.learning_rate <= 1024,
            f"optimizer.learning_rate is at most 1024 under optimizer.kind 'adamw_states' (O-2); got {self.learning_rate}.",
        )
        if self.moment_layout is not None:
            try:
                states.check(b1=self.beta1, b2=self.beta2, eps=self.eps, weight_decay=self.weight_decay, layout=self.moment_layout)
            except ValueError as error:
                raise ValueError(f"optimizer.kind 'adamw_states' takes the numbers of O-2: {error}") from None

    def foreign(self, backend: str) -> list[str]:
        """The keys that are set, and that this backend does not have."""
        return ["optimizer.kind"] if backend == "jax" and self.kind not in ("adamw", "adamw_states") else []

    @property
    def moment_layout(self) -> states.Layout | None:
        """The layout of both moments, and of masters, under ``adamw_states``; None under other kinds."""
        return layout_parts.by_name(self.layout or "sqrt_e4m3") if self.kind == "adamw_states" else None

    @property
    def keeps_masters(self) -> bool:
        """Whether masters are stored narrower than float32 (O-14)."""
        layout = self.moment_layout
        return layout is not None and layout.keeps_master

    def uncut(self, parallel: ParallelConfig, backend: str) -> list[str]:
        """The error messages for a mesh or a model that the layout of the moments cannot be cut for (O-11)."""
        layout = self.moment_layout
        if layout is None:
            return []
        moments = (layout.m, layout.v)
        if backend == "torch" and parallel.tensor > 1 and any(moment.block is not None for moment in moments):
            return [
                f"optimizer.layout {layout.name!r} has blocks of consecutive elements, which parallel.tensor = {parallel.tensor} cuts by columns "
                "(O-11). Use a layout with one scale a tensor, such as sqrt_e5m2, or parallel.tensor 1."
            ]
        return []

    def learning_rate_at(self, step: int, steps: int) -> float:
        """The learning rate of a step, counted from 0, in a run of ``steps``.

        Warm-up, the peak, then decay (spec T-3).
        """
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        begin = self.warmup_steps if self.decay_steps is None else max(self.warmup_steps, steps - self.decay_steps)
        if step < begin or self.decay == "none":
            return self.learning_rate
        done = (step - begin) / (steps - begin)
        shapes = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "sqrt": 1 - math.sqrt(done)}
        return self.min_learning_rate + (self.learning_rate - self.min_learning_rate) * shapes[self.decay]


@dataclass(frozen=True, kw_only=True)
class StatisticsConfig:
    """Statistics of the operands of FP8 GEMMs, and of optimizer states in a layout, recorded during training (spec Q)."""

    every: int = 0
    """Record every so many steps, beginning with step 0; 0 records nothing. A record costs about as much as a step."""

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
    """Steps between validations; 0 for none in between. The last step is always validated."""
    eval_batches: int = 4
    """Validation batches. They are the same each time."""
    out: str | None = None
    """Run directory. Default: runs/<config>-<backend>-<recipe> (of a schedule: a-to-b), followed by -<plan> under numerics.accumulate."""
    init_from: str | None = None
    """Start from these weights: a directory in safetensors that ``fp8ref export`` or transformers wrote."""
    allow_fallback: bool = False
    """Train even if a planned FP8 GEMM or gather is missing from the step. The manifest lists what is missing."""

    def __post_init__(self) -> None:
        for key in ("steps", "eval_batches"):
            require(getattr(self, key) >= 1, f"run.{key} is at least 1; got {getattr(self, key)}.")
        require(self.eval_every >= 0, f"run.eval_every is not negative (0: at the end alone); got {self.eval_every}.")
        require(self.seed >= 0, f"run.seed is not negative; got {self.seed}.")
        for key in ("out", "init_from"):
            require(getattr(self, key) != "", f"run.{key} names a directory; got ''. Leave it out for its default.")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """How often checkpoints are written, and how many are kept (spec K)."""

    every: int = 100
    """Steps between checkpoints; 0 for none in between. The state after the last step, on SIGTERM and on Ctrl-C is always saved."""
    keep_last: int = 2
    """Checkpoints to keep. Older ones are removed once a newer one is complete."""

    def __post_init__(self) -> None:
        require(self.every >= 0, f"checkpoint.every is not negative (0: at the end alone); got {self.every}.")
        require(self.keep_last >= 1, f"checkpoint.keep_last is at least 1; got {self.keep_last}.")


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Experiment trackers. The first process logs the metrics to them."""

    tensorboard: bool = False
    """Write TensorBoard events to the run directory. Needs tensorboardX."""
    wandb: str | None = None
    """Log to this Weights & Biases project. Needs wandb."""

    def __post_init__(self) -> None:
        require(self.wandb != "", "log.wandb is the name of a project; got ''. Leave it out to log nothing there.")
