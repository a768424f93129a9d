"""The training state: name, shape and dtype of every tensor in a checkpoint (spec K-2).

Both backends share this declaration.

    model.<parameter>                    the float32 master; under a layout with masters (O-14) the
                                         fields of a narrower one
    exp_avg.<parameter>                  AdamW's first moment; exp_avg_sq.<parameter> is its second
    fp8.<linear>.<role>.<field>          JAX: a delayed-scaling state. PyTorch names its module,
                                         <linear>.states.<role>. A layer's attention is
                                         <layer>.self_attn
    exp_avg.<parameter>.<field>          under ``adamw_states``, in place of a moment: the fields of
                                         its layout (O-1)
    count                                JAX: steps taken. PyTorch restores them from the manifest's
                                         step
    mu.<linear>.weight                   the automatic factor of a gradient in FP8 (P-22). A state
                                         is read with it or without, as meshes differ

{jax,torch}/optimizer.py makes, changes and names what each parameter has, for the trainer's own
models and for those of users. ``Step.tensors`` adds the rest, and ``Store`` of
{jax,torch}/checkpoint.py writes and reads all by these names. The loop compares ``disk_bytes`` with
the free disk space; ``estimate.memory`` counts the bytes on a device.

docs/how-to/checkpoints.md, "Keep another tensor for each parameter", adds a moving average of the
weights: in this file and both optimizers.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8ref.formats import Format
from fp8ref.recipe import delayed_casts
from fp8ref.shared.errors import ConfigError
from fp8ref.spec.delayed import DelayedScaling
from fp8ref.spec.states.layouts import Moment
from fp8ref.train.config.config import Config
from fp8ref.train.config.sections import OptimizerConfig

# Blocks of torchao's FP8 optimizer (T-6): values of one scale, and the smallest piece in FP8.
FP8_BLOCK, FP8_SMALLEST = 256, 4096

TINY = 2.0**-125  # a smaller weight counts as zero, read from a stored master (O-14)


@dataclass(frozen=True, kw_only=True)
class PerParameter:
    """A float32 tensor for every parameter, of the parameter's shape.

    name    on disk, before the parameter's name.
    label   in the memory table of a dry run; tensors of one label share a line.
    moment  whether it is one of AdamW's two moments, which ``adamw_fp8`` keeps in FP8 (T-6).
    kept    under ``adamw_states``, its index in ``Layout.kept`` of fp8ref/spec/states/layouts.py: 0
            the first moment, 1 the second, 2 the master. None: it stays float32 under every layout.
    """

    name: str
    label: str
    moment: bool = False
    kept: int | None = None

    def device_bytes(
        self, elements: int, optimizer: OptimizerConfig, whole: int | None = None
    ) -> int:
        """Bytes on a device that holds so many elements of a parameter.

        whole  the elements of the whole parameter, to which the scales of ``adamw_states`` belong;
               None: as many.
        """
        size = whole or elements
        stored = self.stored(optimizer, size)
        if stored is not None:
            return stored.stored_bytes(size) - (size - elements) * stored.fmt.bits // 8
        if self.moment and optimizer.kind == "adamw_fp8" and moments_in_fp8(elements):
            # a code for each element, and a float32 scale for each block
            return elements + 4 * elements // FP8_BLOCK
        return 4 * elements

    def stored(self, optimizer: OptimizerConfig, elements: int) -> Moment | None:
        """How ``adamw_states`` stores it, of so many elements; None: as one float32 tensor."""
        layout = optimizer.moment_layout
        if layout is None or self.kept is None or self.kept >= len(layout.kept):
            return None
        return layout.of(elements).kept[self.kept]


MASTERS, COUNT, FP8, MU = "model", "count", "fp8", "mu"  # first parts of names on disk
PER_PARAMETER = (
    PerParameter(name=MASTERS, label="weights, float32 masters", kept=2),
    PerParameter(name="exp_avg", label="AdamW's moments", moment=True, kept=0),
    PerParameter(name="exp_avg_sq", label="AdamW's moments", moment=True, kept=1),
)
"""The tensors that every parameter has in a state: its master, and AdamW's two moments."""

