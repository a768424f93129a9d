"""Optimizer states as data: how AdamW keeps its moments and the master of a weight (spec O).

A ``Moment`` is every decision between a float32 number and what is stored of it. A ``Layout`` is
both moments and the master. LAYOUTS has the layouts of libraries and papers, and fp8ref's own, all
with float32 masters; WITH_MASTERS has those with narrower ones. ``Scalars`` are the numbers of one
step that are the same for every element. ``sim.states`` implements all of them; a backend implements
them or refuses.
"""

import dataclasses
import functools
import math
import struct
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from fp8ref import registry
from fp8ref.formats import BFLOAT16, E4M3FN, E5M2, FLOAT16, FLOAT32, Format

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

GRADIENT_MIN = 2.0**-56
"""A gradient of a smaller magnitude counts as zero (O-2)."""

GRADIENT_MAX = 2.0**56
"""A gradient of a larger magnitude counts as NaN (O-2)."""

CONVERGING = 1 - 2.0**-14
"""The largest b1^2 / b2 under which the ratio of moments has a bound (O-6)."""

STEP_MIN = 2.0**-90
"""A smaller change of a weight counts as zero (O-6)."""

EXPANDED_RANGE = 448.0 * 448.0 / 2
"""The range that an expansion fills, as COAT's kernel has it (O-10)."""

