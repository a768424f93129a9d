"""The decisions of an attention kernel, and the keys that a query sees (spec A-1, A-3).

``attention`` has the values of libraries.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from fp8ref import policy as policies
from fp8ref.formats import BFLOAT16, E4M3FN, E5M2, FLOAT32, Format
from fp8ref.shared import errors
from fp8ref.spec.granularity import Blocks

Granularity = Literal["tensor", "head", "rows_128", "mx_1x32"]
"""Which elements of q, k or v share a scale (A-2).

tensor    all
head      those of one sequence and one head of keys; of q, those of all query heads that use it
rows_128  128 consecutive tokens of one head
mx_1x32   32 consecutive elements of a head: of q and k along the features, of v along the tokens
"""

MX = 32
"""Elements of an MX block."""

ROWS = 128
"""Tokens of a block of ``rows_128``."""

Scores = Literal["raw", "scaled"]
"""``raw``: maxima are taken of unscaled sums, and all scales enter the exponent in one factor
(A-5); ``scaled``: sums are multiplied by each factor first (A-4)."""

Factor = Literal["scale", "q", "k", "qk"]
"""What multiplies a score: the softmax scale, scale_inv of q, of k, or the product of both (A-4).
"""

SumOrder = Literal["tile", "quad", "packed"]
"""The order in which a row's probabilities are added (A-7)."""

Arithmetic = Literal["fast", "stated"]
"""How a backend computes between its products: ``fast``, by the framework's own sums and functions,
within A-18's bound of this specification; ``stated``, every operation in the stated order, rounded
once."""

ARITHMETIC: tuple[Arithmetic, ...] = get_args(Arithmetic)
"""The values of ``Arithmetic``; the first is the default."""

Backward = Literal["own", "bf16"]
"""Whose backward pass gives a variant's gradients: its ``own``; or that of the variant ``bf16``, of
q, k and v themselves (A-25).
"""

LogSum = Literal["fused", "log2", "sum"]
"""How the log-sum-exp is made of the maximum and the sum (A-11)."""

OPERAND_FORMATS = (E4M3FN, E5M2, BFLOAT16, FLOAT32)
"""The formats of q, k, v and the probabilities."""

OUT_FORMATS = (BFLOAT16, FLOAT32, E4M3FN, E5M2)
"""The formats of an output."""

ROLES = ("q", "k", "v", "s", "o")
"""Tensors of the forward pass that have scales. s is the probabilities, in cuDNN's words."""

GRADIENT_ROLES = ("do", "ds", "dq", "dk", "dv")
"""Tensors of the backward pass that have scales. cuDNN calls the scale of ds scale_dP (A-15)."""


def blocks(
    granularity: Granularity | None,
    shape: tuple[int, ...],
    *,
    heads: int,
    along_tokens: bool = False,
) -> Blocks:
    """The block of a tensor [B, H, T, D] whose elements share a scale (A-2).

    heads         of keys and values: ``head`` spans the query heads that use one.
    along_tokens  MX blocks lie along the tokens.

    >>> blocks("head", (2, 8, 300, 64), heads=4), blocks("rows_128", (2, 8, 300, 64), heads=4)
    ((1, 2, None, None), (1, 1, 128, None))

    Raises:       ValueError: for mx_1x32, features that 32 does not divide.
    """
    if granularity in ("tensor", None):
        return (None,) * 4
    if granularity == "head":
        return 1, shape[1] // heads, None, None
    if granularity == "rows_128":
        return 1, 1, ROWS, None
    if along_tokens:
        return 1, 1, MX, 1
    if shape[3] % MX:
        raise ValueError(
            f"mx_1x32 needs features divisible by {MX}; got {shape[3]}. Pad with zeros."
        )
    return 1, 1, 1, MX


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """The keys of a tile, for heads of at most ``features``, by the kind of mask (A-6)."""

    features: int
    full: int
    causal: int
    local: int


@dataclass(frozen=True, kw_only=True)
class Mask:
    """Which keys a query sees (A-3).

    causal     none after its own position.
    window     (left, right): at most so many before and after it; None leaves a side open.
    alignment  the position of query i among the keys: ``end``, i + Tk - Tq; ``start``, i.

    Raises:    ValueError: an unknown alignment; a window that is no pair of integers of at least 0.
    """

    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    alignment: Literal["end", "start"] = "end"

    def __post_init__(self) -> None:
        errors.one_of("alignment", self.alignment, ("end", "start"))
        if not isinstance(self.causal, bool):
            raise ValueError(f"causal is True or False; got {self.causal!r}.")
        if self.window is not None and not (
            isinstance(self.window, tuple)
            and len(self.window) == 2
            and all(side is None or (type(side) is int and side >= 0) for side in self.window)
        ):
            raise ValueError(
                f"window is (left, right), non-negative integers or None; got {self.window!r}."
            )

    @property
    def kind(self) -> Literal["full", "causal", "local"]:
        """What tile lengths depend on."""
        return "local" if self.window is not None else "causal" if self.causal else "full"


