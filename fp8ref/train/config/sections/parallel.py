"""Section parallel: the mesh of devices, and how it shards the model (spec P)."""

from dataclasses import dataclass
from typing import Literal

from fp8ref.shared.errors import require, require_least
from fp8ref.spec import gradient_reduction


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """A mesh of data x fsdp x context x expert x tensor devices, and how it shards the model (spec
    P).
    """

    data: int = 1
    """Data-parallel devices: each has a part of the batch and a copy of the weights."""
    fsdp: int = 1
    """FSDP devices: each has a part of the batch and a shard of every matrix. Weights of FP8
    linears are gathered in FP8; in PyTorch those with one scale."""
    context: int = 1
    """Context-parallel devices: each has a part of every sequence, and together with fsdp a shard
    of every matrix. Of numerics.attention bf16 or cudnn, which gathers keys and values (spec A-24).
    """
    expert: int = 1
    """Expert-parallel devices of a model with experts: each has a part of the batch and experts of
    its own, to which all send their rows. All other matrices are sharded over them as over fsdp."""
    expert_dispatch: Literal["fp8", "compute"] = "fp8"
    """Dtype in which rows are sent to their experts, and gradients of the results: FP8 where one
    scale of an expert's rows serves both GEMMs that take them (tensorwise, delayed), else the
    compute dtype; or the compute dtype. Results are the same bits."""
    tensor: int = 1
    """Tensor-parallel devices: they share each linear of attention (by heads) and MLP (by inner
    features).
    """
    sequence: bool = False
    """Sequence parallelism: also shard the tokens between those linears. Inputs are gathered in
    FP8; in PyTorch under tensorwise scaling (P-15)."""
    amax_scope: Literal["global", "local"] = "global"
    """Amax of input and grad_output: over all devices (global), or for each device's part of the
    batch (local).
    """
    through: Literal["shard_map", "jit"] = "shard_map"
    """JAX: explicit collectives in shard_map, or XLA's partitioner under jit."""
    reduce: Literal["rounded", "accumulators"] = "rounded"
    """What devices sum to complete a GEMM: results rounded to bfloat16 (rounded), or raw float32
    accumulators (JAX: accumulators).
    """
    reduce_dtype: Literal["float32", "bfloat16", "float8_e4m3fn"] = "float32"
    """Dtype in which rounded gradients are summed over devices that share the batch. In JAX those
    of linears; others are summed in float32. float8_e4m3fn: weights of linears are exchanged in
    FP8, by one scale for all devices, and summed in float32."""
    reduce_mu: Literal["one", "automatic"] = "one"
    """Under reduce_dtype float8_e4m3fn, the factor of the scale: 1, or FP8-LM's mu, which is halved
    where elements saturate, and else grows.
    """
    mu_threshold: float = gradient_reduction.AUTO.threshold
    """The share of saturated elements above which an automatic mu is halved."""
    mu_window: int = gradient_reduction.AUTO.window
    """The steps in which an automatic mu doubles, while it is not halved."""
    tensor_reduce_dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype in which rounded partial outputs are summed over tensor.

    Default: bfloat16, which is PyTorch's only one.
    """
    accumulate_dtype: Literal["float32", "bfloat16", "float8_e4m3fn"] = "float32"
    """JAX: dtype in which the gradients of microbatches are summed. bfloat16 halves the memory of
    the sum; float8_e4m3fn keeps sums of linears' weights as codes with a scale. PyTorch: float32.
    """
    gather: Literal["fp8", "compute"] = "fp8"
    """PyTorch: dtype in which FSDP gathers weights with one scale for both GEMMs: FP8 or the
    compute dtype. Results are the same bits.
    """
    precompute_scales: bool = True
    """Compute the scales of all weights that are cast once for both GEMMs with one all-reduce, not
    one for each weight: where a forward pass begins, and in JAX where a step has written the
    weights. PyTorch: of those that FSDP gathers in FP8. Results are the same bits."""
    reduction: Literal["native", "ordered"] = "native"
    """PyTorch: sum gradients over FSDP devices as the backend does (native) or in rank order
    (ordered).
    """
    attention: Literal["xla", "chunked", "cudnn", "tiles", "kernel"] = "xla"
    """JAX: attention by XLA, which writes all scores (xla) or those of 512 queries at a time
    (chunked); or by cuDNN's fused kernel, which needs an NVIDIA GPU. Of numerics.attention, in
    either backend: tile by tile (tiles, its default), or a library's FP8 kernel (kernel): cuDNN's
    in JAX, of cudnn with delayed scales."""
    loss: Literal["whole", "chunked"] = "whole"
    """JAX: the loss of all logits, in bfloat16 (whole), or of 8,192 words of the vocabulary at a
    time, whose logits are computed again in the backward pass (chunked; spec P-29)."""
    checkpointing: Literal["none", "selective", "full"] = "none"
    """Activation checkpointing. Recompute nothing, everything except the outputs of linears and
    attention, or the whole layer. In JAX selective also recomputes attention's scores."""
    scan: bool = False
    """JAX: compile one layer and loop over all of them. All layers need the same recipes."""
    compile: Literal["none", "block", "model"] = "none"
    """PyTorch: torch.compile of nothing, of each layer, or of the whole model.

    FSDP then gathers the whole model at once.
    """
    cuda_graphs: bool = False
    """PyTorch, on one GPU: record what compile makes as CUDA graphs, and replay each by one launch.
    For small models, whose kernels are shorter than their launches.
    """
    timeout_s: int = 600
    """PyTorch: seconds that a rank waits for another before the run ends."""

    def __post_init__(self) -> None:
        sizes = ("data", "fsdp", "context", "expert", "tensor", "timeout_s")
        require_least("parallel", 1, self, *sizes)
        require(
            self.context == 1 or self.through == "shard_map",
            "parallel.context needs visible devices, and plain jit shows none. Use "
            "parallel.through 'shard_map'.",
        )
        require(
            not self.sequence or self.tensor > 1,
            f"parallel.sequence needs parallel.tensor above 1; got {self.tensor}.",
        )
        require(
            self.amax_scope == "global" or self.through == "shard_map",
            "parallel.amax_scope 'local' needs visible devices, and plain jit shows none. Use "
            "parallel.through 'shard_map'.",
        )
        if self.reduce_dtype == "float8_e4m3fn":
            require(
                self.through == "shard_map" and self.reduce == "rounded",
                "parallel.reduce_dtype 'float8_e4m3fn' casts rounded gradients, and XLA under "
                f"plain jit inserts no such sum; got through {self.through!r}, reduce "
                f"{self.reduce!r}. Use through 'shard_map' and reduce 'rounded'.",
            )
        self._check_mu()
        if self.loss == "chunked":
            require(
                self.through == "shard_map"
                and self.reduce == "rounded"
                and self.reduce_dtype != "float8_e4m3fn",
                "parallel.loss 'chunked' sums the last linear's rounded gradient by itself, in "
                f"float32 or bfloat16, inside shard_map; got through {self.through!r}, reduce "
                f"{self.reduce!r}, reduce_dtype {self.reduce_dtype!r}. Leave those out, or use "
                "loss 'whole'.",
            )
        if self.reduce == "accumulators":
            require(
                "bfloat16" not in (self.reduce_dtype, self.tensor_reduce_dtype),
                "parallel.reduce 'accumulators' sums float32; got bfloat16 in reduce_dtype or "
                "tensor_reduce_dtype. Use reduce 'rounded'.",
            )
            require(
                self.amax_scope == "global",
                "parallel.reduce 'accumulators' sums under one scale; got amax_scope 'local'. "
                "Use reduce 'rounded', or amax_scope 'global'.",
            )
        self._check_compile()

    def _check_compile(self) -> None:
        """ConfigError for what torch.compile does not take."""
        require(
            self.compile != "model" or self.tensor == 1,
            "parallel.compile 'model' takes a model without tensor parallelism. Set "
            "parallel.tensor to 1, or use 'block'.",
        )
        require(
            self.compile == "none" or self.tensor == 1 or self.checkpointing != "full",
            "parallel.compile under tensor parallelism takes no blocks that are recomputed "
            "whole, on which torch 2.13 fails. Set parallel.checkpointing to selective or none.",
        )

        require(
            not self.cuda_graphs or (self.compile != "none" and self.devices == 1),
            "parallel.cuda_graphs are of parallel.compile, on one device: FSDP gathers weights to "
            f"new addresses; got compile {self.compile!r} and {self.devices} devices. Set compile "
            "to block, or leave cuda_graphs out.",
        )

    def _check_mu(self) -> None:
        """ValueError for keys of mu that do not fit (P-22)."""
        auto = gradient_reduction.AUTO
        require(
            self.reduce_mu == "one" or self.reduce_dtype == "float8_e4m3fn",
            "parallel.reduce_mu 'automatic' is of gradients in FP8; got parallel.reduce_dtype "
            f"{self.reduce_dtype!r}. Set it to 'float8_e4m3fn'.",
        )
        for key, default in (("mu_threshold", auto.threshold), ("mu_window", auto.window)):
            require(
                self.reduce_mu == "automatic" or getattr(self, key) == default,
                f"parallel.{key} is of parallel.reduce_mu 'automatic'; got {getattr(self, key)} "
                "with reduce_mu 'one'. Leave one of them out.",
            )
        # Counts are exact up to 2^24: 1e-3 of a weight of 2^33 elements is below.
        require(
            0 <= self.mu_threshold <= 1e-3,
            f"parallel.mu_threshold is in [0, 1e-3]; got {self.mu_threshold}.",
        )
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
            axis
            for axis in ("data", "fsdp", "context", "expert", "tensor")
            if axis not in ("context", "expert") or getattr(self, axis) > 1
        )

    @property
    def mesh(self) -> str:
        """The axes and their sizes, as text."""
        return (
            f"{' x '.join(self.axes)} = "
            f"{' x '.join(str(getattr(self, axis)) for axis in self.axes)}"
        )

    @property
    def sharing(self) -> int:
        """Number of devices, or tensor-parallel groups, that share the batch's tokens."""
        return self.data * self.shards

    @property
    def batch_parts(self) -> int:
        """Number of parts into which a batch's sequences are dealt; context cuts within them."""
        return self.data * self.fsdp * self.expert

    @property
    def batch_keys(self) -> str:
        """The keys of ``batch_parts`` and their product, for messages."""
        return (
            f"{' x '.join(axis for axis in self.axes if axis in ('data', 'fsdp', 'expert'))} = "
            f"{self.batch_parts}"
        )

    @property
    def shards(self) -> int:
        """Number of pieces of each matrix, beside tensor parallelism's cuts; experts aside."""
        return self.fsdp * self.context * self.expert

    @property
    def shard_keys(self) -> str:
        """The keys of ``shards`` and their product, for messages."""
        keys = [axis for axis in self.axes if axis in ("fsdp", "context", "expert")]
        return f"{' x '.join(keys)} = {self.shards}"

    def unattended(self, head_dim: int) -> list[str]:
        """The error messages for heads of this size under ``attention``; empty if they fit."""
        if self.attention != "cudnn" or (head_dim % 8 == 0 and head_dim <= 256):
            return []
        return [
            "parallel.attention 'cudnn' takes heads of a multiple of 8 up to 256; got "
            f"{head_dim}. Set it to xla."
        ]

    def unreduced(self, backend: str) -> list[str]:
        """The error messages for gradients that this backend cannot sum as asked (P-25)."""
        if self.reduce_dtype != "float8_e4m3fn":
            return []
        if self.sharing == 1:
            return [
                "parallel.reduce_dtype 'float8_e4m3fn' exchanges gradients over data, fsdp and "
                "context, of which there is one device. Leave it out."
            ]
        if backend == "torch" and self.data > 1:
            return [
                "parallel.reduce_dtype 'float8_e4m3fn' in PyTorch sums over fsdp alone, as "
                f"FSDP2's sum over data has no hook; got parallel.data {self.data}. Set it to "
                "1, and fsdp to all devices."
            ]
        return []

    def foreign(self, backend: str) -> list[str]:
        """The error messages for keys that are set, and that this backend does not have."""
        if backend == "torch":
            own_attention = ["attention"] * (self.attention not in ("tiles", "kernel"))
            theirs = ["through", *own_attention, "scan", "loss", "reduce", "accumulate_dtype"]
            theirs += ["tensor_reduce_dtype"] * (self.tensor_reduce_dtype == "float32")
        else:
            theirs = ["gather", "reduction", "compile", "cuda_graphs", "timeout_s"]
        default = ParallelConfig()
        keys = [f"parallel.{k}" for k in theirs if getattr(self, k) != getattr(default, k)]
        if not keys:
            return []
        return [f"{', '.join(keys)} is not a key of --backend {backend}. Leave it out."]
