"""Fuse the norms, linears and SwiGLU of a model's blocks into ``parts``, and undo it.

Modules are found by structure: an MLP with gate_proj, up_proj and down_proj, or w1, w3 and w2, that
computes SwiGLU; an attention that reads its input by q_proj, k_proj and v_proj, or wq, wk and wv;
a block that calls a norm for one of them. So are those of transformers' Llama, Qwen3 and Mistral
and of torchtitan's Llama. A module keeps its Parameters, its children and its name; its class gets
a forward that calls a part where kernels are on, else what it was.

A part also rotates the query and key of an attention. A copy of its forward then runs, in whose
globals another function has the place of the one that rotates them.
"""

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType

import torch
from torch import Tensor, nn

from fp8ref.torch.blocks import forms, parts
from fp8ref.torch.blocks.forms import NONE, Rotation
from fp8ref.torch.blocks.functions import Tables
from fp8ref.torch.blocks.operations import Norm
from fp8ref.torch.delayed import shared_inputs
from fp8ref.torch.linear.linear import Linear

__all__ = ["fuse", "unfuse"]

MLPS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of gate, up and down."""

READERS = (("q_proj", "k_proj", "v_proj"), ("wq", "wk", "wv"))
"""Names of the linears that read an attention's input."""

_MADE_OF = "_fp8ref_fused"
"""The attribute of a class made here: the arguments of ``_fused_class``, the class before first."""


@dataclass(frozen=True)
class _Fused:
    """What a fused module knows. norm: alone in a tuple, so that it is no submodule; or ().
    input: the name of its forward's parameter. rotation: a part's too, unless it is the default."""

    names: tuple[str, ...]
    norm: tuple["_Norm", ...] = ()
    input: str = "x"
    rotation: Rotation = NONE


_UNFUSED = _Fused(())


class _Module(nn.Module):
    """A module whose linears are a part of a block."""

    fused: _Fused

    @property
    def linears(self) -> list[nn.Linear]:
        """The part's linears."""
        return [self._modules[name] for name in self.fused.names]  # type: ignore[misc]

    def fuses(self, x: Tensor, *others: nn.Module) -> bool:
        """Whether the part runs in a pass of x. others: children whose work it would do."""
        norm = self.fused.norm
        if any(each.normalizes or each.weight.dtype != x.dtype for each in norm):
            return False
        return parts.fuses(x, self.linears, (self, *norm, *others))

    @property
    def norm(self) -> "_Norm | None":
        """The norm of the part, if it has one."""
        return self.fused.norm[0] if self.fused.norm else None

    def normalized(self, x: Tensor) -> Tensor:
        """x as the module's own forward takes it."""
        return x if self.norm is None or self.norm.normalizes else self.norm.normalize(x)


class _MLP(_Module):
    def forward(self, *args, **kwargs) -> Tensor:
        (x,) = args or (kwargs[self.fused.input],)
        if self.fuses(x, *self.children()):
            return parts.mlp(x, self.linears, norm=self.norm, twice=True)[1]
        return super().forward(self.normalized(x))


class _Attention(_Module):
    """Its forward finds results in place of the linears that a part has run."""

    ready: dict | None = None
    rotated: FunctionType

    def forward(self, *args, **kwargs):
        x = args[0] if args else kwargs[self.fused.input]
        run = super().forward
        if not self.fuses(x):
            x = self.normalized(x)
        else:
            rotation = self.fused.rotation
            values = dict(zip(rotation.parameters, args, strict=False)) | kwargs
            tables = _tables(rotation, x, values)
            _, outputs = parts.projections(
                x, self.linears, norm=self.norm, tables=tables, form=rotation.form
            )
            if tables is not None:
                # Query and key stay [B, T, H, D]: views of the forward then copy no gradient.
                run, outputs[2] = self.rotated, outputs[2].flatten(-2)
            named = zip(self.fused.names, outputs, strict=True)
            self.ready = {name: functools.partial(_given, y) for name, y in named}
        try:
            if args:
                return run(x, *args[1:], **kwargs)
            return run(**(kwargs | {self.fused.input: x}))
        finally:
            self.ready = None