FULL = Mask()
"""Every query sees every key."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Every decision of an attention kernel (A-1).

    real          real arithmetic, rounded once; no other field counts but ``source``.
    fmt           of q, k, v and the probabilities.
    granularity   which elements of q, k, v share a scale; None in high precision.
    policy        how a scale is made of an amax.
    rotated       a Hadamard rotation of q and k before they are quantized (A-13).
    scores        ``raw`` or ``scaled``.
    factors       what multiplies scaled scores, in order.
    base          of the exponential: 2 or e.
    bias          raw scores alone: m * factor - offset is ``fused`` in one rounding, or
                  ``separate``.
    offset        added to the exponent, a power of two of every probability.
    p_scale       the scale of probabilities: a number, or ``state``: given, or made of the amax 1.
    threshold     a row's maximum stays behind its tile's by up to so much, in units of the
                  exponent.
    tiles         their lengths.
    descending    tiles from the last to the first.
    sum_order     of a row's probabilities.
    plan          of both GEMMs (G-2, G-3, G-12).
    promotion     tiles of a chain of PV; None: one chain over all of them.
    out_scales    where scale_inv of v and p multiply: at the ``end``, or in each ``tile``.
    finish        ``reciprocal``: multiplied by (1 / sum) * scale; ``divide``: divided by max(sum,
                  1).
    lse           ``fused``, ``log2`` or ``sum``.
    out           format of the output.
    backward      its gradients: ``exact``, ``cast``, or those of ``bf16`` (A-14, A-15, A-25); None:
                  it has none.
    gradient_fmt  of do and ds; None: fmt.
    source        where it comes from.

    Raises:       ValueError: decisions that contradict each other, naming the remedy.
    """

    name: str
    real: bool = False
    fmt: Format = E4M3FN
    granularity: Granularity | None = "tensor"
    policy: str = "te_current"
    rotated: bool = False
    scores: Scores = "scaled"
    factors: tuple[Factor, ...] = ("scale", "q", "k")
    base: Literal["2", "e"] = "e"
    bias: Literal["fused", "separate"] = "fused"
    offset: int = 0
    p_scale: float | Literal["state"] = 1.0
    threshold: float = 0.0
    tiles: tuple[Tiles, ...] = (Tiles(features=256, full=128, causal=128, local=128),)
    descending: bool = False
    sum_order: SumOrder = "tile"
    plan: str = "exact"
    promotion: int | None = 1
    out_scales: Literal["end", "tile"] = "end"
    finish: Literal["reciprocal", "divide"] = "divide"
    lse: LogSum = "sum"
    out: Format = BFLOAT16
    backward: Literal["exact", "cast", "bf16"] | None = None
    gradient_fmt: Format | None = None
    source: str = ""

    def __post_init__(self) -> None:
        for key, choices in (
            ("fmt", OPERAND_FORMATS),
            ("granularity", (*get_args(Granularity), None)),
            ("scores", get_args(Scores)),
            ("base", ("2", "e")),
            ("bias", ("fused", "separate")),
            ("sum_order", get_args(SumOrder)),
            ("out_scales", ("end", "tile")),
            ("finish", ("reciprocal", "divide")),
            ("lse", get_args(LogSum)),
            ("out", OUT_FORMATS),
            ("backward", ("exact", "cast", "bf16", None)),
        ):
            errors.one_of(key, getattr(self, key), choices)
        policies.by_name(self.policy)
        self._check_numbers()
        self._check_operands()
        self._check_orders()

    def _check_numbers(self) -> None:
        errors.integer("offset", self.offset, 0, 16)
        if not 0 <= self.threshold <= 16:
            raise ValueError(f"threshold is in [0, 16]; got {self.threshold!r}.")
        if self.promotion is not None:
            errors.integer("promotion", self.promotion, 1, other=" or None")
        if self.p_scale != "state" and not (
            isinstance(self.p_scale, float) and 0 < self.p_scale < math.inf
        ):
            raise ValueError(f"p_scale is a positive float or 'state'; got {self.p_scale!r}.")
        lengths = [tiles.features for tiles in self.tiles]
        if not lengths or lengths != sorted(set(lengths)):
            raise ValueError(f"tiles ascend by their features; got {lengths}.")
        keys = [n for tiles in self.tiles for n in (tiles.full, tiles.causal, tiles.local)]
        if any(n % 16 or n < 16 for n in keys):
            raise ValueError(f"a tile has a multiple of 16 keys; got {self.tiles}.")
        if self.plan == "exact" and self.promotion != 1:
            raise ValueError(
                f"plan 'exact' needs promotion=1: it keeps no accumulator; got {self.promotion!r}."
            )

    def _check_operands(self) -> None:
        if (self.fmt.bits == 8) != (self.granularity is not None):
            raise ValueError(
                f"FP8 operands have a granularity, others none; got {self.granularity!r} with "
                f"{self.fmt}."
            )
        if self.fmt.bits != 8 and (self.p_scale != 1.0 or self.rotated):
            raise ValueError(
                f"operands in {self.fmt} take no p_scale and no rotation; got {self.p_scale!r}, "
                f"rotated={self.rotated}."
            )
        if self.fmt.bits != 8 and self.plan not in ("f32",) and not self.real:
            raise ValueError(
                f"operands in {self.fmt} need plan='f32', as tensor cores and exact sums take FP8; "
                f"got {self.plan!r} (G-12)."
            )
        if self.gradient_fmt is not None and (
            self.backward != "cast" or self.fmt.bits != 8 or self.gradient_fmt not in (E4M3FN, E5M2)
        ):
            raise ValueError(
                f"gradient_fmt needs FP8, backward='cast'; got {self.gradient_fmt}. Leave it out."
            )
        if self.backward == "bf16" and self.fmt.bits != 8:
            raise ValueError(
                f"backward 'bf16' needs a forward pass in FP8; got {self.fmt}. Use 'cast'."
            )
        if self.backward == "cast" and (self.granularity == "rows_128" or self.rotated):
            raise ValueError(
                f"a backward pass has no row scales or rotation; got {self.granularity!r}."
            )
        mx = (self.out.bits == 8, self.plan, self.factors, self.scores, self.base)
        cast_in_mx = self.backward == "cast" and self.granularity == "mx_1x32"
        if cast_in_mx and mx != (False, "exact", ("scale",), "scaled", "e"):
            raise ValueError(
                "the MX backward pass needs exact sums, base 'e', factor 'scale' alone, o in high "
                f"precision; got {self.plan!r}, {self.base!r}, {self.factors}, {self.out} (A-16)."
            )
        if self.backward == "cast" and self.scores == "scaled" and self.base == "2":
            raise ValueError(
                "scaled scores need base 'e' in a backward pass; got '2'. Use backward=None (A-15)."
            )

    def _check_orders(self) -> None:
        if self.scores == "raw" and (
            self.base != "2" or self.granularity not in ("tensor", "head", None)
        ):
            raise ValueError(
                f"raw scores need base '2' and granularity 'tensor' or 'head'; got {self.base!r}, "
                f"{self.granularity!r}. Use scores='scaled'."
            )
        if self.scores == "scaled" and self.bias != "fused":
            raise ValueError("scaled scores have no bias to round. Leave bias out.")
        if self.base == "e" and self.offset:
            raise ValueError(
                f"an offset needs base '2', as it is a power of two; got offset={self.offset}."
            )
        if self.granularity in ("rows_128", "mx_1x32") and self.out_scales != "tile":
            raise ValueError(
                f"tile scales of v need out_scales='tile'; got {self.granularity!r}, "
                f"{self.out_scales!r}."
            )
        if self.granularity in ("rows_128", "mx_1x32") and any(
            {t.full, t.causal, t.local} != {128} for t in self.tiles
        ):
            raise ValueError(f"scales of blocks need tiles of 128 keys; got {self.tiles}.")
        if self.out_scales == "tile" and self.promotion != 1:
            raise ValueError(
                f"out_scales='tile' needs promotion=1, one chain a tile; got {self.promotion!r}."
            )

    def tile(self, features: int, mask: Mask) -> int:
        """The keys of a tile, for heads of so many features under that mask (A-6).

        Raises:   ValueError: more features than the variant has a length for.
        """
        for tiles in self.tiles:
            if features <= tiles.features:
                return int(getattr(tiles, mask.kind))
        raise ValueError(
            f"{self.name!r} takes at most {self.tiles[-1].features} features; got {features}."
        )

    @property
    def roles(self) -> tuple[str, ...]:
        """The tensors that may have scales; without FP8 gradients, the forward pass's."""
        return (*ROLES, *GRADIENT_ROLES) if self.backward == "cast" else ROLES

    def scaled(self, roles: tuple[str, ...]) -> list[str]:
        """The roles with a scale of their own, which a caller may pass (A-12)."""
        if self.granularity in (None, "mx_1x32"):
            return []
        given_only = {"s": self.p_scale == "state", "ds": self.p_scale == "state"}
        given_only |= dict.fromkeys(("o", "dq", "dk", "dv"), self.out.bits == 8)
        return [role for role in roles if given_only.get(role, True)]

    def format_of(self, role: str) -> Format:
        """The format of a tensor: q, k, v, p, s, o, or one of the backward pass."""
        if role in ("o", "dq", "dk", "dv"):
            return self.out
        return (self.gradient_fmt or self.fmt) if role in ("do", "ds") else self.fmt

    @property
    def gradient_matrices(self) -> tuple[str, ...]:
        """The matrices that a backward pass can keep: of MX blocks dS has no one code."""
        if self.real:
            return ()
        if self.fmt.bits != 8 or self.backward == "bf16":
            return ("ds",)
        return ("p_codes", "ds", "ds_codes")[: 2 if self.granularity == "mx_1x32" else 3]

    @property
    def output_scaling(self) -> tuple[Granularity | None, str]:
        """(granularity, policy) of an output or a gradient: one scale, or none in hp."""
        policy = "te_current" if self.granularity == "mx_1x32" else self.policy
        return "tensor" if self.out.bits == 8 else None, policy

    @property
    def largest_probability(self) -> float:
        """The bound of an unrounded probability (A-8): base^threshold 2^offset."""
        base = 2.0 if self.base == "2" else math.e
        return float(base**self.threshold * 2.0**self.offset)
