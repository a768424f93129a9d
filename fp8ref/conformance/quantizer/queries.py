"""What a quantiser was asked with, and what it gave for each group of elements that share a scale."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fp8ref.conformance.inputs import amax_inputs
from fp8ref.conformance.inputs.amax_inputs import Amaxes
from fp8ref.conformance.inputs.kinds import AMAX_RANGES
from fp8ref.conformance.quantizer.outputs import Quantizer, Reading
from fp8ref.conformance.subject import ConformanceError, RefusedError
from fp8ref.granularity import by_name, scale_shape


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """Which elements share a scale, and what each array beside the codes is, by its name or place: ``scale``, ``scale_inv``, ``amax``."""

    granularity: str
    axis: int
    kinds: Mapping[str, str] = field(default_factory=dict)

    def shape(self, of: tuple[int, ...]) -> tuple[int, ...]:
        """That of the scales of a tensor of this shape (S-6)."""
        return scale_shape(self.granularity, of, self.axis)

    def turned(self, shape: tuple[int, ...], of: tuple[int, ...]) -> bool:
        """Whether scales of a shape, of a tensor of another, are those of S-6 the other way round."""
        wanted = self.shape(of)
        return len(wanted) == 2 and wanted[0] != wanted[1] and tuple(shape) == wanted[::-1]

    @property
    def scale(self) -> str | None:
        """The name of the first scale or scale_inv."""
        return next((name for name, kind in self.kinds.items() if kind != "amax"), None)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One tensor, its groups' questions, and what was read."""

    x: np.ndarray
    group: np.ndarray
    kind: np.ndarray
    largest: np.ndarray
    reading: Reading

    @property
    def amax(self) -> np.ndarray:
        return np.abs(self.largest)

    @property
    def ordinary(self) -> np.ndarray:
        return self.kind == AMAX_RANGES.index("ordinary")


def ask(quantizer: Quantizer, what: Amaxes, shape: tuple[int, int], granularity: str, axis: int) -> list[Asked]:
    """Every question, as many in a tensor as it has groups; groups without one are zeros."""
    group = amax_inputs.groups(shape, granularity, axis)
    count = int(group.max()) + 1
    asked = []
    for begin in range(0, what.largest.size, count):
        some, kinds = what.largest[begin : begin + count], what.kind[begin : begin + count]
        missing = count - some.size
        largest = np.concatenate([some, np.zeros(missing, np.float32)])
        kind = np.concatenate([kinds, np.full(missing, AMAX_RANGES.index("zero"))])
        x = amax_inputs.tensor(largest, group, quantizer.dtype)
        try:
            reading = quantizer.ask(x)
        except RefusedError as error:
            raise RefusedError(
                f"{error} Its amax is {_refused(quantizer, x, np.abs(largest), group):.9g}, as amaxes of a tensor may be (S-9)."
            ) from error
        asked.append(Asked(x=x, group=group, kind=kind, largest=largest, reading=reading))
    return asked


def considered(quantizer: Quantizer, asked: Sequence[Asked], sharing: Sharing) -> np.ndarray:
    """Of each question, whether its answer is the quantiser's: with a memory at ordinary amaxes alone, in JAX not of a NaN that XLA's max loses."""
    if quantizer.memory:
        return ordinary(asked)
    counts = []
    for a in asked:
        nan = a.kind == AMAX_RANGES.index("NaN")
        counts.append(~nan if nan.any() and loses_nan(quantizer, a.x, sharing) else np.ones_like(nan))
    return np.concatenate(counts)


def loses_nan(quantizer: Quantizer, x: np.ndarray, sharing: Sharing) -> bool:
    """Whether jax's own maximum of magnitudes, over the groups of x, is of other numbers than a NaN there (P-3)."""
    if quantizer.subject.framework != "jax":
        return False
    import jax.numpy as jnp

    magnitudes, axis = jnp.abs(quantizer.subject.array(x, quantizer.dtype).astype(jnp.float32)), sharing.axis
    block = by_name(sharing.granularity)
    if sharing.granularity == "tensorwise":
        found = jnp.max(magnitudes)[None]
    elif block.reduced is None:
        found = jnp.max(magnitudes, axis)
    else:  # of blocks of lines, also where blocks are of many
        lines = magnitudes if axis == -1 else magnitudes.T
        found = jnp.max(lines.reshape(len(lines), -1, block.reduced), -1)
    nan = np.isnan(x)
    wanted = nan.any() if sharing.granularity == "tensorwise" else nan.any(axis=axis)
    lines_lost = ~np.isnan(np.asarray(found)).reshape(np.size(wanted), -1).any(axis=1)
    return bool(np.any(lines_lost & np.reshape(wanted, -1)))


def ordinary(asked: Sequence[Asked]) -> np.ndarray:
    return np.concatenate([a.ordinary for a in asked])


def _refused(quantizer: Quantizer, x: np.ndarray, amax: np.ndarray, group: np.ndarray) -> float:
    """The first amax that it raises for by itself, all other groups zeros; the first of all if it takes each."""
    for i, one in enumerate(amax):
        try:
            quantizer.ask(np.where(group == i, x, np.float32(0)))
        except RefusedError:
            return float(one)
    return float(amax[0])


def returned(asked: Sequence[Asked], granularity: str, axis: int) -> Sharing:
    """What each array beside the codes is, by how it goes with the amax.

    Raises:   ConformanceError: one has no number for each group.
    """
    amax, found, sharing = np.concatenate([a.amax for a in asked]), {}, Sharing(granularity=granularity, axis=axis)
    for name in asked[0].reading.scales:
        values = np.concatenate([per_group(a, name, sharing) for a in asked])
        low, high = (float(values[np.argmax(amax == np.float32(v))]) for v in (1, 1024))
        if np.array_equal(values, amax, equal_nan=True) or name.strip("_").lower() == "amax":
            found[name] = "amax"
        elif low > high:
            found[name] = "scale"
        elif low < high:
            found[name] = "scale_inv"
    return replace(sharing, kinds=found)


def per_group(a: Asked, name: str, sharing: Sharing) -> np.ndarray:
    """The numbers of an array of scales in the groups' order: one a group, transposed or not, or one an element."""
    values, count = a.reading.scales[name], int(a.group.max()) + 1
    if values.size == count:
        return (values.T if sharing.turned(values.shape, a.x.shape) else values).reshape(-1)
    if values.shape == a.x.shape:
        return values.reshape(-1)[np.unique(a.group.reshape(-1), return_index=True)[1]]
    raise ConformanceError(
        f"its {name or 'scales'} have shape {list(values.shape)} for x {list(a.x.shape)}, but elements share scales as in "
        f"{sharing.granularity}, axis {sharing.axis}, whose scales have shape {list(sharing.shape(a.x.shape))}. Return one scale for each group."
    )
