"""A problem of attention: one call, on tensors of one shape (spec A-2, A-3, A-12)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import Tensor, distributed
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.nn import functional

from fp8ref.formats import Format
from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variant import MX, blocks
from fp8ref.spec.attention.variants import Variant
from fp8ref.spec.granularity import Blocks

STEP = 16
"""What features, and the keys of a tile, are padded to a multiple of, which kernels need."""

Report = Literal["nothing", "amaxes", "all"]
"""What a pass finds beside its result: nothing but the amaxes that scales are made of; all amaxes;
and how many elements casts clipped. Anything else is 0."""


@dataclass(frozen=True, kw_only=True)
class RankCall(Call):
    """A call whose tensors are parts of larger ones, on one of several ranks.

    amax_group    name of the process group whose ranks have other sequences, heads or tokens of the
                  same tensors: they share the amaxes of whole tensors (P-2); None: that of
                  ``context``.
    context       name of the process group whose ranks have the parts of the tokens, in their
                  order: codes of k and v are gathered (A-21), and gradients of keys summed. The
                  amax_group of whole tensors is then this one, or a larger one.
    """

    amax_group: str | None = None
    context: str | None = None

    @property
    def sharing(self) -> str | None:
        """The name of the process group that shares amaxes."""
        return self.amax_group or self.context

    @property
    def ranks(self) -> distributed.ProcessGroup:
        """The process group of ``context``."""
        assert self.context is not None
        return _resolve_process_group(self.context)  # type: ignore[arg-type]  # a name is a string


@dataclass(frozen=True)
class Shape:
    """B, H, Hkv, Tq, Tk, D of a problem.

    first   the position of the first query among the keys, of a rank's part of the queries; None:
            as the mask is aligned.
    """

    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    features: int
    first: int | None = None

    @property
    def group(self) -> int:
        """Query heads that share a head of keys."""
        return self.heads // self.key_heads

    @property
    def rows(self) -> tuple[int, int, int, int]:
        """B, Hkv, Tq, G: the query heads of a head of keys lie side by side."""
        return self.batch, self.key_heads, self.queries, self.group


class Documents(NamedTuple):
    """Integers [B, T] of queries and of keys, padded to the tiles; None without any."""

    q: Tensor | None
    k: Tensor | None


WHOLE = Documents(None, None)
"""Every row is one document."""


def padded_documents(q: Tensor | None, k: Tensor | None) -> Documents:
    """Documents with -2 for queries' padding, among and behind, -1 for keys': none equal (A-3)."""
    if q is None or k is None:
        return WHOLE
    q, k = (
        x.masked_fill(x < 0, value) if x.dtype.is_signed else x for x, value in ((q, -2), (k, -1))
    )
    return Documents(
        functional.pad(q, (0, -q.shape[1] % MX), value=-2),
        functional.pad(k, (0, -k.shape[1] % STEP), value=-1),
    )


@dataclass(frozen=True)
class Problem:
    """What both passes take beside q, k, v and do.

    scales   delayed scales by role (A-12); those of other roles come from the tensors themselves.
    sinks    [H] (A-23); None: none.
    """

    call: RankCall
    shape: Shape
    documents: Documents = WHOLE
    scales: Mapping[str, Tensor] = field(default_factory=dict)
    sinks: Tensor | None = None

    @property
    def variant(self) -> Variant:
        """The variant of the call."""
        return self.call.variant

    @property
    def low(self) -> bool:
        """Whether operands are in FP8."""
        return self.call.variant.fmt.bits == 8

    @property
    def gradient_fmt(self) -> Format:
        """The format of do and dS."""
        return self.call.variant.format_of("ds")

    def blocks(self, role: str) -> Blocks | None:
        """Which elements of q, k, v or do share a scale (A-2); None in high precision."""
        granularity, shape = self.call.variant.granularity, self.shape
        if granularity is None:
            return None
        heads = shape.heads if role in ("q", "do") else shape.key_heads
        size = shape.batch, heads, -1, shape.features
        return blocks(granularity, size, heads=shape.key_heads, along_tokens=role == "v")

    @property
    def offset(self) -> int:
        """The position of query 0 among the keys (A-3)."""
        shape = self.shape
        if shape.first is not None:
            return shape.first
        return self.call.offset(shape.queries, shape.keys)

    @property
    def window(self) -> tuple[int | None, int | None]:
        """Row i sees keys from i + offset - left to i + offset + right; None: a side is open."""
        left, right = self.call.mask.window or (None, None)
        if self.call.mask.causal:
            right = 0 if right is None else min(right, 0)
        return left, right

    @property
    def softmax_scale(self) -> float:
        """The scale of scores, a float32 number."""
        return float(self.call.softmax_scale(self.shape.features))

    @property
    def score_scale(self) -> float:
        """What multiplies sums of dequantized products, a float32 number (A-4, A-22)."""
        return float(self.call.score_factor(self.shape.features))

    def without_padding(self, do_or_q: Tensor, *keys: Tensor) -> tuple[Tensor, ...]:
        """A tensor of queries, and those of keys, with zeros for padding (A-3)."""
        zeroed = (_without_padding(x, self.documents.k) for x in keys)
        return _without_padding(do_or_q, self.documents.q), *zeroed


def _without_padding(x: Tensor, documents: Tensor | None) -> Tensor:
    """x [B, heads, T, D] with zeros for tokens of negative documents; drops padding behind T."""
    if documents is None:
        return x
    return x.masked_fill((documents[:, : x.shape[2]] < 0)[:, None, :, None], 0.0)
