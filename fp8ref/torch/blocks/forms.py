"""What a module's forward computes, read off its source: SwiGLU's MLP, an attention that reads its
input by linears alone and rotates the results of two, a block that calls a norm for one of them."""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from fp8ref.torch.blocks import operations
from fp8ref.torch.blocks.operations import Norm

__all__ = ["Rotation", "input_name", "norm_constants", "norm_name", "rotation", "swiglu_input"]

_ACTIVATIONS = {"SiLU", "SiLUActivation"}


def _forward(module: nn.Module) -> ast.FunctionDef | None:
    """A module's forward without its docstring; None without a source, or of an instance."""
    if "forward" in vars(module):
        return None
    try:
        source = inspect.getsource(type(module).forward)
        tree = ast.parse(textwrap.dedent(source)).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    if not isinstance(tree, ast.FunctionDef):
        return None
    if ast.get_docstring(tree) is not None:
        tree.body = tree.body[1:]
    return tree


def _text(forward: ast.FunctionDef) -> str:
    return "\n".join(map(ast.unparse, forward.body))


def swiglu_input(mlp: nn.Module, names: tuple[str, ...]) -> str:
    """The one parameter x of a forward that returns down(silu(gate(x)) * up(x)); "" of any other
    forward. names: of gate, up and down."""
    forward = _forward(mlp)
    if forward is None:
        return ""
    gate, up, down = names
    text = re.sub(r"^(\w+) = (.*)\nreturn \1$", r"return \2", _text(forward))
    returned = re.fullmatch(
        rf"return self\.{down}\((\S+)\(self\.{gate}\((\w+)\)\) \* self\.{up}\(\2\)\)", text
    )
    if returned is None or [each.arg for each in forward.args.args[1:]] != [returned.group(2)]:
        return ""
    return returned.group(2) if _is_silu(mlp, returned.group(1)) else ""


def _is_silu(mlp: nn.Module, name: str) -> bool:
    """Whether a forward's name of a function is silu's: ``self.act_fn``, ``F.silu``."""
    first, *rest = name.split(".")
    value = mlp if first == "self" else type(mlp).forward.__globals__.get(first)
    for key in rest:
        value = getattr(value, key, None)
    return value is functional.silu or type(value).__name__ in _ACTIVATIONS


def input_name(module: nn.Module, names: tuple[str, ...]) -> str:
    """The parameter of a forward that reads it for its shape, and calls each of these linears with
    it once; "" if it does anything else with it."""
    forward = _forward(module)
    if forward is None or len(forward.args.args) < 2:
        return ""
    name, text = forward.args.args[1].arg, _text(forward)
    for linear in names:
        text, calls = re.subn(rf"self\.{linear}\({name}\)", "", text)
        if calls != 1 or f"self.{linear}" in text:
            return ""
    return "" if re.search(rf"\b{name}\b", text.replace(f"{name}.shape", "")) else name


def norm_name(block: nn.Module, reader: str) -> str:
    """The child of a block whose result a forward gives its child ``reader``, and nothing else; ""
    if there is none."""
    forward = _forward(block)
    text = "" if forward is None else _text(forward)
    if len(re.findall(rf"self\.{reader}\b", text)) != 1:
        return ""
    nested = re.search(rf"self\.{reader}\(self\.(\w+)\(\w+\)[,)]", text)
    after = re.search(
        rf"^(\w+) = self\.(\w+)\(\w+\)\n\1(?:, _)? = self\.{reader}\((?:\w+=)?\1([,)].*)$",
        text,
        re.MULTILINE,
    )
    if nested:
        name = nested.group(1)
    elif after and not re.search(rf"\b{after.group(1)}\b", after.group(3)):
        name = after.group(2)
    else:
        return ""
    return name if len(re.findall(rf"self\.{name}\b", text)) == 1 else ""


_RMS_NORM = """\
input_dtype = hidden_states.dtype
hidden_states = hidden_states.to(torch.float32)
variance = hidden_states.pow(2).mean(-1, keepdim=True)
hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
return self.weight * hidden_states.to(input_dtype)"""
"""RMSNorm's forward in transformers' Llama, Qwen3 and Mistral."""