MOMENTS = tuple(one.name for one in PER_PARAMETER if one.moment)
"""The names of the moments among ``PER_PARAMETER``."""


_BYTES = {"uint8": 1, "float16": 2, "bfloat16": 2, "float32": 4, "int32": 4, "int64": 8}


@dataclass(frozen=True)
class Tensor:
    """Shape and dtype of a whole tensor, as it is before any mesh cuts it."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * _BYTES[self.dtype]


def schema(config: Config, backend: str) -> dict[str, Tensor]:
    """Every tensor of a state by its name on disk.

    Under ``adamw_fp8`` each process stores codes and scales of its own pieces in place of a moment;
    ``logical`` gives the moment's name.
    """
    tensors: dict[str, Tensor] = {}
    for entry in PER_PARAMETER:
        for name, shape in config.shapes.parameters.items():
            stored = entry.stored(config.optimizer, math.prod(shape))
            full = f"{entry.name}.{name}"
            if stored is None:
                tensors[full] = Tensor(shape, "float32")
            else:
                tensors |= {f"{full}.{key}": x for key, x in _fields(stored, shape).items()}
    if backend == "jax":
        tensors[COUNT] = Tensor((), "int32")
    if config.parallel.auto_scale is not None:
        factors = (f"{MU}.{name}.weight" for name in config.shapes.linears)
        tensors |= dict.fromkeys(factors, Tensor((), "float32"))
    return tensors | fp8_states(config, backend)


def check_master(name: str, dtype: np.dtype) -> None:
    """ConfigError unless a saved master is of a float type: an integer's bits are no weight."""
    if dtype.kind in "biuc":
        raise ConfigError(
            f"{name} is a float in every layout, and {dtype} in the checkpoint. Load a state "
            "that fp8ref wrote."
        )


def weight(codes: np.ndarray, scale_inv: np.ndarray | None) -> np.ndarray:
    """The float32 weight of a stored master (O-14): code x ``scale_inv``, +0 where it is tiny.

    >>> w = weight(np.float16([3, -1, 6e-8]), np.float32(2.0**-110))
    >>> w.tolist() == [3 * 2.0**-110, -(2.0**-110), 0.0]
    True
    """
    w = codes.astype(np.float32)
    if scale_inv is not None:
        w = w * np.float32(scale_inv)
    return np.where(np.abs(w) < TINY, np.float32(0), w)


