"""fp8ref's own linear layer: three GEMMs by any recipe (SEMANTICS L), for those that torchao's Float8Linear does not run."""

import functools
from collections.abc import Sequence
from typing import get_args

import torch
from torch import nn

from fp8ref import recipe as recipes
from fp8ref.recipe import OPERANDS, REDUCED_AXES, CastSpec, Gemm, Recipe, Role
from fp8ref.torch import cast, delayed, gemm, scales, scaling
from fp8ref.torch.scaling import Quantized

ROLES: tuple[Role, ...] = get_args(Role)  # input, weight, grad_output


class Linear(nn.Linear):
    """An nn.Linear whose GEMMs follow a recipe: any that ``check_recipe`` takes, those with delayed scaling or scales of blocks too.

    Shapes:   x [..., K], weight [N, K] and bias [N]; output [..., N] of x's dtype. A weight of another dtype is refused.
    Order:    leading dims flatten to M; SEMANTICS L-2, L-3, L-6; the bias is added to the rounded output (G-15, round_then_bias).
    State:    ``states[role]`` of every role with delayed scaling; read during a step, rolled by ``delayed.update``. Only where gradients
              are enabled and the module is in training mode is anything observed.
    """

    def __init__(self, in_features: int, out_features: int, recipe: str | Recipe, *, bias: bool = True, device=None, dtype=None) -> None:
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.recipe = check_recipe(recipe)
        self._multiply = _multiply(self.recipe)
        self.states = nn.ModuleDict(
            {role: delayed.RoleState(fmt, config, self.weight.device) for role, (fmt, config) in delayed.casts(self.recipe).items()}
        )

    @classmethod
    def of(cls, linear: nn.Linear, recipe: str | Recipe) -> "Linear":
        """An existing nn.Linear's parameters, themselves, in a Linear of this recipe."""
        made = cls(linear.in_features, linear.out_features, recipe, bias=False, device="meta")
        made.weight, made.bias = linear.weight, linear.bias
        for state in made.states.values():
            state.to_empty(device=linear.weight.device)
            state.reset()  # type: ignore[operator]
        return made.train(linear.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _check(x, self.weight)
        observes = torch.is_grad_enabled() and self.training
        states = [self.state(role) for role in ROLES]
        if observes:
            for state, tensor in zip(states[:2], (x, self.weight), strict=True):
                if state:
                    state.see(tensor)
        past = [state.scale if state else None for state in states]
        seen = states[-1].seen if observes and states[-1] else None
        y = self._multiply.apply(x, self.weight, seen, *past)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def __getstate__(self) -> dict:
        return {key: value for key, value in vars(self).items() if key != "_multiply"}  # a class that pickle does not find

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._multiply = _multiply(self.recipe)

    def state(self, role: Role) -> delayed.RoleState | None:
        """The state of a role that is scaled by its past; None of any other."""
        if role not in self.states:
            return None
        return self.states[role]  # type: ignore[return-value]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name}"


@functools.cache
def _multiply(recipe: Recipe) -> type[torch.autograd.Function]:
    """x [..., K] by w [N, K]. A class for each recipe: what a compiled graph calls takes tensors and numbers only."""

    @torch._dynamo.allow_in_graph  # AOTAutograd traces into it; dynamo alone would refuse what backward writes into seen
    class Multiply(torch.autograd.Function):
        """past: the scales, of ROLES, that a state holds; seen: where grad_output's observation is merged."""

        @staticmethod
        def forward(ctx, x: torch.Tensor, w: torch.Tensor, seen: torch.Tensor | None, *past: torch.Tensor | None) -> torch.Tensor:
            ctx.save_for_backward(x, w, *past)
            ctx.seen = seen  # not saved: other uses of the layer merge into it before the backward pass
            tensors: dict[Role, torch.Tensor] = {"input": x.reshape(-1, x.shape[-1]), "weight": w}
            return _gemm("output", tensors, recipe, past).reshape(*x.shape[:-1], len(w))

        @staticmethod
        def backward(ctx, g: torch.Tensor):
            x, w, *past = ctx.saved_tensors
            tensors: dict[Role, torch.Tensor] = {
                "input": x.reshape(-1, x.shape[-1]),
                "weight": w,
                "grad_output": g.reshape(-1, g.shape[-1]),
            }
            if ctx.seen is not None:
                delayed.merge_(ctx.seen, tensors["grad_output"])
            of_input, of_weight, *others = ctx.needs_input_grad
            grad_input = _gemm("grad_input", tensors, recipe, past).reshape(x.shape) if of_input else None
            grad_weight = _gemm("grad_weight", tensors, recipe, past) if of_weight else None
            return grad_input, grad_weight, *(None for _ in others)

    return Multiply


def check_recipe(recipe: str | Recipe) -> Recipe:
    """The recipe, if ``Linear`` runs it; ValueError otherwise."""
    recipe = recipes.by_name(recipe)
    delayed.casts(recipe)
    for which, spec in recipe.gemms.items():
        present = [c for c in (spec.a, spec.b) if c is not None]
        if len({gemm.dequantises(c.granularity) for c in present}) > 1:
            raise ValueError(
                f"operands of a GEMM have scales of all of K, or both of blocks of it; {which} of recipe {recipe.name!r} has one each."
            )
        if present and spec.epilogue not in gemm.EPILOGUES:
            raise ValueError(f"epilogue is one of {', '.join(gemm.EPILOGUES)}; {which} of recipe {recipe.name!r} has {spec.epilogue!r}.")
        for c in present:
            if c.delayed is None:
                try:
                    scales.implemented(c.policy)
                except ValueError as error:
                    raise ValueError(f"{which} of recipe {recipe.name!r}: {error}") from None
    return recipe


def _gemm(which: Gemm, tensors: dict[Role, torch.Tensor], recipe: Recipe, past: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """One GEMM of matrices, each operand quantised along the axis that it reduces."""
    spec, roles = recipe.gemms[which], OPERANDS[which]
    (a, b), (axis_a, axis_b) = (tensors[role] for role in roles), (axis - 2 for axis in REDUCED_AXES[which])
    if spec.a is None or spec.b is None or spec.accumulate is None:
        return gemm.matmul_hp(a, b, axes=(axis_a, axis_b))
    scale_a, scale_b = (past[ROLES.index(role)] for role in roles)
    qa, qb = _quantize(a, spec.a, axis_a, scale_a), _quantize(b, spec.b, axis_b, scale_b)
    out = gemm.matmul(qa, qb, accumulate=spec.accumulate, epilogue=spec.epilogue, out_dtype=gemm.output_dtype(spec, a.dtype))
    return out.to(a.dtype)


def _quantize(x: torch.Tensor, spec: CastSpec, axis: int, past: torch.Tensor | None) -> Quantized:
    if spec.delayed is None:
        return scaling.quantize(x, spec.fmt, granularity=spec.granularity, policy=spec.policy, axis=axis)
    assert past is not None
    return scaling.quantize_with(x, past, spec.fmt, granularity=spec.granularity, axis=axis)


def _check(x: torch.Tensor, w: torch.Tensor) -> None:
    if x.ndim < 1 or x.shape[-1] != w.shape[1]:
        raise ValueError(f"a linear takes x [..., K] and w [N, K] with the same K; got {tuple(x.shape)} and {tuple(w.shape)}.")
    if cast.checked(x).dtype != w.dtype or x.device != w.device:
        raise ValueError(
            f"x and w have one dtype and lie on one device; got {x.dtype} on {x.device} and {w.dtype} on {w.device}. Cast the weight first."
        )