def _tables(rotation: Rotation, x: Tensor, values: dict) -> Tables | None:
    """cos and sin of a pass of x [B, T, K], or None where the forward has to rotate: by tables of
    each sequence, of another dtype or with gradients. values: of the forward's parameters."""
    tables, *others = map(values.get, rotation.arguments)
    if tables is None or x.ndim != 3 or any(other is not None for other in others):
        return None
    shape, dtype = (x.shape[1], rotation.width), x.dtype
    if rotation.form == "pairs":
        tables = tables.real[: shape[0]], tables.imag[: shape[0]]
        shape, dtype = (shape[0], shape[1] // 2), torch.float32
    cos, sin = (table.squeeze(0) for table in tables)
    known = *shape, dtype, False
    fit = [(*each.shape, each.dtype, each.requires_grad) == known for each in (cos, sin)]
    return (cos, sin) if all(fit) else None


def _as_they_are(query: Tensor, key: Tensor, *tables, **options):
    """In place of a function that rotates query and key: a part has rotated them."""
    return query, key


def _with_rotated(forward: FunctionType, function: str) -> FunctionType:
    """A copy of a forward that calls ``_as_they_are`` in place of one of its globals."""
    # Without __name__: dynamo would read the globals of the module of that name.
    scope = forward.__globals__ | {function: _as_they_are}
    del scope["__name__"]
    code, defaults, cells = forward.__code__, forward.__defaults__, forward.__closure__
    copy = FunctionType(code, scope, forward.__name__, defaults, cells)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def _given(y: Tensor, x: Tensor) -> Tensor:
    return y


def _reading(name: str) -> property:
    """A linear, or in a pass of ``_Attention`` what gives its result."""

    def get(self: _Attention):
        return self._modules[name] if self.ready is None else self.ready[name]

    return property(get)


class _Norm(nn.Module):
    """A norm whose reader normalizes: it returns its input, unless hooks read its result, or
    another module has taken the reader's place.

    place     the block and its child's name: in a tuple, so that the block is no submodule.
    """

    constants: Norm
    place: tuple[nn.Module, str]
    weight: nn.Parameter
    normalizes: bool = False

    def forward(self, x: Tensor) -> Tensor:
        reader = getattr(*self.place)
        left = self in getattr(reader, "fused", _UNFUSED).norm
        hooked = parts.hooked(self) or parts.hooked(reader) or parts.any_hooked()
        if self.normalizes != (hooked or not left):
            self.normalizes = not self.normalizes
        return super().forward(x) if self.normalizes else x

    def normalize(self, x: Tensor) -> Tensor:
        """What the norm's class returned before."""
        return super().forward(x)


def fuse(model: nn.Module) -> dict[str, str]:
    """Fuse what can be fused of a converted model, in place.

    Under delayed scaling the linears of one input then share its state (``shared_inputs``).
    Returns:  {path of a linear in FP8: the part that it is in, or why it is in none}.
    """
    notes: dict[str, str] = {}
    parents = Counter(child for each in model.modules() for child in each._modules.values())
    for name, module, names, kind in list(_candidates(model)):
        note, reason = "", _obstacle(module, names, kind)
        if not reason:
            block, _, key = name.rpartition(".")
            norm = _deferred_norm(model.get_submodule(block), key, parents) if name else None
            read = _input_name(module, names, kind)
            rotation, why = _rotation(module, names) if kind is _Attention else (NONE, "")
            fused_class = _fused_class(type(module), kind, names, rotation.function)  # type: ignore[arg-type]
            module.__class__ = fused_class
            module.fused = _Fused(names, (norm,) if norm else (), read, rotation)  # type: ignore[assignment]
            first, *others = names[: 2 if kind is _MLP else 3]
            shared_inputs.share(module, dict.fromkeys(others, first))
            steps = [*names[:-1], "SwiGLU", names[-1]] if kind is _MLP else names
            note = f"fused: {'norm, ' if norm else ''}{', '.join(steps)}"
            note += ", RoPE" if rotation.function else f"; not RoPE: {why}" if why else ""
        prefix = f"{name}." if name else ""
        notes |= {f"{prefix}{key}": note or f"not fused: {reason}" for key in names}
    return notes


def unfuse(model: nn.Module) -> None:
    """Undo ``fuse``, in place."""
    for module in model.modules():
        if made_of := getattr(type(module), _MADE_OF, None):
            module.__class__ = made_of[0]
            for key in ("fused", "constants", "normalizes", "place", "ready"):
                vars(module).pop(key, None)


def _candidates(
    model: nn.Module,
) -> Iterator[tuple[str, nn.Module, tuple[str, ...], type[_Module]]]:
    """(path, module, names of its linears, what it would be) of modules with linears in FP8."""
    for name, module in model.named_modules():
        if hasattr(type(module), _MADE_OF):
            continue
        kinds = [(names, _MLP) for names in MLPS] + [(names, _Attention) for names in READERS]
        for names, kind in kinds:
            linears = [module._modules.get(key) for key in names]
            if all(isinstance(each, nn.Linear) for each in linears):
                yield name, module, names, kind


def _obstacle(module: nn.Module, names: tuple[str, ...], kind: type[_Module]) -> str:
    """Why a module is not fused, or nothing."""
    linears = [module._modules[key] for key in names]
    for key, linear in zip(names, linears, strict=True):
        if not isinstance(linear, Linear):
            return f"{key} is a {type(linear).__name__}, which casts by itself or not at all"
        if reason := parts.unlike(linear):
            return reason
    first, *others = [each.spec for each in linears if isinstance(each, Linear)]
    if any(spec != first for spec in others):
        return "its linears differ in recipe"
    if not _input_name(module, names, kind):
        does = "is not down(silu(gate(x)) * up(x))"
        if kind is _Attention:
            does = "reads its input by more than its linears"
        return f"the forward of {type(module).__name__} {does}"
    hooked = next((each for each in (module, *linears) if each and parts.hooked(each)), None)
    return f"a {type(hooked).__name__} has hooks" if hooked is not None else ""


def _input_name(module: nn.Module, names: tuple[str, ...], kind: type[_Module]) -> str:
    """The parameter of a forward that a part can stand for; "" of another one."""
    return (forms.swiglu_input if kind is _MLP else forms.input_name)(module, names)


def _rotation(module: nn.Module, names: tuple[str, ...]) -> tuple[Rotation, str]:
    """``forms.rotation``, for linears that all make whole heads: a part views each as heads."""
    rotation, why = forms.rotation(module, names)
    for name in names if rotation.width else ():
        features = module.get_parameter(f"{name}.weight").shape[0]
        if features % rotation.width:
            return NONE, f"{name} makes {features} features, no heads of {rotation.width}"
    return rotation, why


def _deferred_norm(block: nn.Module, reader: str, parents: Counter) -> "_Norm | None":
    """The norm that a block calls for its child ``reader``, which normalizes from now on; None if
    there is none that a part computes, or several modules have it (parents: how many have each)."""
    norm = block._modules.get(forms.norm_name(block, reader))
    constants = None if norm is None or parts.hooked(norm) else forms.norm_constants(norm)
    if norm is None or constants is None or parents[norm] > 1:
        return None
    norm.__class__ = _fused_class(type(norm), _Norm, (), "")  # type: ignore[arg-type]
    norm.constants, norm.place = constants, (block, reader)  # type: ignore[assignment]
    return norm  # type: ignore[return-value]


@functools.cache
def _fused_class(base: type, kind: type, read: tuple[str, ...], rotates: str) -> type:
    """The class of fused modules of a class; read: the linears whose results it is given; rotates:
    the function whose work a part does."""
    names = {name: _reading(name) for name in read if kind is _Attention}
    made_of = (base, kind, read, rotates)
    more = {"__module__": base.__module__, "__reduce__": _reduce, _MADE_OF: made_of}
    if rotates:
        more["rotated"] = _with_rotated(base.forward, rotates)  # type: ignore[attr-defined]
    return type(base.__name__, (kind, base), names | more)


def _reduce(module: nn.Module) -> tuple:
    """Reduce for copy and pickle, as the class has no importable name."""
    return _empty, getattr(type(module), _MADE_OF), vars(module).copy()


def _empty(*made_of) -> nn.Module:
    fused = _fused_class(*made_of)
    return fused.__new__(fused)  # type: ignore[call-overload]
