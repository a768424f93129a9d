"""The trainer's Llama as an ``nn.Module`` (spec M). Its module names are Hugging Face's."""

import dataclasses
import math

import numpy as np
import torch
from torch import distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from fp8ref.selection.attention_casts import Casts
from fp8ref.spec import llama
from fp8ref.spec.attention.variants import Mask
from fp8ref.spec.llama import LlamaConfig
from fp8ref.torch.attention import RankCall, attention
from fp8ref.torch.attention import delayed as attention_delayed
from fp8ref.torch.attention import kernel as attention_kernel
from fp8ref.torch.attention.operands import casts as attention_casts
from fp8ref.torch.blocks import operations, parts
from fp8ref.torch.distributed.tensor_parallel import TensorPlan
from fp8ref.train.config.config import Config
from fp8ref.train.torch.llama import experts
from fp8ref.train.torch.llama.experts import MixtureMLP

_CAUSAL = Mask(causal=True)


class RMSNorm(nn.Module):
    """x * rsqrt(mean(x^2) + eps) * weight over the last dim, rounded once from float32 (M-3)."""

    def __init__(self, config: LlamaConfig, features: int | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features or config.hidden_size))
        self.eps = config.rms_norm_eps

    @property
    def constants(self) -> operations.Norm:
        """As a part of a block takes it."""
        return operations.Norm(self.eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize x [..., hidden]; the result has x's shape and dtype."""
        wide = x.float()
        mean_square = wide.square().mean(-1, keepdim=True)
        return (wide * torch.rsqrt(mean_square + self.eps) * self.weight.float()).to(x.dtype)


class Embedding(nn.Module):
    """Rows of the float32 table, then rounded: [B, T] -> [B, T, hidden] (spec M-2).

    widens  whether a narrower table has float32 gradients.
    wide    the pass's table, widened before it; None: the pass widens it itself.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.widens = False
        self.wide: torch.Tensor | None = None

    def forward(self, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[B, T] -> [B, T, hidden] of dtype."""
        table = self.wide if self.wide is not None else self.table()
        # [B, T] -> [B, T, hidden]; the gradient sums in float32
        return functional.embedding(tokens, table).to(dtype)

    def table(self) -> torch.Tensor:
        """The table in float32."""
        if not self.widens:
            return self.weight.float()
        # FSDP2 has gathered another parameter than the shard
        self.weight.grad_dtype = torch.float32
        return _Widened.apply(self.weight)


class _Widened(torch.autograd.Function):
    """A table in float32 whose gradient stays float32: ``float`` would round it."""

    @staticmethod
    def forward(ctx, table: torch.Tensor) -> torch.Tensor:
        return table.float()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        return grad


def widen_before_passes(model: "Llama") -> None:
    """Widen the embedding table before each pass, outside the graph of a model that is compiled
    whole: a graph gives each of its inputs a gradient of the input's dtype."""
    embedding = model.model.embed_tokens

    def before(*_: object) -> None:
        embedding.wide = embedding.table()

    def after(*_: object) -> None:
        embedding.wide = None

    model.register_forward_pre_hook(before)
    model.register_forward_hook(after, always_call=True)


class Attention(nn.Module):
    """Causal rotary attention of [B, T, hidden], with grouped key and value heads (spec M-1).

    call        by a variant; its amax_group's ranks share the batch, tokens and heads, those of its
                context have the parts of the tokens (spec A-24); None: torch's own attention.
    casts       of single operands, in place of the whole variant's (E-9).
    by_kernel   computed by FlashAttention-3's kernel, and not by tiles (spec A-20).
    softcap     of scores (spec A-22); None: none.
    sinks       [H], the logits of the heads' sinks (spec A-23); None: none.
    states      of delayed scaling, by role; empty: scales come from the tensors themselves.
    """

    call: RankCall | None = None
    casts: Casts | None = None
    by_kernel: bool = False

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        hidden, heads = config.hidden_size, config.num_attention_heads
        width, kv = (n * config.head_dim for n in (heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(hidden, width, bias=False)
        self.k_proj = nn.Linear(hidden, kv, bias=False)
        self.v_proj = nn.Linear(hidden, kv, bias=False)
        self.o_proj = nn.Linear(width, hidden, bias=False)
        self.q_norm = RMSNorm(config, config.head_dim) if config.qk_norm else None
        self.k_norm = RMSNorm(config, config.head_dim) if config.qk_norm else None
        self.softcap = config.attention_softcap
        self.sinks = nn.Parameter(torch.empty(heads)) if config.attention_sinks else None
        self.states = nn.ModuleDict()

    def attend_by(self, call: RankCall, *, delays: bool, by_kernel: bool) -> None:
        """Attend by a call from now on, with the model's softcap; delays: by delayed scales."""
        self.call = dataclasses.replace(call, softcap=self.softcap)
        self.by_kernel = by_kernel
        if delays:
            device = self.q_proj.weight.device
            self.states = attention_delayed.states(call.variant, device, call.amax_group)

    @property
    def linears(self) -> list[nn.Linear]:
        """The linears that read the norm."""
        return [self.q_proj, self.k_proj, self.v_proj]

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norm: RMSNorm | None = None
    ) -> torch.Tensor:
        """Attention of x [B, T, hidden], of its shape; cos and sin are rotary tables [T, D].

        norm      of x, to be computed and cast in one pass (``parts``); None: x is normalized.
        """
        rotates = True
        if norm is None:
            outputs = [linear(x) for linear in self.linears]
        else:
            rotates = self.q_norm is not None
            tables = None if rotates else (cos, sin)
            _, outputs = parts.projections(x, self.linears, norm=norm, tables=tables)
        # [B, T, H D] -> [B, H, T, D]; H is computed, since a -1 has no one value where T is 0, and
        # dynamo does not trace Tensor.unflatten under torch.set_default_device
        shapes = [
            (*x.shape[:2], math.prod(y.shape[2:]) // self.head_dim, self.head_dim) for y in outputs
        ]
        pairs = zip(outputs, shapes, strict=True)
        q, k, v = (y.view(shape).transpose(1, 2) for y, shape in pairs)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotates:
            q, k = operations.rotate(q, cos, sin), operations.rotate(k, cos, sin)
        if self.casts is not None:
            y = attention_casts.apply(q, k, v, self.casts)
        elif self.call is None:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        elif self.by_kernel:
            y = attention_kernel.apply(q, k, v, variant=self.call)
        elif self.states:
            y = attention_delayed.apply(
                q, k, v, states=self.states, variant=self.call, sinks=self.sinks
            )
        else:
            y = attention.apply(q, k, v, variant=self.call, sinks=self.sinks)
        return self.o_proj(y.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """SwiGLU: down_proj(silu(gate) * up), the product in float32 and rounded once (spec M-3)."""

    def __init__(self, config: LlamaConfig, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.down_proj = nn.Linear(inner, config.hidden_size, bias=False)

    @property
    def linears(self) -> list[nn.Linear]:
        """gate, up and down."""
        return [self.gate_proj, self.up_proj, self.down_proj]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The MLP of x [..., hidden], of x's shape and dtype."""
        return self.down_proj(operations.swiglu(self.gate_proj(x), self.up_proj(x)))


def _mlp(config: LlamaConfig) -> nn.Module:
    """A layer's MLP, or its experts."""
    if not config.num_experts:
        return MLP(config, config.intermediate_size)
    shared = config.shared_expert_intermediate_size
    return MixtureMLP(config, MLP(config, shared) if shared else None)


class Layer(nn.Module):
    """h + attention(norm(h)), then h + MLP(norm(h)): [B, T, hidden] -> [B, T, hidden]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config)
        self.mlp = _mlp(config)

    def forward(self, h: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """h [B, T, hidden] after attention and MLP; cos and sin are rotary tables [T, D].

        Where kernels cast, each norm, SwiGLU and RoPE is a pass of the linears' casts (``parts``).
        """
        attention, mlp, norm = self.self_attn, self.mlp, self.input_layernorm
        if parts.fuses(h, attention.linears, (norm, attention)):
            y = attention(h, cos, sin, norm)
        else:
            y = attention(norm(h), cos, sin)
        norm = self.post_attention_layernorm
        if isinstance(mlp, MLP) and parts.fuses(h, mlp.linears, (norm, mlp)):
            h, y = parts.mlp(h, mlp.linears, residual=y, norm=norm)
            return h + y
        h = h + y
        return h + mlp(norm(h))


class Decoder(nn.Module):
    """The parameters between tokens and lm_head, by Hugging Face's names, which ``Llama`` runs."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config)
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config)


class Llama(nn.Module):
    """Logits: tokens [B, T] int -> [B, T, vocab_size], of the compute dtype.

    part      (r, n): tokens are the r-th of n equal parts of sequences (spec A-24).
    Order:    spec M-3, rounded to the compute dtype at each of its sites.
    The weights' dtype is the caller's: the training step rounds float32 masters to bfloat16 first
    (spec M-2).
    """

    part: tuple[int, int] = (0, 1)

    rotary: torch.Tensor
    tensor_plan = TensorPlan(
        styles={**dict.fromkeys(llama.COLUMN, "colwise"), **dict.fromkeys(llama.ROW, "rowwise")},
        blocks={Attention: 2, MLP: 0},  # Attention also takes the two rotary tables
        embedding=Embedding,
        norm=RMSNorm,
        last_norm="model.norm",
    )

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.register_buffer("rotary", torch.empty(2, 0, config.head_dim), persistent=False)
        self.register_forward_pre_hook(_make_tables)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, vocab_size] of valid tokens [B, T] (``llama.check_tokens``)."""
        dtype = self.model.norm.weight.dtype
        cos, sin = self.rotary[:, self.part[0] * tokens.shape[1] :][:, : tokens.shape[1]]
        h = self.model.embed_tokens(tokens, dtype)
        for layer in self.model.layers:
            h = layer(h, cos, sin)
        h = self.model.norm(h)
        if not self.config.tie_word_embeddings:
            return self.lm_head(h)
        return functional.linear(h, self.model.embed_tokens.weight.to(dtype))

    def balancing_loss(self, ranks: ProcessGroup | None = None) -> torch.Tensor:
        """The load-balancing loss of the last forward pass (M-8), float32 (); of a model with
        experts. ranks: those that share the batch."""
        balances = [
            module.balance
            for module in self.modules()
            if isinstance(module, MixtureMLP) and module.balance is not None
        ]
        return experts.balancing_loss(balances, self.config.num_experts_per_tok, ranks)


def llama_of(config: Config, mesh: DeviceMesh | None, context: ProcessGroup | None) -> Llama:
    """The model with the config's attention; ranks of a mesh share its tensors' amaxes (A-2)."""
    model = Llama(config.model)
    if context is not None:
        model.part = context.rank(), context.size()
    group = None if mesh is None else distributed.group.WORLD  # the mesh has all processes
    keys = config.numerics
    for layer, module in model.named_modules():
        if isinstance(module, Attention):
            module.casts = config.attention_operands(layer)
            if config.attention_variant is not None:
                call = RankCall(
                    variant=config.attention_variant,
                    mask=_CAUSAL,
                    arithmetic=keys.attention_arithmetic,
                    amax_group=None if group is None else group.group_name,
                    context=None if context is None else context.group_name,
                )
                module.attend_by(
                    call,
                    delays=keys.attention_scaling == "delayed",
                    by_kernel=config.parallel.attention == "kernel",
                )
        elif isinstance(module, MixtureMLP) and mesh is not None and config.parallel.expert > 1:
            module.group = mesh.get_group("expert")
            module.in_codes = config.parallel.expert_dispatch == "fp8"
    return model


def _make_tables(model: nn.Module, args: tuple) -> None:
    """Hook before a forward pass: make rotary tables, [2, T, D], of more positions than before.

    They stay on the device, so that a step copies none.
    """
    assert isinstance(model, Llama)
    (tokens,) = args
    positions = tokens.shape[1] * model.part[1]
    if model.rotary.shape[1] < positions or model.rotary.device != tokens.device:
        tables = llama.rotary_tables(model.config, positions)
        model.rotary = torch.from_numpy(np.stack(tables)).to(tokens.device)
