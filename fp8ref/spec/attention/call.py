"""One call of attention as data: its variant, its mask and all else that is static (spec A)."""

import dataclasses
import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, Self, get_args

import numpy as np

from fp8ref.shared import errors
from fp8ref.spec import rotation
from fp8ref.spec.attention import variants
from fp8ref.spec.attention.variant import blocks
from fp8ref.spec.attention.variants import FULL, Arithmetic, Layout, Mask, Variant

__all__ = ["Call"]


@dataclass(frozen=True, kw_only=True)
class Call:
    """What is static about one call of attention; hashable. ``variant=`` of every function of
    attention takes one, in place of a variant's name, where more is to be said than a mask.

        call = Call(variant="cudnn", mask=Mask(causal=True), softcap=30.0)
        result = attention.forward(q, k, v, variant=call)

    A backend adds what is its own in a subclass, such as the mesh axes of ``jax.attention``.

    variant     every decision of the kernel, or its name.
    mask        which keys a query sees.
    scale       of scores, rounded to float32; None: 1 / sqrt(D).
    softcap     scores become softcap tanh(score / softcap), before the mask; rounded to float32;
                None: they have none (A-22).
    layout      of q, k, v, o and their gradients: ``bhtd``, or ``bthd``, tokens before heads. All
                else that is returned has heads first.
    seed        of a rotated variant's signs (A-13).
    arithmetic  ``fast``, a backend's own sums and functions, within a bound of the specification
                (A-18), or ``stated``, every operation in its order. The simulator's is stated.
    keep_p      return the codes of the probabilities, which are not linear in the lengths.
    keep_s      return the scores, likewise.
    keep_ds     of a backward pass, return dS, and what it cast of P and dS.

    Raises:     ValueError: a value that is none of these; a seed without a rotation; matrices that
                the variant does not have.
    """

    # A Variant. Any admits a name to type checkers: they give __init__ the type of the field.
    variant: Variant | Any
    mask: Mask = FULL
    scale: float | None = None
    softcap: float | None = None
    layout: Layout = "bhtd"
    seed: int = 0
    arithmetic: Arithmetic = "fast"
    keep_p: bool = False
    keep_s: bool = False
    keep_ds: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.variant, Variant):
            object.__setattr__(self, "variant", variants.by_name(self.variant))
        if not isinstance(self.mask, Mask):
            raise ValueError(
                f"mask is a Mask of fp8ref.spec.attention.variants; got {self.mask!r}. Use "
                "Mask(causal=True), a window, or documents."
            )
        for name, choices in (("arithmetic", variants.ARITHMETIC), ("layout", get_args(Layout))):
            errors.one_of(name, getattr(self, name), choices)
        self._check_numbers()
        self._check_kept()

    def _check_numbers(self) -> None:
        for name, value in (("softmax scale", self.scale), ("softcap", self.softcap)):
            # an array's gradient would be lost
            if value is not None and not isinstance(value, Real):
                raise ValueError(
                    f"the {name} is a number; got {type(value).__name__}. Pass a float; multiply q "
                    "by a learned scale."
                )
        if self.scale is not None and not 0 < _float32(self.scale) < np.inf:
            raise ValueError(f"the softmax scale is positive and finite; got {self.scale!r}.")
        if self.seed and not self.variant.rotated:
            raise ValueError(
                f"variant {self.variant.name!r} has no rotation; got seed={self.seed!r}. Drop it."
            )
        errors.seed(self.seed)

    def _check_kept(self) -> None:
        name = self.variant.name
        if self.keep_p and (self.variant.real or self.variant.fmt.bits != 8):
            raise ValueError(
                f"keep_p keeps codes of FP8 probabilities; variant {name!r} has none. Leave it out."
            )
        if self.keep_s and self.variant.real:
            raise ValueError(
                f"keep_s keeps float32 scores; variant {name!r} has real numbers. Leave it out."
            )

    @classmethod
    def resolve(cls, variant: "str | Variant | Call", mask: Mask | None = None) -> Self:
        """The call of a public function's arguments, of this class.

        variant   a variant or its name; or a Call, whose mask is the call's.

        Raises:   ValueError: an unknown variant; a mask beside a Call; another backend's Call.
        """
        if not isinstance(variant, Call):
            return cls(variant=variants.by_name(variant), mask=FULL if mask is None else mask)
        if mask is not None:
            raise ValueError(
                f"a Call has its mask; got {mask!r} too. Use dataclasses.replace(call, mask=mask)."
            )
        if isinstance(variant, cls) and type(variant) is cls:
            return variant
        if type(variant) is not Call:
            raise ValueError(
                f"variant is a {cls.__name__} here; got a {type(variant).__name__}. Pass a Call."
            )
        return cls(
            **{field.name: getattr(variant, field.name) for field in dataclasses.fields(Call)}
        )

    def check_nothing_kept(self) -> None:
        """ValueError of a call whose function gives the output alone."""
        kept = [f"{name}=True" for name in ("keep_p", "keep_s", "keep_ds") if getattr(self, name)]
        if kept:
            raise ValueError(
                f"apply returns o alone; got {', '.join(kept)}. Leave it out, or use forward and "
                "backward."
            )

    def check_features(self, features: int) -> None:
        """ValueError for heads of more features than the variant takes (A-6), or that it cannot cut
        into MX blocks or rotate (A-2, A-13); and for a softcap whose factors are no normal float32
        numbers there (A-22).
        """
        self.variant.tile(features, self.mask)
        blocks(self.variant.granularity, (1, 1, 1, features), heads=1)
        if self.variant.rotated:
            rotation.check_size(int(features))  # a torch.SymInt, where a compiler traces
        if self.softcap is None:
            return
        scale = self.softmax_scale(features)
        with np.errstate(all="ignore"):
            cap = np.float32(self.softcap)
            factors = scale / cap, np.float32(float(cap) * math.log2(math.e))
        if not all(np.isfinite(x) and x >= np.finfo(np.float32).tiny for x in factors):
            raise ValueError(
                "a softcap is positive, with normal float32 numbers scale / cap and cap log2(e); "
                f"got {self.softcap!r}, softmax scale {float(scale)!r}. Use None for no cap (A-22)."
            )

    def offset(self, queries: int, keys: int) -> int:
        """The position of query 0 among the keys (A-3)."""
        return keys - queries if self.mask.alignment == "end" else 0

    def softmax_scale(self, features: int) -> np.float32:
        """The scale of scores."""
        return _float32(1 / math.sqrt(features) if self.scale is None else self.scale)

    def score_factor(self, features: int) -> np.float32:
        """What multiplies sums of dequantized products: the softmax scale under the variant's base
        (A-4); under a softcap, the scale over it (A-22).
        """
        scale = self.softmax_scale(features)
        if self.softcap is None:
            return self.under_base(scale)
        return np.float32(scale / np.float32(self.softcap))

    @property
    def cap(self) -> np.float32:
        """The softcap under the variant's base (A-22), of a call that has one."""
        assert self.softcap is not None
        return self.under_base(np.float32(self.softcap))

    def in_bf16(self) -> Self:
        """The call of the variant ``bf16`` whose backward pass gives the gradients (A-25)."""
        return dataclasses.replace(self, variant=variants.VARIANTS["bf16"], seed=0, keep_p=False)

    def under_base(self, number: np.float32) -> np.float32:
        """A float32 number, times log2(e) under base 2 (A-4)."""
        if self.variant.base == "2":
            return np.float32(float(number) * math.log2(math.e))
        return number


def _float32(number: float) -> np.float32:
    """number rounded to float32; infinity above its range."""
    with np.errstate(over="ignore"):
        return np.float32(number)
