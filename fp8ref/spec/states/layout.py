"""How AdamW's moments and masters are stored (O-1, O-14); ``layouts`` has those of libraries."""

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

from fp8ref.formats import BFLOAT16, E4M3FN, E5M2, FLOAT16, FLOAT32, Format
from fp8ref.shared import errors
from fp8ref.shared.errors import require

Scaling = Literal["multiply", "reciprocal", "divide", "power_of_two"]
"""How an amax makes the scale of a moment, and how the scale is applied (O-7).

multiply      scale = RN32(max / amax), scale_inv = RN32(1 / scale), RN32(x * scale)
reciprocal    scale = RN32(1 / RN32(amax / max)), the rest as ``multiply``
divide        scale_inv = RN32(amax / max), RN32(x / scale_inv)
power_of_two  scale = the largest power of two not above RN32(max / amax), scale_inv = 1 / scale
"""

Amax = Literal["exact", "previous", "predicted"]
"""The amax that makes the scale of a step: that of the new moment, that of the step before, or a
bound that is known before the step (O-9)."""

Average = Literal["products", "lerp"]
"""The order of operations of a moving average (O-5): b m + (1 - b) g, or m + (1 - b) (g - m)."""

MASTER_FORMATS = (FLOAT16, BFLOAT16, FLOAT32)
"""The formats that a master is stored in (O-14)."""

MOMENT_FORMATS = (E4M3FN, E5M2, FLOAT16, BFLOAT16, FLOAT32)
"""The formats that a moment is stored in (O-1)."""