def norm_constants(norm: nn.Module) -> Norm | None:
    """The constants of torch's RMSNorm of one dim, or of transformers'; None of another module."""
    if getattr(norm, "weight", None) is None:
        return None
    if type(norm) is nn.RMSNorm:
        return Norm(norm.eps) if norm.eps is not None and len(norm.normalized_shape) == 1 else None
    forward = _forward(norm)
    if forward is None or _text(forward) != _RMS_NORM:
        return None
    return Norm(norm.variance_epsilon, twice=True)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Rotation:
    """The call ``q, k = function(q, k, ...)`` of a forward with these parameters.

    form        of ``operations.rotate``, of heads of this width.
    arguments   the parameter that has cos and sin, or complex numbers of pairs; then those with
                which the function rotates otherwise, unless they are None.
    """

    function: str = ""
    form: str = "halves"
    width: int = 0
    arguments: tuple[str, ...] = ("",)
    parameters: tuple[str, ...] = ()


NONE = Rotation()
"""Of a forward whose rotation no part can do."""


_CALL = r"^(\w+), (\w+) = (\w+)\((?:\w+=)?\1, (?:\w+=)?\2, (.*)\)$"
_VIEWS = r"(\.view\([^()]*\)|\.transpose\(1, 2\))*"


def rotation(module: nn.Module, names: tuple[str, ...]) -> tuple[Rotation, str]:
    """How a forward rotates the results of its linears' first two, and why a part cannot, or "".

    It calls the forward's function with small tensors: a form is known by what it computes.
    """
    tree, forward = _forward(module), type(module).forward
    if tree is None or hasattr(forward, "__wrapped__"):
        return NONE, "its forward has no source of its own"
    width, text = getattr(module, "head_dim", 0), _text(tree)
    call = re.search(_CALL, text, re.M)
    if call is None or len(re.findall(rf"\b{call.group(3)}\b", text)) > 1:
        return NONE, "no one call rotates its query and key"
    q, k, function, rest = call.groups()
    linears = ", ".join(rf"self\.{name}\(\w+\)" for name in names)
    before, layouts = text[: call.start()], set()
    for y, name in zip((q, k), names[:2], strict=True):
        lines = re.findall(rf"^.*\b{y}\b.*$", before, re.M)
        step = rf"{y} = (self\.{name}\(\w+\)|{y}){_VIEWS}|{q}, {k}, \w+ = \({linears}\)"
        if not lines or not all(re.fullmatch(step, line) for line in lines):
            return NONE, "its query and key change before they are rotated"
        layouts.add("".join(lines).count(".transpose(1, 2)"))
    arguments = tuple(each.rpartition("=")[2] for each in rest.split(", "))
    if two := re.search(rf"^{', '.join(arguments)} = (\w+)$", before, re.M):
        arguments = (two.group(1),)
    # numbers, whatever the caller's default device and modes are
    with _disable_current_modes(), torch.device("cpu"):
        form = _form(forward.__globals__.get(function), two is not None, layouts)
    parameters = tuple(each.arg for each in tree.args.args[1:])
    if not form or not set(arguments) <= set(parameters):
        return NONE, f"{function} rotates in another form, or a part of each head"
    if width < 2 or width & (width - 1):
        return NONE, f"its head_dim is no power of two: {width}"
    return Rotation(function, form, width, arguments, parameters), ""


def _form(function: Callable | None, two: bool, layouts: set[int]) -> str:
    """The form in which a function rotates a query and a key [2, T, H, D], or with heads before
    tokens (layouts {1}), by two tables or by complex numbers; "" if it is none."""
    generator = torch.Generator().manual_seed(0)
    *heads, cos, sin = [  # of 8 bits, so that float32 has their products exactly
        (torch.randint(-255, 256, shape, generator=generator) / 128).bfloat16()
        for shape in ((2, 3, 4, 8), (2, 3, 2, 8), (3, 1, 8), (3, 1, 8))
    ]
    tables: Sequence[Tensor] = cos[None, :, 0], sin[None, :, 0]
    if not two:
        tables = [torch.complex(*(x[:, 0, :4].float() for x in (cos, sin)))]
        cos, sin = (x[..., :4].repeat_interleave(2, -1) for x in (cos, sin))
    axes = (1, 2) if layouts == {1} else (1, 1)

    def rotated(tables: Sequence[Tensor]) -> Sequence[Tensor]:
        try:
            pair = function(*(x.transpose(*axes) for x in heads), *tables)  # type: ignore[misc]
            return [x.transpose(*axes) for x in pair]
        except Exception:  # a stranger's function may raise anything
            return ()

    results = () if rotated([table[..., :2] for table in tables]) else rotated(tables)
    for form in ("halves", "rounded halves") if two else ("pairs",):
        expected = [operations.rotate(x, cos, sin, form) for x in heads]
        if results and all(map(torch.equal, results, expected)):
            return form
    return ""