def _fields(moment: Moment, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """The tensors of a stored moment (O-4, O-9, O-10) by the names of ``MomentState``."""
    codes = {"codes": Tensor(shape, "uint8" if moment.fmt.bits == 8 else moment.fmt.name)}
    groups = Tensor(() if moment.block is None else (moment.groups(math.prod(shape)),), "float32")
    kept = {
        "scale_inv": moment.scaling is not None,
        "amax": moment.amax != "exact",
        "exponent": moment.expansion,
        "center": moment.expansion,
    }
    return codes | {field: groups for field, has in kept.items() if has}


def fp8_states(config: Config, backend: str) -> dict[str, Tensor]:
    """The states of delayed scaling in the schema (spec H-2), in any phase of a schedule (T-9)."""
    # Field names are those of each backend's DelayedState; torch.nn adds ``states``.
    torch = backend == "torch"
    module, scale, count = (".states", "scale", "int64") if torch else ("", "stored", "int32")
    tensors: dict[str, Tensor] = {}
    for (path, role), (_, delayed) in delayed_states(config).items():
        prefix = f"{FP8}.{path}{module}.{role}"
        tensors[f"{prefix}.{scale}"] = Tensor((), "float32")
        tensors[f"{prefix}.amax_history"] = Tensor((delayed.history_length,), "float32")
        tensors[f"{prefix}.step"] = Tensor((), count)
    return tensors


def delayed_states(config: Config) -> dict[tuple[str, str], tuple[Format, DelayedScaling]]:
    """{(linear or a layer's attention, role): format and scaling} of all delayed states."""
    decisions = (d for recipe in config.recipes for d in config.under(recipe).decisions())
    keepers: list[tuple[str, Mapping]] = [(d.path, delayed_casts(d.recipe)) for d in decisions]
    return {
        (path, role): cast
        for path, casts in keepers + list(config.attention_casts.items())
        for role, cast in casts.items()
    }


def interchangeable(a: Config, b: Config, backend: str) -> bool:
    """Whether both configs share a state as it is: names, shapes, and what its numbers mean.

    A schema names codes by their bits alone. So formats, roots and scalings of moments and masters
    are compared too, and the formats of delayed states.
    """

    def meant(config: Config) -> list:
        sizes = [math.prod(shape) for shape in config.shapes.parameters.values()]
        pairs = ((entry, size) for entry in PER_PARAMETER for size in sizes)
        kept = [entry.stored(config.optimizer, size) for entry, size in pairs]
        return [config.optimizer.kind == "adamw_fp8", kept, delayed_states(config)]

    return schema(a, backend) == schema(b, backend) and meant(a) == meant(b)


def disk_bytes(config: Config, backend: str) -> int:
    """Bytes of a checkpoint on the disk; 0 under ``adamw_fp8``, where processes' pieces decide."""
    if config.optimizer.kind == "adamw_fp8":
        return 0
    # 5 % and a MiB more: names and indices, and whole blocks of the disk
    tensors = schema(config, backend).values()
    return int(1.05 * sum(tensor.nbytes for tensor in tensors)) + 2**20


def moments_in_fp8(elements: int) -> bool:
    """Whether ``adamw_fp8`` keeps the moments of a piece of this many elements in FP8 (T-6)."""
    return elements >= FP8_SMALLEST and elements % FP8_BLOCK == 0


def flat(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Nested names joined by dots: {"model": {"norm.weight": x}} -> {"model.norm.weight": x}."""
    flattened: dict[str, Any] = {}
    for name, value in tensors.items():
        if isinstance(value, Mapping):
            flattened |= {f"{name}.{rest}": x for rest, x in flat(value).items()}
        else:
            flattened[name] = value
    return flattened


def logical(name: str) -> str:
    """The schema's name of a tensor on disk: without the rank of codes or scales (T-6)."""
    return re.sub(r"\.rank\d+\.(codes|scale)$", "", name)


def check_saved(
    saved: Mapping[str, tuple[int, ...]], mine: Mapping[str, tuple[int, ...]], same: str
) -> None:
    """ConfigError unless a saved state has the names and shapes of this one, {name on disk: shape}.
    Moments of other ranks (T-6) may be saved too, and mu (P-22) may be in one alone.

    same  what a state has to be of to fit, for the message.
    """
    for name in sorted(saved.keys() ^ mine.keys()):
        where = "is not in the checkpoint"
        if name in saved:
            where = "is in the checkpoint, and not in this model"
        of_another_rank = name in saved and name != logical(name)
        if not of_another_rank and not name.startswith(f"{MU}."):
            raise ConfigError(f"{name} {where}. Load a state of the same {same}.")
    for name, shape in mine.items():
        if saved.get(name, shape) != shape:
            raise ConfigError(
                f"{name} is {list(shape)} here and {list(saved[name])} in the checkpoint. "
                "Load a state of the same model."
            )


def check(tensors: Mapping[str, Any], config: Config, backend: str) -> None:
    """AssertionError unless the nested ``tensors`` have exactly the names of the schema."""
    mine = {logical(name) for name in flat(tensors)}
    declared = schema(config, backend).keys()
    assert mine == declared, (
        f"train_state.schema and {backend}.step disagree on {sorted(mine ^ declared)}"
    )