BLOCKS = (128, 256)
"""Elements of the flattened tensor that may share a scale (O-1)."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """How one moment is stored.

    fmt        e4m3fn, e5m2, float16, bfloat16 or float32.
    scaling    how its scale is made and applied; None without a scale.
    block      elements of the flattened tensor that share a scale; None: the whole tensor does.
    amax       which amax makes the scale.
    floor      a smaller amax is replaced by it, rounded to float32.
    root       the square root of the moment is stored.
    rounding   ``nearest_even`` or ``stochastic``.
    keep       a value that is not zero never becomes a zero code.
    expansion  each block is raised to a power that fills the format's range (O-10).

    Raises:    ValueError: decisions that do not exist, contradict each other, or would be ignored.
    """

    fmt: Format = FLOAT32
    scaling: Scaling | None = None
    block: int | None = None
    amax: Amax = "exact"
    floor: float = 2.0**-90
    root: bool = False
    rounding: Literal["nearest_even", "stochastic"] = "nearest_even"
    keep: bool = False
    expansion: bool = False

    def __post_init__(self) -> None:
        errors.one_of("a moment's fmt", self.fmt, MOMENT_FORMATS)
        self._one_of("scaling", (*get_args(Scaling), None))
        self._one_of("block", (*BLOCKS, None))
        self._one_of("amax", get_args(Amax))
        self._one_of("rounding", ("nearest_even", "stochastic"))
        for key in ("root", "keep", "expansion"):
            self._one_of(key, (True, False))
        text = f"floor is in [2^-100, 1), so that scales are normal float32; got {self.floor!r}."
        require(2.0**-100 <= self.floor < 1, text)
        if self.fmt.bits == 8 and self.scaling is None:
            raise ValueError(
                f"a moment in {self.fmt} needs a scale; got scaling=None. Use scaling='multiply'."
            )
        if self.fmt == FLOAT16 and self.scaling not in (None, "power_of_two"):
            raise ValueError(
                f"float16 takes no scale or scaling='power_of_two'; got scaling={self.scaling!r}."
            )
        if self.fmt in (BFLOAT16, FLOAT32) and self.scaling is not None:
            raise ValueError(
                f"{self.fmt} needs no scale; got scaling={self.scaling!r}. Leave scaling out."
            )
        if self.scaling is None:
            self._unused(("block", "amax", "floor"), "a moment without a scale")
        if self.fmt == FLOAT32:
            self._unused(("rounding", "keep"), "a moment in float32, which is not rounded,")
        if self.fmt == BFLOAT16:
            self._unused(("keep",), "a moment in bfloat16, which has float32's range,")
        if self.expansion and (
            self.block is None or self.scaling != "divide" or self.fmt != E4M3FN
        ):
            raise ValueError(
                f"an expansion needs e4m3fn, a block and scaling='divide'; got {self.fmt}, "
                f"block={self.block}, scaling={self.scaling!r} (O-10)."
            )
        if self.expansion:
            self._unused(("amax", "root"), "a moment with an expansion")

    def _one_of(self, key: str, allowed: tuple) -> None:
        value = getattr(self, key)
        if not any(
            value is choice or (value == choice and type(value) is type(choice))
            for choice in allowed
        ):
            raise ValueError(f"{key} is one of {', '.join(map(repr, allowed))}; got {value!r}.")

    def _unused(self, keys: tuple[str, ...], kind: str) -> None:
        for key in keys:
            if getattr(self, key) != type(self).__dataclass_fields__[key].default:
                raise ValueError(
                    f"{kind} has no use for {key}; got {key}={getattr(self, key)!r}. Leave it out."
                )

    def groups(self, size: int) -> int:
        """How many scales a tensor of that many elements has; 0 without scales."""
        if self.scaling is None:
            return 0
        return 1 if self.block is None else -(-size // self.block)

    def stored_bytes(self, size: int) -> int:
        """The bytes of a moment of so many elements, including scales."""
        per_group = 4 * (1 + (self.amax != "exact") + 2 * self.expansion)
        return size * self.fmt.bits // 8 + self.groups(size) * per_group


@dataclass(frozen=True, kw_only=True)
class Layout:
    """AdamW's moments, m, the mean of gradients, v, of their squares, and a weight's master.

    master    how the weight itself is kept (O-14); float32: the parameter is the master.
    average   the order of operations of both.
    bounded   the ratio of moments is clipped to a bound that float32 states never reach (O-6).
    smallest  tensors of fewer elements keep both moments in float32.
    ragged    whether a last block may be shorter; otherwise such a tensor keeps float32 moments.
    source    where the layout comes from.

    Raises:   ValueError: decisions that contradict each other, naming the remedy.
    """

    name: str
    m: Moment = Moment()
    v: Moment = Moment()
    master: Moment = Moment()
    average: Average = "products"
    bounded: bool = False
    smallest: int = 0
    ragged: bool = True
    source: str = ""

    def __post_init__(self) -> None:
        for key in ("m", "v", "master"):
            if not isinstance(getattr(self, key), Moment):
                raise ValueError(
                    f"{key} of layout {self.name!r} is a Moment, such as Moment(fmt=BFLOAT16); got "
                    f"{getattr(self, key)!r}."
                )
        errors.one_of("average", self.average, get_args(Average))
        errors.integer("smallest", self.smallest, 0)
        text = f"m has signs, so layout {self.name!r} cannot store its root. Use root=True of v."
        require(not self.m.root, text)
        if self.average == "lerp" and "predicted" in (self.m.amax, self.v.amax):
            raise ValueError(
                f"a bound is predicted for average 'products'; layout {self.name!r} has 'lerp'. "
                "Use amax='exact' (O-9)."
            )
        if not self.ragged and self.m.block is None and self.v.block is None:
            raise ValueError(
                f"layout {self.name!r} has no blocks, so ragged has no use. Leave it out."
            )
        self._check_master()

    def _check_master(self) -> None:
        """ValueError for a master that is no weight (O-14), or has no valid bound (O-15)."""
        master = self.master
        if (
            master.fmt not in MASTER_FORMATS
            or master.root
            or master.keep
            or master.block is not None
            or master.amax == "previous"
        ):
            raise ValueError(
                f"a master is {', '.join(fmt.name for fmt in MASTER_FORMATS)}, at most one scale "
                f"per tensor, exact or predicted amax, without root or keep; got {master} of "
                f"layout {self.name!r}. Use Moment(fmt=FLOAT16, scaling='power_of_two') (O-14)."
            )
        if master.amax == "predicted" and not self.bounded:
            raise ValueError(
                f"a predicted master amax needs bounded=True; layout {self.name!r} is not. Use it, "
                "or amax='exact' (O-6)."
            )

    def of(self, size: int) -> "Layout":
        """The layout of a tensor of so many elements: this, or float32's (O-1)."""
        blocks = [moment.block for moment in (self.m, self.v) if moment.block is not None]
        if size >= self.smallest and (self.ragged or all(size % block == 0 for block in blocks)):
            return self
        return dataclasses.replace(self, m=Moment(), v=Moment(), smallest=0, ragged=True)

    @property
    def keeps_master(self) -> bool:
        """Whether a master is kept beside the parameter, or in its place (O-14)."""
        return self.master.fmt != FLOAT32

    @property
    def kept(self) -> tuple[Moment, ...]:
        """What a step stores: m, v and, where one is kept, the master."""
        return (self.m, self.v, self.master) if self.keeps_master else (self.m, self.v)

    @property
    def stochastic(self) -> bool:
        """Whether something is rounded stochastically: the optimizer then has a seed."""
        return "stochastic" in (self.m.rounding, self.v.rounding, self.master.rounding)

    @property
    def smallest_moment(self) -> float:
        """A moment of a smaller magnitude counts as zero (O-5)."""
        # Above it no operation of the average needs a subnormal number, which XLA flushes: a
        # difference, unlike a product, may be one where its terms are not.
        return 2.0**-125 if self.average == "products" else 2.0**-100

    def bytes_per_parameter(self, size: int) -> float:
        """The bytes of both moments, divided by the elements of a tensor."""
        own = self.of(size)
        return (own.m.stored_bytes(size) + own.v.stored_bytes(size)) / size

    def bytes_with_master(self, size: int) -> float:
        """The bytes of both moments and the master, divided by the elements of a tensor."""
        return self.bytes_per_parameter(size) + self.master.stored_bytes(size) / size

    def step_bytes(self, size: int) -> float:
        """The bytes that a step of a tensor too large for a cache must read and write, with a
        float32 gradient, divided by its elements: the master and both moments twice, the gradient
        once.

        Where the whole tensor has one scale, of an exact amax, what makes that amax is read once
        more, before: the gradient and the moment; for a master's, the gradient, both moments and
        the master.
        """
        own = self.of(size)
        m, v, master = (x.fmt.bits // 8 for x in (own.m, own.v, own.master))
        first = [
            x.scaling is not None and x.block is None and x.amax == "exact"
            for x in (own.m, own.v, own.master)
        ]
        again = m + v + master if first[2] else m * first[0] + v * first[1]
        return 4 + 2 * self.bytes_with_master(size) + again + 4 * any(first)