EXPONENTS = (4.0, 2.0, 1.0, 0.5)
"""The exponents of an expansion, the largest first: those that products and roots give exactly
(O-10)."""


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
        if self.fmt not in MOMENT_FORMATS:
            raise ValueError(f"a moment's fmt is one of {', '.join(f.name for f in MOMENT_FORMATS)}; got {self.fmt!r}.")
        self._one_of("scaling", (*get_args(Scaling), None))
        self._one_of("block", (*BLOCKS, None))
        self._one_of("amax", get_args(Amax))
        self._one_of("rounding", ("nearest_even", "stochastic"))
        for key in ("root", "keep", "expansion"):
            self._one_of(key, (True, False))
        if not 2.0**-100 <= self.floor < 1:
            raise ValueError(f"floor is in [2^-100, 1), so that scales are normal float32 numbers; got {self.floor!r}.")
        if self.fmt.bits == 8 and self.scaling is None:
            raise ValueError(f"a moment in {self.fmt} needs a scale; got scaling=None. Use scaling='multiply'.")
        if self.fmt == FLOAT16 and self.scaling not in (None, "power_of_two"):
            raise ValueError(f"float16 takes no scale or a power of two; got scaling={self.scaling!r}. Use scaling='power_of_two'.")
        if self.fmt in (BFLOAT16, FLOAT32) and self.scaling is not None:
            raise ValueError(f"{self.fmt} has float32's range and takes no scale; got scaling={self.scaling!r}. Leave scaling out.")
        if self.scaling is None:
            self._unused(("block", "amax", "floor"), "a moment without a scale")
        if self.fmt == FLOAT32:
            self._unused(("rounding", "keep"), "a moment in float32, which is not rounded,")
        if self.fmt == BFLOAT16:
            self._unused(("keep",), "a moment in bfloat16, which has float32's range,")
        if self.expansion and (self.block is None or self.scaling != "divide" or self.fmt != E4M3FN):
            raise ValueError(
                "an expansion needs fmt e4m3fn, a block and scaling='divide' (O-10); got "
                f"{self.fmt}, block={self.block}, scaling={self.scaling!r}."
            )
        if self.expansion:
            self._unused(("amax", "root"), "a moment with an expansion")

    def _one_of(self, key: str, allowed: tuple) -> None:
        value = getattr(self, key)
        if not any(value is choice or (value == choice and type(value) is type(choice)) for choice in allowed):
            raise ValueError(f"{key} is one of {', '.join(map(repr, allowed))}; got {value!r}.")

    def _unused(self, keys: tuple[str, ...], kind: str) -> None:
        for key in keys:
            if getattr(self, key) != type(self).__dataclass_fields__[key].default:
                raise ValueError(f"{kind} has no use for {key}; got {key}={getattr(self, key)!r}. Leave it out.")

    def groups(self, size: int) -> int:
        """How many scales a tensor of that many elements has; 0 without scales."""
        return 0 if self.scaling is None else 1 if self.block is None else -(-size // self.block)

    def stored_bytes(self, size: int) -> int:
        """The bytes of a moment of that many elements, scales and what travels with them
        included."""
        per_group = 4 * (1 + (self.amax != "exact") + 2 * self.expansion)
        return size * self.fmt.bits // 8 + self.groups(size) * per_group


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Both moments of AdamW, m, the mean of gradients, and v, the mean of their squares, and the master
    of a weight.

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
                raise ValueError(f"{key} of layout {self.name!r} is a Moment, such as Moment(fmt=BFLOAT16); got {getattr(self, key)!r}.")
        if self.average not in get_args(Average):
            raise ValueError(f"average is one of {', '.join(get_args(Average))}; got {self.average!r}.")
        if isinstance(self.smallest, bool) or not isinstance(self.smallest, int) or self.smallest < 0:
            raise ValueError(f"smallest is an integer of at least 0; got {self.smallest!r}.")
        if self.m.root:
            raise ValueError(f"m has signs, so layout {self.name!r} cannot store its root. Use root=True of v alone.")
        if self.average == "lerp" and "predicted" in (self.m.amax, self.v.amax):
            raise ValueError(f"a bound is predicted of average 'products' alone (O-9); layout {self.name!r} has 'lerp'. Use amax='exact'.")
        if not self.ragged and self.m.block is None and self.v.block is None:
            raise ValueError(f"layout {self.name!r} has no blocks, so ragged has no use. Leave it out.")
        self._check_master()

    def _check_master(self) -> None:
        """ValueError for a master that is no weight (O-14), or whose bound does not hold (O-15)."""
        master = self.master
        if master.fmt not in MASTER_FORMATS or master.root or master.keep or master.block is not None or master.amax == "previous":
            raise ValueError(
                f"a master is {', '.join(fmt.name for fmt in MASTER_FORMATS)}, with at most one scale for the tensor, of an exact or a predicted "
                f"amax, without root or keep (O-14); got {master} of layout {self.name!r}. Use Moment(fmt=FLOAT16, scaling='power_of_two')."
            )
        if master.amax == "predicted" and not self.bounded:
            raise ValueError(
                f"the amax of a master is predicted from the bound of O-6; layout {self.name!r} is not bounded. Use bounded=True, or amax='exact'."
            )

    def of(self, size: int) -> "Layout":
        """The layout that a tensor of that many elements has: this one, or float32's under the
        same average (O-1)."""
        blocks = [moment.block for moment in (self.m, self.v) if moment.block is not None]
        if size >= self.smallest and (self.ragged or all(size % block == 0 for block in blocks)):
            return self
        return Layout(name=self.name, master=self.master, average=self.average, bounded=self.bounded, source=self.source)

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
        """The bytes that a step of a tensor too large for a cache must read and write, with a float32 gradient, divided by
        its elements: the master and both moments twice, the gradient once.

        Where the whole tensor has one scale, of an exact amax, what makes that amax is read once more,
        before: the gradient and the moment; for a master's, the gradient, both moments and the master.
        """
        own = self.of(size)
        m, v, master = (x.fmt.bits // 8 for x in (own.m, own.v, own.master))
        first = [x.scaling is not None and x.block is None and x.amax == "exact" for x in (own.m, own.v, own.master)]
        again = m + v + master if first[2] else m * first[0] + v * first[1]
        return 4 + 2 * self.bytes_with_master(size) + again + 4 * any(first)


class Scalars(NamedTuple):
    """The numbers of one step, float32 numbers as Python floats (O-3).

    b1, a1, b2, a2           the betas and what they lack to 1
    inverse1, inverse2       1 / (1 - b1^t) and 1 / sqrt(1 - b2^t), which correct the bias
    bound                    the largest ratio of moments (O-6)
    learning_rate, eps, weight_decay
    """

    b1: float
    a1: float
    b2: float
    a2: float
    inverse1: float
    inverse2: float
    bound: float
    learning_rate: float
    eps: float
    weight_decay: float


def scalars(step: int, *, learning_rate: float, b1: float, b2: float, eps: float, weight_decay: float) -> Scalars:
    """The numbers of the step with that number, 1 for the first.

    Order:    float64 products and quotients, each rounded once, then one rounding to float32 (O-3).
    Raises:   ValueError: as ``check``; step below 1; a learning rate outside [0, 1024].
    """
    check(b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise ValueError(f"steps are counted from 1; got step={step!r}.")
    if not 0 <= learning_rate <= 1024:
        raise ValueError(f"learning_rate is in [0, 1024]; got {learning_rate!r}.")
    table = corrections(b1, b2)
    inverse1, inverse2, bound = table[min(step, len(table)) - 1]
    given = (b1, 1.0 - b1, b2, 1.0 - b2, inverse1, inverse2, bound, learning_rate, eps, weight_decay)
    return Scalars(*(float32(value) for value in given))


@functools.lru_cache(maxsize=16)
def corrections(b1: float, b2: float) -> tuple[tuple[float, float, float], ...]:
    """(1 / (1 - b1^t), 1 / sqrt(1 - b2^t), bound) of the steps from 1 on, rounded to float32; later steps have
    the last entry, where all powers are below 2^-30 (O-3)."""
    found = []
    ratio = b1 * b1 / b2
    converges = ratio <= CONVERGING
    power1 = power2 = power_r = 1.0
    while max(power1, power2, power_r if converges else 0.0) >= 2.0**-30:
        power1, power2, power_r = power1 * b1, power2 * b2, power_r * ratio
        of_v = math.sqrt(1.0 - power2)
        bound = math.inf
        if converges:
            of_ratio = math.sqrt((1.0 - power_r) / (1.0 - ratio))
            bound = (1.0 - b1) * of_ratio / math.sqrt(1.0 - b2) * of_v / (1.0 - power1) * (1.0 + 2.0**-7)
        found.append((float32(1.0 / (1.0 - power1)), float32(1.0 / of_v), float32(bound)))
    return tuple(found)


def float32(value: float) -> float:
    """RN32(value), as a Python float.

    >>> float32(0.1)
    0.10000000149011612
    """
    return value if math.isinf(value) else struct.unpack("f", struct.pack("f", value))[0]


def check(*, b1: float, b2: float, eps: float, weight_decay: float, layout: "Layout | None" = None) -> None:
    """ValueError unless AdamW's numbers are in the ranges in which no operation overflows or needs
    a subnormal number (O-2); and b1^2 / b2 below 1 - 2^-14 where the layout is bounded."""
    if not (b1 == 0 or 0.5 <= b1 <= 1 - 2.0**-14):
        raise ValueError(f"b1 is 0 or in [0.5, 1 - 2^-14]; got {b1!r}.")
    if not 0.5 <= b2 <= 1 - 2.0**-14:
        raise ValueError(f"b2 is in [0.5, 1 - 2^-14], so that squares of gradients stay normal numbers; got {b2!r}.")
    if not 2.0**-50 <= eps <= 1:
        raise ValueError(f"eps is in [2^-50, 1], where 2^-50 is about 8.9e-16; got {eps!r}. Use 1e-8, or 1e-15 for tiny gradients.")
    if not 0 <= weight_decay <= 1024:
        raise ValueError(f"weight_decay is in [0, 1024]; got {weight_decay!r}.")
    if layout is not None and layout.bounded and b1 * b1 / b2 > CONVERGING:
        raise ValueError(
            f"layout {layout.name!r} is bounded, which needs b1^2 / b2 below 1 - 2^-14 (O-6); got b1={b1!r}, b2={b2!r}. Use a larger b2."
        )
    if layout is not None and layout.average == "lerp" and (b1 <= 0.5 or b2 <= 0.5):
        raise ValueError(f"average 'lerp' needs betas above 0.5 (O-5); got b1={b1!r}, b2={b2!r}.")


def check_seed(seed: int, layout: Layout) -> None:
    """ValueError unless a seed is one of stochastic rounding (C-2), and 0 where nothing is rounded so."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 64:
        raise ValueError(f"seed is an integer in [0, 2^64); got {seed!r}.")
    if seed and not layout.stochastic:
        raise ValueError(f"layout {layout.name!r} rounds to nearest and has no use for a seed; got seed={seed}. Leave it out.")


_TENSOR_E4M3 = Moment(fmt=E4M3FN, scaling="multiply")
_BLOCK_E4M3 = Moment(fmt=E4M3FN, scaling="multiply", block=128)
_TORCHAO = Moment(fmt=E4M3FN, scaling="divide", block=256, floor=1e-12)
_COAT = Moment(fmt=E4M3FN, scaling="divide", block=128, floor=1e-30, expansion=True)

LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout(name="float32", source="Loshchilov, Hutter, 'Decoupled weight decay regularization', 2019"),
        Layout(
            name="bfloat16",
            m=Moment(fmt=BFLOAT16),
            v=Moment(fmt=BFLOAT16),
            source="DeepSeek-V3 technical report, arXiv:2412.19437, section 3.3.3",
        ),
        Layout(
            name="msamp",
            m=Moment(fmt=E4M3FN, scaling="power_of_two"),
            v=Moment(fmt=FLOAT16, scaling="power_of_two"),
            source="MS-AMP, msamp/optim/adamw.cu and adamw.py, commit 9746ea8; arXiv:2310.18313",
        ),
        Layout(
            name="fishman",
            m=_TENSOR_E4M3,
            v=Moment(fmt=E5M2, scaling="multiply"),
            source="Fishman et al., 'Scaling FP8 training to trillion-token LLMs', arXiv:2409.12517",
        ),
        Layout(
            name="sqrt_e5m2",
            m=_TENSOR_E4M3,
            v=Moment(fmt=E5M2, scaling="multiply", root=True, keep=True),
            bounded=True,
            source="MS-AMP, issue 99, which asks for sqrt(v) in e5m2; keep and the bound are fp8ref's",
        ),
        Layout(
            name="sqrt_e4m3",
            m=_BLOCK_E4M3,
            v=Moment(fmt=E4M3FN, scaling="multiply", block=128, root=True, keep=True),
            bounded=True,
            source="fp8ref",
        ),
        Layout(
            name="torchao",
            m=_TORCHAO,
            v=_TORCHAO,
            average="lerp",
            smallest=4096,
            ragged=False,
            source="torchao 0.18, torchao/optim/subclass_fp8.py and adam.py: AdamWFp8",
        ),
        Layout(
            name="te",
            m=Moment(fmt=E4M3FN, scaling="reciprocal"),
            v=Moment(fmt=E4M3FN, scaling="reciprocal"),
            source="TransformerEngine, transformer_engine/pytorch/optimizers/fused_adam.py, commit 04912bf",
        ),
        Layout(
            name="coat",
            m=_COAT,
            v=_COAT,
            source="COAT, coat/optimizer/kernels/fp8_adamw_expand_cuda_kernel.cu, commit 80ec99f; arXiv:2410.19313",
        ),
    )
}
"""The layouts with float32 masters by name (O-1)."""

WITH_MASTERS = {
    layout.name: layout
    for layout in (
        dataclasses.replace(
            LAYOUTS["msamp"],
            name="msamp_o2",
            master=Moment(fmt=FLOAT16, scaling="power_of_two"),
            source="MS-AMP, msamp/optim/adamw.py and msamp/common/tensor/tensor.py, commit 9746ea8; arXiv:2310.18313",
        ),
        dataclasses.replace(
            LAYOUTS["sqrt_e4m3"],
            name="sqrt_e4m3_f16",
            master=Moment(fmt=FLOAT16, scaling="power_of_two", amax="predicted"),
            source="fp8ref",
        ),
    )
}
"""The layouts with narrower masters by name (O-14)."""


def by_name(layout: str | Layout) -> Layout:
    """The layout of that name; a Layout is itself; ValueError for anything else."""
    return registry.lookup("layout is a Layout or", LAYOUTS | WITH_MASTERS, layout, Layout)
